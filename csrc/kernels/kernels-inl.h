// The kernels, included once for each instruction set by a source file that has chosen it (baseline.cpp, avx2.cpp,
// avx512.cpp) and has defined
//   RINGREDUCE_TARGET        the namespace to fill
//   RINGREDUCE_TARGET_NAME   its name for users
//   RINGREDUCE_VECTOR_BYTES  the width of a vector register: 16, 32 or 64
//   RINGREDUCE_STREAM(p, v)  stores the vector v, of bytes, at the aligned p past the caches, if the CPU can
//   RINGREDUCE_STREAMED()    orders such stores before all later ones
//
// A kernel walks over its operands by blocks. A block is four vectors of lanes, the type in which elements are combined
// (float32 for the narrower floats, else the element itself). For each block the first operand is loaded, the others
// are combined into it one by one while it stays in registers, and it is rounded and stored once: this is the same loop
// for any number of operands. The rest, shorter than a block, goes the same way through a padded copy.
//
// Whatever is used below has internal linkage or is a compiler's built-in: an inline function shared with other
// sources could be compiled here for an instruction set that the others may not use, and be the one the linker keeps.
// Results are the same for all targets because every operation on lanes is exact or rounded as IEEE 754 says, in the
// order written; hence no contraction to fused multiply-add (-ffp-contract=off).

#define RINGREDUCE_INLINE inline __attribute__((always_inline))

