// Keeps what torch computes in the calling thread.
#pragma once

// Functions of the OpenMP that torch has; null if torch has none.
extern "C" {
int omp_get_max_threads() __attribute__((weak));
void omp_set_num_threads(int threads) __attribute__((weak));
}

namespace ringreduce {

// The calling thread's part of a parallel region, as long as this exists: OpenMP gives it no others. No effect where
// torch is built without OpenMP.
struct OneThread {
  OneThread() : before(omp_get_max_threads == nullptr ? 0 : omp_get_max_threads()) { set(1); }
  ~OneThread() { set(before); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  static void set(int threads) {
    if (omp_set_num_threads != nullptr) omp_set_num_threads(threads);
  }
  const int before;
};

}  // namespace ringreduce
