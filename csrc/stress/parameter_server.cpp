// The parameter server with workers as threads: what they read is what they pushed; and a window full of nonsense.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "parameter_server/client.h"
#include "parameter_server/server.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

namespace ps = parameter_server;

constexpr std::size_t kCount = 3000;                                  // elements of the tensor
constexpr std::size_t kPerBlock = 512;                                // of a block
constexpr std::size_t kData = 16 * kPerBlock * sizeof(std::int64_t);  // a window's, which is often full

int own_pidfd() { return static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)); }

ps::WorkerSpec spec_of(const ps::Client& client, ps::WorkerId id, std::size_t servers, std::size_t lane) {
  return {id, "workers", dup(client.window()), client.window_bytes(), servers, lane, own_pidfd()};
}

ps::ServerSpec spec_of(const ps::Server& server, std::size_t index) {
  return {dup(server.values()), dup(server.bell()), own_pidfd(), server.capacity(), "server " + std::to_string(index)};
}

struct Party {
  Party(int servers, int workers, const ps::Mode& mode) {
    for (int i = 0; i < servers; ++i)
      this->servers.push_back(std::make_unique<ps::Server>(1 << 20, ps::Server::Hooks{}));
    for (int i = 0; i < workers; ++i) {
      clients.push_back(std::make_unique<ps::Client>(i, servers, kData));
      for (int s = 0; s < servers; ++s) {
        this->servers[s]->join(spec_of(*clients[i], i, servers, s));
        clients[i]->attach(s, spec_of(*this->servers[s], s));
      }
    }
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
  }

  std::vector<std::unique_ptr<ps::Server>> servers;
  std::vector<std::unique_ptr<ps::Client>> clients;
  std::vector<ps::Part> parts;
};

const std::byte* bytes_of(const std::vector<std::int64_t>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// In sync a worker that has pushed i times reads i times the sum of all.
void synchronous(int servers, int workers, int rounds) {
  Party party(servers, workers, {});
  in_threads(workers, [&](int w) {
    ps::Client& client = *party.clients[w];
    std::vector<std::int64_t> value(kCount, 0), push(kCount, w + 1);
    const auto finish = [&](const std::shared_ptr<ps::Call>& call) {
      check(client.wait(*call, 60 * kSecond), "a call of the parameter server did not end");
    };
    finish(client.send(ps::RequestKind::initialise, party.parts, bytes_of(value), {}));
    for (int round = 1; round <= rounds; ++round) {
      finish(client.send(ps::RequestKind::push, party.parts, bytes_of(push), {round % 3, 1, 60 * kSecond}));
      client.read(party.parts, reinterpret_cast<std::byte*>(value.data()), 60 * kSecond);
      for (const std::int64_t each : value)
        check(each == round * workers * (workers + 1) / 2, "a pull is not the sum of the pushes");
    }
    finish(client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}, {}));
  });
}

#if !defined(__SANITIZE_THREAD__)  // a pull may copy while the server writes, and is then repeated
// In asynchronous mode no push is lost or doubled, and what a worker reads never goes back.
void asynchronous(int workers, int pushes) {
  Party party(2, workers, {ps::Consistency::asynchronous, 0, 0, 0, "workers"});
  in_threads(workers, [&](int w) {
    ps::Client& client = *party.clients[w];
    std::vector<std::int64_t> value(kCount, 0), before(kCount, 0), push(kCount, 1);
    client.wait(*client.send(ps::RequestKind::initialise, party.parts, bytes_of(value), {}), 60 * kSecond);
    for (int i = 1; i <= pushes; ++i) {
      const auto call = client.send(ps::RequestKind::push, party.parts, bytes_of(push), {0, 1, 60 * kSecond});
      if (i % 3 == 0) check(client.wait(*call, 60 * kSecond), "a push did not end");
      client.read(party.parts, reinterpret_cast<std::byte*>(value.data()), 60 * kSecond);
      for (std::size_t k = 0; k < kCount; ++k)
        check(value[k] >= before[k] && value[k] >= i && value[k] <= workers * pushes, "a push was lost or doubled");
      for (const ps::Part& part : party.parts)
        for (std::size_t k = 1; k < part.bytes / 8; ++k)
          check(value[part.begin / 8 + k] == value[part.begin / 8], "a pull is half of one version");
      before = value;
    }
    client.wait(*client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}, {}), 60 * kSecond);
    client.wait(*client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{1}, {}), 60 * kSecond);
    client.read(party.parts, reinterpret_cast<std::byte*>(value.data()), 60 * kSecond);
    for (const std::int64_t each : value) check(each == workers * pushes, "the last value is not the sum");
  });
}
#endif

// A worker whose requests are nonsense harms neither the server nor another worker.
void nonsense(int requests) {
  Party party(1, 2, {ps::Consistency::asynchronous, 0, 0, 0, "workers"});
  ps::Client& good = *party.clients[1];
  std::vector<std::int64_t> value(kCount, 0), push(kCount, 1);
  good.wait(*good.send(ps::RequestKind::initialise, party.parts, bytes_of(value), {}), 60 * kSecond);
  const ps::Mapping window(party.clients[0]->window(), party.clients[0]->window_bytes(), true);
  auto& lane = *reinterpret_cast<ps::Lane*>(window.at(sizeof(ps::Bell)));
  auto& bell = *reinterpret_cast<ps::Bell*>(window.at());
  Random random(7);
  const auto some = [&](std::uint64_t usual) { return random_int(random, 0, 2) > 0 ? random() % usual : random(); };
  for (int i = 0; i < requests; ++i) {
    ps::RequestSlot& slot = lane.requests[i % ps::kMostOutstanding];
    slot = {static_cast<ps::RequestKind>(some(6)),
            static_cast<ps::BlockId>(some(8)),
            some(requests),
            some(requests),
            some(4),
            some(4),
            1.0,
            some(kData),
            kPerBlock * 8,
            0,
            0};
    if (slot.kind == ps::RequestKind::leave) slot.kind = ps::RequestKind::push;
    if (i % 2 == 0) slot.number = i / 2 + 1;  // the next
    slot.seen = i % 3 == 0 ? slot.number - 1 : slot.seen;
    lane.asked.store(i + 1);
    if (i % 512 == 511) {
      party.servers[0]->statistics();  // returns when the server has been through its loop
      bell.ring();
    }
  }
  check(party.servers[0]->statistics().updates > 0, "none of the nonsense was a push that can be done");
  check(good.wait(*good.send(ps::RequestKind::push, party.parts, bytes_of(push), {}), 60 * kSecond),
        "a push waits for a worker that sends nonsense");
  good.read(party.parts, reinterpret_cast<std::byte*>(value.data()), 60 * kSecond);
}

}  // namespace

void stress_parameter_server() {
  synchronous(1, 1, 200);
  synchronous(1, 3, 150);
  synchronous(3, 4, 100);
#if !defined(__SANITIZE_THREAD__)
  asynchronous(4, 150);
#endif
  nonsense(100000);
  std::printf("parameter server: pushes and pulls of 1 to 4 workers, a window full of nonsense\n");
}

}  // namespace ringreduce::stress
