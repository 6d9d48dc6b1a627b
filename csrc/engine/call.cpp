#include "engine/call.h"

#include <algorithm>
#include <cstdio>

namespace ringreduce {

Operation operation_named(std::string_view wanted) {
  const auto found = std::find(kOperationNames.begin(), kOperationNames.end(), wanted);
  if (found == kOperationNames.end())
    throw Error(ErrorKind::invalid_argument, "unknown collective '" + std::string(wanted) + "'");
  return static_cast<Operation>(found - kOperationNames.begin());
}

std::uint64_t fingerprint(const Call& call, std::uint64_t seq, std::uint64_t plan_digest, std::uint64_t before) {
  const std::uint64_t kinds = static_cast<std::uint64_t>(call.packing) << 56 |
                              static_cast<std::uint64_t>(call.operation) << 48 |
                              static_cast<std::uint64_t>(call.dtype) << 40 |
                              static_cast<std::uint64_t>(call.reduce_op) << 32 | static_cast<std::uint32_t>(call.root);
  return mix(mix(mix(mix(mix(seq, kinds), call.count), call.shape), plan_digest), before);
}

std::string title(const Call& call, std::uint64_t seq) {
  return std::string(name(call.title())) + " seq " + std::to_string(call.number == 0 ? seq : call.number);
}

CallHeader header_of(const Call& call, std::uint64_t seq, std::uint64_t plan_digest, std::uint64_t before) {
  return {.seq = seq,
          .fingerprint = fingerprint(call, seq, plan_digest, before),
          .number = call.number == 0 ? seq : call.number,
          .count = call.op == nullptr ? call.count : call.count * call.op->element_bytes,
          .plan = plan_digest,
          .operation = static_cast<std::uint32_t>(call.title()),
          .dtype = static_cast<std::uint32_t>(call.dtype),
          .reduce_op = call.op == nullptr ? static_cast<std::uint32_t>(call.reduce_op) : kOperator,
          .root = call.root,
          .part = call.part_of ? 1u : 0u,
          .packing = static_cast<std::uint32_t>(call.packing)};
}

std::string describe(const CallHeader& header, const std::string& op) {
  // The fields come from another process: they are checked before they index anything.
  if (header.operation >= kOperationNames.size() || header.dtype >= kDTypeCount || header.reduce_op > kOperator ||
      header.packing >= kPackings)
    return "";
  const auto what = static_cast<Operation>(header.operation);
  std::string text(name(what));
  if (what == Operation::barrier) return text + "()";
  if (what == Operation::gpu_setup) return text + " (the group's first call on one)";
  if (header.part == 1) return text + (what == Operation::all_to_all ? " with split sizes" : " of a sparse tensor");
  const bool by_operator = header.reduce_op == kOperator;
  text += (by_operator ? "(bytes=" : "(count=") + std::to_string(header.count);
  if (!by_operator) text += ", dtype=" + std::string(name(static_cast<DType>(header.dtype)));
  if (by_operator)
    text += ", op=" + op;
  else if (reduces(what))
    text += ", op=" + std::string(name(static_cast<ReduceOp>(header.reduce_op)));
  if (has_root(what)) text += ", root=" + std::to_string(header.root);
  if (header.packing != 0) text += ", wire_dtype=" + std::string(name(static_cast<Packing>(header.packing)));
  char digest[24];
  std::snprintf(digest, sizeof digest, "%08x", static_cast<unsigned>(header.plan));
  return text + ", plan=" + digest + ")";
}

}  // namespace ringreduce
