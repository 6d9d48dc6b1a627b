// A call of a collective, and the comparison by which two ranks find out that their calls differ.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/arithmetic.h"
#include "core/call_header.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/types.h"
#include "engine/feedback.h"
#include "engine/operator.h"
#include "kernels/packing.h"

namespace ringreduce {

class HeldLock;

// The order is that of kOperationNames. A barrier runs an all_reduce plan over nothing.
enum class Operation : std::uint32_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  reduce,
  gather,
  scatter,
  all_to_all,
  barrier,
  gpu_setup,  // as a title only: what ranks tell one another at a group's first call on CUDA tensors
};
inline constexpr std::array<std::string_view, 10> kOperationNames{
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "gather",     "scatter",        "all_to_all", "barrier",   "set-up for CUDA tensors"};

constexpr std::string_view name(Operation o) { return kOperationNames[static_cast<std::size_t>(o)]; }
// Throws invalid_argument for an unknown name.
Operation operation_named(std::string_view name);

constexpr bool reduces(Operation o) {
  return o == Operation::all_reduce || o == Operation::reduce_scatter || o == Operation::reduce;
}
constexpr bool has_root(Operation o) {
  return o == Operation::broadcast || o == Operation::reduce || o == Operation::gather || o == Operation::scatter;
}

struct Call {
  Operation operation = Operation::barrier;
  DType dtype = DType::uint8;
  ReduceOp reduce_op = ReduceOp::sum;
  int root = 0;                  // rooted operations only
  std::uint64_t count = 0;       // elements of a block (for uneven blocks: of all blocks together)
  std::uint64_t largest = 0;     // elements of the largest block of any rank
  std::uint64_t shape = 0;       // a hash of the counts where blocks are uneven, or the digest of `op`; else 0
  double factor = 1.0;           // premul_sum only; may differ between ranks
  const Operator* op = nullptr;  // all_reduce by the user's own, whose elements are counted, instead of by reduce_op
  // How all_reduce sends float32 to other hosts, where the plan allows it, and this rank's rests; null to forget them.
  Packing packing = Packing::none;
  Feedback* feedback = nullptr;
  Nanoseconds timeout = 0;  // for the whole call, from the moment it first waits
  bool by_caller = false;   // the thread that made it runs it, and computes nothing meanwhile
  // What the calling thread releases when a wait becomes long. Null but in small calls on one host.
  HeldLock* held = nullptr;
  // Only the texts of errors use these two. A user's call may be several of the engine's: `part_of` is that call, if it
  // has another name, and `number` its number among the user's calls (0: the engine's own number is shown).
  std::optional<Operation> part_of = std::nullopt;
  std::uint64_t number = 0;

  Operation title() const { return part_of.value_or(operation); }
  std::size_t element_bytes() const { return op == nullptr ? size_of(dtype) : op->element_bytes; }
};

// Equal on two ranks exactly if (up to a 64-bit hash) they make the same call with the same plan at the same place in
// the group's sequence of calls, and have made the same calls `before`: the fingerprint of the call before this one.
std::uint64_t fingerprint(const Call& call, std::uint64_t seq, std::uint64_t plan_digest, std::uint64_t before = 0);

// Mixes `value` into `hash`.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) { return mixed(hash + value); }

// "all_reduce seq 7"
std::string title(const Call& call, std::uint64_t seq);

// CallHeader::reduce_op of a call by an Operator.
inline constexpr std::uint32_t kOperator = kReduceOpCount;

// The description of a call that ranks send to each other.
CallHeader header_of(const Call& call, std::uint64_t seq, std::uint64_t plan_digest, std::uint64_t before = 0);
// "all_reduce(count=1024, dtype=float32, op=sum, plan=1f0c22d1)"; empty if this is no header. `op` is the name of the
// user's operator, if the call has one.
std::string describe(const CallHeader& header, const std::string& op = "");

}  // namespace ringreduce
