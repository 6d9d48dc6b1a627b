// The collectives of c10d, each as one or more calls of the engine.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "core/float_environment.h"
#include "process_group/arena_allocator.h"
#include "process_group/one_thread.h"
#include "process_group/running.h"

namespace ringreduce {

using c10d::OpType;
using c10d::Work;

namespace {

// Reads a call from c10d's options. Here the root is only checked to fit its type; later checks see whether the group
// has it.
template <class CallOptions>
Collective asked(OpType type, Operation operation, const CallOptions& opts) {
  Collective collective{.type = type, .operation = operation, .timeout = opts.timeout, .async = opts.asyncOp};
  if constexpr (requires { opts.reduceOp; }) collective.op = &opts.reduceOp;
  if constexpr (requires { opts.rootRank; }) {
    if (!std::in_range<int>(opts.rootRank)) invalid("root is ", opts.rootRank, "; it must be a rank of the group");
    collective.root = static_cast<int>(opts.rootRank);
  }
  return collective;
}

// An all_gather into one tensor, and a reduce_scatter of one.
Collective gathered(const c10d::AllgatherOptions& opts) {
  Collective collective = asked(OpType::_ALLGATHER_BASE, Operation::all_gather, opts);
  collective.flat_output = true;
  return collective;
}

Collective scattered(const c10d::ReduceScatterOptions& opts) {
  Collective collective = asked(OpType::_REDUCE_SCATTER_BASE, Operation::reduce_scatter, opts);
  collective.flat_input = true;
  return collective;
}

}  // namespace

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  return heard("all_reduce", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& tensor = only(tensors, "all_reduce");
    if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
    return call(asked(OpType::ALLREDUCE, Operation::all_reduce, opts), tensor, tensor);
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_packed(TensorList& tensors, std::optional<Packing> packing,
                                                            std::shared_ptr<Feedback> feedback,
                                                            const c10d::AllreduceOptions& opts) {
  return heard("all_reduce", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& tensor = only(tensors, "all_reduce");
    const at::ScalarType type = tensor.scalar_type();
    if (!tensor.is_cpu() || (type != at::kFloat && type != at::kHalf && type != at::kBFloat16))
      invalid("all_reduce: tensor has dtype ", type, " and is on ", tensor.device(),
              "; with wire_dtype or feedback it must be float32, float16 or bfloat16, on the CPU");
    check_tensor(tensor, "all_reduce");
    check_outputs({tensor}, "all_reduce");
    const Packing asked_for = packing.value_or(settings_.packing);
    if (running_->wire && (asked_for != Packing::none || feedback != nullptr))
      invalid("all_reduce: wire_dtype is '", name(asked_for), "'", feedback != nullptr ? ", with feedback" : "",
              ", and the group's transport is 'gloo', which sends float32 as it is; leave these arguments out, or make "
              "the group with transport='auto' or 'tcp'");
    if (feedback != nullptr && opts.reduceOp != c10d::ReduceOp::SUM && opts.reduceOp != c10d::ReduceOp::AVG)
      invalid(
          "all_reduce: op is no sum; what rounding cuts off a SUM or an AVG can be added later, so leave out feedback");
    const at::NoGradGuard no_grad;
    const at::Tensor wide = tensor.to(at::kFloat);
    const Collective collective = asked(OpType::ALLREDUCE, Operation::all_reduce, opts);
    std::vector<Job> only_job;
    only_job.push_back(job(collective, {wide}, {wide}));
    Job& job = only_job.back();
    job.targets = {tensor};
    if (packing) job.call.packing = *packing;
    job.feedback = std::move(feedback);
    job.call.feedback = job.feedback.get();
    return submit(collective, std::move(only_job));
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_coalesced(TensorList& given,
                                                               const c10d::AllreduceCoalescedOptions& opts) {
  return heard("all_reduce_coalesced", [&]() -> c10::intrusive_ptr<Work> {
    TensorList tensors = given;
    copy_repeated(tensors);
    const Collective collective = asked(OpType::ALLREDUCE_COALESCED, Operation::all_reduce, opts);
    if (!tensors.empty() && device_of(tensors, {}, "all_reduce_coalesced").is_cuda())
      return submit_each(collective, tensors, tensors);
    Fusion fusion(tensors);
    std::vector<Job> jobs;  // one a bundle
    for (const Fusion::Bundle& bundle : fusion.bundles()) {
      const at::Tensor& first = fusion.tensors()[bundle.first];
      jobs.push_back(job(collective, {first}, {first}));
      Call& call = jobs.back().call;
      call.count = call.largest = bundle.count;
      if (tensors.size() > 1) call.shape = fusion.shape();
    }
    return take_turn(collective, tensors, tensors,
                     [this, fusion = std::move(fusion), jobs = std::move(jobs)](std::uint64_t number) mutable {
                       return sum_fused(fusion, jobs, number);
                     });
  });
}

// Bundles of several tensors go through memory of the group's; calls take turns, so that there is only one of it.
Tally ProcessGroupRing::sum_fused(const Fusion& fusion, std::vector<Job>& jobs, std::uint64_t number) {
  if (fusion_buffer_bytes_ < fusion.buffer_bytes()) {
    fusion_buffer_ = staging_memory(fusion.buffer_bytes());
    fusion_buffer_bytes_ = fusion.buffer_bytes();
  }
  Tally tally;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Fusion::Bundle& bundle = fusion.bundles()[i];
    jobs[i].call.number = number;
    if (bundle.size() == 1) {
      tally += jobs[i].run(*running_->engine);
      continue;
    }
    auto* data = static_cast<std::byte*>(fusion_buffer_.get());
    fusion.pack(bundle, data);
    tally += running_->engine->run(jobs[i].call, {{{&data, 1}, {&bundle.count, 1}}, {{&data, 1}, {&bundle.count, 1}}});
    fusion.unpack(bundle, data);
  }
  return tally;
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu())
    invalid("all_reduce of a sparse tensor: it has layout ", tensor.layout(), " on ", tensor.device(),
            "; it must be sparse COO on the CPU");
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM)
    invalid("all_reduce of a sparse tensor: reduce op ", static_cast<int>(opts.reduceOp.op_), "; only SUM is defined");
  Engine::check(
      {.operation = Operation::all_reduce, .dtype = dtype_of(tensor.scalar_type(), "all_reduce of a sparse tensor")},
      getSize());
  Collective collective = asked(OpType::_ALLREDUCE_SPARSE, Operation::all_reduce, opts);
  collective.op = nullptr;  // which an asynchronous call outlives
  return take_turn(collective, {tensor}, {tensor},
                   [this, tensor, collective](std::uint64_t number) { return sum_sparse(tensor, collective, number); });
}

// All ranks tell each other how many elements they have, then which, and each sums them all.
Tally ProcessGroupRing::sum_sparse(const at::Tensor& tensor, const Collective& collective, std::uint64_t number) {
  const auto n = static_cast<std::size_t>(getSize());
  const auto summed = [](const at::Tensor& sparse) {
    const DefaultFloatEnvironment environment;
    const OneThread one_thread;  // torch's other threads have environments of their own
    return sparse.coalesce();
  };
  const at::Tensor own = summed(tensor);
  const auto gather = [&](const at::Tensor& input, TensorList outputs, Tally& tally) {
    Job j = job({.operation = Operation::all_gather, .timeout = collective.timeout}, {input}, outputs);
    // The tensors' dimensions are part of the call, so that ranks that differ in them find out.
    for (int64_t d : own.sizes()) j.call.shape = mix(j.call.shape, static_cast<std::uint64_t>(d));
    j.call.shape = mix(j.call.shape, static_cast<std::uint64_t>(own.sparse_dim()) << 8 |
                                         static_cast<std::uint64_t>(own.scalar_type()));
    j.call.part_of = Operation::all_reduce;
    j.call.number = number;
    tally += j.run(*running_->engine);
    return outputs;
  };
  Tally tally;
  TensorList counts, indices, values;
  for (std::size_t r = 0; r < n; ++r) counts.push_back(at::empty({1}, at::kLong));
  gather(at::full({1}, own._nnz(), at::kLong), counts, tally);
  for (const at::Tensor& count : counts) {
    auto value_sizes = own.values().sizes().vec();
    value_sizes[0] = count.item<int64_t>();
    indices.push_back(at::empty({own.sparse_dim(), value_sizes[0]}, at::kLong));
    values.push_back(at::empty(value_sizes, own.values().options()));
  }
  gather(own.indices(), indices, tally);
  gather(own.values(), values, tally);
  copy_elements(tensor, summed(at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), own.sizes())));
  return tally;
}

