#include "process_group/job.h"

#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "process_group/arena_allocator.h"

namespace ringreduce {

Blocks cut(const at::Tensor& flat, std::vector<std::size_t> counts) {
  Blocks blocks;
  auto* at = static_cast<std::byte*>(flat.mutable_data_ptr());
  for (std::size_t n : counts) {
    blocks.data.push_back(at);
    at += n * flat.element_size();
  }
  blocks.count = std::move(counts);
  return blocks;
}

namespace {

// Each tensor as a block.
Blocks blocks_of(const TensorList& tensors) {
  Blocks blocks;
  for (const at::Tensor& t : tensors) {
    blocks.data.push_back(static_cast<std::byte*>(t.mutable_data_ptr()));
    blocks.count.push_back(static_cast<std::size_t>(t.numel()));
  }
  return blocks;
}

// All blocks of a call have one dtype, which this returns.
at::ScalarType check_tensors(const TensorList& inputs, const TensorList& outputs, const char* what) {
  const at::ScalarType type = (inputs.empty() ? outputs : inputs)[0].scalar_type();
  for (const TensorList* side : {&inputs, &outputs})
    for (const at::Tensor& t : *side) {
      check_tensor(t, what);
      if (t.scalar_type() != type) invalid(what, ": tensors have different dtypes: ", t.scalar_type(), " and ", type);
    }
  check_outputs(outputs, what);
  return type;
}

// Memory for the values of a tensor on the engine's device; on the host such that peers read it in place.
at::Tensor staging_for(const at::Tensor& t, at::Device device) {
  if (device.is_cpu()) return empty_for_staging(t.sizes(), t.scalar_type());
  return at::empty(t.sizes(), t.options().device(device));
}

at::Tensor staged(const at::Tensor& t, at::Device device) {
  at::Tensor copy = staging_for(t, device);
  copy_elements(copy, t);
  return copy;
}

// Fills in inputs and outputs. A tensor that is both is staged once, with its values; an output alone, without.
void stage(Job& job, const TensorList& inputs, at::Device device) {
  const TensorList& targets = job.targets;
  for (const at::Tensor& t : targets) {
    const bool in_place = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& i) { return i.is_same(t); });
    job.outputs.push_back(is_plain(t, device) ? t : in_place ? staged(t, device) : staging_for(t, device));
  }
  for (const at::Tensor& t : inputs) {
    const auto same = std::find_if(targets.begin(), targets.end(), [&](const at::Tensor& o) { return o.is_same(t); });
    const auto index = static_cast<std::size_t>(same - targets.begin());
    const bool both = same != targets.end();
    job.inputs.push_back(both ? job.outputs[index] : is_plain(t, device) ? t : staged(t, device));
  }
}

// Whether an output block lies over an input block, so that it may be written before that is read. A call may be in
// place: its own output block may be its own input block. But all_to_all moves other blocks there before it has read
// all of its input.
bool writes_over_inputs(const Job& job, int rank) {
  const Blocks &input = job.input, &output = job.output;
  const auto own = [&](const Blocks& blocks) { return blocks.data.size() == 1 ? 0 : static_cast<std::size_t>(rank); };
  const std::size_t element = size_of(job.call.dtype);
  for (std::size_t i = 0; i < input.data.size(); ++i)
    for (std::size_t o = 0; o < output.data.size(); ++o) {
      const bool in_place = i == own(input) && o == own(output) && input.data[i] == output.data[o] &&
                            job.call.operation != Operation::all_to_all;
      if (!in_place && overlap(input.data[i], input.count[i] * element, output.data[o], output.count[o] * element))
        return true;
    }
  return false;
}

// Checks the blocks' sizes against each other, and fills in the call's. all_to_all's, unless its
// sides are flat, is known when ranks have agreed.
void set_size(Job& job, int rank, bool flat) {
  const auto own = static_cast<std::size_t>(rank);
  const std::vector<std::size_t>&input = job.input.count, &output = job.output.count;
  switch (job.call.operation) {
    case Operation::all_to_all:
      job.agreed = flat;
      if (flat) check_count("all_to_all: output", output[own], input[own]);
      if (flat) size_from(job.call, input);
      break;
    case Operation::all_gather:
      check_count("all_gather: the output of this rank", output[own], input[0]);
      size_from(job.call, output);
      break;
    case Operation::reduce_scatter:
      check_count("reduce_scatter: output", output[0], input[own]);
      size_from(job.call, input);
      break;
    case Operation::gather:
      for (std::size_t n : output) check_count("gather: a tensor of gather_list", n, input[0]);
      size_from(job.call, input);
      break;
    case Operation::scatter:
      for (std::size_t n : input) check_count("scatter: a tensor of scatter_list", n, output[0]);
      size_from(job.call, output);
      break;
    default:
      size_from(job.call, input);
  }
}

}  // namespace

