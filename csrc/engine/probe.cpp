#include "engine/probe.h"

#include <sched.h>
#include <semaphore.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "core/atomics.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/threads.h"
#include "kernels/accumulate.h"
#include "transport/peer_memory.h"

namespace ringreduce {
namespace {

constexpr std::size_t kCached = 32 << 10, kCopied = 256 << 10, kMemory = 8 << 20;
constexpr std::size_t kMostCores = 8;
constexpr int kBatches = 5;                         // each figure is that of the best: others may use the machine too
constexpr Nanoseconds kBatch = kMillisecond / 2;    // how long one lasts at least
constexpr Nanoseconds kLongest = 4 * kMillisecond;  // and, waiting for another core, at most

// Floats that nobody has touched: who fills them first decides where they are.
using Buffer = std::unique_ptr<float[]>;
Buffer untouched(std::size_t bytes) { return std::make_unique_for_overwrite<float[]>(bytes / sizeof(float)); }
void fill(const Buffer& buffer, std::size_t bytes) { std::fill_n(buffer.get(), bytes / sizeof(float), 1.0f); }
Buffer filled(std::size_t bytes) {
  Buffer buffer = untouched(bytes);
  fill(buffer, bytes);
  return buffer;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Runs body(0), body(1), ... in a thread on each of the cores, all from the same moment on.
void on_cores(std::span<const int> cores, const std::function<void(std::size_t)>& body) {
  enum : int { wait, go, cancel };
  std::atomic<int> signal{wait};
  std::atomic<std::size_t> here{0};
  std::vector<std::thread> threads;
  const auto end = [&](int how) {
    signal = how;
    for (std::thread& thread : threads) thread.join();
  };
  try {
    for (std::size_t i = 0; i < cores.size(); ++i)
      threads.push_back(start_thread([&, i] {
        pin(cores[i]);
        ++here;
        while (signal == wait) sched_yield();
        if (signal == go) body(i);
      }));
  } catch (...) {
    end(cancel);
    throw;
  }
  while (here < cores.size()) std::this_thread::yield();
  end(go);
}

// Seconds that `work` takes.
template <class Work>
double time(const Work& work) {
  double best = std::numeric_limits<double>::infinity();
  for (int batch = 0; batch < kBatches; ++batch) {
    int times = 0;
    const Nanoseconds begin = now();
    Nanoseconds end = begin;
    do {
      work();
      ++times;
      end = now();
    } while (end - begin < kBatch);
    best = std::min(best, seconds(end - begin) / times);
  }
  return best;
}

// Two threads take turns: each side's part runs when the other's has ended. The first says when it is over.
class Turns {
 public:
  // For thread 0: calls `mine`, lets the other have its turn, and so on, `times` times or until kLongest has passed.
  // Returns how often.
  template <class Part>
  int lead(int times, const Part& mine, const std::function<void()>& wait) {
    const Nanoseconds last = now() + kLongest;
    int done = 0;
    do {
      mine();
      const std::uint32_t turn = turn_.fetch_add(1) + 1;
      while (turn_.load(std::memory_order_acquire) == turn) wait();
    } while (++done < times && now() < last);
    return done;
  }
  void finish() { over_ = true, turn_.fetch_add(1); }

  // For thread 1: until the other one finishes.
  template <class Part>
  void follow(const Part& mine, const std::function<void()>& wait) {
    while (true) {
      while (turn_.load(std::memory_order_acquire) % 2 == 0) wait();
      if (over_) return;
      mine();
      turn_.fetch_add(1);
    }
  }

 private:
  alignas(64) std::atomic<std::uint32_t> turn_{0};  // even: the leader's
  std::atomic<bool> over_{false};
};

// Looks all the time, but not for ever: the other thread may be kept from its core by somebody else.
std::function<void()> spinning() {
  return [looks = 0]() mutable { ++looks % 10'000 == 0 ? void(sched_yield()) : cpu_relax(); };
}

double handover(std::span<const int> two_cores, bool yield) {
  constexpr int kTimes = 200;
  const auto waiting = [&] { return yield ? std::function<void()>([] { sched_yield(); }) : spinning(); };
  double best = std::numeric_limits<double>::infinity();
  Turns turns;
  on_cores(two_cores, [&](std::size_t i) {
    if (i == 1) return turns.follow([] {}, waiting());
    for (int batch = 0; batch < kBatches; ++batch) {
      const Nanoseconds begin = now();
      const int times = turns.lead(kTimes, [] {}, waiting());
      best = std::min(best, seconds(now() - begin) / (2 * times));
    }
    turns.finish();
  });
  return best;
}

// Two threads of a core wake each other, and sleep.
double wake_up(int core) {
  constexpr int kTimes = 50;
  std::array<sem_t, 2> turns;
  for (sem_t& turn : turns) sem_init(&turn, 0, 0);
  const auto await = [&](std::size_t i) {
    while (sem_wait(&turns[i]) != 0) {  // a signal came
    }
  };
  double best = std::numeric_limits<double>::infinity();
  const std::array<int, 2> together{core, core};
  on_cores(together, [&](std::size_t i) {
    for (int batch = 0; batch < kBatches; ++batch) {
      const Nanoseconds begin = now();
      for (int time = 0; time < kTimes; ++time) {
        if (i == 1) await(1);
        sem_post(&turns[1 - i]);
        if (i == 0) await(0);
      }
      if (i == 0) best = std::min(best, seconds(now() - begin) / (2 * kTimes));
    }
  });
  for (sem_t& turn : turns) sem_destroy(&turn);
  return best;
}

void staging(std::span<const int> two_cores, std::size_t bytes, double& put, double& take) {
  const Buffer stage = filled(bytes), source = filled(kCached), target = filled(kCached);
  const auto timed = [](std::vector<double>& each, const auto& work) {
    return [&] {
      const Nanoseconds begin = now();
      work();
      each.push_back(seconds(now() - begin));
    };
  };
  const auto in_parts = [&](const auto& move) {
    for (std::size_t at = 0; at < bytes; at += kCached) move(reinterpret_cast<std::byte*>(stage.get()) + at);
  };
  std::vector<double> puts, takes;
  Turns turns;
  on_cores(two_cores, [&](std::size_t i) {
    if (i == 1)
      return turns.follow(timed(takes, [&] { in_parts([&](std::byte* s) { std::memcpy(target.get(), s, kCached); }); }),
                          spinning());
    turns.lead(1 << 20, timed(puts, [&] { in_parts([&](std::byte* s) { std::memcpy(s, source.get(), kCached); }); }),
               spinning());
    turns.finish();
  });
  put = median(puts) / static_cast<double>(bytes);
  take = median(takes) / static_cast<double>(bytes);
}

Probe measured(std::span<const int> cores) {
  cores = cores.first(std::min(cores.size(), kMostCores));
  const std::array<int, 2> apart{cores.front(), cores[cores.size() > 1 ? 1 : 0]}, together{cores[0], cores[0]};
  Probe result;
  result.turn = handover(together, true);
  result.wake = wake_up(cores[0]);
  result.hop = cores.size() > 1 ? handover(apart, false) : result.turn;

  std::vector<Probe> each(cores.size());
  std::vector<std::array<Buffer, 2>> memory(cores.size());  // here, as a thread could not say that there is none
  for (auto& pair : memory) pair = {untouched(kMemory), untouched(kMemory)};
  std::atomic<std::size_t> ready{0};
  on_cores(cores, [&](std::size_t i) {
    const Buffer &a = memory[i][0], &b = memory[i][1];
    fill(a, kMemory);
    fill(b, kMemory);
    const auto copy = [&](std::size_t bytes) {
      return time([&] { std::memcpy(a.get(), b.get(), bytes); }) / static_cast<double>(bytes);
    };
    const auto add = [&](std::size_t bytes) {
      const void* const operands[] = {a.get(), b.get()};
      void* const sum = a.get();
      const std::size_t count = bytes / sizeof(float);
      return time([&] { kernels::accumulate(DType::float32, ReduceOp::sum, {&sum, 1}, operands, count); }) /
             static_cast<double>(bytes);
    };
    if (i == 0) {
      result.copy_cached = copy(kCached);
      result.add_cached = add(kCached);
      result.copy_memory = copy(kMemory);
      const Buffer scratch = filled(kCopied);
      const auto to_scratch = [&](const auto& move) {
        return time([&] {
                 for (const Buffer* source : {&a, &b})
                   for (std::size_t at = 0; at < kMemory; at += kCopied)
                     move(reinterpret_cast<std::byte*>(scratch.get()),
                          reinterpret_cast<std::byte*>(source->get()) + at);
               }) /
               static_cast<double>(2 * kMemory);
      };
      bool open = true;
      result.copy_scratch = to_scratch([](std::byte* to, const std::byte* from) { std::memcpy(to, from, kCopied); });
      result.fetch_scratch = to_scratch([&](std::byte* to, const std::byte* from) {
        open &= read_memory(getpid(), to, reinterpret_cast<std::uint64_t>(from), kCopied) == 0;
      });
      if (!open) result.fetch_scratch = 0;
    }
    ++ready;
    while (ready < cores.size()) sched_yield();
    each[i].copy_memory_all = copy(kMemory);
    each[i].add_memory_all = add(kMemory);
  });
  for (const Probe& one : each) {
    result.copy_memory_all = std::max(result.copy_memory_all, one.copy_memory_all);
    result.add_memory_all = std::max(result.add_memory_all, one.add_memory_all);
  }
  for (std::size_t s = 0; s < Probe::kStaging.size(); ++s)
    staging(apart, Probe::kStaging[s], result.put[s], result.take[s]);
  return result;
}

}  // namespace

Probe probe(std::span<const int> cores) {
  try {
    return measured(cores);
  } catch (const std::bad_alloc&) {
    throw Error(ErrorKind::system, "there is not enough memory to probe the machine");
  }
}

}  // namespace ringreduce
