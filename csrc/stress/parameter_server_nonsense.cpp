// The parameter server among workers that send nonsense: a window full of it, frames that are almost right, and workers
// that never read.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "stress/parameter_server.h"

namespace ringreduce::stress {
namespace {

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

}  // namespace

void stress_parameter_server_nonsense() {
  nonsense(100000);
  const auto [taken, refused] = frames(1000000);
  check(taken > 100000 && refused > 100000, "frames: too few were taken or refused to show anything");
  sends_nonsense(3000);
  pulls_an_unknown_block();
  asks_and_never_reads();
  std::printf("parameter server: a window full of nonsense; %ld frames taken, %ld refused\n", taken, refused);
}

}  // namespace ringreduce::stress
