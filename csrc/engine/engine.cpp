#include "engine/engine.h"

#include <algorithm>

#include "kernels/accumulate.h"

namespace ringreduce {
namespace {

// The operation whose plans a call runs: a barrier is an all_reduce over nothing.
Operation planned(Operation operation) { return operation == Operation::barrier ? Operation::all_reduce : operation; }

Engine::Needs needs_of(const Call& call) {
  const bool orders = call.reduce_op == ReduceOp::min || call.reduce_op == ReduceOp::max;
  return {call.op != nullptr, call.op == nullptr && reduces(call.operation) && narrow_float(call.dtype) && !orders};
}

}  // namespace

Engine::Engine(int rank, int size, int channels, const Options& options, std::size_t most_slice_bytes)
    : rank_(rank),
      size_(size),
      channels_(channels),
      options_(options),
      most_slice_bytes_(most_slice_bytes),
      choices_(kOperationNames.size()) {}

int Engine::add_plan(LoweredPlan plan) {
  const auto same = std::find_if(plans_.begin(), plans_.end(), [&](const LoweredPlan& known) {
    return known.operation == plan.operation && known.digest == plan.digest && known.words == plan.words;
  });
  if (same != plans_.end()) return static_cast<int>(same - plans_.begin());
  ringreduce::program_of(plan, {.rank = rank_, .size = size_, .channels = channels_});  // throws if it is malformed
  plans_.push_back(std::move(plan));
  return static_cast<int>(plans_.size()) - 1;
}

void Engine::choose(Operation operation, std::uint64_t most_bytes, int plan, std::size_t slice_bytes) {
  if (plan < 0 || static_cast<std::size_t>(plan) >= plans_.size() ||
      plans_[static_cast<std::size_t>(plan)].operation != operation)
    throw Error(ErrorKind::invalid_argument,
                "there is no plan " + std::to_string(plan) + " for " + std::string(name(operation)));
  auto& choices = choices_[static_cast<std::size_t>(operation)];
  choices.erase(choices.begin(), choices.upper_bound(most_bytes));
  choices[most_bytes] = {plan, slice_bytes};
  ++choices_made_;
}

const Engine::Choice* Engine::find(const Choices& choices, std::uint64_t bytes) {
  const auto choice = choices.lower_bound(bytes);
  return choice == choices.end() || choice->second.least_bytes > bytes ? nullptr : &choice->second;
}

const Engine::Choice& Engine::choice_for(const Call& call) {
  const Operation operation = planned(call.operation);
  const std::uint64_t bytes = call.count * call.element_bytes();
  const Needs needs = needs_of(call);
  if (!needs.in_order || !ask_)
    if (const Choice* chosen = find(choices_[static_cast<std::size_t>(operation)], bytes)) return *chosen;
  const int root = has_root(operation) ? call.root : 0;
  Choices& asked = asked_[{operation, root, needs}];
  if (const Choice* chosen = find(asked, bytes)) return *chosen;
  if (!ask_)
    throw Error(ErrorKind::invalid_argument,
                "no plan is registered for " + std::string(name(operation)) + " of this size");
  PlanFor answer = ask_(operation, root, bytes, needs);
  const Choice choice{add_plan(std::move(answer.plan)), answer.slice_bytes, answer.least_bytes};
  return asked.insert_or_assign(answer.most_bytes, choice).first->second;
}

const Program& Engine::program_for(const Call& call, int plan) {
  const std::pair<int, int> key{plan, call.root};
  auto found = programs_.find(key);
  if (found == programs_.end()) found = programs_.emplace(key, program_of(rank_, call, plan)).first;
  return found->second;
}

Program Engine::program_of(int rank, const Call& call, int plan) const {
  return ringreduce::program_of(plans_[static_cast<std::size_t>(plan)],
                                {.rank = rank, .size = size_, .root = call.root, .channels = channels_});
}

// A multiple of a cache line, or of the elements of the user's operator; at most a slot.
std::size_t Engine::slice_bytes(const Call& call, const Program& program, std::size_t chosen) const {
  std::size_t bytes = chosen;
  if (chosen == 0) {
    // The plan's chunk may be smaller than a block; a slice that is a share of the block is only a little too small
    // then.
    const std::size_t chunk = call.largest * call.element_bytes() / program.channels[0].chunks;
    bytes = std::max(chunk / static_cast<std::size_t>(options_.slices), options_.least_slice_bytes);
  }
  const std::size_t most = std::min(most_slice_bytes_, options_.most_slice_bytes);
  const std::size_t slice = std::min(std::max(bytes / kCacheLine * kCacheLine, kCacheLine), most);
  return call.op == nullptr ? slice : std::max(slice / call.op->element_bytes, std::size_t{1}) * call.op->element_bytes;
}

Engine::Planned Engine::plan_of(const Call& call) {
  const Choice& choice = choice_for(call);
  const Program& program = program_for(call, choice.plan);
  return {&program, slice_bytes(call, program, choice.slice_bytes)};
}

void Engine::check(const Call& call, int size) {
  if (reduces(call.operation) && moves_only(call.dtype))
    throw Error(ErrorKind::invalid_argument,
                std::string(name(call.operation)) + ": elements of dtype " + std::string(name(call.dtype)) +
                    " can be moved, but not reduced; convert the tensor to a dtype that can, such as int64, float32 or "
                    "complex64; of one that torch cannot convert, pass view(torch.uint8)");
  if (reduces(call.operation) && !kernels::supports(call.dtype, call.reduce_op))
    throw Error(ErrorKind::invalid_argument, std::string(name(call.operation)) + ": the reduction '" +
                                                 std::string(name(call.reduce_op)) + "' is not defined for dtype " +
                                                 std::string(name(call.dtype)));
  if (call.root < 0 || call.root >= size)
    throw Error(ErrorKind::invalid_argument, std::string(name(call.operation)) + ": root is " +
                                                 std::to_string(call.root) + "; the group has ranks 0 to " +
                                                 std::to_string(size - 1));
}

}  // namespace ringreduce
