// What has names in Python: the values of enums, and the members of structs. Settings(timeout=1.5, name="world") sets
// the members of these names.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "core/types.h"

namespace ringreduce {

// The names of an enum's values, in their order. An enum that has them is a str in Python.
template <class Enum>
constexpr auto kNames = nullptr;
template <>
inline constexpr auto kNames<DType> = [] {
  std::array<std::string_view, kDTypeCount> names;
  for (std::size_t i = 0; i < names.size(); ++i) names[i] = name(static_cast<DType>(i));
  return names;
}();
template <>
inline constexpr auto kNames<ReduceOp> = detail::kReduceOps;

// Binds members by their names: bind_members(bound, "rank", &Roster::rank, "memfd", &Roster::memfd).
template <class Bound>
Bound& bind_members(Bound& bound) {
  return bound;
}
template <class Bound, class Member, class... Rest>
Bound& bind_members(Bound& bound, const char* name, Member member, Rest... rest) {
  return bind_members(bound.def_readwrite(name, member), rest...);
}

// Binds methods without arguments by their names, to be called without the GIL.
template <class Bound>
void bind_methods(Bound&) {}
template <class Bound, class Method, class... Rest>
void bind_methods(Bound& bound, const char* name, Method method, Rest... rest) {
  bind_methods(bound.def(name, method, pybind11::call_guard<pybind11::gil_scoped_release>()), rest...);
}
// The same, as properties.
template <class Bound>
void bind_properties(Bound&) {}
template <class Bound, class Method, class... Rest>
void bind_properties(Bound& bound, const char* name, Method method, Rest... rest) {
  const pybind11::cpp_function getter(method, pybind11::call_guard<pybind11::gil_scoped_release>());
  bind_properties(bound.def_property_readonly(name, getter), rest...);
}

// The struct with these members, which def_readwrite or def_property has bound. Another name is an AttributeError.
template <class Struct>
Struct from_keywords(const pybind11::kwargs& members) {
  Struct made;
  const pybind11::object seen = pybind11::cast(&made, pybind11::return_value_policy::reference);
  for (const auto& [name, value] : members) pybind11::setattr(seen, name, value);
  return made;
}

// A constructor that takes them.
template <class Struct>
auto init_by_keywords() {
  return pybind11::init(&from_keywords<Struct>);
}

}  // namespace ringreduce

namespace pybind11::detail {

template <class Enum>
concept HasNames = requires { ringreduce::kNames<Enum>.size(); };

// pybind11 3 has a caster for enums, and this switch of it. pybind11 2 has neither.
template <class Enum, class>
struct type_caster_enum_type_enabled;
template <HasNames Enum>
struct type_caster_enum_type_enabled<Enum, void> : std::false_type {};

template <HasNames Enum>
struct type_caster<Enum> {
  PYBIND11_TYPE_CASTER(Enum, const_name("str"));
  bool load(handle from, bool) {
    if (!isinstance<str>(from)) return false;
    const auto& names = ringreduce::kNames<Enum>;
    const auto wanted = from.cast<std::string>();
    const auto found = std::find(names.begin(), names.end(), wanted);
    if (found == names.end())
      throw ringreduce::Error(ringreduce::ErrorKind::invalid_argument,
                              "'" + wanted + "' is no " + pybind11::type_id<Enum>());
    value = static_cast<Enum>(found - names.begin());
    return true;
  }
  // A value without a name, which another process may have sent, has the last one.
  static handle cast(Enum of, return_value_policy, handle) {
    const auto& names = ringreduce::kNames<Enum>;
    return str(names[std::min(static_cast<std::size_t>(of), names.size() - 1)]).release();
  }
};

}  // namespace pybind11::detail
