// Elements on a GPU: how they lie in memory, the type in which they are combined, and the operations on it.
//
// Host and device compile the same source, and give the bits of kernels/kernels-inl.h: floats narrower than float32 are
// combined in float32 and rounded once, to nearest even; integers wrap around. Only which NaN comes out may differ.
// Where a GPU has instructions that convert narrow floats exactly so, they are used.
#pragma once

#include "kernels/gpu/job.h"

#if defined(__CUDACC__)
#define RINGREDUCE_UNROLL _Pragma("unroll")
#define RINGREDUCE_LOOP _Pragma("unroll 1")
#else
#define RINGREDUCE_UNROLL
#define RINGREDUCE_LOOP
#endif

namespace ringreduce::gpu {

// ---- Arithmetic ---------------------------------------------------------------------------------------------------
//
// As IEEE 754 says whatever the compiler's flags: on the device neither contracted to a fused multiply-add, nor flushed
// to zero, nor approximate. The host compiles with -ffp-contract=off.

template <class T>
RINGREDUCE_BOTH T add(T a, T b) {
  return static_cast<T>(a + b);
}
template <class T>
RINGREDUCE_BOTH T subtract(T a, T b) {
  return static_cast<T>(a - b);
}
template <class T>
RINGREDUCE_BOTH T multiply(T a, T b) {
  return static_cast<T>(1u * a * b);  // unsigned: the product of two std::uint16_t may be too large for int
}
template <class T>
RINGREDUCE_BOTH T divide(T a, T b) {
  return a / b;
}
template <class T>
RINGREDUCE_BOTH bool less(T a, T b) {
  return a < b;
}

#if defined(__CUDA_ARCH__)
#define RINGREDUCE_PTX(name, instruction, T, letter)                             \
  RINGREDUCE_BOTH T name(T a, T b) {                                             \
    T result;                                                                    \
    asm(instruction " %0, %1, %2;" : "=" letter(result) : letter(a), letter(b)); \
    return result;                                                               \
  }
RINGREDUCE_PTX(add, "add.rn.f32", float, "f")
RINGREDUCE_PTX(subtract, "sub.rn.f32", float, "f")
RINGREDUCE_PTX(multiply, "mul.rn.f32", float, "f")
RINGREDUCE_PTX(divide, "div.rn.f32", float, "f")
RINGREDUCE_PTX(add, "add.rn.f64", double, "d")
RINGREDUCE_PTX(subtract, "sub.rn.f64", double, "d")
RINGREDUCE_PTX(multiply, "mul.rn.f64", double, "d")
RINGREDUCE_PTX(divide, "div.rn.f64", double, "d")
#undef RINGREDUCE_PTX

RINGREDUCE_BOTH bool less(float a, float b) {
  std::uint32_t result;
  asm("{ .reg .pred p; setp.lt.f32 p, %1, %2; selp.u32 %0, 1, 0, p; }" : "=r"(result) : "f"(a), "f"(b));
  return result;
}
#endif

// ---- Operations ---------------------------------------------------------------------------------------------------

struct Sum {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return add(a, b);
  }
};

struct Product {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return multiply(a, b);
  }
};

// A NaN on the left is kept by the first test, one on the right because it compares as false.
struct Min {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return a != a ? a : less(a, b) ? a : b;
  }
};

struct Max {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return a != a ? a : less(b, a) ? a : b;
  }
};

struct And {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return a & b;
  }
};

struct Or {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return a | b;
  }
};

struct Xor {
  template <class T>
  static RINGREDUCE_BOTH T apply(T a, T b) {
    return a ^ b;
  }
};

// ---- Formats ------------------------------------------------------------------------------------------------------
//
// A format has the size kElement of an element in bytes and reads memory in units of one or more elements. A unit is
// kWords words in memory and kLanes lanes while it is combined; `widen` and `narrow` go from one to the other. Formats
// of floats have kFloating, and multiply and divide lanes by a number.

using Word = std::uint32_t;

template <int N>
struct Words {
  Word word[N];
};

template <class T, int N>
struct Lanes {
  T lane[N];
};

// The bytes of `from` as another type of the same size.
template <class To, class From>
RINGREDUCE_BOTH To bits_as(const From& from) {
#if defined(__CUDACC__) && (__CUDACC_VER_MAJOR__ < 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ < 4))
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
#else
  return __builtin_bit_cast(To, from);
#endif
}

RINGREDUCE_BOTH float as_float(Word bits) { return bits_as<float>(bits); }
RINGREDUCE_BOTH Word as_word(float value) { return bits_as<Word>(value); }

