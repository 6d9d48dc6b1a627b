// The parameter server with workers as threads, in shared memory and over sockets: what they read is what they pushed.
// A window full of nonsense, and frames that are.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "parameter_server/client/client.h"
#include "parameter_server/server/server.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

namespace ps = parameter_server;

constexpr std::size_t kCount = 3000;                                  // elements of the tensor
constexpr std::size_t kPerBlock = 512;                                // of a block
constexpr std::size_t kData = 16 * kPerBlock * sizeof(std::int64_t);  // a window's, which is often full

constexpr std::size_t kWidth = 4;  // of the table's rows, which begin at 0

ps::WorkerSpec spec_of(const ps::Client& client, ps::WorkerId id, std::size_t servers, std::size_t lane) {
  const int pidfd = own_pidfd().release();
  return {id, "workers", dup(client.window()), client.window_bytes(), servers, lane, pidfd, dup(client.news()), ""};
}

ps::ServerSpec spec_of(const ps::Server& server, std::size_t index) {
  return {dup(server.values()),
          dup(server.bell()),
          own_pidfd().release(),
          server.capacity(),
          "server " + std::to_string(index),
          0,
          0,
          ""};
}

enum class Over { memory, sockets };

void join_over_sockets(ps::Server& server, ps::Client& client, ps::WorkerId worker, std::uint32_t index) {
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

const std::byte* bytes_of(const std::vector<std::int64_t>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// In sync a worker that has pushed i times reads i times the sum of all.
void synchronous(int servers, int workers, int rounds, Over over) {
  Party party(servers, workers, {}, over);
  in_threads(workers, [&](int w) {
    ps::Client& client = *party.clients[w];
    std::vector<std::int64_t> value(kCount, 0), push(kCount, w + 1);
    const auto finish = [&](const std::shared_ptr<ps::Call>& call) {
      check(client.wait(*call, 60 * kSecond), "a call of the parameter server did not end");
    };
    finish(client.send(ps::RequestKind::initialise, party.parts, bytes_of(value), {}));
    for (int round = 1; round <= rounds; ++round) {
      const bool comes_back = !party.far && round % 2 == 0;
      auto* const out = comes_back ? reinterpret_cast<std::byte*>(value.data()) : nullptr;
      const ps::Client::Pushed pushed{&party.parts, bytes_of(push), Packing::none, out};
      const auto call = client.push({pushed}, {round % 3, 1, 60 * kSecond}).front();
      finish(call);
      check(call->new_values.versions.size() == (comes_back ? party.parts.size() : 0),
            "new values did not come back with a push");
      if (!comes_back) party.pull(client, value);
      for (const std::int64_t each : value)
        check(each == round * workers * (workers + 1) / 2, "a pull is not the sum of the pushes");
    }
    finish(client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}));
  });
}

// Rows of a table in sync: a row is the sum of all that was pushed to it, an id may come twice, and a server may get
// none.
void rows(int servers, int workers, int rounds, Over over) {
  Party party(servers, workers, {}, over);
  const std::vector<std::uint32_t> owners = ps::owners_of_slots(servers);
  in_threads(workers, [&](int w) {
    ps::Client& client = *party.clients[w];
    std::vector<float> sums(64, 0);
    for (int round = 0; round < rounds; ++round) {
      std::vector<std::int64_t> ids;
      std::vector<float> values, out;
      for (int other = 0; other < workers; ++other)
        for (int i = 0; i < round % 40; ++i) {
          const std::size_t id = (other * 5 + i * 3) % 64;
          sums[id] += static_cast<float>(other + 1);
          if (other != w) continue;
          ids.push_back(static_cast<std::int64_t>(id) - 32);
          values.insert(values.end(), kWidth, static_cast<float>(w + 1));
        }
      const ps::RowSet pushed(ids, owners, servers);
      const auto push = client.push_rows(party.table, pushed, reinterpret_cast<const std::byte*>(values.data()), false,
                                         {0, 1, 60 * kSecond});
      ids.clear();
      for (std::int64_t id = 0; id < 64; ++id) ids.insert(ids.end(), id % 3 + 1, id - 32);
      const ps::RowSet wanted(ids, owners, servers);
      const auto given_up = client.pull_rows(party.table, wanted, 60 * kSecond);
      client.cancel(*given_up);
      const auto pull = client.pull_rows(party.table, wanted, 60 * kSecond);
      check(client.wait(*pull, 60 * kSecond) && client.wait(*push, 60 * kSecond), "rows do not come");
      out.resize(ids.size() * kWidth);
      client.take_rows(party.table, wanted, *pull, reinterpret_cast<std::byte*>(out.data()), false);
      for (std::size_t i = 0; i < out.size(); ++i)
        check(out[i] == sums[static_cast<std::size_t>(ids[i / kWidth] + 32)], "a row is not the sum of its pushes");
    }
    client.wait(*client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}), 60 * kSecond);
  });
}

