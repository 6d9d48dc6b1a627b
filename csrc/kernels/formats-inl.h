// What kernels-inl.h combines, included there: vectors, the formats of elements in memory, and operations on blocks of
// lanes.

constexpr std::size_t kVector = RINGREDUCE_VECTOR_BYTES;

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVector)));
};
template <class T>
using Vec = typename VectorOf<T>::type;

using Words = Vec<std::uint32_t>;
using Floats = Vec<float>;

template <class T>
struct Block {
  Vec<T> v[4];
};

template <class T>
RINGREDUCE_INLINE Vec<T> load(const char* p) {
  Vec<T> v;
  __builtin_memcpy(&v, p, kVector);
  return v;
}

template <class V>
RINGREDUCE_INLINE void store(char* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// The lanes numbered I, those of `b` after those of `a`.
template <class R, int... I, class V>
RINGREDUCE_INLINE R lanes(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, I...);
#else  // GCC 11
  constexpr int kCount = sizeof(V) / sizeof(a[0]);
  return R{(I < kCount ? a[I % kCount] : b[I % kCount])...};
#endif
}

// ---- Formats: how elements lie in memory and which lanes they become ----------------------------------------------
//
// A format has the type of its Lane, the size of an element and of a block in memory, and load and store of a block.
// Elements may take any place among the lanes, as long as load and store agree.

// Elements that are combined as they are.
template <class T>
struct Native {
  using Lane = T;
  static constexpr std::size_t kElement = sizeof(T);
  static constexpr std::size_t kBlock = 4 * kVector;

  static Block<T> load(const char* p) {
    Block<T> block;
    for (int j = 0; j < 4; ++j) block.v[j] = RINGREDUCE_TARGET::load<T>(p + j * kVector);
    return block;
  }
  static void store(char* p, const Block<T>& block) {
    for (int j = 0; j < 4; ++j) RINGREDUCE_TARGET::store(p + j * kVector, block.v[j]);
  }
};

// Any byte but zero is true.
struct Boolean : Native<std::uint8_t> {
  static Block<std::uint8_t> load(const char* p) {
    Block<std::uint8_t> block = Native::load(p);
    for (auto& v : block.v) v = (Vec<std::uint8_t>)(v != 0) & 1;
    return block;
  }
};

// Complex numbers; lanes are v[0] + i v[1] and v[2] + i v[3]. Only the product needs it: for the sum, a complex number
// is two real ones.
template <class T>
struct Complex {
  using Lane = T;
  static constexpr std::size_t kElement = 2 * sizeof(T);
  static constexpr std::size_t kBlock = 4 * kVector;
  static constexpr int kLanes = kVector / sizeof(T);

  static Block<T> load(const char* p) {
    const Block<T> mixed = Native<T>::load(p);
    Block<T> block;
    for (int j = 0; j < 4; j += 2) unzip(mixed.v[j], mixed.v[j + 1], block.v[j], block.v[j + 1], Indices{});
    return block;
  }
  static void store(char* p, const Block<T>& block) {
    Block<T> mixed;
    for (int j = 0; j < 4; j += 2) zip(block.v[j], block.v[j + 1], mixed.v[j], mixed.v[j + 1], Indices{});
    Native<T>::store(p, mixed);
  }

 private:
  using Indices = std::make_integer_sequence<int, kLanes>;

  template <int... I>
  static void unzip(Vec<T> a, Vec<T> b, Vec<T>& even, Vec<T>& odd, std::integer_sequence<int, I...>) {
    even = lanes<Vec<T>, (2 * I)...>(a, b);
    odd = lanes<Vec<T>, (2 * I + 1)...>(a, b);
  }
  template <int... I>
  static void zip(Vec<T> even, Vec<T> odd, Vec<T>& a, Vec<T>& b, std::integer_sequence<int, I...>) {
    a = lanes<Vec<T>, (I / 2 + I % 2 * kLanes)...>(even, odd);
    b = lanes<Vec<T>, (I / 2 + I % 2 * kLanes + kLanes / 2)...>(even, odd);
  }
};

constexpr std::uint32_t kInfinity = 0x7f800000;  // as float32
constexpr std::uint32_t kSign = 0x80000000;

