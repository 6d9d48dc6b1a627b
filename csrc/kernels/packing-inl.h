// Packing of float32 values (packing.h), included by kernels-inl.h once for each instruction set, and under its rules.
//
// A block is 32 values in vectors of at most 32 bytes: wider ones would cut across the words below. Packed values are
// kept in words, so shifts alone move them, in every instruction set:
//   bfloat16  word w of 16 has values w and w + 16, from its low bits on;
//   int8      word w of 8 has values w, w + 8, w + 16 and w + 24;
//   int4      word w of 4 is word w of int8, whose bytes have 4 bits each, and word w + 4 in the bits between.

constexpr std::size_t kPart = kVector < 32 ? kVector : 32;
constexpr int kLanes = kPart / sizeof(float), kParts = kPackedTogether / kLanes;
constexpr int kBias = 127;
constexpr std::uint32_t kExponents = 255;  // the exponent of infinities and NaNs, and the scale of a block with one

typedef float Part __attribute__((vector_size(kPart)));
typedef std::uint32_t PartWords __attribute__((vector_size(kPart)));
typedef std::int32_t PartInts __attribute__((vector_size(kPart)));

struct Values {
  Part v[kParts];
};

template <class V>
RINGREDUCE_INLINE V load_vector(const char* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

// Vector by vector: a copy of all at once would go through the stack.
RINGREDUCE_INLINE Values load_values(const char* p) {
  Values values;
  for (int j = 0; j < kParts; ++j) values.v[j] = load_vector<Part>(p + j * kPart);
  return values;
}

RINGREDUCE_INLINE void store_values(char* p, const Values& values) {
  for (int j = 0; j < kParts; ++j) store(p + j * kPart, values.v[j]);
}

// Powers of two as two factors each, since they may be out of a float's range where what they are multiplied with makes
// up for that.
struct Factors {
  explicit RINGREDUCE_INLINE Factors(PartInts exponents)
      : one(power(exponents >> 1)), other(power(exponents - (exponents >> 1))) {}
  static RINGREDUCE_INLINE Part power(PartInts exponents) { return (Part)((exponents + kBias) << 23); }
  Part one, other;
};

struct AsBFloat16 {
  static constexpr std::size_t kBytes = 64;

  static RINGREDUCE_INLINE void pack(const Values& values, Values& rounded, char* to) {
    for (int j = 0; j < kParts; ++j) {
      const PartWords bits = (PartWords)values.v[j];
      const PartWords nearest = bits + (bits >> 16 & 1) + 0x7fff;
      const PartWords quiet = bits | 0x400000;
      const PartInts is_nan = values.v[j] != values.v[j];
      rounded.v[j] = (Part)((is_nan ? quiet : nearest) & 0xffff0000);
    }
    if (to == nullptr) return;
    for (int j = 0; j < kParts / 2; ++j) {
      const PartWords words = (PartWords)rounded.v[j] >> 16 | (PartWords)rounded.v[j + kParts / 2];
      store(to + j * kPart, words);
    }
  }

  static RINGREDUCE_INLINE void unpack(const char* from, Values& values) {
    for (int j = 0; j < kParts / 2; ++j) {
      const auto words = load_vector<PartWords>(from + j * kPart);
      values.v[j] = (Part)(words << 16);
      values.v[j + kParts / 2] = (Part)(words & 0xffff0000);
    }
  }
};

// Integers of kBits bits with two bits before the binary point, one of which is the sign, after a byte with their
// scale: a biased exponent, such that all magnitudes are below 2 ^ (scale + 1 - bias).
template <int kBits>
struct AsInteger {
  static constexpr std::size_t kBytes = 1 + kPackedTogether * kBits / 8;
  static constexpr int kFraction = kBits - 2;
  static constexpr int kMost = (1 << (kBits - 1)) - 1;
  // A sum with it has no bits behind the binary point, and the integer as its last.
  static constexpr float kRounder = 3 << 22;
  static constexpr int kWords = 8 / kLanes;  // vectors of the words of int8

  // A block with an infinity or a NaN becomes all NaN.
  static RINGREDUCE_INLINE void pack(const Values& values, Values& rounded, char* to) {
    const PartInts scales = largest(values) >> 23;
    const auto scale = static_cast<std::uint32_t>(scales[0]);
    if (scale == kExponents) {
      for (Part& part : rounded.v) part = (Part)(PartWords{} + 0x7fc00000);
      if (to != nullptr) {
        __builtin_memset(to, 0, kBytes);
        *to = static_cast<char>(scale);
      }
      return;
    }
    const Factors to_integer(kFraction + kBias - scales), to_float(scales - kBias - kFraction);
    const PartInts least = PartInts{} + bits_of(kRounder - kMost), most = PartInts{} + bits_of(kRounder + kMost);
    PartWords words[kWords] = {};
    for (int j = 0; j < kParts; ++j) {
      PartInts sum = (PartInts)(values.v[j] * to_integer.one * to_integer.other + kRounder);
      sum = sum < most ? sum : most;
      sum = sum > least ? sum : least;
      rounded.v[j] = ((Part)sum - kRounder) * to_float.one * to_float.other;
      words[j % kWords] |= ((PartWords)sum & ((1u << kBits) - 1)) << (j / kWords * 8);
    }
    if (to != nullptr) {
      *to = static_cast<char>(scale);
      store_words(to + 1, words);
    }
  }

  static RINGREDUCE_INLINE void unpack(const char* from, Values& values) {
    const int scale = static_cast<unsigned char>(*from);
    if (scale == kExponents) {
      for (Part& part : values.v) part = (Part)(PartWords{} + 0x7fc00000);
      return;
    }
    const Factors to_float(PartInts{} + scale - kBias - kFraction);
    PartWords words[kWords];
    load_words(from + 1, words);
    for (int j = 0; j < kParts; ++j) {
      const PartInts integers = (PartInts)(words[j % kWords] << (32 - kBits - j / kWords * 8)) >> (32 - kBits);
      values.v[j] = __builtin_convertvector(integers, Part) * to_float.one * to_float.other;
    }
  }

 private:
  using Lanes = std::make_integer_sequence<int, kLanes>;
  typedef std::uint32_t Quarter __attribute__((vector_size(16)));

  static constexpr std::int32_t bits_of(float value) { return __builtin_bit_cast(std::int32_t, value); }

  // The bits of the largest magnitude, in all lanes.
  static RINGREDUCE_INLINE PartInts largest(const Values& values) {
    PartInts most{};
    for (const Part& part : values.v) {
      const PartInts magnitude = (PartInts)part & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    most = most_of_pairs<4>(most, Lanes{});
    most = most_of_pairs<2>(most, Lanes{});
    return most_of_pairs<1>(most, Lanes{});
  }

  // Of lanes whose numbers differ in the bit kBit, the larger in both. Fewer lanes have no such pairs.
  template <int kBit, int... I>
  static RINGREDUCE_INLINE PartInts most_of_pairs(PartInts v, std::integer_sequence<int, I...>) {
    const PartInts other = lanes<PartInts, (I ^ kBit)...>(v, v);
    return v > other ? v : other;
  }

  static RINGREDUCE_INLINE void store_words(char* to, const PartWords (&words)[kWords]) {
    if constexpr (kBits == 8) {
      for (int i = 0; i < kWords; ++i) store(to + i * kPart, words[i]);
    } else {
      const PartWords &first = words[0], &last = words[kWords - 1];
      const auto low = lanes<Quarter, 0, 1, 2, 3>(first, last);
      const auto high = lanes<Quarter, 4, 5, 6, 7>(first, last);
      store(to, low | high << 4);
    }
  }

  static RINGREDUCE_INLINE void load_words(const char* from, PartWords (&words)[kWords]) {
    if constexpr (kBits == 8) {
      for (int i = 0; i < kWords; ++i) words[i] = load_vector<PartWords>(from + i * kPart);
    } else {
      const auto both = load_vector<Quarter>(from);
      join(both & 0x0f0f0f0f, both >> 4 & 0x0f0f0f0f, words);
    }
  }

  // Not through memory, where a load must not be wider than the stores before it.
  template <class Half>
  static RINGREDUCE_INLINE void join(Half low, Half high, PartWords (&words)[kWords]) {
    if constexpr (sizeof(Half) < kPart) {
      words[0] = lanes<PartWords, 0, 1, 2, 3, 4, 5, 6, 7>(low, high);
    } else {
      words[0] = low;
      words[kWords - 1] = high;
    }
  }
};

template <class Format, bool kPacks, bool kRest>
void pack_blocks(const PackJob& job) {
  for (std::size_t at = 0; at < job.blocks; ++at) {
    Values values = load_values(job.values + at * sizeof(Values)), rounded;
    if constexpr (kRest) {
      const Values rest = load_values(job.rest + at * sizeof(Values));
      for (int j = 0; j < kParts; ++j) values.v[j] += rest.v[j];
    }
    Format::pack(values, rounded, kPacks ? job.to + at * Format::kBytes : nullptr);
    if constexpr (!kPacks) store_values(job.to + at * sizeof(Values), rounded);
    if constexpr (kRest) {
      for (int j = 0; j < kParts; ++j) {
        const Part rest = values.v[j] - rounded.v[j];
        values.v[j] = (Part)((PartWords)rest & (PartWords)(rest - rest == 0));  // 0 where it is not finite
      }
      store_values(job.rest + at * sizeof(Values), values);
    }
  }
}

template <class Format>
void pack_as(const PackJob& job) {
  if (job.packs) return job.rest ? pack_blocks<Format, true, true>(job) : pack_blocks<Format, true, false>(job);
  return job.rest ? pack_blocks<Format, false, true>(job) : pack_blocks<Format, false, false>(job);
}

template <class Format>
void unpack_as(char* values, const char* packed, std::size_t blocks) {
  for (std::size_t at = 0; at < blocks; ++at) {
    Values block;
    Format::unpack(packed + at * Format::kBytes, block);
    store_values(values + at * sizeof(Values), block);
  }
}

void pack(Packing packing, const PackJob& job) {
  switch (packing) {
    case Packing::none:
      return;
    case Packing::bfloat16:
      return pack_as<AsBFloat16>(job);
    case Packing::int8:
      return pack_as<AsInteger<8>>(job);
    case Packing::int4:
      return pack_as<AsInteger<4>>(job);
  }
}

void unpack(Packing packing, char* values, const char* packed, std::size_t blocks) {
  switch (packing) {
    case Packing::none:
      return;
    case Packing::bfloat16:
      return unpack_as<AsBFloat16>(values, packed, blocks);
    case Packing::int8:
      return unpack_as<AsInteger<8>>(values, packed, blocks);
    case Packing::int4:
      return unpack_as<AsInteger<4>>(values, packed, blocks);
  }
}