// Snapshots amid pushes, each of which adds 1 everywhere: what is saved of a block, and of all rows, is of one moment.
void snapshots(int pushes, Over over) {
  Party party(1, 2, {ps::Consistency::asynchronous, 0, 0, 0, "workers"}, over);
  ps::Server& server = *party.servers[0];
  ps::Client& first = *party.clients[0];
  std::vector<std::int64_t> ids(500), ones(kCount, 1), zeros(kCount, 0);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i * i);
  const ps::RowSet rows(ids, ps::owners_of_slots(1), 1);
  const std::vector<float> values(ids.size() * kWidth, 1);
  const auto push = [&] {
    first.wait(*first.push_rows(party.table, rows, reinterpret_cast<const std::byte*>(values.data()), true, {}),
               60 * kSecond);
  };
  first.wait(*first.send(ps::RequestKind::initialise, party.parts, bytes_of(zeros), {}), 60 * kSecond);
  push();
  std::atomic<bool> done = false;
  in_threads(2, [&](int thread) {
    if (thread == 0) {
      for (int i = 0; i < pushes; ++i) {
        push();
        first.wait(*first.send(ps::RequestKind::push, party.parts, bytes_of(ones), {}), 60 * kSecond);
      }
      done = true;
      return;
    }
    for (int taken = 0; !done || taken == 0; ++taken) {
      std::size_t pieces = 0;
      for (const auto& entry : server.begin_snapshot()) pieces += entry.rows == 0 || entry.rows == ids.size();
      check(pieces == party.parts.size() + 1, "a snapshot has other blocks");
      const auto next = [&] { return server.ask([](ps::Replica& its) { return its.blocks.next_piece(); }); };
      for (auto piece = next(); piece.has_value(); piece = next(), --pieces) {
        const bool of_rows = piece->block == party.table.blocks[0];
        const std::byte* at = piece->bytes.get() + piece->rows * sizeof(std::int64_t);
        const std::size_t size = of_rows ? sizeof(float) : sizeof(std::int64_t);
        check(piece->rows == (of_rows ? ids.size() : 0), "a piece has other rows");
        for (const std::byte* each = at; each < piece->bytes.get() + piece->size; each += size)
          check(std::memcmp(each, at, size) == 0, "a snapshot is of two moments");
      }
      check(pieces == 0, "a block is in a snapshot twice, or not at all");
      server.ask([](ps::Replica& its) { its.blocks.end_snapshot(); });
    }
  });
}

// In asynchronous mode no push is lost or doubled, and what a worker reads never goes back.
void asynchronous(int workers, int pushes, Over over) {
  Party party(2, workers, {ps::Consistency::asynchronous, 0, 0, 0, "workers"}, over);
  in_threads(workers, [&](int w) {
    ps::Client& client = *party.clients[w];
    std::vector<std::int64_t> value(kCount, 0), before(kCount, 0), push(kCount, 1);
    client.wait(*client.send(ps::RequestKind::initialise, party.parts, bytes_of(value), {}), 60 * kSecond);
    for (int i = 1; i <= pushes; ++i) {
      const auto call = client.send(ps::RequestKind::push, party.parts, bytes_of(push), {0, 1, 60 * kSecond});
      if (i % 3 == 0) check(client.wait(*call, 60 * kSecond), "a push did not end");
      party.pull(client, value);
      for (std::size_t k = 0; k < kCount; ++k)
        check(value[k] >= before[k] && value[k] >= i && value[k] <= workers * pushes, "a push was lost or doubled");
      for (const ps::Part& part : party.parts)
        for (std::size_t k = 1; k < part.bytes / 8; ++k)
          check(value[part.begin / 8 + k] == value[part.begin / 8], "a pull is half of one version");
      before = value;
    }
    client.wait(*client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{0}), 60 * kSecond);
    client.wait(*client.ask(ps::RequestKind::barrier, std::vector<std::uint32_t>{1}), 60 * kSecond);
    party.pull(client, value);
    for (const std::int64_t each : value) check(each == workers * pushes, "the last value is not the sum");
  });
}

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
    slot = {static_cast<ps::RequestKind>(some(8)),
            static_cast<ps::BlockId>(some(8)),
            some(requests),
            some(requests),
            some(4),
            some(4),
            1.0,
            some(kData),
            random() % 2 != 0 ? kPerBlock * 8 : some(9) * 8,
            0,
            static_cast<Packing>(random() % 5)};
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
  party.pull(good, value);
}

