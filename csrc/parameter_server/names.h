// What Python calls the values of the parameter server's enumerations, and how it gives descriptors.
#pragma once

#include <array>
#include <string_view>

#include "core/file_descriptor.h"
#include "parameter_server/server/replica.h"
#include "process_group/keywords.h"

namespace ringreduce {

namespace ps = parameter_server;

template <>
constexpr auto kNames<ps::Rule::Kind> = std::to_array<std::string_view>(
    {"assign", "reduce", "sgd", "adam", "adagrad", "rmsprop", "rowwise_adagrad", "python"});
template <>
constexpr auto kNames<ps::Consistency> = std::to_array<std::string_view>({"sync", "asynchronous", "ssp"});
template <>
constexpr auto kNames<ps::RequestKind> = std::to_array<std::string_view>(
    {"", "initialise", "push", "pull", "clock", "barrier", "leave", "restore", "change"});
template <>
constexpr auto kNames<ps::Outcome> = std::to_array<std::string_view>(
    {"", "applied", "late", "initialised", "kept", "ready", "done", "failed", "refused"});
template <>
constexpr auto kNames<ps::Step> =
    std::to_array<std::string_view>({"never", "taken", "logged", "updated", "carried out", "answered", "gives", "takes",
                                     "leaves", "inherits", "taking over", "serving"});

// Binds descriptors, which the struct takes over. Given before what needs memory, none is left open.
template <class Bound>
void bind_descriptors(Bound&) {}
template <class Bound, class Struct, class... Rest>
void bind_descriptors(Bound& bound, const char* name, FileDescriptor Struct::* member, Rest... rest) {
  bound.def_property(name, nullptr, [member](Struct& self, int given) { self.*member = FileDescriptor(given); });
  bind_descriptors(bound, rest...);
}

}  // namespace ringreduce