// Whether a < b, where neither has its sign bit set: all instruction sets compare signed integers.
RINGREDUCE_INLINE Vec<std::int32_t> below(Words a, std::uint32_t b) {
  return (Vec<std::int32_t>)a < static_cast<std::int32_t>(b);
}

// A narrow float in a word is its code in the word's upper bits. `widen` gives its value and expects zeros below the
// code; `narrow` rounds to nearest even and leaves anything there.
struct BFloat16 {
  static constexpr std::size_t kElement = 2;

  static Floats widen(Words word) { return (Floats)word; }

  static Words narrow(Floats value) {
    const Words bits = (Words)value;
    return value != value ? Words{} + 0x7fc00000 : bits + (bits >> 16 & 1) + 0x7fff;
  }
};

// A float of one sign bit, kExponent bits of exponent and kFraction bits of fraction, with gradual underflow. Too large
// a number becomes kOverflow: infinity, or the largest number of a format without infinities. Codes from kSpecial on
// are not numbers.
//
// Constants are float32 in bits. Codes are aligned with them, the last place of one with that place of the other, and
// then differ from them in the exponent's bias only.
template <int kExponent, int kFraction, std::uint32_t kOverflow, std::uint32_t kSpecial>
struct SmallFloat {
  static constexpr std::size_t kElement = (1 + kExponent + kFraction) / 8;
  static constexpr int kDrop = 23 - kFraction;  // places of the fraction to be dropped
  static constexpr int kAlign = 8 - kExponent;  // from the aligned code to the word's upper bits
  static constexpr std::uint32_t kBias = (128u - (1u << (kExponent - 1))) << 23;
  static constexpr std::uint32_t kLeastNormal = kBias + (1u << 23);
  static constexpr std::uint32_t kBound = kBias + (kOverflow << kDrop);
  // The number whose last place is that of the least subnormal: what is added to it is rounded there.
  static constexpr std::uint32_t kRounder = kLeastNormal + (static_cast<std::uint32_t>(kDrop) << 23);
  static constexpr std::uint32_t kNaN = 0x7fffffffu >> kAlign;  // aligned code

  static Floats widen(Words word) {
    const Words code = (word & ~kSign) >> kAlign;
    const Words normal = code + kBias;
    const Words subnormal = (Words)((Floats)(code + kLeastNormal) - (Floats)(Words{} + kLeastNormal));
    const Words finite = below(code, 1u << 23) ? subnormal : normal;
    const Words magnitude = below(code, kSpecial << kDrop) ? finite : code | kInfinity;
    return (Floats)(magnitude | (word & kSign));
  }

  static Words narrow(Floats value) {
    const Words bits = (Words)value;
    const Words magnitude = bits & ~kSign;
    const Words bounded = below(magnitude, kBound) ? magnitude : Words{} + kBound;
    const Words normal = bounded + (bounded >> kDrop & 1) + ((1u << (kDrop - 1)) - 1 - kBias);
    const Words subnormal = (Words)((Floats)bounded + (Floats)(Words{} + kRounder)) << kDrop;
    const Words rounded = below(bounded, kLeastNormal) ? subnormal : normal;
    const Words code = below(magnitude, kInfinity + 1) ? rounded : Words{} + kNaN;
    return code << kAlign | (bits & kSign);
  }
};

// Narrow floats, two or four to a word. Shifts alone take a word's parts to different vectors.
template <class Code>
struct Packed {
  using Lane = float;
  static constexpr std::size_t kElement = Code::kElement;
  static constexpr std::size_t kBlock = kElement * kVector;
  static constexpr int kParts = 4 / kElement;
  static constexpr int kBits = 8 * kElement;
  static constexpr std::uint32_t kUpper = ~0u << (32 - kBits);