// Pulls that are given up in the middle: what they were for is freed, and nothing is stored there.
void gives_up_pulls(int times) {
  Party party(1, 1, {ps::Consistency::asynchronous, 0, 0, 0, "workers"}, Over::sockets);
  ps::Client& client = *party.clients[0];
  std::vector<std::int64_t> first(kCount, 3);
  client.wait(*client.send(ps::RequestKind::initialise, party.parts, bytes_of(first), {}), 60 * kSecond);
  for (int i = 0; i < times; ++i) {
    std::vector<std::int64_t> value(kCount);
    const auto call = client.pull(party.parts, reinterpret_cast<std::byte*>(value.data()), 60 * kSecond);
    client.wait(*call, (i % 10) * 5 * kMicrosecond);
    client.cancel(*call);
  }
  party.pull(client, first);
  check(first == std::vector<std::int64_t>(kCount, 3), "a pull after many that were given up is not the value");
}

// The same when half of a value has come: the other half is put aside, and what comes after it is understood.
void gives_up_half_a_value() {
  constexpr std::size_t kHalf = 40000;
  ps::Bell bell{};
  ps::WorkerWire wire(bell, [] {});
  int ends[2];
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
  wire.connections().take_over();  // nothing moves but what is moved here
  wire.connections().add(0, ends[0], "a test's");
  auto place = std::make_unique<std::byte[]>(2 * kHalf);
  wire.expect(0, 1, place.get(), 2 * kHalf);
  const std::vector<std::byte> half(kHalf, std::byte{1});
  const auto write_all = [&](const void* data, std::size_t bytes) {
    check(write(ends[1], data, bytes) == static_cast<ssize_t>(bytes), "a value does not fit a socket");
    while (wire.connections().progress()) {
    }
  };
  const FrameHeader value{.kind = ps::WireKind::value, .bytes = 2 * kHalf, .tag = 1};
  write_all(&value, sizeof value);
  write_all(half.data(), kHalf);
  check(place[kHalf - 1] == std::byte{1}, "a value is not stored in its place");
  wire.forget(0, 1);
  place.reset();
  write_all(half.data(), kHalf);
  const ps::ReplySlot reply{2, 0, ps::Outcome::done, 0};
  const FrameHeader replies{.kind = ps::WireKind::replies, .bytes = sizeof reply};
  write_all(&replies, sizeof replies);
  write_all(&reply, sizeof reply);
  const auto taken = wire.take_replies();
  check(taken.size() == 1 && taken[0].second.number == 2, "a reply after a value that was given up is lost");
  wire.connections().hand_over(false);
  close(ends[1]);
}

// ---- Frames -------------------------------------------------------------------------------------------------------

struct Sent {
  FrameHeader header;
  std::vector<std::byte> payload;
};

// A frame that could be right, most of the time.
Sent some_frame(Random& random) {
  Sent sent;
  FrameHeader& header = sent.header;
  const int kind = random_int(random, 1, 4);
  header = {.kind = static_cast<std::uint32_t>(kind)};
  header.tag = random() % 40;
  header.seq = random() % 64 * 64;
  if (kind == ps::WireKind::request) {
    const ps::RequestSlot slot{static_cast<ps::RequestKind>(random() % 8),
                               static_cast<ps::BlockId>(random() % 8),
                               random() % 2000,
                               random() % 2000,
                               random() % 4,
                               random() % 4,
                               1.0,
                               random() % 4096,
                               random() % 2 != 0 ? random() % 2 * 64 : random() % 9 * 8,
                               0,
                               static_cast<Packing>(random() % 5)};
    sent.payload.resize(sizeof slot);
    std::memcpy(sent.payload.data(), &slot, sizeof slot);
  } else if (kind == ps::WireKind::replies) {
    const ps::ReplySlot slot{random() % 40, random(), static_cast<ps::Outcome>(random() % 9), 0};
    sent.payload.resize(sizeof slot);
    std::memcpy(sent.payload.data(), &slot, sizeof slot);
  } else {
    sent.payload.resize(64);
  }
  header.bytes = static_cast<std::uint32_t>(sent.payload.size());
  if (kind != ps::WireKind::request && kind != ps::WireKind::replies && random() % 2 == 0) {
    header.packing = random() % 2 == 0 ? Packing::bfloat16 : Packing::int8;
    header.total = random() % 9 * 32;
    header.bytes = static_cast<std::uint32_t>(ps::wire_bytes(header.packing, header.total));
    sent.payload.resize(header.bytes);
  }
  if (random() % 3 == 0) {
    auto* const bytes = reinterpret_cast<std::byte*>(&header);
    bytes[random() % sizeof header] = static_cast<std::byte>(random());
  }
  return sent;
}

