// Structs with names, as Python sees them: Settings(timeout=1.5, name="world") sets the members of these names.
#pragma once

#include <pybind11/pybind11.h>

namespace ringreduce {

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
