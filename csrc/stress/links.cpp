// Tests of links: their group ends, a connection is slow, a peer dies or lies.
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "stress/harness.h"
#include "transport/frame.h"
#include "transport/links.h"

namespace ringreduce::stress {
namespace {

std::array<int, 2> sockets() {
  std::array<int, 2> ends;
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends.data()) == 0, "no sockets");
  return ends;
}

void keep_little(int socket) {
  const int least = 0;  // the kernel makes it the least that it allows
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
}

std::ptrdiff_t descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

std::shared_ptr<Message> message(bool sends, int peer, std::vector<std::byte>& bytes) {
  auto m = std::make_shared<Message>();
  m->sends = sends;
  m->peer = peer;
  m->data = bytes.data();
  m->bytes = bytes.size();
  m->timeout = 60 * kSecond;
  return m;
}

void add(Group& group, int rank, int peer, int socket) {
  group.ranks[static_cast<std::size_t>(rank)]->team->links()->add(peer, socket, "a test's");
}

// Passes on what comes from either side, 1 KiB a millisecond, until both have ended.
void pass_on_slowly(std::array<int, 2> ends) {
  std::array<char, 1024> bytes;
  for (int open = 2; open > 0;) {
    std::array<pollfd, 2> polled{{{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}}};
    poll(polled.data(), 2, 1000);
    for (std::size_t from : {std::size_t{0}, std::size_t{1}}) {
      if (ends[from] < 0 || polled[from].revents == 0) continue;
      const ssize_t read = ::read(ends[from], bytes.data(), bytes.size());
      if (read > 0) {
        for (ssize_t done = 0, some = 0; done < read && ends[1 - from] >= 0; done += std::max<ssize_t>(some, 0)) {
          some = send(ends[1 - from], bytes.data() + done, static_cast<std::size_t>(read - done), MSG_NOSIGNAL);
          if (some < 0 && errno != EAGAIN && errno != EINTR) break;  // the other side has left: the rest is for nobody
        }
      } else if (read == 0) {
        shutdown(ends[1 - from], SHUT_WR);
        ends[from] = -1 - ends[from];  // closed at the end: the other direction may go on
        --open;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (const int end : ends) close(end < 0 ? -1 - end : end);
}

// A rank sends a message and leaves. Most of the message goes over a connection that is slow, and the farewell could
// overtake it over the other.
void leaves_behind_data() {
  constexpr std::size_t kSlot = 65536;
  Group group(2, 8, 256, {0, 1}, false, kSlot);
  const std::array<int, 2> slow_sender = sockets(), slow_receiver = sockets(), fast = sockets();
  keep_little(slow_sender[0]);
  add(group, 0, 1, slow_sender[0]);
  add(group, 1, 0, slow_receiver[1]);
  add(group, 0, 1, fast[0]);
  add(group, 1, 0, fast[1]);
  std::vector<std::byte> sent(4 * kSlot), received(4 * kSlot);
  for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<std::byte>(i * 7 + i / 256);
  in_threads(3, [&](int thread) {
    if (thread == 2) return pass_on_slowly({slow_sender[1], slow_receiver[0]});
    Rank& rank = *group.ranks[static_cast<std::size_t>(thread)];
    const auto m = message(thread == 0, 1 - thread, thread == 0 ? sent : received);
    rank.mailbox.post(m);
    rank.mailbox.wait(m);
    group.ranks[static_cast<std::size_t>(thread)] = nullptr;
  });
  check(received == sent, "links: a message of a rank that has left is not what was sent");
  std::printf("links: a rank leaves, with data on a slow connection\n");
}

// Both would join the links' thread.
void leaves_twice_at_once() {
  for (int round = 0; round < 100; ++round) {
    Group group(2, 8, 256, {0, 1});
    std::barrier together(3);
    in_threads(3, [&](int thread) {
      together.arrive_and_wait();
      group.ranks[thread == 0 ? 1 : 0]->team->leave();
    });
  }
  std::printf("links: two threads leave at once\n");
}

// A peer says that the group has failed, and its numbers mean nothing here, or name a rank whose call is not known.
void errors_with_bad_numbers() {
  struct ErrorFrame {
    FrameHeader header{.kind = FrameKind::error, .bytes = sizeof(ErrorImage) + 4};
    ErrorImage error;
    char text[4] = {'o', 'd', 'd', '!'};
  };
  Nanoseconds least = kForever;  // of the time to the error: others use the machine too
  for (const std::int32_t culprit : {-1, -1000, 2, 1 << 30, 1, 1, 1}) {
    Group group(2, 8, 256, {0, 1}, false);
    const std::array<int, 2> ends = sockets();
    add(group, 0, 1, ends[0]);
    Nanoseconds told = 0;
    std::thread liar([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ErrorFrame frame{};
      frame.error = {.kind = static_cast<std::int32_t>(ErrorKind::mismatch), .culprit = culprit, .reporter = culprit};
      told = now();
      check(write(ends[1], &frame, sizeof frame) == sizeof frame, "links: cannot write an error");
    });
    const Error error = error_of([&] { run_all_reduce(*group.ranks[0], 2000, 60 * kSecond); });
    const Nanoseconds heard = now();
    liar.join();
    least = std::min(least, heard - told);
    check(error.kind() == ErrorKind::mismatch && std::strstr(error.what(), "odd!") != nullptr &&
              error.culprit() == (culprit == 1 ? 1 : -1),
          std::string("links: an error with a bad number: ") + error.what());
    close(ends[1]);
  }
  check(least < kSecond / 2, "links: a mismatch that another rank found is looked for here once more");
  std::printf("links: errors with bad numbers\n");
}

// A thread that was told of a failure goes back to sleep: nothing is left that wakes it for ever.
void wakes_and_sleeps_again() {
  constexpr int kRounds = 3000;
  Group group(2, 8, 256, {0, 1});
  std::vector<pollfd> wakers;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    if (std::error_code gone;
        std::filesystem::read_symlink(entry, gone).string().find("[eventfd]") != std::string::npos)
      wakers.push_back({std::stoi(entry.path().filename()), POLLIN, 0});
  check(wakers.size() >= 2, "links: no eventfd was found");
  std::barrier together(2);
  in_threads(2, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      together.arrive_and_wait();
      for (int i = 0; i < 3; ++i) group.ranks[0]->team->links()->tell_soon();
      together.arrive_and_wait();
      if (thread != 0) continue;
      const Nanoseconds deadline = now() + 10 * kSecond;
      while (poll(wakers.data(), wakers.size(), 0) > 0) {
        check(now() < deadline, "links: their thread is woken for ever");
        std::this_thread::yield();
      }
    }
  });
  std::printf("links: the thread sleeps after it was woken\n");
}

// A connection is full while the control block changes: its latest state arrives.
void tells_the_latest() {
  constexpr std::uint64_t kStates = 600;
  Group group(2, 8, 256, {0, 1}, false);
  const std::array<int, 2> ends = sockets();
  for (const auto& rank : group.ranks) rank->team->links()->take_over();  // nothing moves but what is moved here
  keep_little(ends[0]);
  add(group, 0, 1, ends[0]);
  add(group, 1, 0, ends[1]);
  Team &teller = *group.ranks[0]->team, &told = *group.ranks[1]->team;
  for (std::uint64_t state = 1; state <= kStates; ++state) {
    teller.control(0).barriers_entered = state;
    teller.links()->tell(true);
  }
  for (int quiet = 0; quiet < 100; ++quiet)
    while (told.links()->progress() || teller.links()->progress()) quiet = 0;
  check(told.control(0).barriers_entered == kStates, "links: the latest control block was not sent");
  for (const auto& rank : group.ranks) rank->team->links()->hand_over(false);
  std::printf("links: the latest control block arrives\n");
}

// Two ranks wait for one another when a third is cut off, to which one of them has no link.
void hears_of_a_death_elsewhere() {
  Group group(3, 8, 256, {0, 1, 2}, false);
  group.link(0, 2);
  const std::array<int, 2> ends = sockets();
  const int cut = dup(ends[0]);
  add(group, 0, 1, ends[0]);
  add(group, 1, 0, ends[1]);
  in_threads(2, [&](int thread) {
    if (thread == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      shutdown(cut, SHUT_RDWR);
      return;
    }
    std::vector<std::byte> bytes(100);
    const auto m = message(false, 0, bytes);
    const Error error = error_of([&] {  // rank 0 does nothing at all
      group.ranks[2]->mailbox.post(m);
      group.ranks[2]->mailbox.wait(m);
    });
    check(error.kind() == ErrorKind::peer_lost && error.culprit() == 1,
          std::string("links: a death elsewhere: ") + error.what());
  });
  close(cut);
  std::printf("links: a rank without a link to a dead one hears of it\n");
}

void takes_a_blocking_socket() {
  Group group(2, 8, 256, {0, 1}, false);
  const std::array<int, 2> ends = sockets();
  fcntl(ends[0], F_SETFL, 0);
  add(group, 0, 1, ends[0]);
  check((fcntl(ends[0], F_GETFL) & O_NONBLOCK) != 0, "links: a socket blocks");
  close(ends[1]);
  std::printf("links: no socket blocks\n");
}

// The system gives no more threads.
void has_no_thread() {
  pthread_attr_t usual, greedy;
  pthread_getattr_default_np(&usual);
  pthread_getattr_default_np(&greedy);
  pthread_attr_setstacksize(&greedy, std::size_t{1} << 46);
  const std::ptrdiff_t before = descriptors();
  pthread_setattr_default_np(&greedy);
  bool refused = false;
  try {
    const Group group(2, 8, 256, {0, 1});
  } catch (const Error& error) {
    refused = error.kind() == ErrorKind::system;
  }
  pthread_setattr_default_np(&usual);
  check(refused, "links: no thread is refused");
  check(descriptors() == before + 1, "links: descriptors are left where a thread is refused");  // the other end's
  std::printf("links: no thread to be had\n");
}

struct Case {
  const char* name;
  void (*run)();
};
constexpr Case kCases[]{{"data", leaves_behind_data},          {"twice", leaves_twice_at_once},
                        {"numbers", errors_with_bad_numbers},  {"sleep", wakes_and_sleeps_again},
                        {"latest", tells_the_latest},          {"death", hears_of_a_death_elsewhere},
                        {"blocking", takes_a_blocking_socket}, {"thread", has_no_thread}};

}  // namespace

void stress_links(const std::string& only) {
  for (const Case& each : kCases)
    if (only.empty() || only == each.name) each.run();
}

}  // namespace ringreduce::stress
