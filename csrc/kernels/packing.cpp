#include "kernels/packing.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/float_environment.h"

namespace ringreduce {
namespace {

using Block = std::array<float, kPackedTogether>;

constexpr std::uint32_t kExponents = 255;  // the exponent of infinities and NaNs, and the scale of what held one
constexpr int kFraction = 6;               // bits of an int8 behind the binary point
constexpr int kBias = 127;

std::uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const std::uint32_t quiet = bits >> 16 | 0x40;
  return static_cast<std::uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

float from_bfloat16(std::uint16_t value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value) << 16); }

float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + kBias) << 23); }

// A power of two as two factors, since it may be out of a float's range where what it is multiplied with makes up for
// that.
struct Factors {
  explicit Factors(int exponent) : one(power_of_two(exponent / 2)), other(power_of_two(exponent - exponent / 2)) {}
  float one, other;
};

// Returns the scale: a biased exponent, such that all magnitudes are below 2 ^ (scale + 1 - bias).
std::uint8_t pack_block(const Block& values, std::array<std::int8_t, kPackedTogether>& packed) {
  std::uint32_t largest = 0;
  for (const float value : values) largest = std::max(largest, std::bit_cast<std::uint32_t>(value) & 0x7fffffff);
  const std::uint32_t scale = largest >> 23;
  packed.fill(0);
  if (scale == kExponents) return kExponents;
  const Factors factors(kFraction + kBias - static_cast<int>(scale));
  constexpr float kRounder = 3 << 22;  // a sum with it has no bits behind the binary point, and the integer as its last
  for (std::size_t i = 0; i < kPackedTogether; ++i) {
    const float scaled = std::clamp(values[i] * factors.one * factors.other, -127.0f, 127.0f);
    packed[i] = static_cast<std::int8_t>(std::bit_cast<std::int32_t>(scaled + kRounder));
  }
  return static_cast<std::uint8_t>(scale);
}

void unpack_block(std::uint8_t scale, const std::array<std::int8_t, kPackedTogether>& packed, Block& values) {
  if (scale == kExponents) {
    values.fill(std::bit_cast<float>(0x7fc00000));
    return;
  }
  const Factors factors(static_cast<int>(scale) - kBias - kFraction);
  for (std::size_t i = 0; i < kPackedTogether; ++i)
    values[i] = static_cast<float>(packed[i]) * factors.one * factors.other;
}

// Calls `f` for each block with its number, its first value's and how many it has.
template <class F>
void for_each_block(std::size_t count, F f) {
  for (std::size_t first = 0; first < count; first += kPackedTogether)
    f(first / kPackedTogether, first, std::min(kPackedTogether, count - first));
}

constexpr std::size_t block_count(std::size_t count) { return (count + kPackedTogether - 1) / kPackedTogether; }

}  // namespace

Packing packing_named(std::string_view name) {
  if (name == "float32") return Packing::none;
  if (name == "bfloat16") return Packing::bfloat16;
  if (name == "int8") return Packing::int8;
  throw Error(ErrorKind::invalid_argument,
              "wire_dtype is '" + std::string(name) + "'; it must be 'float32', 'bfloat16' or 'int8'");
}

std::size_t packed_bytes(Packing packing, std::size_t count) {
  switch (packing) {
    case Packing::none:
      return count * sizeof(float);
    case Packing::bfloat16:
      return count * sizeof(std::uint16_t);
    case Packing::int8:
      return block_count(count) + count;  // the scales, then the values
  }
  return 0;
}

void pack(Packing packing, std::byte* packed, const std::byte* values, std::size_t count) {
  if (packing == Packing::none) {
    std::memcpy(packed, values, count * sizeof(float));
    return;
  }
  const DefaultFloatEnvironment environment;
  for_each_block(count, [&](std::size_t number, std::size_t first, std::size_t some) {
    Block block{};
    std::memcpy(block.data(), values + first * sizeof(float), some * sizeof(float));
    if (packing == Packing::bfloat16) {
      std::array<std::uint16_t, kPackedTogether> halves;
      for (std::size_t i = 0; i < kPackedTogether; ++i) halves[i] = to_bfloat16(block[i]);
      std::memcpy(packed + first * sizeof(std::uint16_t), halves.data(), some * sizeof(std::uint16_t));
    } else {
      std::array<std::int8_t, kPackedTogether> bytes;
      packed[number] = static_cast<std::byte>(pack_block(block, bytes));
      std::memcpy(packed + block_count(count) + first, bytes.data(), some);
    }
  });
}

void unpack(Packing packing, std::byte* values, const std::byte* packed, std::size_t count) {
  if (packing == Packing::none) {
    std::memcpy(values, packed, count * sizeof(float));
    return;
  }
  const DefaultFloatEnvironment environment;
  for_each_block(count, [&](std::size_t number, std::size_t first, std::size_t some) {
    Block block;
    if (packing == Packing::bfloat16) {
      std::array<std::uint16_t, kPackedTogether> halves{};
      std::memcpy(halves.data(), packed + first * sizeof(std::uint16_t), some * sizeof(std::uint16_t));
      for (std::size_t i = 0; i < kPackedTogether; ++i) block[i] = from_bfloat16(halves[i]);
    } else {
      std::array<std::int8_t, kPackedTogether> bytes{};
      std::memcpy(bytes.data(), packed + block_count(count) + first, some);
      unpack_block(static_cast<std::uint8_t>(packed[number]), bytes, block);
    }
    std::memcpy(values + first * sizeof(float), block.data(), some * sizeof(float));
  });
}

void round(Packing packing, std::byte* values, std::size_t count) {
  if (packing == Packing::none) return;
  std::array<std::byte, kPackedTogether * sizeof(float)> packed;
  for_each_block(count, [&](std::size_t, std::size_t first, std::size_t some) {
    pack(packing, packed.data(), values + first * sizeof(float), some);
    unpack(packing, values + first * sizeof(float), packed.data(), some);
  });
}

}  // namespace ringreduce
