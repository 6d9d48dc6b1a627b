// Ranks that come to a team and go from it, on its host and on others, while the rest go on talking.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "stress/harness.h"
#include "transport/links.h"

namespace ringreduce::stress {
namespace {

constexpr Geometry kRoom{.ranks = 4, .depth = 4, .slot_bytes = 256, .mailbox_depth = 4, .mailbox_slot_bytes = 256};

FileDescriptor copy_of(const FileDescriptor& fd) { return FileDescriptor(dup(fd.get())); }

// A process, played by this one: memory of its own, a team, messages, and an end.
struct Process {
  explicit Process(int rank) : memory(memfd_create("stress", MFD_CLOEXEC)), end(eventfd(0, EFD_CLOEXEC)) {
    check(ftruncate(memory.get(), static_cast<off_t>(kRoom.segment_bytes())) == 0, "peers: no memory");
    team = std::make_shared<Team>(Team::Own{.rank = rank,
                                            .name = {"thread", getpid()},
                                            .segment = std::make_shared<Segment>(memory, kRoom),
                                            .connect = [](int, Nanoseconds) { check(false, "peers: no link"); }});
    mailbox = std::make_unique<Mailbox>(team, kPatience);
  }

  int rank() const { return team->rank(); }

  void meet(const Process& other, int socket, bool fatal) {
    const bool linked = socket >= 0;
    team->add(other.rank(), {.name = {"thread", getpid()},
                             .segment = linked ? nullptr : std::make_shared<Segment>(copy_of(other.memory), kRoom),
                             .pidfd = linked ? FileDescriptor() : copy_of(other.end),
                             .fatal = fatal});
    if (linked) team->links()->add(other.rank(), socket, "a test's");
    mailbox->admit(other.rank());
  }
  void part_from(int rank) {
    mailbox->dismiss(rank, Error(ErrorKind::peer_lost, "it was dropped", rank));
    team->drop(rank);
  }

  FileDescriptor memory, end;
  std::shared_ptr<Team> team;
  std::unique_ptr<Mailbox> mailbox;
};

// Makes two known to each other. Returns, where they are linked, what cuts them off.
FileDescriptor introduce(Process& one, Process& other, bool linked, bool fatal = false) {
  std::array<int, 2> ends{-1, -1};
  if (linked)
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) == 0, "peers: no sockets");
  FileDescriptor cut(linked ? dup(ends[0]) : -1);
  one.meet(other, ends[0], fatal);
  other.meet(one, ends[1], fatal);
  return cut;
}

void die(const Process& process, const FileDescriptor& cut) {
  const std::uint64_t one = 1;
  check(write(process.end.get(), &one, sizeof one) == sizeof one, "peers: cannot end");
  if (cut.get() >= 0) shutdown(cut.get(), SHUT_RDWR);
}

std::shared_ptr<Message> post(Process& process, bool sends, int peer, std::vector<std::uint64_t>& words) {
  auto message = std::make_shared<Message>();
  message->sends = sends;
  message->peer = peer;
  message->dtype = DType::int64;
  message->data = reinterpret_cast<std::byte*>(words.data());
  message->bytes = words.size() * sizeof(words[0]);
  message->timeout = 60 * kSecond;
  process.mailbox->post(message);
  return message;
}

// Sends what nobody else sends, and receives what the peer does.
void exchange(Process& process, int peer, std::uint64_t number) {
  std::vector<std::uint64_t> mine(100, number << 8 | static_cast<unsigned>(process.rank())), theirs(100);
  const auto sent = post(process, true, peer, mine), received = post(process, false, peer, theirs);
  process.mailbox->wait(sent);
  process.mailbox->wait(received);
  check(theirs == std::vector<std::uint64_t>(100, number << 8 | static_cast<unsigned>(peer)),
        "peers: a message is not what was sent");
}

std::ptrdiff_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

// Another in the place of the last one, over the same kind of way or the other.
void visit(Process& host, int round) {
  const bool linked = round % 2 == 1;
  Process guest(2);
  const FileDescriptor cut = introduce(host, guest, linked);
  in_threads(2, [&](int thread) {
    for (std::uint64_t i = 0; i < 20; ++i) thread == 0 ? exchange(host, 2, i) : exchange(guest, 0, i);
  });
  std::vector<std::uint64_t> never(100);
  const auto awaited = post(host, false, 2, never);
  if (round % 3 == 2) {  // dropped while it lives
    host.part_from(2);
  } else {
    die(guest, cut);
  }
  const Error error = error_of([&] { host.mailbox->wait(awaited); });
  check(error.kind() == ErrorKind::peer_lost && error.culprit() == 2,
        std::string("peers: a message from one that is gone: ") + error.what());
  check(host.team->fate().error() == nullptr, "peers: the end of a rank is everybody's");
  if (round % 3 != 2) host.part_from(2);
}

void come_and_go() {
  constexpr int kRounds = 60;
  const auto before = descriptors();
  {
    Process host(0), neighbour(1), distant(3);
    introduce(host, neighbour, false);
    introduce(host, distant, true);
    std::atomic<bool> over = false;
    std::array<std::atomic<std::uint64_t>, 2> done{};
    const auto talk = [&](std::size_t i, Process& other) {
      std::uint64_t number = 0;
      for (bool last = false; !last; done[i] = ++number) {
        std::uint64_t ends = over;
        // The host says whether it is the last time.
        std::vector<std::uint64_t> word{ends}, heard(1);
        std::thread there([&] {
          other.mailbox->wait(post(other, false, 0, heard));
          exchange(other, 0, number);
        });
        host.mailbox->wait(post(host, true, other.rank(), word));
        exchange(host, other.rank(), number);
        there.join();
        last = heard[0] != 0;
      }
    };
    std::thread near([&] { talk(0, neighbour); }), far([&] { talk(1, distant); });
    for (int round = 0; round < kRounds; ++round) {
      const std::array<std::uint64_t, 2> reached{done[0], done[1]};
      visit(host, round);
      for (std::size_t i = 0; i < 2; ++i)
        while (done[i] == reached[i]) std::this_thread::yield();
    }
    over = true;
    near.join();
    far.join();
  }
  check(descriptors() == before, "peers: descriptors are left of those that have gone");
  std::printf("peers: one comes and goes %d times, two talk on\n", kRounds);
}

// The end of a rank that was said to be everybody's.
void one_is_fatal() {
  for (const bool linked : {false, true}) {
    Process host(0), other(1), fatal(2);
    introduce(host, other, !linked);
    const FileDescriptor cut = introduce(host, fatal, linked, true);
    std::vector<std::uint64_t> never(1);
    const auto awaited = post(host, false, 1, never);
    die(fatal, cut);
    const Error error = error_of([&] { host.mailbox->wait(awaited); });
    check(error.kind() == ErrorKind::peer_lost && error.culprit() == 2,
          std::string("peers: a fatal end: ") + error.what());
  }
  std::printf("peers: the end of one is everybody's\n");
}

}  // namespace

void stress_peers() {
  come_and_go();
  one_is_fatal();
}

}  // namespace ringreduce::stress
