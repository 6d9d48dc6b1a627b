// Every way in which a group fails, and what each rank hears of it.
#include <barrier>
#include <cstdio>
#include <thread>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr Nanoseconds kLong = 60 * kSecond;

void expect(const Error& error, ErrorKind kind, int culprit, const std::string& scenario) {
  check(error.kind() == kind && error.culprit() == culprit,
        scenario + ": kind " + std::to_string(static_cast<int>(error.kind())) + ", culprit " +
            std::to_string(error.culprit()) + ": " + error.what());
}

// Calls until the group fails, or for good.
void call_for_ever(Rank& rank) {
  for (std::uint64_t number = 0;; ++number) run_scripted(rank, 3, number);
}

void other_calls(int size) {
  Group group(size, 8, 256);
  std::barrier together(size);  // ranks end a call at different times, and this is about the next one
  on_all_ranks(group, [&](Rank& rank) {
    for (std::uint64_t number = 0; number < 20; ++number) run_scripted(rank, 1, number);
    together.arrive_and_wait();
    rank.engine.choose(Operation::all_reduce, ~std::uint64_t{0}, 0);
    const bool odd_one = rank.number() == size - 1;
    const Error error = error_of([&] { run_all_reduce(rank, odd_one ? 3000 : 2000, kLong); });
    check(error.kind() == ErrorKind::mismatch, std::string("mismatch: ") + error.what());
    const Error again = error_of([&] { run_all_reduce(rank, 10, kLong); });
    check(again.kind() == ErrorKind::mismatch, std::string("after a mismatch: ") + again.what());
  });
  std::printf("faults: mismatch, %d ranks\n", size);
}

void never_comes(int size) {
  constexpr Nanoseconds kTimeout = 300 * kMillisecond;
  Group group(size, 8, 256);
  const Nanoseconds start = now();
  on_all_ranks(group, [&](Rank& rank) {
    if (rank.number() == 1) return;
    const Error error = error_of([&] { run_all_reduce(rank, 2000, kTimeout); });
    check(now() - start >= kTimeout, "timeout: too early");
    expect(error, ErrorKind::timeout, 1, "timeout");
  });
  std::printf("faults: timeout, %d ranks\n", size);
}

void leaves(int size) {
  Group group(size, 8, 256);
  on_all_ranks(group, [&](Rank& rank) {
    if (rank.number() != 1) return expect(error_of([&] { call_for_ever(rank); }), ErrorKind::peer_lost, 1, "leaving");
    for (std::uint64_t number = 0; number < 25; ++number) run_scripted(rank, 3, number);
    group.ranks[1] = nullptr;
  });
  std::printf("faults: a rank leaves, %d ranks\n", size);
}

// Rank 0 waits for a message, the others but the last for calls, and the last one's engine is told to abort.
void aborted(int size) {
  Group group(size, 8, 256);
  on_all_ranks(group, [&](Rank& rank) {
    if (rank.number() == size - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return rank.engine.abort("enough");
    }
    const Error error = error_of([&] {
      if (rank.number() > 0) run_all_reduce(rank, 2000, kLong);
      std::vector<std::byte> bytes(100);
      const auto message = std::make_shared<Message>();
      message->data = bytes.data();
      message->bytes = bytes.size();
      message->timeout = kLong;
      rank.mailbox.post(message);
      rank.mailbox.wait(message);
    });
    expect(error, ErrorKind::aborted, -1, "abort");
  });
  std::printf("faults: abort, %d ranks\n", size);
}

// The same from a second thread of a rank that calls.
void aborts_itself() {
  Group group(3, 8, 256);
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    group.ranks[0]->engine.abort("enough");
  });
  on_all_ranks(group, [](Rank& rank) {
    expect(error_of([&] { call_for_ever(rank); }), ErrorKind::aborted, -1, "abort in the midst of calls");
  });
  other.join();
  std::printf("faults: abort in the midst of calls, 3 ranks\n");
}

// A rank that is late writes nothing once another has failed, whatever the id of that one's thread means by then.
void writes_late() {
  Group group(2, 8, 256);
  Team &failed = *group.ranks[0]->team, &late = *group.ranks[1]->team;
  if (!late.opens_memory()) return;
  std::uint64_t word = 1;
  const auto write = [&](std::uint64_t value) {
    late.write(0, reinterpret_cast<std::uint64_t>(&word), reinterpret_cast<const std::byte*>(&value), sizeof(value));
  };
  write(2);
  check(word == 2, "late: cannot write before the failure");
  failed.fate().fail(1);
  expect(error_of([&] { write(3); }), ErrorKind::peer_lost, 0, "late");
  check(word == 2, "late: written after the failure");
  std::printf("faults: a late writer\n");
}

// A rank has failed in the call, and another died while it wrote down why: nobody's call ends well.
void dies_while_it_says_why() {
  Group group(2, 8, 256);
  group.ranks[0]->team->fate().record().state = 1;
  group.ranks[0]->team->fate().fail(1);
  on_all_ranks(group, [](Rank& rank) {
    expect(error_of([&] { run_all_reduce(rank, 2000, kLong); }), ErrorKind::aborted, -1, "no reason");
  });
  std::printf("faults: no reason, 2 ranks\n");
}

}  // namespace

void stress_faults() {
  for (int size : {2, 3, 5}) other_calls(size);
  for (int size : {2, 4}) never_comes(size);
  for (int size : {2, 4}) leaves(size);
  for (int size : {2, 4}) aborted(size);
  aborts_itself();
  writes_late();
  dies_while_it_says_why();
}

}  // namespace ringreduce::stress
