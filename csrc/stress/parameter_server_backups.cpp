// Servers that are stopped while workers push: their backups go on, and every push is in the value once.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "parameter_server/client/client.h"
#include "parameter_server/server/server.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

namespace ps = parameter_server;

constexpr std::size_t kCount = 2000, kPerBlock = 500;  // elements of the tensor, and of a block
constexpr std::size_t kData = 8 * kPerBlock * sizeof(std::int64_t);

ps::ServerSpec spec_of(const ps::Server& server, const char* name) {
  return {duplicate(server.values()), duplicate(server.bell()), own_pidfd(), server.capacity(), name, 0, 0, ""};
}

template <class F>
void wait_for(F&& ready, const char* otherwise) {
  const Nanoseconds until = now() + 60 * kSecond;
  while (!ready() && now() < until) std::this_thread::yield();
  check(ready(), otherwise);
}

// Has the server keep its blocks at the other one, too.
void make_backup(ps::Server& server, ps::Server& backup) {
  const FileDescriptor log = ps::NearLog::make();
  int passage[2];
  check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, passage) == 0, "no sockets");
  auto follows = ps::PartnerSpec{duplicate(log.get()),
                                 duplicate(server.bell()),
                                 duplicate(server.values()),
                                 own_pidfd(),
                                 FileDescriptor(passage[1]),
                                 0,
                                 "",
                                 ""};
  backup.follow(std::make_unique<ps::NearPartner>(std::move(follows), false));
  auto leads = ps::PartnerSpec{duplicate(log.get()),
                               duplicate(backup.bell()),
                               duplicate(backup.values()),
                               own_pidfd(),
                               FileDescriptor(passage[0]),
                               backup.capacity(),
                               "the backup",
                               ""};
  server.lead(std::make_unique<ps::NearPartner>(std::move(leads), true));
  wait_for([&] { return server.standing().has_backup; }, "the new backup has not got all");
}

std::shared_ptr<ps::Server> new_server() { return std::make_shared<ps::Server>(8 << 20, ps::Server::Hooks{}); }

std::array<int, 2> connection() {
  std::array<int, 2> ends{};
  check(socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0, "socketpair");
  return ends;
}

