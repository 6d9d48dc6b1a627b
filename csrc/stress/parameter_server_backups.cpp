// Servers that are stopped while workers push: their backups go on, and every push is in the value once.
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "parameter_server/client.h"
#include "parameter_server/server.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

namespace ps = parameter_server;

constexpr std::size_t kCount = 2000, kPerBlock = 500;  // elements of the tensor, and of a block
constexpr std::size_t kData = 8 * kPerBlock * sizeof(std::int64_t);

int own_pidfd() { return static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0)); }

ps::ServerSpec spec_of(const ps::Server& server, const char* name) {
  return {dup(server.values()), dup(server.bell()), own_pidfd(), server.capacity(), name};
}

// A server, its backup, and workers that know both.
struct Pair {
  Pair(int workers, const ps::Mode& mode) {
    const FileDescriptor journal = ps::Journal::make();
    backup->follow({dup(journal.get()), dup(server->bell()), dup(server->values()), own_pidfd()});
    server->lead({dup(journal.get()), dup(backup->bell()), dup(backup->values()), own_pidfd()});
    for (int i = 0; i < workers; ++i) {
      clients.push_back(std::make_unique<ps::Client>(i, 1, kData));
      ps::Client& client = *clients.back();
      const auto spec = [&] {
        return ps::WorkerSpec{
            static_cast<ps::WorkerId>(i), "workers", dup(client.window()), client.window_bytes(), 1, 0, own_pidfd()};
      };
      backup->join(spec());
      server->join(spec());
      client.attach(0, spec_of(*server, "the server"));
      client.attach_backup(0, spec_of(*backup, "the backup"));
    }
    if (workers > 1) clients[0]->host(server);
    ps::BlockSpec block;
    block.dtype = DType::int64;
    block.mode = mode;
    block.count = kPerBlock;
    block.rule.kind = ps::Rule::Kind::reduce;
    for (std::size_t begin = 0; begin < kCount; begin += kPerBlock) {
      const auto [id, offset] = server->create(block);
      parts.push_back({0, id, begin * sizeof(std::int64_t), kPerBlock * sizeof(std::int64_t), offset});
    }
  }

  std::shared_ptr<ps::Server> server = std::make_shared<ps::Server>(8 << 20, ps::Server::Hooks{});
  std::shared_ptr<ps::Server> backup = std::make_shared<ps::Server>(8 << 20, ps::Server::Hooks{});
  std::vector<std::unique_ptr<ps::Client>> clients;
  std::vector<ps::Part> parts;
};

// The server is stopped when the first worker has pushed `when` times.
void stopped(int workers, int pushes, int when, const ps::Mode& mode) {
  Pair pair(workers, mode);
  std::thread stopper;
  in_threads(workers, [&](int w) {
    ps::Client& client = *pair.clients[w];
    std::vector<std::int64_t> value(kCount, 0), push(kCount, w + 1);
    const auto finish = [&](const std::shared_ptr<ps::Call>& call) {
      check(client.wait(*call, 60 * kSecond), "a call did not end");
      for (const ps::Call::Answer& each : call->answers)
        check(each.outcome != ps::Outcome::refused && each.outcome != ps::Outcome::late, "a request was refused");
    };
    const auto bytes = [](std::vector<std::int64_t>& of) { return reinterpret_cast<std::byte*>(of.data()); };
    finish(client.send(ps::RequestKind::initialise, pair.parts, bytes(value), {}));
    for (int i = 1; i <= pushes; ++i) {
      const auto call = client.send(ps::RequestKind::push, pair.parts, bytes(push), {i % 3, 1, 60 * kSecond});
      if (w == 0 && i == when) stopper = std::thread([&] { pair.server->stop(); });
      finish(call);
      if (mode.consistency != ps::Consistency::sync) continue;
      client.read(pair.parts, bytes(value), 60 * kSecond);
      for (const std::int64_t each : value)
        check(each == i * workers * (workers + 1) / 2, "a pull is not the sum of the pushes");
    }
    finish(client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}, {}));
    client.read(pair.parts, bytes(value), 60 * kSecond);
    for (const std::int64_t each : value)
      check(each == pushes * workers * (workers + 1) / 2, "a push was lost, or was applied twice");
  });
  stopper.join();
  const Nanoseconds until = now() + 60 * kSecond;  // the server may have stopped after the last answer
  while (!pair.backup->serves() && now() < until) std::this_thread::yield();
  check(pair.backup->serves(), "the backup has not taken over");
}

}  // namespace

void stress_parameter_server_backups() {
  ps::Mode asynchronous;
  asynchronous.consistency = ps::Consistency::asynchronous;
  for (int when = 1; when <= 40; when += 3) {
    stopped(3, 40, when, {});
    stopped(3, 40, when, asynchronous);
    stopped(1, 40, when, {});
  }
  std::printf("parameter server: 42 servers stopped, whose backups went on\n");
}

}  // namespace ringreduce::stress
