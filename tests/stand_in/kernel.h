// How a kernel is written for the stand-in driver: STAND_IN_KERNEL(name, Parameters, most_threads) { ... }
// The body is run once a block, and plays all its threads. It has `parameters`, `block`, `blocks` and `threads`.
#pragma once

#include <cstddef>

#define STAND_IN_EXPORT extern "C" __attribute__((visibility("default")))

#define STAND_IN_KERNEL(name, Parameters, most_threads)                                                             \
  STAND_IN_EXPORT const std::size_t stand_in_##name##_parameters;                                                   \
  const std::size_t stand_in_##name##_parameters = sizeof(Parameters);                                              \
  STAND_IN_EXPORT const unsigned stand_in_##name##_threads;                                                         \
  const unsigned stand_in_##name##_threads = most_threads;                                                          \
  static void name(const Parameters& parameters, unsigned block, unsigned blocks, unsigned threads);                \
  STAND_IN_EXPORT void stand_in_##name(const void* const* all, unsigned block, unsigned blocks, unsigned threads) { \
    name(*static_cast<const Parameters*>(all[0]), block, blocks, threads);                                          \
  }                                                                                                                 \
  static void name(const Parameters& parameters, [[maybe_unused]] unsigned block, [[maybe_unused]] unsigned blocks, \
                   [[maybe_unused]] unsigned threads)
