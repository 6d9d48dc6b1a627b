#include "kernels/records.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace ringreduce::kernels {
namespace {

template <class T>
T load(const char* place) {
  T value;
  std::memcpy(&value, place, sizeof value);
  return value;
}

template <class T>
void store(char* place, T value) {
  std::memcpy(place, &value, sizeof value);
}

// Whether b comes first.
template <class Key, class Index>
struct Comparison {
  bool highest;
  bool by_index;

  bool operator()(Key key_a, Key key_b, Index index_a, Index index_b) const {
    const bool nan_a = key_a != key_a, nan_b = key_b != key_b;  // NOLINT(misc-redundant-expression)
    if (nan_a != nan_b) return nan_b;
    if (key_a == key_b || nan_a) return by_index && index_b < index_a;
    return (key_a < key_b) == highest;
  }
};

// kBytes of a record, so that copies of common ones are a load and a store or two; 0: only known when it runs.
template <std::size_t kBytes, class Key, class Index>
void choose_as(const Order& order, std::size_t record_bytes, const char* a, const char* b, char* out,
               std::size_t count) {
  const std::size_t bytes = kBytes == 0 ? record_bytes : kBytes;
  const std::size_t key = order.key.offset, index = order.index ? order.index->offset : 0;
  const Comparison<Key, Index> b_first{order.highest, order.index.has_value()};
  const auto index_of = [&](const char* record) { return b_first.by_index ? load<Index>(record + index) : Index{}; };
  for (; count > 0; --count, a += bytes, b += bytes, out += bytes) {
    const char* const first = b_first(load<Key>(a + key), load<Key>(b + key), index_of(a), index_of(b)) ? b : a;
    if (first != out) std::memcpy(out, first, bytes);
  }
}

template <class Key, class Index>
void choose_sized(const Order& order, std::size_t record_bytes, const char* a, const char* b, char* out,
                  std::size_t count) {
  switch (record_bytes) {
    case 8:
      return choose_as<8, Key, Index>(order, record_bytes, a, b, out, count);
    case 12:
      return choose_as<12, Key, Index>(order, record_bytes, a, b, out, count);
    case 16:
      return choose_as<16, Key, Index>(order, record_bytes, a, b, out, count);
    default:
      return choose_as<0, Key, Index>(order, record_bytes, a, b, out, count);
  }
}

template <class Key, class Index>
void merge_best_as(const Order& order, std::size_t k, std::size_t record_bytes, const char* a, const char* b, char* out,
                   std::size_t count) {
  const Comparison<Key, Index> b_first{order.highest, true};
  const std::size_t keys = order.key.offset, indices = order.index->offset;
  const auto key_of = [&](const char* record, std::size_t i) { return load<Key>(record + keys + i * sizeof(Key)); };
  const auto index_of = [&](const char* record, std::size_t i) {
    return load<Index>(record + indices + i * sizeof(Index));
  };
  const auto is_b = [&](std::size_t i, std::size_t j) {
    return b_first(key_of(a, i), key_of(b, j), index_of(a, i), index_of(b, j));
  };
  for (; count > 0; --count, a += record_bytes, b += record_bytes, out += record_bytes) {
    std::size_t from_a = 0, from_b = 0;
    while (from_a + from_b < k) is_b(from_a, from_b) ? ++from_b : ++from_a;
    // From the last one on, since `out` may be `a` or `b`: what is written there has been read.
    for (std::size_t place = k; place-- > 0;) {
      const bool last_is_b = from_a == 0 || (from_b > 0 && !is_b(from_a - 1, from_b - 1));
      const char* const record = last_is_b ? b : a;
      const std::size_t i = last_is_b ? --from_b : --from_a;
      store(out + keys + place * sizeof(Key), key_of(record, i));
      store(out + indices + place * sizeof(Index), index_of(record, i));
    }
  }
}

// Calls f<Key, Index>() for the types of `order`.
template <class Key, class F>
void with_index(const Order& order, F f) {
  if (order.index && order.index->dtype == DType::int32) return f.template operator()<Key, std::int32_t>();
  f.template operator()<Key, std::int64_t>();
}

template <class F>
void with_types(const Order& order, F f) {
  switch (order.key.dtype) {
    case DType::float64:
      return with_index<double>(order, f);
    case DType::float32:
      return with_index<float>(order, f);
    case DType::int8:
      return with_index<std::int8_t>(order, f);
    case DType::int16:
      return with_index<std::int16_t>(order, f);
    case DType::int32:
      return with_index<std::int32_t>(order, f);
    case DType::int64:
      return with_index<std::int64_t>(order, f);
    case DType::uint8:
    case DType::boolean:
      return with_index<std::uint8_t>(order, f);
    default:
      std::abort();  // excluded by supports()
  }
}

template <class T>
void merge_moments_of(const char* a, const char* b, char* out, std::size_t count) {
  constexpr std::size_t kMean = sizeof(T), kSquares = 2 * sizeof(T), kBytes = 3 * sizeof(T);
  for (; count > 0; --count, a += kBytes, b += kBytes, out += kBytes) {
    const T size_a = load<T>(a), size_b = load<T>(b), size = size_a + size_b;
    if (size_a == 0 || size_b == 0) {  // whose mean may be NaN
      if (const char* const other = size_b == 0 ? a : b; other != out) std::memcpy(out, other, kBytes);
      continue;
    }
    const T mean_a = load<T>(a + kMean), mean_b = load<T>(b + kMean);
    const T squares = load<T>(a + kSquares) + load<T>(b + kSquares);
    const T gap = mean_b - mean_a, share = size_b / size;
    store(out, size);
    store(out + kMean, mean_a + gap * share);
    store(out + kSquares, squares + gap * gap * size_a * share);
  }
}

}  // namespace

bool supports(const Order& order) {
  const DType key = order.key.dtype;
  const bool has_key = key == DType::float64 || key == DType::float32 || (key >= DType::int8 && key <= DType::boolean);
  return has_key && (!order.index || order.index->dtype == DType::int32 || order.index->dtype == DType::int64);
}

void choose(const Order& order, std::size_t record_bytes, const void* a, const void* b, void* out, std::size_t count) {
  with_types(order, [&]<class Key, class Index>() {
    choose_sized<Key, Index>(order, record_bytes, static_cast<const char*>(a), static_cast<const char*>(b),
                             static_cast<char*>(out), count);
  });
}

void merge_best(const Order& order, std::size_t k, std::size_t record_bytes, const void* a, const void* b, void* out,
                std::size_t count) {
  with_types(order, [&]<class Key, class Index>() {
    merge_best_as<Key, Index>(order, k, record_bytes, static_cast<const char*>(a), static_cast<const char*>(b),
                              static_cast<char*>(out), count);
  });
}

void merge_moments(DType dtype, const void* a, const void* b, void* out, std::size_t count) {
  const auto merge = dtype == DType::float32 ? merge_moments_of<float> : merge_moments_of<double>;
  merge(static_cast<const char*>(a), static_cast<const char*>(b), static_cast<char*>(out), count);
}

}  // namespace ringreduce::kernels
