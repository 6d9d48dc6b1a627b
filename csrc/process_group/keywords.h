// Structs with names, as Python sees them: Settings(timeout=1.5, name="world") sets the members of these names.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

// Binds members by their names: bind_members(bound, "rank", &Roster::rank, "memfd", &Roster::memfd).
template <class Bound>
Bound& bind_members(Bound& bound) {
  return bound;
}
template <class Bound, class Member, class... Rest>
Bound& bind_members(Bound& bound, const char* name, Member member, Rest... rest) {
  return bind_members(bound.def_readwrite(name, member), rest...);
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
