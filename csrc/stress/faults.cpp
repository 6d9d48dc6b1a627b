// Every way in which a group fails, and what each rank hears of it.
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
  on_all_ranks(group, [&](Rank& rank) {
    for (std::uint64_t number = 0; number < 20; ++number) run_scripted(rank, 1, number);
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

}  // namespace

void stress_faults() {
  for (int size : {2, 3, 5}) other_calls(size);
  for (int size : {2, 4}) never_comes(size);
  for (int size : {2, 4}) leaves(size);
  for (int size : {2, 4}) aborted(size);
  aborts_itself();
}

}  // namespace ringreduce::stress