// Operations that treat each lane alone.
template <class T, int N>
struct LaneByLane {
  static constexpr int kLanes = N;
  static constexpr bool kFloating = static_cast<T>(0.5) != 0;
  using Value = Lanes<T, N>;

  template <class Op>
  static RINGREDUCE_BOTH void combine(Value& a, const Value& b) {
    RINGREDUCE_UNROLL for (int i = 0; i < N; ++i) a.lane[i] = Op::apply(a.lane[i], b.lane[i]);
  }
  static RINGREDUCE_BOTH void multiply(Value& a, double factor) {
    RINGREDUCE_UNROLL for (int i = 0; i < N; ++i) a.lane[i] = gpu::multiply(a.lane[i], static_cast<T>(factor));
  }
  static RINGREDUCE_BOTH void divide(Value& a, double divisor) {
    RINGREDUCE_UNROLL for (int i = 0; i < N; ++i) a.lane[i] = gpu::divide(a.lane[i], static_cast<T>(divisor));
  }
};

// Elements that are combined as they are, as many as make a word.
template <class T, int N = sizeof(T) < sizeof(Word) ? sizeof(Word) / sizeof(T) : 1>
struct Native : LaneByLane<T, N> {
  static constexpr int kElement = sizeof(T);
  static constexpr int kWords = N * sizeof(T) / sizeof(Word);
  using Value = Lanes<T, N>;

  static RINGREDUCE_BOTH Value widen(const Words<kWords>& unit) { return bits_as<Value>(unit); }
  static RINGREDUCE_BOTH Words<kWords> narrow(const Value& value) { return bits_as<Words<kWords>>(value); }
};

// Bytes, for operations on bits.
struct Bytes : Native<Word> {
  static constexpr int kElement = 1;
};

// Any byte but zero is true.
struct Boolean : Bytes {
  static RINGREDUCE_BOTH Value widen(const Words<1>& unit) {
    constexpr Word kLow =
        0x7f7f7f7f;  // adding it to a byte's lower bits carries into its upper one unless they are zero
    const Word word = unit.word[0];
    return {{(((word & kLow) + kLow) | word) >> 7 & 0x01010101}};
  }
};

// Complex numbers, for their product: their sum is one of twice as many real numbers.
template <class T>
struct Complex : Native<T, 2> {
  static constexpr int kElement = 2 * sizeof(T);
  using Value = Lanes<T, 2>;

  template <class Op>
  static RINGREDUCE_BOTH void combine(Value& a, const Value& b) {
    const T real = subtract(gpu::multiply(a.lane[0], b.lane[0]), gpu::multiply(a.lane[1], b.lane[1]));
    const T imaginary = add(gpu::multiply(a.lane[0], b.lane[1]), gpu::multiply(a.lane[1], b.lane[0]));
    a = {{real, imaginary}};
  }
};

// ---- Narrow floats ------------------------------------------------------------------------------------------------

// Those that fill a word, in float32. `Code` converts one: `widen` from its code, `narrow` to its code.
template <class Code>
struct Packed : LaneByLane<float, 4 / Code::kElement> {
  static constexpr int kElement = Code::kElement;
  static constexpr int kWords = 1;
  static constexpr int kLanes = 4 / kElement;
  static constexpr int kBits = 8 * kElement;
  using Value = Lanes<float, kLanes>;

  static RINGREDUCE_BOTH Value widen(const Words<1>& unit) {
    Value value;
    RINGREDUCE_UNROLL for (int i = 0; i < kLanes; ++i) value.lane[i] =
        Code::widen(unit.word[0] >> (i * kBits) & ((1u << kBits) - 1));
    return value;
  }
  static RINGREDUCE_BOTH Words<1> narrow(const Value& value) {
    Word word = 0;
    RINGREDUCE_UNROLL for (int i = 0; i < kLanes; ++i) word |= Code::narrow(value.lane[i]) << (i * kBits);
    return {{word}};
  }
};

constexpr Word kInfinity = 0x7f800000;  // as float32
constexpr Word kSign = 0x80000000;

struct BFloat16Code {
  static constexpr int kElement = 2;

  static RINGREDUCE_BOTH float widen(Word code) { return as_float(code << 16); }

