// The parameter server with workers as threads, in shared memory and over sockets: what they read is what they pushed.
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "stress/parameter_server.h"

namespace ringreduce::stress {
namespace {

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
  gives_up_pulls(300);
  gives_up_half_a_value();
  stopped_twice(300);
  std::printf("parameter server: pushes and pulls of 1 to 4 workers\n");
}

}  // namespace ringreduce::stress