namespace ringreduce::kernels::RINGREDUCE_TARGET {
namespace {

#include "kernels/formats-inl.h"

// ---- Loops --------------------------------------------------------------------------------------------------------

// The block at `p`, of which only the first `bytes` may be read.
template <class Format>
RINGREDUCE_INLINE auto load_part(const char* p, std::size_t bytes) {
  if (bytes == Format::kBlock) return Format::load(p);
  char padded[Format::kBlock] = {};
  __builtin_memcpy(padded, p, bytes);
  return Format::load(padded);
}

template <class Format>
RINGREDUCE_INLINE void store_part(char* p, const Block<typename Format::Lane>& block, std::size_t bytes) {
  if (bytes == Format::kBlock) return Format::store(p, block);
  char padded[Format::kBlock];
  Format::store(padded, block);
  __builtin_memcpy(p, padded, bytes);
}

// A core fetches one sequence of addresses at no more than its prefetcher's pace, which starts anew on every page.
// Large jobs therefore walk through several parts at once. Swept for all_reduce on a Xeon with AVX-512 (2 ranks,
// November 2026): of 1, 2, 4 and 8 walks 4 were the best or near it; below 128 KiB one walk was.
constexpr std::size_t kWalks = 4, kLarge = 128 * 1024;

// Calls block_of(job, at, bytes) for each block of `total` bytes, `at` being its offset; all but the last are full.
template <std::size_t kBlock, void (*block_of)(const Job&, std::size_t at, std::size_t bytes)>
inline void for_each_block(const Job& job, std::size_t total) {
  std::size_t at = 0;
  if (total >= kLarge) {
    // An odd number of blocks, so that the walks do not meet in the same sets of the L1 cache.
    const std::size_t part = ((total / kBlock / kWalks - 1) | 1) * kBlock;
    for (; at < part; at += kBlock)
      for (std::size_t walk = 0; walk < kWalks; ++walk) block_of(job, at + walk * part, kBlock);
    at = kWalks * part;
  }
  for (; at + kBlock <= total; at += kBlock) block_of(job, at, kBlock);
  if (at < total) block_of(job, at, total - at);
}

inline const char* source(const Job& job, int k) { return static_cast<const char*>(job.srcs[k]); }

template <class Format, bool kWeighs>
RINGREDUCE_INLINE auto operand(const Job& job, int k, std::size_t at, std::size_t bytes) {
  auto block = load_part<Format>(source(job, k) + at, bytes);
  if constexpr (kWeighs)
    for (auto& v : block.v) v *= job.weights[k];
  return block;
}

template <class Format, ReduceOp op, bool kWeighs>
RINGREDUCE_INLINE void accumulate_block(const Job& job, std::size_t at, std::size_t bytes) {
  using Lane = typename Format::Lane;
  Block<Lane> block = operand<Format, kWeighs>(job, 0, at, bytes);
  for (int k = 1; k < job.n; ++k) combine<Format, op>(block, operand<Format, kWeighs>(job, k, at, bytes));
  if constexpr (std::is_floating_point_v<Lane>) {
    if (job.factor != 1)
      for (auto& v : block.v) v /= static_cast<Lane>(job.factor);
  }
  for (int k = 0; k < job.copies; ++k) store_part<Format>(static_cast<char*>(job.dsts[k]) + at, block, bytes);
}

template <class Format>
RINGREDUCE_INLINE void scale_block(const Job& job, std::size_t at, std::size_t bytes) {
  using Lane = typename Format::Lane;
  Block<Lane> block = load_part<Format>(source(job, 0) + at, bytes);
  for (auto& v : block.v) v *= static_cast<Lane>(job.factor);
  store_part<Format>(static_cast<char*>(job.dsts[0]) + at, block, bytes);
}

template <class Format, ReduceOp op, bool kWeighs = false>
void accumulate_as(const Job& job) {
  for_each_block<Format::kBlock, accumulate_block<Format, op, kWeighs>>(job, job.count * Format::kElement);
}

template <class Format>
void scale_as(const Job& job) {
  for_each_block<Format::kBlock, scale_block<Format>>(job, job.count * Format::kElement);
}

void copy(const Job& job) { accumulate_as<Native<std::uint8_t>, ReduceOp::bor>(job); }

RINGREDUCE_INLINE void stream_block(const Job& job, std::size_t at, std::size_t bytes) {
  using Bytes = Native<std::uint8_t>;
  char* const dst = static_cast<char*>(job.dsts[0]) + at;
  const auto block = load_part<Bytes>(source(job, 0) + at, bytes);
  if (bytes < Bytes::kBlock) return store_part<Bytes>(dst, block, bytes);
  for (int j = 0; j < 4; ++j) RINGREDUCE_STREAM(dst + j * kVector, block.v[j]);
}

void stream(const Job& job) {
  auto* dst = static_cast<char*>(job.dsts[0]);
  const std::size_t ahead = -reinterpret_cast<std::uintptr_t>(dst) % kVector;
  const std::size_t head = ahead < job.count ? ahead : job.count;
  __builtin_memcpy(dst, source(job, 0), head);
  void* const rest = dst + head;
  const void* const from = source(job, 0) + head;
  for_each_block<Native<std::uint8_t>::kBlock, stream_block>({&rest, 1, &from, 1, job.count - head, 1},
                                                             job.count - head);
  RINGREDUCE_STREAMED();
}

// ---- Choice of the loop -------------------------------------------------------------------------------------------

// The same bytes seen as elements of a `parts`-th of the size.
inline Job in_parts(const Job& job, std::size_t parts) {
  return {job.dsts, job.copies, job.srcs, job.n, job.count * parts, job.factor};
}

template <class Format>
void floating(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::product:
      return accumulate_as<Format, ReduceOp::product>(job);
    case ReduceOp::min:
      return accumulate_as<Format, ReduceOp::min>(job);
    case ReduceOp::max:
      return accumulate_as<Format, ReduceOp::max>(job);
    case ReduceOp::logaddexp:
      return accumulate_as<Format, ReduceOp::logaddexp>(job);
    default:
      if constexpr (Format::kElement < sizeof(typename Format::Lane))
        if (job.weights != nullptr) return accumulate_as<Format, ReduceOp::sum, true>(job);
      return accumulate_as<Format, ReduceOp::sum>(job);
  }
}

template <class T>
void complex(ReduceOp op, const Job& job) {
  if (op == ReduceOp::product) return accumulate_as<Complex<T>, ReduceOp::product>(job);
  accumulate_as<Native<T>, ReduceOp::sum>(in_parts(job, 2));
}

// Sums and products do not depend on the sign, and wrap around where they are unsigned.
template <class T>
void integer(ReduceOp op, const Job& job) {
  using Unsigned = std::make_unsigned_t<T>;
  switch (op) {
    case ReduceOp::product:
      return accumulate_as<Native<Unsigned>, ReduceOp::product>(job);
    case ReduceOp::min:
      return accumulate_as<Native<T>, ReduceOp::min>(job);
    case ReduceOp::max:
      return accumulate_as<Native<T>, ReduceOp::max>(job);
    case ReduceOp::band:
      return accumulate_as<Native<std::uint8_t>, ReduceOp::band>(in_parts(job, sizeof(T)));
    case ReduceOp::bor:
      return accumulate_as<Native<std::uint8_t>, ReduceOp::bor>(in_parts(job, sizeof(T)));
    case ReduceOp::bxor:
      return accumulate_as<Native<std::uint8_t>, ReduceOp::bxor>(in_parts(job, sizeof(T)));
    default:
      return accumulate_as<Native<Unsigned>, ReduceOp::sum>(job);
  }
}

void boolean(ReduceOp op, const Job& job) {
  switch (op) {
    case ReduceOp::product:
    case ReduceOp::min:
    case ReduceOp::band:
      return accumulate_as<Boolean, ReduceOp::band>(job);
    case ReduceOp::bxor:
      return accumulate_as<Boolean, ReduceOp::bxor>(job);
    default:
      return accumulate_as<Boolean, ReduceOp::bor>(job);
  }
}

void accumulate(DType dtype, ReduceOp op, const Job& job) {
  switch (dtype) {
    case DType::float64:
      return floating<Native<double>>(op, job);
    case DType::float32:
      return floating<Native<float>>(op, job);
    case DType::float16:
      return floating<Float16>(op, job);
    case DType::bfloat16:
      return floating<Packed<BFloat16>>(op, job);
    case DType::float8_e4m3fn:
      return floating<Float8E4M3FN>(op, job);
    case DType::float8_e5m2:
      return floating<Float8E5M2>(op, job);
    case DType::int8:
      return integer<std::int8_t>(op, job);
    case DType::int16:
      return integer<std::int16_t>(op, job);
    case DType::int32:
      return integer<std::int32_t>(op, job);
    case DType::int64:
      return integer<std::int64_t>(op, job);
    case DType::uint8:
      return integer<std::uint8_t>(op, job);
    case DType::boolean:
      return boolean(op, job);
    case DType::complex64:
      return complex<float>(op, job);
    case DType::complex128:
      return complex<double>(op, job);
  }
}

void scale(DType dtype, const Job& job) {
  switch (dtype) {
    case DType::float64:
      return scale_as<Native<double>>(job);
    case DType::float32:
      return scale_as<Native<float>>(job);
    case DType::float16:
      return scale_as<Float16>(job);
    case DType::bfloat16:
      return scale_as<Packed<BFloat16>>(job);
    case DType::float8_e4m3fn:
      return scale_as<Float8E4M3FN>(job);
    case DType::float8_e5m2:
      return scale_as<Float8E5M2>(job);
    case DType::complex64:
      return scale_as<Native<float>>(in_parts(job, 2));
    case DType::complex128:
      return scale_as<Native<double>>(in_parts(job, 2));
    default:
      return;  // excluded by the precondition
  }
}

#include "kernels/packing-inl.h"

}  // namespace

extern const Target target = {RINGREDUCE_TARGET_NAME, accumulate, copy, stream, scale, pack, unpack};

}  // namespace ringreduce::kernels::RINGREDUCE_TARGET
