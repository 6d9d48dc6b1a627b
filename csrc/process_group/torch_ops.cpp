// torch.ops.ringreduce: collectives that the compiler of torch keeps in its graphs. ringreduce/ops.py documents them.
//
// Each op writes to tensors that its caller has, so a compiled graph needs no copies and no wait. A group goes by its
// name, since a graph holds only tensors, numbers and strings. The ops are registered from C++ because dispatch through
// a Python kernel takes longer than a small collective.
#include <ATen/ATen.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <vector>

#include "process_group/arguments.h"
#include "process_group/gil.h"
#include "process_group/process_group_ring.h"

namespace py = pybind11;

namespace ringreduce::torch_ops {
namespace {

using Tensor = at::Tensor;
using Tensors = std::initializer_list<std::reference_wrapper<const Tensor>>;

c10::intrusive_ptr<c10d::ProcessGroup> group_named(std::string_view group, const char* what) {
  try {
    return c10d::resolve_process_group(std::string(group));
  } catch (const c10::Error&) {
    invalid(what, ": group is '", group,
            "', and no process group has this name: it was never made here, or has been destroyed; pass the group_name "
            "of a group that this rank is in, such as torch.distributed.group.WORLD.group_name");
  }
}

c10::intrusive_ptr<ProcessGroupRing> backend_of(std::string_view group, const Tensor& tensor, const char* what) {
  const auto found = group_named(group, what);
  try {
    const auto backend = found->getBackend(tensor.device().type());
    if (auto* const ring = dynamic_cast<ProcessGroupRing*>(backend.get()))
      return c10::intrusive_ptr<ProcessGroupRing>::reclaim_copy(ring);
  } catch (const c10::Error&) {  // the group has none for this device
  }
  // Behind torch's wrapper, with TORCH_DISTRIBUTED_DEBUG=DETAIL; or there is none, and this says so.
  const py::gil_scoped_acquire gil;
  return py::module_::import("ringreduce.groups.lookup")
      .attr("backend_of")(py::cast(found))
      .cast<c10::intrusive_ptr<ProcessGroupRing>>();
}

c10d::ReduceOp operation(std::string_view op, const char* what) {
  for (int each = c10d::ReduceOp::SUM; each < c10d::ReduceOp::PREMUL_SUM; ++each) {  // that one would need its factor
    const c10d::ReduceOp found(static_cast<c10d::ReduceOp::RedOpType>(each));
    if (name(reduce_op_of(found)) == op) return found;
  }
  invalid(what, ": op is '", op, "'; it must be 'sum', 'avg', 'product', 'min', 'max', 'band', 'bor' or 'bxor'");
}

// What is wrong with the tensors whatever their sizes, so that a compiler which only knows these much says it too.
void check(const char* what, Tensors tensors) {
  const Tensor& first = *tensors.begin();
  for (const Tensor& each : tensors) {
    if (each.scalar_type() != first.scalar_type())
      invalid(what, ": the output is of ", name(dtype_of(first.scalar_type(), what)), " and the input of ",
              name(dtype_of(each.scalar_type(), what)), "; they must have one dtype");
    if (each.device() != first.device())
      invalid(what, ": the output is on ", first.device(), " and the input on ", each.device(),
              "; they must be on one device");
  }
}

// Makes a call of the group's backend, and returns when it has ended. Autograd hears that `output` has been written.
template <class MakeCall>
void run(const char* what, std::string_view group, const Tensor& output, MakeCall make_call) {
  const auto backend = backend_of(group, output, what);
  {
    const WithoutGil no_gil;
    if (const auto work = make_call(*backend)) work->wait();
  }
  if (!output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
}

// Sets what all c10d's options have.
template <class Options>
Options synchronous(Options options = {}) {
  options.asyncOp = false;
  return options;
}

void all_reduce(const Tensor& x, std::string_view group, std::string_view op) {
  check("all_reduce_", {x});
  auto options = synchronous<c10d::AllreduceOptions>();
  options.reduceOp = operation(op, "all_reduce_");
  run("all_reduce_", group, x, [&](ProcessGroupRing& backend) {
    TensorList tensors{x};
    return backend.allreduce(tensors, options);
  });
}

void broadcast(const Tensor& x, std::string_view group, int64_t root) {
  check("broadcast_", {x});
  auto options = synchronous<c10d::BroadcastOptions>();
  options.rootRank = root;
  run("broadcast_", group, x, [&](ProcessGroupRing& backend) {
    if (root < 0 || root >= backend.getSize())
      invalid("broadcast_: root is ", root, "; it must be a rank of the group, from 0 to ", backend.getSize() - 1);
    TensorList tensors{x};
    return backend.broadcast(tensors, options);
  });
}

void all_gather(const Tensor& output, const Tensor& input, std::string_view group) {
  check("all_gather_into", {output, input});
  run("all_gather_into", group, output, [&, to = output, from = input](ProcessGroupRing& backend) mutable {
    return backend._allgather_base(to, from, synchronous<c10d::AllgatherOptions>());
  });
}

void reduce_scatter(const Tensor& output, const Tensor& input, std::string_view group, std::string_view op) {
  check("reduce_scatter_into", {output, input});
  auto options = synchronous<c10d::ReduceScatterOptions>();
  options.reduceOp = operation(op, "reduce_scatter_into");
  run("reduce_scatter_into", group, output, [&, to = output, from = input](ProcessGroupRing& backend) mutable {
    return backend._reduce_scatter_base(to, from, options);
  });
}

void all_to_all(const Tensor& output, const Tensor& input, std::string_view group,
                at::OptionalIntArrayRef output_splits, at::OptionalIntArrayRef input_splits) {
  check("all_to_all_into", {output, input});
  auto rows = [](at::OptionalIntArrayRef splits) { return splits ? splits->vec() : std::vector<int64_t>(); };
  run("all_to_all_into", group, output,
      [&, to = output, from = input, outs = rows(output_splits),
       ins = rows(input_splits)](ProcessGroupRing& backend) mutable {
        return backend.alltoall_base(to, from, outs, ins, synchronous<c10d::AllToAllOptions>());
      });
}

// The same without data, for compilers.

void fake_all_reduce(const Tensor& x, std::string_view, std::string_view op) {
  check("all_reduce_", {x});
  operation(op, "all_reduce_");
}

void fake_broadcast(const Tensor& x, std::string_view, int64_t) { check("broadcast_", {x}); }

void fake_all_gather(const Tensor& output, const Tensor& input, std::string_view) {
  check("all_gather_into", {output, input});
}

void fake_reduce_scatter(const Tensor& output, const Tensor& input, std::string_view, std::string_view op) {
  check("reduce_scatter_into", {output, input});
  operation(op, "reduce_scatter_into");
}

void fake_all_to_all(const Tensor& output, const Tensor& input, std::string_view, at::OptionalSymIntArrayRef,
                     at::OptionalSymIntArrayRef) {
  check("all_to_all_into", {output, input});
}

void run_on_device(torch::Library& m) {
  m.impl("all_reduce_", all_reduce);
  m.impl("broadcast_", broadcast);
  m.impl("all_gather_into", all_gather);
  m.impl("reduce_scatter_into", reduce_scatter);
  m.impl("all_to_all_into", all_to_all);
}

TORCH_LIBRARY(ringreduce, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def("all_reduce_(Tensor(a!) x, str group, str op='sum') -> ()", tags);
  m.def("broadcast_(Tensor(a!) x, str group, int root) -> ()", tags);
  m.def("all_gather_into(Tensor(a!) output, Tensor input, str group) -> ()", tags);
  m.def("reduce_scatter_into(Tensor(a!) output, Tensor input, str group, str op='sum') -> ()", tags);
  m.def(
      "all_to_all_into(Tensor(a!) output, Tensor input, str group, SymInt[]? output_split_sizes=None, SymInt[]? "
      "input_split_sizes=None) -> ()",
      tags);
}

TORCH_LIBRARY_IMPL(ringreduce, CPU, m) { run_on_device(m); }
TORCH_LIBRARY_IMPL(ringreduce, CUDA, m) { run_on_device(m); }

TORCH_LIBRARY_IMPL(ringreduce, Meta, m) {
  m.impl("all_reduce_", fake_all_reduce);
  m.impl("broadcast_", fake_broadcast);
  m.impl("all_gather_into", fake_all_gather);
  m.impl("reduce_scatter_into", fake_reduce_scatter);
  m.impl("all_to_all_into", fake_all_to_all);
}

// In the place of autograd: a tensor whose gradient is recorded, by autograd, in forward mode or by torch.func, would
// get a wrong one without a word.
void refuse_gradient(const char* what, const Tensor& tensor) {
  if ((tensor.requires_grad() && at::GradMode::is_enabled()) || tensor._fw_grad(0).defined())
    invalid(what,
            ": a tensor requires grad, and this op has no gradient; call it under torch.no_grad() or in a "
            "torch.autograd.Function, or take torch's functional collectives, which have gradients");
}
template <class T>
void refuse_gradient(const char*, const T&) {}

constexpr char kAllReduce[] = "ringreduce::all_reduce_", kBroadcast[] = "ringreduce::broadcast_",
               kAllGather[] = "ringreduce::all_gather_into", kReduceScatter[] = "ringreduce::reduce_scatter_into",
               kAllToAll[] = "ringreduce::all_to_all_into";

template <const char* Name, class... Arguments>
void without_gradient(c10::DispatchKeySet keys, Arguments... arguments) {
  constexpr std::size_t kPrefix = sizeof("ringreduce::") - 1;
  (refuse_gradient(Name + kPrefix, arguments), ...);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Name, "").typed<void(Arguments...)>();
  op.redispatch(keys & c10::after_autograd_keyset, arguments...);
}

TORCH_LIBRARY_IMPL(ringreduce, Autograd, m) {
  using Text = std::string_view;
  using Splits = at::OptionalSymIntArrayRef;
  m.impl("all_reduce_", without_gradient<kAllReduce, const Tensor&, Text, Text>);
  m.impl("broadcast_", without_gradient<kBroadcast, const Tensor&, Text, int64_t>);
  m.impl("all_gather_into", without_gradient<kAllGather, const Tensor&, const Tensor&, Text>);
  m.impl("reduce_scatter_into", without_gradient<kReduceScatter, const Tensor&, const Tensor&, Text, Text>);
  m.impl("all_to_all_into", without_gradient<kAllToAll, const Tensor&, const Tensor&, Text, Splits, Splits>);
}

}  // namespace
}  // namespace ringreduce::torch_ops
