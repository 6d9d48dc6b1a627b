// Functions of integers that several layers need.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce {

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Every bit of the result depends on every bit of `x` (splitmix64's finalizer; Steele, Lea and Flood 2014).
constexpr std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace ringreduce
