#include "kernels/packing.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/error.h"
#include "core/float_environment.h"
#include "kernels/target.h"

namespace ringreduce {
namespace {

constexpr std::array<std::string_view, kPackings> kNames{"float32", "bfloat16", "int8", "int4"};

constexpr std::size_t block_bytes(Packing packing) {
  switch (packing) {
    case Packing::none:
      break;
    case Packing::bfloat16:
      return kPackedTogether * 2;
    case Packing::int8:
      return 1 + kPackedTogether;
    case Packing::int4:
      return 1 + kPackedTogether / 2;
  }
  return kPackedTogether * sizeof(float);
}

// The values behind the last full block, which are not rounded. `to` may be `values`.
void add_rest(std::byte* to, const std::byte* values, std::byte* rest, std::size_t count) {
  for (std::size_t at = 0; at < count * sizeof(float); at += sizeof(float)) {
    float value, more;
    std::memcpy(&value, values + at, sizeof(float));
    std::memcpy(&more, rest + at, sizeof(float));
    value += more;
    std::memcpy(to + at, &value, sizeof(float));
  }
  std::memset(rest, 0, count * sizeof(float));
}

char* chars(std::byte* bytes) { return reinterpret_cast<char*>(bytes); }
const char* chars(const std::byte* bytes) { return reinterpret_cast<const char*>(bytes); }

}  // namespace

Packing packing_named(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found != kNames.end()) return static_cast<Packing>(found - kNames.begin());
  throw Error(ErrorKind::invalid_argument,
              "wire_dtype is '" + std::string(name) + "'; it must be 'float32', 'bfloat16', 'int8' or 'int4'");
}

std::string_view name(Packing packing) { return kNames[static_cast<std::size_t>(packing)]; }

std::size_t packed_bytes(Packing packing, std::size_t count) {
  return count / kPackedTogether * block_bytes(packing) + count % kPackedTogether * sizeof(float);
}

void pack(Packing packing, std::byte* packed, const std::byte* values, std::size_t count, std::byte* rest) {
  const DefaultFloatEnvironment environment;
  const std::size_t blocks = packing == Packing::none ? 0 : count / kPackedTogether;
  const std::size_t full = blocks * kPackedTogether;
  kernels::current_target().pack(packing, {chars(values), chars(packed), true, chars(rest), blocks});
  packed += packed_bytes(packing, full);
  values += full * sizeof(float);
  if (rest == nullptr)
    std::memcpy(packed, values, (count - full) * sizeof(float));
  else
    add_rest(packed, values, rest + full * sizeof(float), count - full);
}

void unpack(Packing packing, std::byte* values, const std::byte* packed, std::size_t count) {
  const DefaultFloatEnvironment environment;
  const std::size_t blocks = packing == Packing::none ? 0 : count / kPackedTogether;
  const std::size_t full = blocks * kPackedTogether;
  kernels::current_target().unpack(packing, chars(values), chars(packed), blocks);
  std::memcpy(values + full * sizeof(float), packed + packed_bytes(packing, full), (count - full) * sizeof(float));
}

void round(Packing packing, std::byte* values, std::size_t count, std::byte* rest) {
  if (packing == Packing::none) return;
  const DefaultFloatEnvironment environment;
  const std::size_t blocks = count / kPackedTogether, full = blocks * kPackedTogether;
  kernels::current_target().pack(packing, {chars(values), chars(values), false, chars(rest), blocks});
  std::byte* const behind = values + full * sizeof(float);
  if (rest != nullptr) add_rest(behind, behind, rest + full * sizeof(float), count - full);
}

}  // namespace ringreduce
