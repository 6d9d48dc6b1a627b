#include "parameter_server/block/dense.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "core/error.h"
#include "kernels/accumulate.h"

namespace ringreduce::parameter_server {
namespace {

// Bytes of a gradient that are combined at once, to stay in the cache.
constexpr std::size_t kGradientSlice = 32 * 1024;

// How the pushes of an update are combined into one gradient.
struct Combination {
  DType dtype;
  ReduceOp op;
  std::vector<const std::byte*> sources;
  std::vector<double> weights;
  double divisor = 1;
  bool weighted = false;

  Combination(const BlockSpec& spec, const Operation& operation);
  const std::byte* operator()(std::byte* dst, std::size_t begin, std::size_t count, std::byte* scratch) const;
};

Combination::Combination(const BlockSpec& spec, const Operation& operation) : dtype(spec.dtype) {
  const bool reduces = spec.rule.kind == Rule::Kind::reduce;
  op = reduces ? spec.rule.op : ReduceOp::sum;
  double sum = 0;
  for (const Contribution& each : operation.contributions) {
    weighted |= each.weight != 1;
    sum += each.weight;
    if (each.payload == nullptr) continue;  // counts as zeros
    sources.push_back(data_of(each).at());
    weights.push_back(each.weight);
  }
  const bool scalable = kernels::supports(dtype, ReduceOp::avg);
  weighted &= scalable;
  if (scalable && !reduces && spec.rule.average) {
    if (weighted)  // shares of the sum, since a weight times a value may be too large for the dtype
      for (double& weight : weights) weight /= sum;
    else
      divisor = sum;
  }
}

// Combines elements [begin, begin + count) of the pushes into `dst`, and returns where the result is: `dst`, or the
// place of the only push if that needs no change. `scratch` has room for the elements of all contributions.
const std::byte* Combination::operator()(std::byte* dst, std::size_t begin, std::size_t count,
                                         std::byte* scratch) const {
  const std::size_t size = size_of(dtype);
  std::vector<const void*> from;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    from.push_back(sources[i] + begin * size);
    if (!weighted) continue;
    std::byte* const scaled = scratch + i * count * size;
    kernels::scale(dtype, scaled, from.back(), count, weights[i]);
    from.back() = scaled;
  }
  if (from.size() == 1 && divisor == 1) return static_cast<const std::byte*>(from[0]);
  void* const to = dst;
  kernels::accumulate(dtype, op, {&to, 1}, from, count, divisor);
  return dst;
}

}  // namespace

Dense::Dense(BlockSpec its, std::byte* at, std::size_t left, std::size_t capacity)
    : Block(std::move(its)), words_(reinterpret_cast<BlockWords*>(at)) {
  const std::string dtype(name(spec.dtype)), op(name(spec.rule.op));
  if (moves_only(spec.dtype))
    throw Error(ErrorKind::invalid_argument, "a parameter server has no values of " + dtype + "; convert the tensor");
  if (spec.rule.kind == Rule::Kind::reduce && !kernels::supports(spec.dtype, spec.rule.op))
    throw Error(ErrorKind::invalid_argument, "there is no reduction '" + op + "' of " + dtype);
  if (spec.count > capacity / size_of(spec.dtype))  // so that nothing below overflows
    throw Error(ErrorKind::invalid_argument, "a block of " + std::to_string(spec.count) +
                                                 " elements is larger than the " + std::to_string(capacity) +
                                                 " bytes of the server");
  state_bytes_ = by_python() ? 0 : static_cast<std::size_t>(spec.rule.states()) * spec.bytes();
  if (spec.count == 0 || bytes() > left)
    throw Error(ErrorKind::invalid_argument,
                "a block of " + std::to_string(spec.count) + " elements needs " + std::to_string(bytes()) +
                    " bytes for two buffers and the optimizer's state; " + std::to_string(left) + " of the server's " +
                    std::to_string(capacity) + " are left: join with a larger memory=, or with more servers");
  const double accumulated = spec.rule.initial_accumulator_value;
  if (state_bytes_ > 0 && spec.rule.kind == Rule::Kind::adagrad && accumulated != 0)
    fill(spec.dtype, state(words_, 1), spec.count, accumulated);
}

std::byte* Dense::state(const BlockWords* words, std::uint64_t published) const {
  return reinterpret_cast<std::byte*>(const_cast<BlockWords*>(words)) + block_bytes(spec.bytes()) +
         (spec.two_states ? (published & 1) * aligned(state_bytes_) : 0);
}

bool Dense::fits(const RequestSlot& slot) const {
  if (slot.kind != RequestKind::restore) return slot.offset % size_of(spec.dtype) == 0 && slot.bytes == spec.bytes();
  constexpr std::size_t kSteps = sizeof(std::uint64_t);
  return slot.offset % kSteps == 0 && slot.bytes == kSteps + spec.bytes() + state_bytes_;
}

