// The load of a long-running job: eight groups at once on every rank, four threads that call and send messages in them,
// and groups that come, fail and go while the others work.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstdio>
#include <limits>
#include <map>
#include <mutex>
#include <semaphore>
#include <thread>

#include "engine/completions.h"
#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr int kRanks = 3, kThreads = 4, kShared = 4;  // and a group for each thread

// How a life of a group ends.
enum class End { peaceful, abort, leave };

// A rank's part of a life of a group, with everything that a process group has.
class Member {
 public:
  Member(std::unique_ptr<Rank> rank, End end) : rank_(std::move(rank)), end_(end) {}
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  // In the order of ProcessGroupRing::shutdown.
  ~Member() {
    if (queue_.busy()) rank_->engine.abort("left while calls were under way");
    queue_.stop();
    rank_->mailbox.stop();
    completions_.stop();
  }

  int number() const { return rank_->number(); }
  void abort() { rank_->engine.abort("enough"); }

  // The next call of the group's script, whichever thread's turn it is. Ends before it returns.
  void run() {
    attempt([&] { queue_.run([&] { run_scripted(*rank_, 5, next_++); }); });
  }
  // The same, ends later.
  void post() {
    queue_.post([this] { attempt([&] { run_scripted(*rank_, 5, next_++); }); },
                [this] { completions_.post([this] { ended_.release(); }); });
  }
  // Waits for the end of as many posted calls.
  void wait(int count) {
    for (int i = 0; i < count; ++i) ended_.acquire();
  }
  void exchange(int round) {
    attempt([&] { exchange_messages(*rank_, round); });
  }

 private:
  template <class F>
  void attempt(F&& body) {
    try {
      body();
    } catch (const Error& error) {
      const bool meant =
          error.kind() == ErrorKind::aborted || (end_ == End::leave && error.kind() == ErrorKind::peer_lost);
      check(end_ != End::peaceful && meant, std::string("mixed: ") + error.what());
    }
  }

  const std::unique_ptr<Rank> rank_;
  const End end_;
  std::uint64_t next_ = 0;  // guarded by the queue's turns alone
  std::counting_semaphore<> ended_{0};
  Completions completions_;
  CallQueue queue_;
};

// The lives of all groups. A life begins when its first rank comes.
class Lives {
 public:
  std::unique_ptr<Member> join(int group, int life, int rank, End end) {
    const std::lock_guard lock(mutex_);
    auto& born = born_[{group, life}];
    if (!born) born = std::make_unique<Group>(kRanks, 8, 256), ++count_;
    auto part = std::move(born->ranks[static_cast<std::size_t>(rank)]);
    const bool all_there = std::none_of(born->ranks.begin(), born->ranks.end(), [](const auto& r) { return !!r; });
    if (all_there) born_.erase({group, life});
    return std::make_unique<Member>(std::move(part), end);
  }
  int count() const { return count_; }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<Group>> born_;
  int count_ = 0;
};

// A random sequence that is the same on all ranks.
Random common(int a, int b) {
  return Random(mix(mix(11, static_cast<std::uint64_t>(a)), static_cast<std::uint64_t>(b)));
}

End end_of(Random& random) {
  return std::array{End::peaceful, End::peaceful, End::abort,
                    End::leave}[static_cast<std::size_t>(random_int(random, 0, 3))];
}

// A group's whole life in one thread of each rank. It may end at any call, on any rank.
void live_alone(Lives& lives, int rank, int thread, int epoch) {
  Random random = common(epoch, thread);
  const End end = end_of(random);
  const int calls = random_int(random, 5, 25);
  const int last = end == End::peaceful ? calls : random_int(random, 0, calls - 1);
  const bool ends_it = random_int(random, 0, kRanks - 1) == rank;
  const auto member = lives.join(kShared + thread, epoch, rank, end);
  int posted = 0;
  for (int call = 0; call < calls; ++call) {
    const int kind = random_int(random, 0, 9);
    if (call == last && ends_it) {
      if (end == End::leave) return;
      member->abort();
    }
    // A receive from any source does not end because one of the sources left.
    if (kind == 0 && (end != End::leave || call < last)) {
      member->exchange(call);
    } else if (kind < 5) {
      member->run();
    } else {
      member->post();
      ++posted;
    }
  }
  member->wait(posted);
}

// A rank's parts of the groups that all its threads use. The first group never fails, so no rank is more than an epoch
// ahead of another.
class Shared {
 public:
  Shared(Lives& lives, int rank) : lives_(lives), rank_(rank) { renew(0); }

  // Between two epochs, while no thread of this rank is in one.
  void renew(int epoch) {
    for (int g = 0; g < kShared; ++g) {
      if (epoch % (g + 3) != 0) continue;
      auto& member = members_[static_cast<std::size_t>(g)];
      member = nullptr;
      const int life = epoch / (g + 3);
      member = lives_.join(g, life, rank_, fails(g, life) ? End::abort : End::peaceful);
    }
  }

  // Posts calls to all groups, in an order of this rank's own, and exchanges messages in one.
  void begin(int thread, int epoch) {
    Random random(mix(static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(rank_ * kThreads + thread)));
    std::array<int, kShared * kCalls> order;
    for (int i = 0; i < kShared * kCalls; ++i) order[static_cast<std::size_t>(i)] = i % kShared;
    std::shuffle(order.begin(), order.end(), random);
    for (int group : order) members_[static_cast<std::size_t>(group)]->post();
    for (int g = 0; g < kShared; ++g)
      if (fails(g, epoch / (g + 3)) && epoch % (g + 3) == g + 2 && epoch % kRanks == rank_ &&
          epoch % kThreads == thread)
        members_[static_cast<std::size_t>(g)]->abort();
    members_[static_cast<std::size_t>(epoch % kShared)]->exchange(epoch * kThreads + thread);
  }

  void end() {
    for (const auto& member : members_) member->wait(kCalls);
  }

 private:
  static constexpr int kCalls = 3;  // per thread, epoch and group

  // Group g lives for g + 3 epochs; some lives end with an abort in the last of them.
  static bool fails(int group, int life) {
    return group > 0 && mix(13, static_cast<std::uint64_t>(group * 1000 + life)) % 2 == 0;
  }

  Lives& lives_;
  const int rank_;
  std::array<std::unique_ptr<Member>, kShared> members_;
};

}  // namespace

void stress_mixed(int seconds) {
  const Nanoseconds end = now() + seconds * kSecond;
  Lives lives;
  std::atomic<int> epochs{std::numeric_limits<int>::max()};
  in_threads(kRanks, [&](int rank) {
    Shared shared(lives, rank);
    int epoch = 0;
    std::barrier over(kThreads, [&]() noexcept {
      ++epoch;
      int none = std::numeric_limits<int>::max();
      if (now() > end) epochs.compare_exchange_strong(none, epoch + 1);  // no rank is further than that
      if (epoch < epochs) shared.renew(epoch);
    });
    in_threads(kThreads, [&](int thread) {
      while (epoch < epochs) {
        shared.begin(thread, epoch);
        live_alone(lives, rank, thread, epoch);
        shared.end();
        over.arrive_and_wait();
      }
    });
  });
  std::printf("mixed: %d ranks, %d groups, %d threads each, %d epochs, %d lives of groups\n", kRanks,
              kShared + kThreads, kThreads, epochs.load(), lives.count());
}

}  // namespace ringreduce::stress
