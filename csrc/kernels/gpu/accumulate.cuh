// The share of each GPU thread in an Accumulate, for host and device.
//
// Where all pointers are the same modulo 16, whole packs of 16 bytes are read and written, and the elements before the
// first and after the last one by one; else all elements are. A thread takes a batch of them at once, `threads` apart
// so that neighbours read neighbouring ones, and loads a source's whole batch before it uses any of it. The first
// source is widened, the others are combined into it one by one while it stays in registers, and it is rounded and
// stored once.
//
// Loads are plain ones: peers may have written the sources while the kernel lives. Each byte of a destination belongs
// to one thread, which has read all sources there before it writes: so a destination can be a source.
#pragma once

#include "kernels/gpu/elements.cuh"

namespace ringreduce::gpu {

template <class T>
RINGREDUCE_BOTH bool aligned(const void* p) {
  return reinterpret_cast<std::uintptr_t>(p) % alignof(T) == 0;
}

// `p`, which the compiler may take for an address in global memory where a GPU has other memories too.
template <class T>
RINGREDUCE_BOTH T* in_global_memory(T* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

// Units as they lie in memory.
template <class Format, int N>
struct Units {
  Words<Format::kWords> unit[N];
};

#if defined(__CUDACC__)
using Pack = uint4;
#else
struct alignas(16) Pack {
  Word word[4];
};
#endif

// Reads and writes a T, a Pack or a Word, at a multiple of its size.
template <class Format, class T>
struct ByWhole {
  static constexpr int kBytes = sizeof(T);
  static constexpr int kUnits = sizeof(T) / sizeof(Words<Format::kWords>);
  using Raw = Units<Format, kUnits>;

  static RINGREDUCE_BOTH Raw load(const char* p) { return bits_as<Raw>(*reinterpret_cast<const T*>(p)); }
  static RINGREDUCE_BOTH void store(char* p, const Raw& raw) { *reinterpret_cast<T*>(p) = bits_as<T>(raw); }
};

// The integer in which an element of kBytes bytes is read, or each part of a larger one.
template <int kBytes>
struct PartOf {
  using type = Word;
};
template <>
struct PartOf<1> {
  using type = std::uint8_t;
};
template <>
struct PartOf<2> {
  using type = std::uint16_t;
};

// Reads and writes an element at any address, as a unit that is zero but for its first element. By bytes where its
// parts are not aligned.
template <class Format>
struct ByElement {
  static constexpr int kBytes = Format::kElement;
  static constexpr int kUnits = 1;
  using Raw = Units<Format, 1>;
  using Part = typename PartOf<kBytes>::type;
  static constexpr int kPart = sizeof(Part);

  static RINGREDUCE_BOTH Raw load(const char* p) {
    Raw raw = {};
    RINGREDUCE_UNROLL for (int i = 0; i < kBytes / kPart; ++i) raw.unit[0].word[i] = load_part(p + i * kPart);
    return raw;
  }
  static RINGREDUCE_BOTH void store(char* p, const Raw& raw) {
    RINGREDUCE_UNROLL for (int i = 0; i < kBytes / kPart; ++i)
        store_part(p + i * kPart, static_cast<Part>(raw.unit[0].word[i]));
  }

 private:
  static RINGREDUCE_BOTH Part load_part(const char* p) {
    if (aligned<Part>(p)) return *reinterpret_cast<const Part*>(p);
    Word part = 0;
    RINGREDUCE_UNROLL for (int i = 0; i < kPart; ++i) part |= static_cast<Word>(static_cast<unsigned char>(p[i]))
                                                              << 8 * i;
    return static_cast<Part>(part);
  }
  static RINGREDUCE_BOTH void store_part(char* p, Part part) {
    if (aligned<Part>(p)) {
      *reinterpret_cast<Part*>(p) = part;
    } else {
      RINGREDUCE_UNROLL for (int i = 0; i < kPart; ++i) p[i] = static_cast<char>(part >> 8 * i);
    }
  }
};

// Where packs or elements lie: `count` of them, one after the other but for a gap of `gap` bytes after the first
// `before`.
struct Places {
  std::uint64_t count;
  std::uint64_t before;
  std::uint64_t gap;
};

template <class Op>
inline constexpr bool kIsSum = false;
template <>
inline constexpr bool kIsSum<Sum> = true;

// The elements that a thread takes at once: places first, first + threads, ..., as far as there are any. Source 0
// begins the values. Of the other sources kInFlight are loaded before the first of them is combined. More would not fit
// the registers: a lane takes one or two of its own while it is combined, so a batch is half as long where a unit has
// four lanes.
template <class Format, class Op, class Access>
class Batch {
 public:
  static constexpr int kSize = Format::kLanes == 4 ? 2 : 4;

  RINGREDUCE_BOTH Batch(const Accumulate& job, const Places& places, std::uint64_t first, std::uint64_t threads)
      : job_(job), places_(places), first_(first), threads_(threads) {}

  RINGREDUCE_BOTH void run() {
    load(0, raw_[0]);
    widen(0, raw_[0]);
    RINGREDUCE_LOOP for (std::int32_t k = 1; k < job_.n; k += kInFlight) {
      RINGREDUCE_UNROLL for (int i = 0; i < kInFlight; ++i) if (k + i < job_.n) load(k + i, raw_[i]);
      RINGREDUCE_UNROLL for (int i = 0; i < kInFlight; ++i) if (k + i < job_.n) combine(k + i, raw_[i]);
    }
    divide();
    store();
  }

 private:
  using Raw = typename Access::Raw;
  static constexpr int kUnits = Access::kUnits;
  static constexpr int kInFlight = kUnits == 1 ? 1 : 2;
  static constexpr bool kScales = kIsSum<Op> && Format::kFloating;

  RINGREDUCE_BOTH std::uint64_t place(int j) const { return first_ + j * threads_; }
  RINGREDUCE_BOTH bool present(int j) const { return place(j) < places_.count; }
  RINGREDUCE_BOTH std::uint64_t byte(int j) const {
    return place(j) * Access::kBytes + (place(j) < places_.before ? 0 : places_.gap);
  }

  RINGREDUCE_BOTH void load(std::int32_t k, Raw (&into)[kSize]) const {
    const char* const src = in_global_memory(static_cast<const char*>(job_.srcs[k]));
    RINGREDUCE_UNROLL for (int j = 0; j < kSize; ++j) into[j] = present(j) ? Access::load(src + byte(j)) : Raw{};
  }

  RINGREDUCE_BOTH void scale(std::int32_t k, Raw (&source)[kSize]) const {
    if constexpr (kScales) {
      if (k != job_.scaled) return;
      RINGREDUCE_UNROLL for (auto& units : source) RINGREDUCE_UNROLL for (auto& unit : units.unit) {
        auto value = Format::widen(unit);
        Format::multiply(value, job_.factor);
        unit = Format::narrow(value);
      }
    }
  }

  template <class Unit>
  RINGREDUCE_BOTH typename Format::Value operand(std::int32_t k, const Unit& unit) const {
    auto value = Format::widen(unit);
    if constexpr (kScales)
      if (job_.weighs) Format::multiply(value, job_.weights[k]);
    return value;
  }

  RINGREDUCE_BOTH void widen(std::int32_t k, Raw (&source)[kSize]) {
    scale(k, source);
    RINGREDUCE_UNROLL for (int j = 0; j < kSize; ++j) RINGREDUCE_UNROLL for (int u = 0; u < kUnits; ++u) values_[j][u] =
        operand(k, source[j].unit[u]);
  }

  RINGREDUCE_BOTH void combine(std::int32_t k, Raw (&source)[kSize]) {
    scale(k, source);
    RINGREDUCE_UNROLL for (int j = 0; j < kSize; ++j) RINGREDUCE_UNROLL for (int u = 0; u < kUnits; ++u)
        Format::template combine<Op>(values_[j][u], operand(k, source[j].unit[u]));
  }

  RINGREDUCE_BOTH void divide() {
    if constexpr (kScales) {
      if (job_.divisor != 1)
        RINGREDUCE_UNROLL for (auto& units : values_) RINGREDUCE_UNROLL for (auto& value : units)
            Format::divide(value, job_.divisor);
    }
  }

  RINGREDUCE_BOTH void store() {
    Raw(&result)[kSize] = raw_[0];
    RINGREDUCE_UNROLL for (int j = 0; j < kSize; ++j) RINGREDUCE_UNROLL for (int u = 0; u < kUnits; ++u) result[j]
        .unit[u] = Format::narrow(values_[j][u]);
    RINGREDUCE_LOOP for (std::int32_t copy = 0; copy < job_.copies; ++copy) {
      char* const dst = in_global_memory(static_cast<char*>(job_.dsts[copy]));
      RINGREDUCE_UNROLL for (int j = 0; j < kSize; ++j) if (present(j)) Access::store(dst + byte(j), result[j]);
    }
  }

  const Accumulate& job_;
  const Places places_;
  const std::uint64_t first_, threads_;
  Raw raw_[kInFlight][kSize];
  typename Format::Value values_[kSize][kUnits];
};

template <class Format, class Op, class Access>
RINGREDUCE_BOTH void accumulate_places(const Accumulate& job, const Places& places, std::uint64_t thread,
                                       std::uint64_t threads) {
  using B = Batch<Format, Op, Access>;
  RINGREDUCE_LOOP for (std::uint64_t first = thread; first < places.count; first += B::kSize * threads)
      B(job, places, first, threads)
          .run();
}

// Whether all pointers are the same modulo the size of a T.
template <class T>
RINGREDUCE_BOTH bool aligned_alike(const Accumulate& job) {
  const auto first = reinterpret_cast<std::uintptr_t>(job.dsts[0]);
  std::uintptr_t differs = 0;
  if (job.copies == 2) differs |= reinterpret_cast<std::uintptr_t>(job.dsts[1]) ^ first;
  RINGREDUCE_LOOP for (std::int32_t k = 0; k < job.n; ++k) differs |=
      reinterpret_cast<std::uintptr_t>(job.srcs[k]) ^ first;
  return differs % sizeof(T) == 0;
}

// Does the share of virtual thread `thread` of `threads`. `job` may lie in constant or shared memory.
template <class Format, class Op, class T = Pack>
RINGREDUCE_BOTH void accumulate(const Accumulate& job, std::uint64_t thread, std::uint64_t threads) {
  if (job.copies == 0) return;
  constexpr std::uint64_t kElement = Format::kElement, kWhole = sizeof(T);
  const std::uint64_t ahead = -reinterpret_cast<std::uintptr_t>(job.dsts[0]) % kWhole;  // bytes before the first T
  const std::uint64_t head = ahead / kElement;
  std::uint64_t wholes = 0;
  if (ahead % kElement == 0 && head <= job.count && aligned_alike<T>(job))
    wholes = (job.count - head) * kElement / kWhole;

  accumulate_places<Format, Op, ByWhole<Format, T>>(job, {wholes, 0, ahead}, thread, threads);
  const std::uint64_t taken = wholes * kWhole;
  accumulate_places<Format, Op, ByElement<Format>>(job, {job.count - taken / kElement, head, taken}, thread, threads);
}

// The same for bytes, the first source's, that are moved as they are: by 16, by 4 or one by one.
RINGREDUCE_BOTH void move_bytes(const Accumulate& job, std::uint64_t thread, std::uint64_t threads) {
  if (aligned_alike<Pack>(job))
    accumulate<Bytes, Or>(job, thread, threads);
  else
    accumulate<Bytes, Or, Word>(job, thread, threads);
}

}  // namespace ringreduce::gpu
