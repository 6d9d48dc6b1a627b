// float32 values as fewer bytes, for the wire between hosts.
//
//   bfloat16  2 bytes a value, rounded to nearest even: an error of at most 2^-8 of the value.
//   int8      33 bytes for 32 values, which share a power of two and have 8 bits each: MXINT8 of the OCP Microscaling
//             Formats specification, version 1.0 (2023). An error of at most 1/127 of the block's largest magnitude. A
//             block with an infinity or a NaN becomes all NaN.
//   int4      17 bytes for 32 values: the same with 4 bits each, and an error of at most 1/7 of that magnitude.
//
// The values behind the last full block of 32 keep their 4 bytes and are not rounded. What was unpacked is packed again
// without loss, so values that have been rounded once can be forwarded from rank to rank, and all get the same bits.
// Those bits are the same for all instruction sets. Thread-safe; no alignment is required.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringreduce {

enum class Packing : std::uint32_t { none, bfloat16, int8, int4 };
inline constexpr std::uint32_t kPackings = 4;

// Values that are packed together: ranges that begin at multiples of it can be packed one by one, to
// packed_bytes(begin).
inline constexpr std::size_t kPackedTogether = 32;

// "float32": as they are, "bfloat16", "int8" or "int4". Throws invalid_argument for anything else.
Packing packing_named(std::string_view name);

std::string_view name(Packing packing);

// For `count` values.
std::size_t packed_bytes(Packing packing, std::size_t count);

// Packs `values`. With `rest`, as many floats as values, packs their sum with `rest` and leaves in `rest` what rounding
// has cut off it: 0 where that is not finite.
void pack(Packing packing, std::byte* packed, const std::byte* values, std::size_t count, std::byte* rest = nullptr);
void unpack(Packing packing, std::byte* values, const std::byte* packed, std::size_t count);

// Rounds the values as packing and unpacking would; `rest` as for pack().
void round(Packing packing, std::byte* values, std::size_t count, std::byte* rest = nullptr);

}  // namespace ringreduce
