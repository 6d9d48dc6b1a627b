// Time. All durations and instants in csrc are nanoseconds of the monotonic clock, comparable between the processes of
// a host.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>

namespace ringreduce {

using Nanoseconds = std::int64_t;

inline constexpr Nanoseconds kMicrosecond = 1'000;
inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1'000'000'000;
inline constexpr Nanoseconds kForever = INT64_MAX;

inline Nanoseconds now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

constexpr double seconds(Nanoseconds duration) { return static_cast<double>(duration) / kSecond; }

// "1.5 s"
inline std::string in_seconds(Nanoseconds duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", seconds(duration));
  return text;
}

}  // namespace ringreduce
