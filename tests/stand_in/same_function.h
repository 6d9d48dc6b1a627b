// Whether a function that we wrote down is that of a library's header, for what a caller passes and gets.
#pragma once

#include <type_traits>

// Whether a caller that has an A may pass it where a B is taken: equal, or handles, numbers, or structs of one shape.
template <class A, class B>
constexpr bool same_value() {
  using C = std::remove_cv_t<A>;
  using D = std::remove_cv_t<B>;
  constexpr auto is_number = [](auto kind) {
    using T = typename decltype(kind)::type;
    return std::is_integral_v<T> || std::is_enum_v<T>;
  };
  if constexpr (std::is_same_v<C, D>) {
    return true;
  } else if constexpr (std::is_pointer_v<C> && std::is_pointer_v<D>) {
    using E = std::remove_pointer_t<C>;
    using F = std::remove_pointer_t<D>;
    if constexpr (std::is_const_v<E> != std::is_const_v<F>)
      return false;
    else if constexpr (std::is_void_v<E>)  // a handle, whose struct nobody knows
      return std::is_class_v<F>;
    else
      return same_value<E, F>();
  } else if constexpr (std::is_class_v<C> && (std::is_class_v<D> || std::is_union_v<D>)) {
    return sizeof(C) == sizeof(D) && std::is_trivially_copyable_v<C>;
  } else {
    return is_number(std::type_identity<C>{}) && is_number(std::type_identity<D>{}) && sizeof(C) == sizeof(D);
  }
}

template <class A, class B>
struct same_function : std::false_type {};
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct same_function<R(A...), S(B...)> : std::bool_constant<same_value<R, S>() && (same_value<A, B>() && ...)> {};