  static Block<float> load(const char* p) {
    Block<float> block;
    for (int j = 0; j < 4; j += kParts) {
      const Words words = RINGREDUCE_TARGET::load<std::uint32_t>(p + j / kParts * kVector);
      block.v[j] = Code::widen(words << (32 - kBits));
      for (int part = 1; part < kParts; ++part)
        block.v[j + part] = Code::widen(words << (32 - kBits - part * kBits) & kUpper);
    }
    return block;
  }
  static void store(char* p, const Block<float>& block) {
    for (int j = 0; j < 4; j += kParts) {
      Words words = Code::narrow(block.v[j]) >> (32 - kBits);
      for (int part = 1; part < kParts; ++part)
        words |= (Code::narrow(block.v[j + part]) & kUpper) >> (32 - kBits - part * kBits);
      RINGREDUCE_TARGET::store(p + j / kParts * kVector, words);
    }
  }
};

using Float8E4M3FN = Packed<SmallFloat<4, 3, 0x7e, 0x7f>>;
using Float8E5M2 = Packed<SmallFloat<5, 2, 0x7c, 0x7c>>;

#if RINGREDUCE_VECTOR_BYTES == 16
using Float16 = Packed<SmallFloat<5, 10, 0x7c00, 0x7c00>>;
#else
// As Packed<SmallFloat<5, 10, 0x7c00, 0x7c00>>, by the F16C instructions.
struct Float16 {
  using Lane = float;
  static constexpr std::size_t kElement = 2;
  static constexpr std::size_t kBlock = 2 * kVector;

  static Block<float> load(const char* p) {
    Block<float> block;
    for (int j = 0; j < 4; ++j) block.v[j] = widen(p + j * kVector / 2);
    return block;
  }
  static void store(char* p, const Block<float>& block) {
    for (int j = 0; j < 4; ++j) narrow(p + j * kVector / 2, block.v[j]);
  }