at::Device device_of(const TensorList& inputs, const TensorList& outputs, const char* what) {
  const at::Device device = (inputs.empty() ? outputs : inputs)[0].device();
  for (const TensorList* side : {&inputs, &outputs})
    for (const at::Tensor& t : *side)
      if (t.device() != device)
        invalid(what, ": tensors are on different devices: ", device, " and ", t.device(), "; move them to one");
  return device;
}

void synchronize(at::Device device, std::string_view what) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (cuda::capturing(device.index(), static_cast<cuda::CUstream>(guard.getStreamNativeHandle(stream))))
    invalid(what, ": the current stream is being captured, and the call goes through the host's memory, which a graph ",
            "cannot replay; make it outside of the capture");
  guard.synchronizeStream(stream);
}

Job::Job(const Collective& collective, const TensorList& from, const TensorList& to, int rank, int size,
         at::Device device)
    : device(device) {
  const char* what = name(collective.operation).data();
  call.operation = collective.operation;
  call.root = collective.root;
  call.timeout = nanoseconds(collective.timeout);
  if (collective.operation == Operation::barrier) {
    input = output = {{nullptr}, {0}};
    return;
  }
  call.dtype = dtype_of(check_tensors(from, to, what), what);
  if (collective.op != nullptr) {
    call.reduce_op = reduce_op_of(*collective.op);
    call.factor = factor_of(*collective.op);
  }
  Engine::check(call, size);  // here already: nobody may wait for the call, and of several none begins if one is wrong

  const at::NoGradGuard no_grad;
  targets = to;
  stage(*this, from, device);
  const auto lay_out = [&](const TensorList& tensors, bool flat, const char* side) {
    if (!flat) return blocks_of(tensors);
    return cut(tensors[0], equal_blocks(tensors[0], size, c10::str(what, ": ", side).c_str()));
  };
  input = lay_out(inputs, collective.flat_input, "input");
  output = lay_out(outputs, collective.flat_output, "output");
  if (writes_over_inputs(*this, rank)) copy_inputs();
  set_size(*this, rank, collective.flat_input);
  if (collective.own_op != nullptr) reduce_by(*collective.own_op);
}

// Has the engine count the elements of the user's operator.
void Job::reduce_by(const Operator& op) {
  for (Blocks* side : {&input, &output})
    for (std::size_t& n : side->count) n = n * size_of(call.dtype) / op.element_bytes;
  set_operator(call, op, input.count[0]);
}

void Job::copy_inputs() {
  for (at::Tensor& t : inputs) t = staged(t, device);
  input = inputs.size() == input.data.size() ? blocks_of(inputs) : cut(inputs[0], std::move(input.count));
}

// Every rank sees all split sizes: so all raise the same error if two disagree, and all count the same rounds if not.
Tally Job::agree(Engine& host) {
  if (std::exchange(agreed, true)) return {};
  const std::size_t n = input.count.size();
  std::vector<std::size_t> own = input.count, all(2 * n * n);
  own.insert(own.end(), output.count.begin(), output.count.end());
  std::vector<std::byte*> rows;
  for (std::size_t r = 0; r < n; ++r) rows.push_back(reinterpret_cast<std::byte*>(&all[2 * n * r]));
  const std::vector<std::size_t> row_counts(n, 2 * n);
  auto* own_data = reinterpret_cast<std::byte*>(own.data());
  const std::size_t own_count = 2 * n;
  Call counts = call;
  counts.operation = Operation::all_gather;
  counts.part_of = call.operation;
  counts.dtype = DType::int64;
  counts.count = counts.largest = own_count;
  counts.shape = mix(static_cast<std::uint64_t>(call.operation), static_cast<std::uint64_t>(call.dtype));
  const Tally tally = host.run(counts, {{{&own_data, 1}, {&own_count, 1}}, {rows, row_counts}});

  for (std::size_t from = 0; from < n; ++from)
    for (std::size_t to = 0; to < n; ++to) {
      const std::size_t sent = all[2 * n * from + to], expected = all[2 * n * to + n + from];
      if (sent != expected)
        throw Error(ErrorKind::mismatch, c10::str("all_to_all: rank ", from, " of the group sends ", sent,
                                                  " elements to rank ", to, " of it, which expects ", expected));
      splits.push_back(sent);
      call.largest = std::max<std::uint64_t>(call.largest, sent);
    }
  call.count = call.largest;
  return tally;
}

Tally Job::run(Engine& engine) {
  const Tally tally = engine.run(call, buffers());
  fill_targets();
  return tally;
}

void Job::enqueue(GpuEngine& engine, const cuda::Stream& stream) {
  engine.enqueue(call, buffers(), stream);
  fill_targets();
}

void Job::fill_targets() const {
  for (std::size_t i = 0; i < targets.size(); ++i)
    if (!targets[i].is_same(outputs[i])) copy_elements(targets[i], outputs[i]);
}

}  // namespace ringreduce
