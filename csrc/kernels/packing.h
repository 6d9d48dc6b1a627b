// float32 values as fewer bytes, for the wire between hosts.
//
//   bfloat16  Rounded to nearest even: an error of at most 2^-8 of the value.
//   int8      Blocks of 32 values share a power of two and have 8 bits each: MXINT8 of the OCP Microscaling Formats
//             specification, version 1.0 (2023). An error of at most 1/127 of the block's largest magnitude. A block
//             with an infinity or a NaN becomes all NaN.
//
// What was unpacked is packed again without loss, so values that have been rounded once can be forwarded from rank to
// rank, and all get the same bits. Thread-safe; no alignment is required.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringreduce {

enum class Packing : std::uint32_t { none, bfloat16, int8 };
inline constexpr std::uint32_t kPackings = 3;

// Values that are packed together: ranges that begin at multiples of it can be packed one by one.
inline constexpr std::size_t kPackedTogether = 32;

// "float32": as they are, "bfloat16" or "int8". Throws invalid_argument for anything else.
Packing packing_named(std::string_view name);

// For `count` values.
std::size_t packed_bytes(Packing packing, std::size_t count);
void pack(Packing packing, std::byte* packed, const std::byte* values, std::size_t count);
void unpack(Packing packing, std::byte* values, const std::byte* packed, std::size_t count);

// Rounds the values as packing and unpacking would.
void round(Packing packing, std::byte* values, std::size_t count);

}  // namespace ringreduce
