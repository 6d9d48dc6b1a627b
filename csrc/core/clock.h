// Time. All durations and instants in csrc are nanoseconds of the monotonic clock, comparable between the processes of
// a host.
#pragma once

#include <algorithm>
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
// No duration that comes from outside is longer, so an instant plus a duration does not overflow: ten years.
inline constexpr Nanoseconds kLongest = 10 * 365 * 24 * 3600 * kSecond;

// A duration from outside, cut to kLongest.
constexpr Nanoseconds nanoseconds(std::chrono::milliseconds duration) {
  constexpr std::chrono::milliseconds longest(kLongest / kMillisecond);
  return std::clamp(duration, -longest, longest).count() * kMillisecond;
}
constexpr Nanoseconds nanoseconds(double seconds) {
  constexpr auto longest = static_cast<double>(kLongest / kSecond);
  return static_cast<Nanoseconds>(std::clamp(seconds, -longest, longest) * kSecond);
}

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