 private:
#if RINGREDUCE_VECTOR_BYTES == 32
  static Floats widen(const char* p) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void narrow(char* p, Floats v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#else  // The zero-masking forms: GCC 12 warns of its own plain ones (maybe-uninitialized).
  static Floats widen(const char* p) {
    return (Floats)_mm512_maskz_cvtph_ps(-1, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void narrow(char* p, Floats v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(-1, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
};
#endif

// ---- Operations ---------------------------------------------------------------------------------------------------

template <ReduceOp op, class V>
RINGREDUCE_INLINE V apply(V a, V b) {
  if constexpr (op == ReduceOp::product) return a * b;
  // A NaN on the left is kept by the first test, one on the right because it compares as false.
  if constexpr (op == ReduceOp::min) return a != a ? a : a < b ? a : b;
  if constexpr (op == ReduceOp::max) return a != a ? a : a > b ? a : b;
  if constexpr (op == ReduceOp::band) return a & b;
  if constexpr (op == ReduceOp::bor) return a | b;
  if constexpr (op == ReduceOp::bxor) return a ^ b;
  if constexpr (op == ReduceOp::sum) return a + b;
}

// What log_add_exp() needs of float32 and float64.
template <class T>
struct LogAddExpConstants;

template <>
struct LogAddExpConstants<float> {
  using Integer = std::uint32_t;
  static constexpr int kFraction = 23;        // bits of the fraction
  static constexpr float kLeast = -87;        // its exponential is a normal number
  static constexpr float kLog2 = 0x1.63p-1f;  // so short that its products with exponents are exact
  static constexpr float kRestOfLog2 = -0x1.bd0106p-13f;
  static constexpr int kExpTerms = 8, kArtanhTerms = 7;  // as many as the digits need
};

template <>
struct LogAddExpConstants<double> {
  using Integer = std::uint64_t;
  static constexpr int kFraction = 52;
  static constexpr double kLeast = -708;
  static constexpr double kLog2 = 0x1.62e42feep-1;
  static constexpr double kRestOfLog2 = 0x1.a39ef35793c76p-33;
  static constexpr int kExpTerms = 14, kArtanhTerms = 16;
};

template <class T, int kTerms>
struct Series {
  T coefficients[kTerms];
};

template <class T>
constexpr auto kExp = [] {  // exp(x) is the sum of x^k / k!
  Series<T, LogAddExpConstants<T>::kExpTerms> series{};
  double factorial = 1;
  for (int k = 0; k < LogAddExpConstants<T>::kExpTerms; factorial *= ++k)
    series.coefficients[k] = static_cast<T>(1 / factorial);
  return series;
}();

template <class T>
constexpr auto kArtanh = [] {  // artanh(x) is x times the sum of (x^2)^k / (2k + 1)
  Series<T, LogAddExpConstants<T>::kArtanhTerms> series{};
  for (int k = 0; k < LogAddExpConstants<T>::kArtanhTerms; ++k)
    series.coefficients[k] = static_cast<T>(1.0 / (2 * k + 1));
  return series;
}();

// The vectors of a block go side by side through each step, as each would wait for its own last one.
template <class T, int kTerms>
RINGREDUCE_INLINE Block<T> value(const Series<T, kTerms>& series, const Block<T>& at) {
  Block<T> sum{};
  for (int k = kTerms - 1; k >= 0; --k)
    for (int j = 0; j < 4; ++j) sum.v[j] = sum.v[j] * at.v[j] + series.coefficients[k];
  return sum;
}

// exp(x) for x <= 0; 0 where that is no normal number.
template <class T>
RINGREDUCE_INLINE Block<T> exp_of(const Block<T>& x) {
  using Constants = LogAddExpConstants<T>;
  using Integers = Vec<typename Constants::Integer>;
  constexpr T kLog2E = static_cast<T>(1.4426950408889634);
  constexpr T kRounder = static_cast<T>(3ULL << (Constants::kFraction - 1));  // what is added to it becomes whole
  Block<T> shifted, rest;
  for (int j = 0; j < 4; ++j) {
    const Vec<T> bounded = x.v[j] < Constants::kLeast ? Vec<T>{} + Constants::kLeast : x.v[j];
    shifted.v[j] = bounded * kLog2E + kRounder;
    const Vec<T> exponent = shifted.v[j] - kRounder;
    rest.v[j] = bounded - exponent * Constants::kLog2 - exponent * Constants::kRestOfLog2;
  }
  Block<T> power = value(kExp<T>, rest);
  for (int j = 0; j < 4; ++j) {
    const auto scaled = (Vec<T>)((Integers)power.v[j] + ((Integers)shifted.v[j] << Constants::kFraction));
    power.v[j] = x.v[j] < Constants::kLeast ? Vec<T>{} : scaled;
  }
  return power;
}

// a = log(exp(a) + exp(b)) = max(a, b) + log(1 + x), where x is exp(-|a - b|), and log(1 + x) is 2 artanh(x / (2 + x)).
template <class T>
RINGREDUCE_INLINE void log_add_exp(Block<T>& a, const Block<T>& b) {
  Block<T> below, ratio, square;
  for (int j = 0; j < 4; ++j) {
    const Vec<T> gap = a.v[j] < b.v[j] ? a.v[j] - b.v[j] : b.v[j] - a.v[j];
    below.v[j] = a.v[j] == b.v[j] ? Vec<T>{} : gap;  // also of infinities, which have no difference
  }
  const Block<T> x = exp_of(below);
  for (int j = 0; j < 4; ++j) {
    ratio.v[j] = x.v[j] / (x.v[j] + 2);
    square.v[j] = ratio.v[j] * ratio.v[j];
  }
  const Block<T> sum = value(kArtanh<T>, square);
  for (int j = 0; j < 4; ++j) a.v[j] = apply<ReduceOp::max>(a.v[j], b.v[j]) + 2 * ratio.v[j] * sum.v[j];
}

template <class Format, ReduceOp op, class T>
RINGREDUCE_INLINE void combine(Block<T>& a, const Block<T>& b) {
  if constexpr (std::is_same_v<Format, Complex<T>>) {  // the product
    for (int j = 0; j < 4; j += 2) {
      const Vec<T> real = a.v[j] * b.v[j] - a.v[j + 1] * b.v[j + 1];
      const Vec<T> imaginary = a.v[j] * b.v[j + 1] + a.v[j + 1] * b.v[j];
      a.v[j] = real;
      a.v[j + 1] = imaginary;
    }
  } else if constexpr (op == ReduceOp::logaddexp) {
    log_add_exp(a, b);
  } else {
    for (int j = 0; j < 4; ++j) a.v[j] = apply<op>(a.v[j], b.v[j]);
  }
}