// Gives a frame to what a connection would give it to. Returns whether it was taken.
bool give(FrameUser& user, const Sent& sent, std::vector<std::byte>& aside) {
  try {
    std::byte* const to = user.place_for(0, sent.header, aside);
    if (to != nullptr) std::memset(to, 1, sent.header.bytes);
    if (to == aside.data()) std::copy_n(sent.payload.begin(), std::min(sent.payload.size(), aside.size()), to);
    user.deliver(0, sent.header, aside);
    return true;
  } catch (const Error& error) {
    check(error.kind() == ErrorKind::mismatch, std::string("frames: ") + error.what());
    return false;
  }
}

// Frames with a byte changed here and there, to both ends: what is taken lands where it may, and the rest is refused.
std::pair<long, long> frames(int count) {
  ps::Bell bell{};
  Random random(11);
  std::vector<std::byte> aside;
  long taken = 0;
  {
    ps::ServerWire wire(bell);
    const auto memory = std::make_shared<std::vector<std::byte>>(4096);
    for (int i = 0, open = 0; i < count / 2; ++i) {
      if (open == 0) wire.admit(0, memory, memory->data(), memory->size());
      open = give(wire, some_frame(random), aside) ? 1 : 0;
      taken += open;
      if (open == 0) wire.drop(0);
      if (i % 100 == 0) check(wire.take_requests().size() <= 2 * ps::kMostOutstanding, "frames: requests pile up");
    }
  }
  ps::WorkerWire wire(bell, [] {});
  std::vector<std::unique_ptr<std::byte[]>> places(40);
  for (int i = 0; i < count / 2; ++i) {
    const std::size_t number = random() % places.size();
    if (random() % 8 == 0) {
      wire.forget(0, number);
      places[number] = std::make_unique<std::byte[]>(512);
      wire.expect(0, number, places[number].get(), 512);
    }
    taken += give(wire, some_frame(random), aside) ? 1 : 0;
    if (i % 100 == 0) wire.take_replies();
  }
  return {taken, count / 2 * 2 - taken};
}

// A server with a good worker, which nothing may harm, and whoever else connects to it.
struct Besieged : Party {
  Besieged() : Party(1, 1, {ps::Consistency::asynchronous, 0, 0, 0, "workers"}, Over::sockets) {
    good.wait(*good.send(ps::RequestKind::initialise, parts, bytes_of(value), {}), 60 * kSecond);
  }

  // Returns the other end of the connection of a worker that joins.
  FileDescriptor admit(ps::WorkerId worker) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
    server.join_far(worker, "workers", 4096);
    server.connect(worker, ends[0], "a stranger's");
    return FileDescriptor(ends[1]);
  }

  ps::Server& server = *servers[0];
  ps::Client& good = *clients[0];
  std::vector<std::int64_t> value = std::vector<std::int64_t>(kCount, 1);
};

void ask(const FileDescriptor& end, const ps::RequestSlot& slot) {
  const FrameHeader header{.kind = ps::WireKind::request, .bytes = sizeof slot};
  check(send(end.get(), &header, sizeof header, MSG_NOSIGNAL) == sizeof header &&
            send(end.get(), &slot, sizeof slot, MSG_NOSIGNAL) == sizeof slot,
        "the server hung up");
}