  static RINGREDUCE_BOTH Word narrow(float value) {
    const Word bits = as_word(value);
    return value != value ? 0x7fc0 : (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
  }
};

// A float of one sign bit, kExponent bits of exponent and kFraction bits of fraction, with gradual underflow. Too large
// a number becomes the code kOverflow: infinity, or the largest number of a format without infinities. Codes from
// kSpecial on are not numbers.
//
// Constants are float32 in bits. Codes are aligned with them, the last place of one with that place of the other, and
// then differ from them in the exponent's bias only.
template <int kExponent, int kFraction, Word kOverflow, Word kSpecial>
struct SmallFloat {
  static constexpr int kElement = (1 + kExponent + kFraction) / 8;
  static constexpr int kDrop = 23 - kFraction;               // places of the fraction to be dropped
  static constexpr int kShift = 31 - kExponent - kFraction;  // from the sign's place in a code to that in a word
  static constexpr Word kBias = (128u - (1u << (kExponent - 1))) << 23;
  static constexpr Word kLeastNormal = kBias + (1u << 23);
  static constexpr Word kBound = kBias + (kOverflow << kDrop);
  // The number whose last place is that of the least subnormal: what is added to it is rounded there.
  static constexpr Word kRounder = kLeastNormal + (static_cast<Word>(kDrop) << 23);
  static constexpr Word kNaN = (1u << (kExponent + kFraction)) - 1;

  static RINGREDUCE_BOTH float widen(Word code) {
    const Word sign = code << kShift & kSign;
    const Word aligned = (code & kNaN) << kDrop;
    const Word normal = aligned + kBias;
    const Word subnormal = as_word(subtract(as_float(aligned + kLeastNormal), as_float(kLeastNormal)));
    const Word finite = aligned < 1u << 23 ? subnormal : normal;
    return as_float((aligned < kSpecial << kDrop ? finite : aligned | kInfinity) | sign);
  }

  static RINGREDUCE_BOTH Word narrow(float value) {
    const Word bits = as_word(value);
    const Word sign = (bits & kSign) >> kShift;
    const Word magnitude = bits & ~kSign;
    if (magnitude > kInfinity) return kNaN | sign;
    const Word bounded = magnitude < kBound ? magnitude : kBound;
    const Word normal = (bounded + (bounded >> kDrop & 1) + ((1u << (kDrop - 1)) - 1 - kBias)) >> kDrop;
    const Word subnormal = as_word(add(as_float(bounded), as_float(kRounder))) - kRounder;
    return (bounded < kLeastNormal ? subnormal : normal) | sign;
  }
};

using Float8E4M3FNCode = SmallFloat<4, 3, 0x7e, 0x7f>;
using Float8E5M2Code = SmallFloat<5, 2, 0x7c, 0x7c>;

// The instruction knows no overflow to infinity: it gives the largest float8_e5m2, whose code is the one before
// infinity's. Makes it infinity, in the lane at `shift` of a word.
RINGREDUCE_BOTH Word infinite_float8_e5m2(float value, int shift) {
  constexpr Word kOverflows = 0x47700000;  // 61440, half-way from the largest number to the next power of two
  const Word magnitude = as_word(value) & ~kSign;
  return magnitude >= kOverflows && magnitude <= kInfinity ? 1u << shift : 0;
}

// The rest is what GPUs convert themselves. All have instructions for float16, those from sm_80 on narrow two numbers
// at a time, to bfloat16 too, and those from sm_89 on know float8. What a GPU lacks is computed as on the host.
// Compilers before CUDA 12.1 know float8 only for sm_90.
#if defined(__CUDA_ARCH__)
#define RINGREDUCE_HAS_PAIRS (__CUDA_ARCH__ >= 800)
#define RINGREDUCE_HAS_FLOAT8 \
  (__CUDA_ARCH__ >= 900 ||    \
   (__CUDA_ARCH__ >= 890 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 1))))

// Instructions take the upper operand first.
#define RINGREDUCE_NARROW_PAIR(result, letter, instruction, lower, upper) \
  asm(instruction " %0, %1, %2;" : "=" letter(result) : "f"(upper), "f"(lower))

#define RINGREDUCE_NARROW_FOUR(word, instruction, value)                               \
  do {                                                                                 \
    std::uint16_t lower, upper;                                                        \
    RINGREDUCE_NARROW_PAIR(lower, "h", instruction, (value).lane[0], (value).lane[1]); \
    RINGREDUCE_NARROW_PAIR(upper, "h", instruction, (value).lane[2], (value).lane[3]); \
    word = static_cast<Word>(upper) << 16 | lower;                                     \
  } while (false)

