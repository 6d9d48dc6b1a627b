// A quick look at the machine: what the cost model of ringreduce/plan/cost.py needs to know of it.
//
// Threads of this process, one on each of the given cores, bounce a flag, copy, add, and hand each other data. Takes
// some 50 ms, at most about 100 where the cores are busy, and up to 24 MB a core (of at most kMostCores).
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace ringreduce {

// Seconds, or seconds per byte. A byte copied is read once and written once.
struct Probe {
  static constexpr std::array<std::size_t, 4> kStaging{64 << 10, 256 << 10, 1 << 20, 4 << 20};

  double hop = 0;          // from a store on one core to the moment another core, which looks all the time, sees it
  double turn = 0;         // sched_yield, from one thread of a core to the other
  double wake = 0;         // from one thread of a core to another that sleeps, which the first wakes before it sleeps
  double copy_cached = 0;  // copying within 32 KB
  double add_cached = 0;   // float32 a = a + b within 32 KB, per byte of a
  double copy_memory = 0;  // copying between buffers of 8 MB, by one core while the others idle
  double copy_memory_all = 0;  // the same by each core while all do it
  double add_memory_all = 0;   // a = a + b on such buffers, per byte of a
  // Bringing two such buffers to 256 KB of scratch space, part by part: by a copy, and as peers' memory is read, by the
  // kernel; the latter is 0 if it may not be read.
  double copy_scratch = 0, fetch_scratch = 0;
  // Per entry of kStaging: a buffer of so many bytes that one core fills (`put`) and then another one reads (`take`),
  // again and again. What is put comes from the core's cache, and what is taken goes there.
  std::array<double, kStaging.size()> put{}, take{};
};

// `cores`: the numbers of the cores that the ranks may use, at least one. Those that this process may not use are
// probed on whatever core the kernel picks. Throws Error(system) if a thread or the memory cannot be had.
Probe probe(std::span<const int> cores);

}  // namespace ringreduce
