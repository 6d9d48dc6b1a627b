#include "parameter_server/block/rules.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/error.h"

namespace ringreduce::parameter_server {
namespace {

template <class T>
constexpr DType kDType = std::is_same_v<T, float> ? DType::float32 : DType::float64;

// The arrays of an update as those of its dtype.
template <class T>
const T* of(const void* array) {
  return static_cast<const T*>(array);
}
template <class T>
T* of(void* array) {
  return static_cast<T*>(array);
}

}  // namespace
}  // namespace ringreduce::parameter_server

#define RINGREDUCE_TARGET baseline
#include "parameter_server/block/rules-inl.h"
#undef RINGREDUCE_TARGET

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define RINGREDUCE_TARGET avx2
#include "parameter_server/block/rules-inl.h"
#undef RINGREDUCE_TARGET
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace ringreduce::parameter_server {
namespace {

// Both targets give the same bits, since they round every operation in the same way.
template <class T>
void dispatch(const Rule& rule, const Update& update) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_avx2) return rule.fused ? avx2::update<true, T>(rule, update) : avx2::update<false, T>(rule, update);
#endif
  return rule.fused ? baseline::update<true, T>(rule, update) : baseline::update<false, T>(rule, update);
}

}  // namespace

void Rule::change(std::uint64_t place, double number) {
  static constexpr double Rule::* kPlaces[kNumbers] = {&Rule::lr,           &Rule::momentum, &Rule::dampening,
                                                       &Rule::weight_decay, &Rule::beta1,    &Rule::beta2,
                                                       &Rule::eps,          &Rule::lr_decay, &Rule::alpha};
  if (place >= kNumbers) return;
  Rule changed = *this;
  changed.*kPlaces[place] = number;
  if (changed.states() == states()) *this = changed;
}

int Rule::states() const {
  switch (kind) {
    case Kind::sgd:
      return momentum != 0 ? 1 : 0;
    case Kind::adam:
      return 2;
    case Kind::adagrad:
    case Kind::rowwise_adagrad:
      return 1;
    case Kind::rmsprop:
      return 3;
    default:
      return 0;
  }
}

bool Rule::native(DType dtype) const {
  if (kind == Kind::python) return false;
  if (kind == Kind::assign || kind == Kind::reduce) return true;
  return dtype == DType::float32 || dtype == DType::float64;
}

void fill(DType dtype, void* to, std::size_t count, double value) {
  if (dtype == DType::float32)
    std::fill_n(static_cast<float*>(to), count, static_cast<float>(value));
  else
    std::fill_n(static_cast<double*>(to), count, value);
}

void update(const Rule& rule, DType dtype, const Update& update) {
  if (dtype == DType::float32)
    dispatch<float>(rule, update);
  else if (dtype == DType::float64)
    dispatch<double>(rule, update);
  else
    throw Error(ErrorKind::invalid_argument, "no native update for " + std::string(name(dtype)));
}

}  // namespace ringreduce::parameter_server