RINGREDUCE_BOTH Lanes<float, 2> widen_halves(Word word) {
  Lanes<float, 2> value;
  asm("{ .reg .b16 lower, upper; mov.b32 {lower, upper}, %2; cvt.f32.f16 %0, lower; cvt.f32.f16 %1, upper; }"
      : "=f"(value.lane[0]), "=f"(value.lane[1])
      : "r"(word));
  return value;
}
#endif

struct BFloat16 : Packed<BFloat16Code> {
  static RINGREDUCE_BOTH Words<1> narrow(const Value& value) {
#if defined(__CUDA_ARCH__) && RINGREDUCE_HAS_PAIRS
    Word word;
    RINGREDUCE_NARROW_PAIR(word, "r", "cvt.rn.bf16x2.f32", value.lane[0], value.lane[1]);
    return {{ word }};
#else
    return Packed::narrow(value);
#endif
  }
};

struct Float16 : Packed<SmallFloat<5, 10, 0x7c00, 0x7c00>> {
  static RINGREDUCE_BOTH Value widen(const Words<1>& unit) {
#if defined(__CUDA_ARCH__)
    return widen_halves(unit.word[0]);
#else
    return Packed::widen(unit);
#endif
  }
  static RINGREDUCE_BOTH Words<1> narrow(const Value& value) {
#if defined(__CUDA_ARCH__)
    Word word;
#if RINGREDUCE_HAS_PAIRS
    RINGREDUCE_NARROW_PAIR(word, "r", "cvt.rn.f16x2.f32", value.lane[0], value.lane[1]);
#else
    asm("{ .reg .b16 lower, upper; cvt.rn.f16.f32 lower, %1; cvt.rn.f16.f32 upper, %2; mov.b32 %0, {lower, upper}; }"
        : "=r"(word)
        : "f"(value.lane[0]), "f"(value.lane[1]));
#endif
    return {{ word }};
#else
    return Packed::narrow(value);
#endif
  }
};

struct Float8E4M3FN : Packed<Float8E4M3FNCode> {
  static RINGREDUCE_BOTH Value widen(const Words<1>& unit) {
#if defined(__CUDA_ARCH__) && RINGREDUCE_HAS_FLOAT8
    Word lower, upper;  // as float16, which has all values of float8
    asm("{ .reg .b16 lower, upper; mov.b32 {lower, upper}, %2; cvt.rn.f16x2.e4m3x2 %0, lower; "
        "cvt.rn.f16x2.e4m3x2 %1, upper; }"
        : "=r"(lower), "=r"(upper)
        : "r"(unit.word[0]));
    const Lanes<float, 2> a = widen_halves(lower), b = widen_halves(upper);
    return {{ a.lane[0], a.lane[1], b.lane[0], b.lane[1] }};
#else
    return Packed::widen(unit);
#endif
  }
  static RINGREDUCE_BOTH Words<1> narrow(const Value& value) {
#if defined(__CUDA_ARCH__) && RINGREDUCE_HAS_FLOAT8
    Word word;
    RINGREDUCE_NARROW_FOUR(word, "cvt.rn.satfinite.e4m3x2.f32", value);
    return {{ word }};
#else
    return Packed::narrow(value);
#endif
  }
};

struct Float8E5M2 : Packed<Float8E5M2Code> {
  static RINGREDUCE_BOTH Value widen(const Words<1>& unit) {
#if defined(__CUDA_ARCH__)
    // Its codes are the upper bytes of those of float16.
    const Word word = unit.word[0];
    const Lanes<float, 2> even = widen_halves(word << 8 & 0xff00ff00), odd = widen_halves(word & 0xff00ff00);
    return {{ even.lane[0], odd.lane[0], even.lane[1], odd.lane[1] }};
#else
    return Packed::widen(unit);
#endif
  }
  static RINGREDUCE_BOTH Words<1> narrow(const Value& value) {
#if defined(__CUDA_ARCH__) && RINGREDUCE_HAS_FLOAT8
    Word word;
    RINGREDUCE_NARROW_FOUR(word, "cvt.rn.satfinite.e5m2x2.f32", value);
    RINGREDUCE_UNROLL for (int i = 0; i < kLanes; ++i) word += infinite_float8_e5m2(value.lane[i], i * kBits);
    return {{ word }};
#else
    return Packed::narrow(value);
#endif
  }
};

#undef RINGREDUCE_HAS_PAIRS
#undef RINGREDUCE_HAS_FLOAT8
#undef RINGREDUCE_NARROW_PAIR
#undef RINGREDUCE_NARROW_FOUR

}  // namespace ringreduce::gpu