c10::intrusive_ptr<Work> ProcessGroupRing::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  return heard("broadcast", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& tensor = only(tensors, "broadcast");
    return call(asked(OpType::BROADCAST, Operation::broadcast, opts), tensor, tensor);
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  return heard("reduce", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& tensor = only(tensors, "reduce");
    return call(asked(OpType::REDUCE, Operation::reduce, opts), tensor, tensor);
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  return heard("all_gather", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& input = only(inputs, "all_gather");
    check_list("all_gather: output_tensors", outputs.size(), 1);
    check_list("all_gather: tensor_list", outputs[0].size(), getSize());
    return submit(asked(OpType::ALLGATHER, Operation::all_gather, opts), {input}, outputs[0]);
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  return heard("all_gather_coalesced", [&]() -> c10::intrusive_ptr<Work> {
    const Collective collective = asked(OpType::ALLGATHER_COALESCED, Operation::all_gather, opts);
    check_list("all_gather_coalesced: output_tensor_lists", outputs.size(), getSize());
    for (const TensorList& of_rank : outputs) check_pairs("all_gather_coalesced", of_rank, inputs);
    std::vector<Job> jobs;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      TensorList blocks;
      for (const TensorList& of_rank : outputs) blocks.push_back(of_rank[i]);
      jobs.push_back(job(collective, {inputs[i]}, blocks));
    }
    return submit(collective, std::move(jobs));
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& opts) {
  return heard("all_gather", [&]() -> c10::intrusive_ptr<Work> { return call(gathered(opts), output, input); });
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::AllgatherOptions& opts) {
  return heard("all_gather",
               [&]() -> c10::intrusive_ptr<Work> { return submit_each(gathered(opts), inputs, outputs); });
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  return heard("reduce_scatter", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& output = only(outputs, "reduce_scatter");
    check_list("reduce_scatter: input_tensors", inputs.size(), 1);
    check_list("reduce_scatter: input_list", inputs[0].size(), getSize());
    return submit(asked(OpType::REDUCE_SCATTER, Operation::reduce_scatter, opts), inputs[0], {output});
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  return heard("reduce_scatter", [&]() -> c10::intrusive_ptr<Work> { return call(scattered(opts), output, input); });
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::ReduceScatterOptions& opts) {
  return heard("reduce_scatter",
               [&]() -> c10::intrusive_ptr<Work> { return submit_each(scattered(opts), inputs, outputs); });
}

c10::intrusive_ptr<Work> ProcessGroupRing::gather(std::vector<TensorList>& outputs, TensorList& inputs,
                                                  const c10d::GatherOptions& opts) {
  return heard("gather", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& input = only(inputs, "gather");
    const bool is_root = getRank() == opts.rootRank;
    if (is_root) {
      check_list("gather: output_tensors", outputs.size(), 1);
      check_list("gather: gather_list", outputs[0].size(), getSize());
    } else if (!outputs.empty() && !outputs[0].empty()) {
      invalid("gather: gather_list must be given on the destination rank only");
    }
    return submit(asked(OpType::GATHER, Operation::gather, opts), {input}, is_root ? outputs[0] : TensorList{});
  });
}

#if RINGREDUCE_HAS_GATHER_SINGLE
c10::intrusive_ptr<Work> ProcessGroupRing::gather_single(at::Tensor& output, at::Tensor& input,
                                                         const c10d::GatherOptions& opts) {
  return heard("gather", [&]() -> c10::intrusive_ptr<Work> {
    Collective collective = asked(OpType::GATHER, Operation::gather, opts);
    collective.flat_output = getRank() == opts.rootRank;  // torch gives the other ranks' output no elements
    return submit(collective, {input}, collective.flat_output ? TensorList{output} : TensorList{});
  });
}
#endif

c10::intrusive_ptr<Work> ProcessGroupRing::scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                                   const c10d::ScatterOptions& opts) {
  return heard("scatter", [&]() -> c10::intrusive_ptr<Work> {
    const at::Tensor& output = only(outputs, "scatter");
    const bool is_root = getRank() == opts.rootRank;
    if (is_root) {
      check_list("scatter: input_tensors", inputs.size(), 1);
      check_list("scatter: scatter_list", inputs[0].size(), getSize());
    } else if (!inputs.empty() && !inputs[0].empty()) {
      invalid("scatter: scatter_list must be given on the source rank only");
    }
    return submit(asked(OpType::SCATTER, Operation::scatter, opts), is_root ? inputs[0] : TensorList{}, {output});
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                         std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits,
                                                         const c10d::AllToAllOptions& opts) {
  return heard("all_to_all", [&]() -> c10::intrusive_ptr<Work> {
    Collective collective = asked(OpType::ALLTOALL_BASE, Operation::all_to_all, opts);
    // Either all ranks give split sizes or none does, so without any, all know that their blocks are equal.
    collective.flat_input = collective.flat_output = output_splits.empty() && input_splits.empty();
    if (collective.flat_input) return call(collective, output, input);
    std::vector<Job> only;
    Job& j = only.emplace_back(job(collective, {input}, {output}));
    j.input = cut(j.inputs[0], split_blocks(input, input_splits, getSize(), "all_to_all: input"));
    j.output = cut(j.outputs[0], split_blocks(output, output_splits, getSize(), "all_to_all: output"));
    for (const Blocks* side : {&j.input, &j.output})
      collective.splits.insert(collective.splits.end(), side->count.begin(), side->count.end());
    return submit(collective, std::move(only));
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall(TensorList& outputs, TensorList& inputs,
                                                    const c10d::AllToAllOptions& opts) {
  return heard("all_to_all", [&]() -> c10::intrusive_ptr<Work> {
    check_list("all_to_all: input_tensor_list", inputs.size(), getSize());
    check_list("all_to_all: output_tensor_list", outputs.size(), getSize());
    return submit(asked(OpType::ALLTOALL, Operation::all_to_all, opts), inputs, outputs);
  });
}

c10::intrusive_ptr<Work> ProcessGroupRing::barrier(const c10d::BarrierOptions& opts) {
  return heard("barrier", [&]() -> c10::intrusive_ptr<Work> {
    return submit(asked(OpType::BARRIER, Operation::barrier, opts), TensorList{}, TensorList{});
  });
}

}  // namespace ringreduce