// A server, its backup, and workers.
struct Pair {
  // `far`: whether the log and what the last worker asks go over connections.
  Pair(int workers, const ps::Mode& mode, bool far) : far(far) {
    far ? tie_far() : make_backup(*server, *backup);
    for (int i = 0; i < workers; ++i) {
      clients.push_back(std::make_unique<ps::Client>(i, 1, kData));
      ps::Client& client = *clients.back();
      const auto id = static_cast<ps::WorkerId>(i);
      if (far && i == workers - 1) {
        server->join_far(id, "workers", kData);
        client.attach_far(0, "the server");
        connect(client, id, *server, 0);
      } else {
        server->join({id, "workers", duplicate(client.window()), client.window_bytes(), 1, 0, own_pidfd(),
                      duplicate(client.news()), ""});
        client.attach(0, spec_of(*server, "the server"));
      }
      if (far) client.seek();
    }
    if (far) attach_all();
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
  ~Pair() {
    if (far) backup->stop();  // first: it is not to take over
    if (decider.joinable()) decider.join();
    if (loser.joinable()) loser.join();
  }

  // The server ends, or every second one leaves its blocks to its backup, which gets one of its own. Between hosts,
  // workers come to every second backup before it takes over, and to the others afterwards.
  void stop_one() {
    const bool leaves = ended.size() % 2 == 1;
    if (leaves)
      leave();
    else
      server->stop();
    wait_for([&] { return leaves ? backup->standing().is_heir : backup->serves(); }, "the backup has not taken over");
    if (decider.joinable()) decider.join();
    if (far && replica % 2 == 0) attach_all();
    ended.push_back(std::exchange(server, backup));
    backup = new_server();
    if (!far) return make_backup(*server, *backup);
    ++replica;
    tie_far();
    if (replica % 2 == 1) attach_all();
    if (leaves) wait_for([&] { return ended.back()->has_ended(); }, "the server that leaves does not end");
    if (loser.joinable()) loser.join();
  }

  void leave() {
    if (far) {
      const std::uint64_t written = server->freeze();
      wait_for([&] { return server->standing().confirmed >= written; }, "the backup does not confirm");
    }
    server->leave_to_backup();
  }

  void tie_far() {
    const auto backup_decides = [this, its = backup.get()](auto&) {
      decider = std::thread([its] { its->decided(true); });
    };
    const auto server_decides = [this, its = server.get()](auto&) {
      if (its->leaves()) loser = std::thread([its] { its->decided(false); });
    };
    backup->follow(std::make_unique<ps::FarPartner>(backup->bell_words(), backup_decides, ""));
    server->lead(std::make_unique<ps::FarPartner>(server->bell_words(), server_decides, "the backup"));
    for (int i = 0; i < 2; ++i) {
      const auto [one, other] = connection();
      server->connect_partner(one, "to the backup");
      backup->connect_partner(other, "to the server");
    }
    wait_for([&] { return server->standing().backup_follows; }, "the new backup has not got all");
    server->count_backup();
  }

  static void connect(ps::Client& client, ps::WorkerId id, ps::Server& to, std::uint32_t replica) {
    const auto [one, other] = connection();
    client.connect(0, one, "to a server", replica);
    to.connect(id, other, "to a worker");
  }

  void attach_all() {
    for (std::size_t i = 0; i < clients.size(); ++i) {
      const auto id = static_cast<ps::WorkerId>(i);
      backup->join_far(id, "workers", kData);
      clients[i]->attach_far_backup(0, "the backup", replica);
      connect(*clients[i], id, *backup, replica);
    }
  }

  const bool far;
  std::uint32_t replica = 1;  // the backup's number
  std::thread decider, loser;
  std::shared_ptr<ps::Server> server = new_server(), backup = new_server();
  std::vector<std::shared_ptr<ps::Server>> ended;
  std::vector<std::unique_ptr<ps::Client>> clients;
  std::vector<ps::Part> parts;
};

// Copies what all parts are to `value`, wherever they are asked for.
void pull(ps::Client& client, const std::vector<ps::Part>& parts, std::byte* value) {
  if (client.is_near(0)) {
    const auto versions = client.read(parts, value, 60 * kSecond);
    check(versions.has_value(), "a read did not end");
    if (!versions->empty()) return;
  }
  const auto call = client.pull(parts, value);
  check(client.wait(*call, 60 * kSecond), "a pull did not end");
  client.cancel(*call);
}

// Servers are stopped one after the other, from when the first worker has pushed `when` times.
void stopped(int workers, int pushes, int when, int servers, const ps::Mode& mode, bool far = false) {
  Pair pair(workers, mode, far);
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
      if (w == 0 && i == when)
        stopper = std::thread([&] {
          for (int left = servers; left > 0; --left) pair.stop_one();
        });
      finish(call);
      if (mode.consistency != ps::Consistency::sync) continue;
      pull(client, pair.parts, bytes(value));
      for (const std::int64_t each : value)
        check(each == i * workers * (workers + 1) / 2, "a pull is not the sum of the pushes");
    }
    finish(client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}));
    pull(client, pair.parts, bytes(value));
    for (const std::int64_t each : value)
      check(each == pushes * workers * (workers + 1) / 2, "a push was lost, or was applied twice");
  });
  stopper.join();
}

// A partner whose frames do not fit each other is given up.
void lies_in_the_log() {
  constexpr std::uint32_t kPushed = 2, kSome = 64;  // the kind of frames with pushed data
  const FrameHeader right{.kind = kPushed, .bytes = kSome, .total = kSome};
  const FrameHeader longer{.kind = kPushed, .bytes = kSome, .seq = 4096, .total = 8192};
  const std::shared_ptr<ps::Server> backup = new_server();
  backup->follow(std::make_unique<ps::FarPartner>(backup->bell_words(), [](auto&) {}, ""));
  const auto [one, other] = connection();
  const FileDescriptor end(one);
  backup->connect_partner(other, "to a liar");
  for (const FrameHeader& header : {right, longer}) {
    const std::array<std::byte, kSome> payload{};
    check(send(end.get(), &header, sizeof header, MSG_NOSIGNAL) == sizeof header &&
              send(end.get(), payload.data(), kSome, MSG_NOSIGNAL) == kSome,
          "the backup hung up");
  }
  std::array<std::byte, 4096> answer;
  wait_for([&] { return recv(end.get(), answer.data(), answer.size(), MSG_DONTWAIT) == 0; }, "a liar is not given up");
  backup->stop();
}

}  // namespace

void stress_parameter_server_backups() {
  lies_in_the_log();
  ps::Mode asynchronous;
  asynchronous.consistency = ps::Consistency::asynchronous;
  for (int when = 1; when <= 40; when += 3) {
    stopped(3, 40, when, 1 + when % 4, {});
    stopped(3, 40, when, 1 + when % 4, asynchronous);
    stopped(1, 40, when, 1, {});
    stopped(3, 40, when, 1 + when % 4, {}, true);
    stopped(2, 40, when, 1 + when % 4, asynchronous, true);
  }
  std::printf("parameter server: 146 servers stopped, whose backups went on\n");
}

}  // namespace ringreduce::stress
