// These are vectorcall functions rather than pybind11's, and they remember the group that was used last: otherwise the
// dispatch, and asking a torch group for its backend, would take longer than a small call between two ranks.
#include "process_group/bindings.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "process_group/gil.h"
#include "process_group/process_group_ring.h"
#include "process_group/python_error.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

using c10d::OpType;

// The default group; None if there is none. Tests replace torch's `_world`, so it is looked up each time, in the
// module's dict, as an attribute takes twice as long. Its attribute `_default_pg` saves the call of the property
// `default_pg`, which is asked where torch has no such attribute.
py::object default_group() {
  static PyObject* const c10d =
      PyModule_GetDict(py::module_::import("torch.distributed.distributed_c10d").release().ptr());
  static PyObject* const names[] = {PyUnicode_InternFromString("_world"), PyUnicode_InternFromString("_default_pg"),
                                    PyUnicode_InternFromString("default_pg")};
  const auto world = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(c10d, names[0]));
  if (!world) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_AttributeError, "torch.distributed has no _world");
    throw py::error_already_set();
  }
  auto group = py::reinterpret_steal<py::object>(PyObject_GetAttr(world.ptr(), names[1]));
  if (!group) {
    PyErr_Clear();
    group = py::reinterpret_steal<py::object>(PyObject_GetAttr(world.ptr(), names[2]));
    if (!group) throw py::error_already_set();
  }
  return group;
}

// Whether `weak`, a weak reference, refers to `group`.
bool refers_to(const py::object& weak, const py::object& group) {
  if (!weak || group.is_none()) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(weak.ptr(), &found);
  return py::reinterpret_steal<py::object>(found).is(group);
#else
  return PyWeakref_GetObject(weak.ptr()) == group.ptr();
#endif
}

// The group that was used last, and its backend. Neither is kept alive. Guarded by the GIL.
struct Latest {
  py::object group;  // a weak reference
  c10::weak_intrusive_ptr<ProcessGroupRing> backend{c10::intrusive_ptr<ProcessGroupRing>()};
};

// The backend of `given`, or of the default group if that is None. Raises what ringreduce.api.backend_of raises for a
// group that has no backend of ours.
c10::intrusive_ptr<ProcessGroupRing> backend_of(py::handle given) {
  static Latest& latest = *new Latest;  // not destroyed: Python may be gone by then
  const py::object group = given.is_none() ? default_group() : py::reinterpret_borrow<py::object>(given);
  if (refers_to(latest.group, group))
    if (auto backend = latest.backend.lock()) return backend;
  auto backend =
      py::module_::import("ringreduce.api").attr("backend_of")(group).cast<c10::intrusive_ptr<ProcessGroupRing>>();
  py::object weak = py::weakref(group);
  // The old reference is dropped last: that may run Python code, and other threads.
  std::swap(latest.group, weak);
  latest.backend = c10::weak_intrusive_ptr<ProcessGroupRing>(backend);
  return backend;
}

// f(), which returns a new reference; whatever it throws is raised in Python.
template <class F>
PyObject* guarded(F f) {
  HANDLE_TH_ERRORS
  try {
    return f();
  } catch (const Error& error) {
    raise(error);
    return nullptr;
  } catch (const std::bad_alloc&) {  // of which torch would make a RuntimeError
    return PyErr_NoMemory();
  }
  END_HANDLE_TH_ERRORS
}

using Arguments = PyObject* const*;

bool are_tensors(Arguments from, int count) {
  return std::all_of(from, from + count, [](PyObject* each) { return THPVariable_Check(each); });
}

// Autograd hears that `output` is written, unlike in calls by torch, where it does not with any backend.
PyObject* call(ProcessGroupRing& backend, const Collective& collective, const at::Tensor& output,
               const at::Tensor& input) {
  const bool tells_autograd = collective.operation != Operation::broadcast || collective.root != backend.getRank();
  bool made = false;
  {
    HeldGil gil;
    made = backend.call_now(collective, output, input, tells_autograd, &gil);
  }
  return PyBool_FromLong(made);
}

// Makes the call in the group args[0].
PyObject* call(Arguments args, const Collective& collective, const at::Tensor& output, const at::Tensor& input) {
  const auto backend = backend_of(args[0]);
  return call(*backend, collective, output, input);
}

// A rank; -1 for what is none.
int rank_of(PyObject* given) {
  if (!PyLong_CheckExact(given)) return -1;
  int overflow = 0;
  const long rank = PyLong_AsLongAndOverflow(given, &overflow);
  return overflow != 0 || rank < 0 || rank > std::numeric_limits<int>::max() ? -1 : static_cast<int>(rank);
}

// The reduction that `given` stands for, if it is one without a factor.
std::optional<c10d::ReduceOp> operation(PyObject* given) {
  // pybind11 makes one object of the default value, which stays the same as long as torch is loaded.
  static const py::object& sum = *new py::object(py::module_::import("torch.distributed").attr("ReduceOp").attr("SUM"));
  if (given == sum.ptr()) return c10d::ReduceOp::SUM;
  if (!py::isinstance<c10d::ReduceOp::RedOpType>(given)) return std::nullopt;
  const auto type = py::handle(given).cast<c10d::ReduceOp::RedOpType>();
  return type == c10d::ReduceOp::PREMUL_SUM ? std::nullopt : std::optional<c10d::ReduceOp>(type);
}

