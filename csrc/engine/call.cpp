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

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  std::uint64_t z = hash + value + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

std::uint64_t fingerprint(const Call& call, std::uint64_t seq, std::uint64_t plan_digest) {
  const std::uint64_t kinds = static_cast<std::uint64_t>(call.operation) << 48 |
                              static_cast<std::uint64_t>(call.dtype) << 40 |
                              static_cast<std::uint64_t>(call.reduce_op) << 32 | static_cast<std::uint32_t>(call.root);
  return mix(mix(mix(mix(mix(seq, kinds), call.count), call.shape), plan_digest), 0);
}

void record(RankControl& own, const Call& call, std::uint64_t seq, std::uint64_t fingerprint,
            std::uint64_t plan_digest) {
  constexpr auto relaxed = std::memory_order_relaxed;
  CallRecord& r = own.calls[seq % kCallHistory];
  r.seq.store(0, relaxed);
  // Release: a reader that sees any of the new fields sees the 0 when it looks at `seq` again.
  r.fingerprint.store(fingerprint, std::memory_order_release);
  r.number.store(call.number == 0 ? seq : call.number, std::memory_order_release);
  r.count.store(call.count, std::memory_order_release);
  r.plan.store(plan_digest, std::memory_order_release);
  r.operation.store(static_cast<std::uint32_t>(call.title()), std::memory_order_release);
  r.dtype.store(static_cast<std::uint32_t>(call.dtype), std::memory_order_release);
  r.reduce_op.store(static_cast<std::uint32_t>(call.reduce_op), std::memory_order_release);
  r.root.store(call.root, std::memory_order_release);
  r.seq.store(seq, std::memory_order_release);
  own.entered.store(seq, std::memory_order_release);
}

bool differs(const RankControl& peer, std::uint64_t seq, std::uint64_t fingerprint) {
  const CallRecord& r = peer.calls[seq % kCallHistory];
  if (r.seq.load(std::memory_order_acquire) != seq) return false;
  const std::uint64_t theirs = r.fingerprint.load(std::memory_order_acquire);
  return theirs != fingerprint && r.seq.load(std::memory_order_relaxed) == seq;
}

std::uint64_t number_of_call(const RankControl& rank, std::uint64_t seq) {
  const CallRecord& r = rank.calls[seq % kCallHistory];
  const bool known = r.seq.load(std::memory_order_acquire) == seq;
  const std::uint64_t number = r.number.load(std::memory_order_acquire);
  return known && r.seq.load(std::memory_order_relaxed) == seq ? number : seq;
}

std::string describe_call(const RankControl& rank, std::uint64_t seq) {
  constexpr auto acquire = std::memory_order_acquire;
  const CallRecord& r = rank.calls[seq % kCallHistory];
  const bool known = r.seq.load(acquire) == seq;
  const std::uint64_t count = r.count.load(acquire);
  const std::uint64_t plan = r.plan.load(acquire);
  const std::uint32_t operation = r.operation.load(acquire), dtype = r.dtype.load(acquire);
  const std::uint32_t op = r.reduce_op.load(acquire);
  const std::int32_t root = r.root.load(acquire);
  // The fields lie in another process's memory: they are checked before they index anything.
  if (!known || r.seq.load(std::memory_order_relaxed) != seq || operation >= kOperationNames.size() ||
      dtype >= kDTypeCount || op >= kReduceOpCount)
    return "a call that is no longer recorded (it is at call " + std::to_string(rank.entered.load(acquire)) + ")";

  const auto what = static_cast<Operation>(operation);
  std::string text(name(what));
  if (what == Operation::barrier) return text + "()";
  text += "(count=" + std::to_string(count) + ", dtype=" + std::string(name(static_cast<DType>(dtype)));
  if (reduces(what)) text += ", op=" + std::string(name(static_cast<ReduceOp>(op)));
  if (has_root(what)) text += ", root=" + std::to_string(root);
  char digest[24];
  std::snprintf(digest, sizeof digest, "%08x", static_cast<unsigned>(plan));
  return text + ", plan=" + digest + ")";
}

}  // namespace ringreduce