void Dense::apply(const Operation& operation, const Means& means) {
  if (operation.version > 0) watch_.touch(0);
  const auto [value, out] = begin_version(*words_, spec.bytes());
  if (operation.version == 0) {
    const Data& data = data_of(operation.contributions[0]);
    const std::byte* const from = operation.restores ? restored(*this, data) : data.at();
    std::memcpy(out, from, spec.bytes());
    if (operation.restores) std::memcpy(state(words_, words_->begun), from + spec.bytes(), state_bytes_);
    return;
  }
  const bool has_data = std::any_of(operation.contributions.begin(), operation.contributions.end(),
                                    [](const Contribution& each) { return each.payload != nullptr; });
  steps += has_data;
  if (has_data) return by_python() ? update_by_python(operation, means) : update(operation, means);
  std::memcpy(out, value, spec.bytes());  // a version with the same value and states
  if (spec.two_states) std::memcpy(state(words_, words_->begun), state(words_, words_->published), state_bytes_);
}

void Dense::publish() {
  words_->steps[words_->begun & 1] = steps;
  publish_version(*words_);
}

void Dense::update(const Operation& operation, const Means& means) {
  const std::size_t size = size_of(spec.dtype);
  const auto [value, out] = begun_version(*words_, spec.bytes());
  const std::byte* const states = state(words_, words_->published);
  std::byte* const next_states = state(words_, words_->begun);
  Combination combine(spec, operation);
  if (spec.rule.kind == Rule::Kind::reduce) {
    combine.sources.insert(combine.sources.begin(), value);
    combine.weights.insert(combine.weights.begin(), 1);
  }
  const std::size_t slice = kGradientSlice / size;
  means.scratch.resize((combine.sources.size() + 2) * kGradientSlice);
  for (std::size_t begin = 0; begin < spec.count; begin += slice) {
    const std::size_t count = std::min(slice, spec.count - begin);
    std::byte* const to = out + begin * size;
    if (spec.rule.kind == Rule::Kind::reduce || spec.rule.kind == Rule::Kind::assign) {
      const std::byte* const combined = combine(to, begin, count, means.scratch.data());
      if (combined != to) std::memcpy(to, combined, count * size);
      continue;
    }
    Update part;
    part.step = steps;
    part.count = count;
    part.value = value + begin * size;
    part.scratch = means.scratch.data() + kGradientSlice;
    part.roots = means.roots;
    part.gradient = combine(means.scratch.data(), begin, count, means.scratch.data() + 2 * kGradientSlice);
    part.out = to;
    for (std::size_t i = 0; i < static_cast<std::size_t>(spec.rule.states()); ++i) {
      const std::size_t at = (i * spec.count + begin) * size;
      part.state[i] = next_states + at;
      if (spec.two_states) std::memcpy(part.state[i], states + at, count * size);
    }
    parameter_server::update(spec.rule, spec.dtype, part);
  }
}

void Dense::update_by_python(const Operation& operation, const Means& means) {
  const std::size_t bytes = spec.bytes();
  const auto [value, out] = begun_version(*words_, bytes);
  std::memcpy(out, value, bytes);
  const Combination combine(spec, operation);
  means.scratch.resize((combine.sources.size() + 1) * bytes);
  const std::byte* const gradient = combine(means.scratch.data(), 0, spec.count, means.scratch.data() + bytes);
  try {
    means.update({operation.block, operation.version, value, out, gradient, operation.contributions, spec.rule});
  } catch (...) {
    std::memcpy(out, value, bytes);  // undoes what the function had changed
    throw;
  }
}

std::uint64_t Dense::read(const std::byte*, std::size_t, std::byte* out) {
  return read_block(*words_, out, spec.bytes());
}

// The words, both buffers (readers of rounds may need both), and the states.
void Dense::visit(Archive& archive, std::size_t) {
  archive(steps, failure);
  archive.raw(words_, block_bytes(spec.bytes()) + aligned(state_bytes_));
}

Snapshot::Piece Dense::copy(BlockId id, std::size_t) const {
  Snapshot::Piece piece{id, 0, 0, spec.bytes() + state_bytes_, nullptr};
  piece.bytes = std::make_unique_for_overwrite<std::byte[]>(piece.size);
  const std::uint64_t version = read_block(*words_, piece.bytes.get(), spec.bytes());
  std::memcpy(piece.bytes.get() + spec.bytes(), state(words_, version + 1), state_bytes_);
  return piece;
}

void Dense::adopt(const BlockWords& from) {
  const std::uint64_t published = from.published.load(std::memory_order_acquire);
  if (published == 0) return;
  for (const std::uint64_t version : {published - 1, published})  // readers of rounds may need both
    std::memcpy(buffer(words_, version, spec.bytes()), buffer(const_cast<BlockWords*>(&from), version, spec.bytes()),
                spec.bytes());
  std::memcpy(state(words_, published), state(&from, published), state_bytes_);
  steps = from.steps[published & 1];
  words_->steps[published & 1] = steps;
  words_->begun.store(from.begun.load(std::memory_order_relaxed), std::memory_order_relaxed);
  words_->published.store(published, std::memory_order_release);
}

}  // namespace ringreduce::parameter_server