PyObject* all_reduce(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    const bool in_place = count == 4 && args[3] == Py_None && are_tensors(args + 1, 1);
    if (!in_place) Py_RETURN_FALSE;
    Collective collective{.type = OpType::ALLREDUCE, .operation = Operation::all_reduce};
    const at::Tensor& tensor = THPVariable_Unpack(args[1]);
    const auto op = operation(args[2]);
    if (op) {
      collective.op = &*op;
      return call(args, collective, tensor, tensor);
    }
    if (!py::isinstance<Operator>(args[2])) Py_RETURN_FALSE;
    collective.own_op = py::handle(args[2]).cast<const Operator*>();
    const auto backend = backend_of(args[0]);
    if (!backend->why_not(collective.own_op->element_bytes).empty()) Py_RETURN_FALSE;
    return call(*backend, collective, tensor, tensor);
  });
}

PyObject* broadcast(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 4 || !are_tensors(args + 1, 1) || (args[2] != Py_None && args[3] != Py_None)) Py_RETURN_FALSE;
    const auto backend = backend_of(args[0]);
    const bool of_group = args[3] != Py_None, given = of_group || args[2] != Py_None;
    const int rank = given ? rank_of(args[of_group ? 3 : 2]) : 0;
    const int root = of_group ? rank : backend->group_rank(rank);
    if (root < 0) Py_RETURN_FALSE;
    const at::Tensor& tensor = THPVariable_Unpack(args[1]);
    return call(*backend, {.type = OpType::BROADCAST, .operation = Operation::broadcast, .root = root}, tensor, tensor);
  });
}

PyObject* reduce_scatter(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    const auto op = count == 4 && are_tensors(args + 1, 2) ? operation(args[3]) : std::nullopt;
    if (!op) Py_RETURN_FALSE;
    return call(
        args,
        {.type = OpType::_REDUCE_SCATTER_BASE, .operation = Operation::reduce_scatter, .op = &*op, .flat_input = true},
        THPVariable_Unpack(args[1]), THPVariable_Unpack(args[2]));
  });
}

PyObject* all_gather(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 3 || !are_tensors(args + 1, 2)) Py_RETURN_FALSE;
    return call(args, {.type = OpType::_ALLGATHER_BASE, .operation = Operation::all_gather, .flat_output = true},
                THPVariable_Unpack(args[1]), THPVariable_Unpack(args[2]));
  });
}

PyObject* all_to_all(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 3 || !are_tensors(args + 1, 2)) Py_RETURN_FALSE;
    return call(
        args,
        {.type = OpType::ALLTOALL_BASE, .operation = Operation::all_to_all, .flat_input = true, .flat_output = true},
        THPVariable_Unpack(args[1]), THPVariable_Unpack(args[2]));
  });
}

// The address of a tensor's memory if it is a plain one that looks like `like`: dense, contiguous, on the CPU, with all
// of its memory, and no gradient. None for others, which the caller looks at one by one. If `writes`, autograd hears
// that the tensor is changed.
PyObject* memory_of(PyObject* /*module*/, Arguments args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 3 || !THPVariable_CheckExact(args[0]) || !are_tensors(args + 1, 1)) Py_RETURN_NONE;
    const at::Tensor &tensor = THPVariable_Unpack(args[0]), &like = THPVariable_Unpack(args[1]);
    const bool plain = tensor.scalar_type() == like.scalar_type() && tensor.is_cpu() && !tensor.is_nested() &&
                       tensor.layout() == at::kStrided && tensor.sizes() == like.sizes() && tensor.is_contiguous() &&
                       !tensor.requires_grad() && !tensor.is_neg() && !tensor.is_conj();
    if (!plain || !tensor.has_storage() || at::functionalization::impl::isFunctionalTensor(tensor)) Py_RETURN_NONE;
    const auto end = (static_cast<std::size_t>(tensor.storage_offset() + tensor.numel())) * tensor.itemsize();
    if (tensor.storage().data() == nullptr || tensor.storage().nbytes() < end) Py_RETURN_NONE;
    if (args[2] == Py_True && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    return PyLong_FromVoidPtr(tensor.mutable_data_ptr());
  });
}

PyCFunction vectorcall(PyObject* (*function)(PyObject*, Arguments, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void bind_direct_calls(py::module_& m) {
  static PyMethodDef functions[] = {
      {"all_reduce_now", vectorcall(all_reduce), METH_FASTCALL, "all_reduce_now(group, tensor, op, out)"},
      {"broadcast_now", vectorcall(broadcast), METH_FASTCALL, "broadcast_now(group, tensor, src, group_src)"},
      {"reduce_scatter_now", vectorcall(reduce_scatter), METH_FASTCALL, "reduce_scatter_now(group, output, input, op)"},
      {"all_gather_now", vectorcall(all_gather), METH_FASTCALL, "all_gather_now(group, output, input)"},
      {"all_to_all_now", vectorcall(all_to_all), METH_FASTCALL, "all_to_all_now(group, output, input)"},
      {"memory_of", vectorcall(memory_of), METH_FASTCALL, "memory_of(tensor, like, writes)"},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace ringreduce
