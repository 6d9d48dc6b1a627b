// Servers and workers of one process, for the scenarios of the parameter server.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "parameter_server/client/client.h"
#include "parameter_server/server/server.h"
#include "stress/harness.h"

namespace ringreduce::stress {

namespace ps = parameter_server;

constexpr std::size_t kCount = 3000;                                  // elements of the tensor
constexpr std::size_t kPerBlock = 512;                                // of a block
constexpr std::size_t kData = 16 * kPerBlock * sizeof(std::int64_t);  // a window's, which is often full

constexpr std::size_t kWidth = 4;  // of the table's rows, which begin at 0

inline ps::WorkerSpec spec_of(const ps::Client& client, ps::WorkerId id, std::size_t servers, std::size_t lane) {
  return {id,
          "workers",
          duplicate(client.window()),
          client.window_bytes(),
          servers,
          lane,
          own_pidfd(),
          duplicate(client.news()),
          ""};
}

inline ps::ServerSpec spec_of(const ps::Server& server, std::size_t index) {
  return {duplicate(server.values()),
          duplicate(server.bell()),
          own_pidfd(),
          server.capacity(),
          "server " + std::to_string(index),
          0,
          0,
          ""};
}

enum class Over { memory, sockets };

inline void join_over_sockets(ps::Server& server, ps::Client& client, ps::WorkerId worker, std::uint32_t index) {
  server.join_far(worker, "workers", kData);
  client.attach_far(index, "server " + std::to_string(index));
  for (int connection = 0; connection < 2; ++connection) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    server.connect(worker, ends[0], "a test's");
    client.connect(index, ends[1], "a test's");
  }
}

struct Party {
  Party(int servers, int workers, const ps::Mode& mode, Over over = Over::memory) {
    for (int i = 0; i < servers; ++i)
      this->servers.push_back(std::make_shared<ps::Server>(8 << 20, ps::Server::Hooks{}));
    for (int i = 0; i < workers; ++i) {
      clients.push_back(std::make_unique<ps::Client>(i, servers, kData));
      if (i < servers && i % 2 == 0) clients[i]->host(this->servers[i]);
      for (int s = 0; s < servers; ++s) {
        if (over == Over::sockets) {
          join_over_sockets(*this->servers[s], *clients[i], i, s);
          continue;
        }
        this->servers[s]->join(spec_of(*clients[i], i, servers, s));
        clients[i]->attach(s, spec_of(*this->servers[s], s));
      }
    }
    far = over == Over::sockets;
    ps::BlockSpec block;
    block.dtype = DType::int64;
    block.mode = mode;
    block.rule.kind = ps::Rule::Kind::reduce;
    for (std::size_t begin = 0; begin < kCount; begin += kPerBlock) {
      const auto server = static_cast<std::uint32_t>(begin / kPerBlock % servers);
      block.count = std::min(kPerBlock, kCount - begin);
      const auto [id, offset] = this->servers[server]->create(block);
      parts.push_back({server, id, begin * sizeof(std::int64_t), block.count * sizeof(std::int64_t), offset});
    }
    block.dtype = DType::float32;
    block.width = table.width = kWidth;
    for (const auto& server : this->servers) table.blocks.push_back(server->create(block).first);
  }

  // The latest value, as it is read here or sent.
  void pull(ps::Client& client, std::vector<std::int64_t>& value) const {
    auto* const to = reinterpret_cast<std::byte*>(value.data());
    if (!far) {
      check(client.read(parts, to, 60 * kSecond).has_value(), "a read did not end");
      return;
    }
    const auto call = client.pull(parts, to, 60 * kSecond);
    check(client.wait(*call, 60 * kSecond), "a pull did not end");
  }

  std::vector<std::shared_ptr<ps::Server>> servers;
  std::vector<std::unique_ptr<ps::Client>> clients;
  std::vector<ps::Part> parts;
  ps::TablePlace table;
  bool far = false;
};

inline const std::byte* bytes_of(const std::vector<std::int64_t>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

}  // namespace ringreduce::stress