// A worker that sends nonsense over its connection is given up, and nobody else is harmed.
void sends_nonsense(int times) {
  Besieged party;
  Random random(13);
  for (int i = 1; i <= times; ++i) {
    const auto worker = static_cast<ps::WorkerId>(i);
    {
      const FileDescriptor end = party.admit(worker);
      for (int frame = 0; frame < 20; ++frame) {
        const Sent sent = some_frame(random);
        if (send(end.get(), &sent.header, sizeof sent.header, MSG_NOSIGNAL) < 0) break;
        if (send(end.get(), sent.payload.data(), sent.payload.size(), MSG_NOSIGNAL) < 0) break;
      }
    }
    if (i % 64 != 0) party.server.lose(worker);
  }
  const auto push = party.good.send(ps::RequestKind::push, party.parts, bytes_of(party.value), {});
  check(party.good.wait(*push, 60 * kSecond), "a push waits for workers that send nonsense");
  party.pull(party.good, party.value);
}

// A pull that was answered comes again, for a block that there is not.
void pulls_an_unknown_block() {
  Besieged party;
  const FileDescriptor end = party.admit(1);
  for (const ps::BlockId block : {ps::BlockId{0}, ps::BlockId{9999}}) {
    ask(end, {ps::RequestKind::pull, block, 1, 0, 0, 0, 1.0, 0, 0, 0, {}});
    std::byte answer{};
    check(recv(end.get(), &answer, 1, 0) == 1, "a pull is not answered");
  }
  party.pull(party.good, party.value);
}

// A worker that asks on and on, says that it has all replies, and reads none: it is given up before they fill the
// memory.
void asks_and_never_reads() {
  Besieged party;
  const FileDescriptor end = party.admit(1);
  for (std::uint64_t number = 1; number < 100000 && party.server.statistics().workers == 2; ++number)
    ask(end, {ps::RequestKind::pull, 0, number, number - 1, 0, 0, 1.0, 0, 0, 0, {}});
  check(party.server.statistics().workers == 1, "a worker that reads nothing may ask for ever");
  party.pull(party.good, party.value);
}

// Two threads end a server at the same time.
void stopped_twice(int times) {
  for (int i = 0; i < times; ++i) {
    ps::Server server(1 << 20, ps::Server::Hooks{});
    std::thread other([&] { server.stop(); });
    server.stop();
    other.join();
  }
}

// A server that fails ends, and its worker learns of it. The process goes on.
void fails(Over over) {
  ps::Server::Hooks hooks;
  hooks.enter = [](const auto&) { throw std::bad_alloc(); };
  ps::Server server(1 << 20, std::move(hooks));
  ps::Client client(0, 1, kData);
  if (over == Over::sockets) {
    join_over_sockets(server, client, 0, 0);
  } else {
    server.join(spec_of(client, 0, 1, 0));
    client.attach(0, spec_of(server, 0));
  }
  ps::BlockSpec block;
  block.dtype = DType::int64;
  block.mode.consistency = ps::Consistency::asynchronous;
  block.count = kPerBlock;
  block.rule.kind = ps::Rule::Kind::python;
  const auto [id, offset] = server.create(block);
  const std::vector<ps::Part> parts{{0, id, 0, block.bytes(), offset}};
  const std::vector<std::int64_t> value(kPerBlock, 1);
  client.wait(*client.send(ps::RequestKind::initialise, parts, bytes_of(value), {}), 60 * kSecond);
  bool is_told = false;
  try {
    client.wait(*client.send(ps::RequestKind::push, parts, bytes_of(value), {}), 60 * kSecond);
  } catch (const Error& error) {
    is_told = error.kind() == ErrorKind::server_lost;
  }
  check(is_told && server.has_ended(), "a worker does not learn that its server has failed");
}

}  // namespace

void stress_parameter_server() {
  for (const Over over : {Over::memory, Over::sockets}) {
    synchronous(1, 1, 200, over);
    synchronous(1, 3, 150, over);
    synchronous(3, 4, 100, over);
    rows(1, 2, 80, over);
    rows(3, 4, 80, over);
    snapshots(200, over);
    fails(over);
  }
#if !defined(__SANITIZE_THREAD__)  // a pull may copy while the server writes, and is then repeated
  asynchronous(4, 150, Over::memory);
#endif
  asynchronous(4, 150, Over::sockets);
  nonsense(100000);
  gives_up_pulls(300);
  gives_up_half_a_value();
  std::printf("parameter server: pushes and pulls of 1 to 4 workers, a window full of nonsense\n");
  const auto [taken, refused] = frames(1000000);
  check(taken > 100000 && refused > 100000, "frames: too few were taken or refused to show anything");
  sends_nonsense(3000);
  pulls_an_unknown_block();
  asks_and_never_reads();
  stopped_twice(300);
  std::printf("parameter server: %ld frames taken, %ld refused\n", taken, refused);
}

}  // namespace ringreduce::stress
