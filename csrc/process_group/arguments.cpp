#include "process_group/arguments.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "process_group/compat.h"

namespace ringreduce {

DType dtype_of(at::ScalarType type, const char* what) {
  switch (type) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat8_e4m3fn:
      return DType::float8_e4m3fn;
    case at::kFloat8_e5m2:
      return DType::float8_e5m2;
    case at::kChar:
      return DType::int8;
    case at::kShort:
      return DType::int16;
    case at::kInt:
      return DType::int32;
    case at::kLong:
      return DType::int64;
    case at::kByte:
      return DType::uint8;
    case at::kBool:
      return DType::boolean;
    case at::kComplexFloat:
      return DType::complex64;
    case at::kComplexDouble:
      return DType::complex128;
    default:
      invalid(what, ": tensors of dtype ", c10::toString(type), " are not supported; ",
              c10::isQIntType(type) ? "pass the tensor's dequantize()"
                                    : "convert the tensor, or pass a view of it as torch.uint8");
  }
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::premul_sum;
    default:
      invalid("reduce op ", static_cast<int>(op.op_), " is not one of c10d's");
  }
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1.0;
  const auto* supplement = dynamic_cast<const PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) invalid("premul_sum comes without its factor");
  if (supplement->tensor_factor.defined() && supplement->tensor_factor.is_complex())
    invalid("premul_sum: the factor is complex; it must be a real number");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

const at::Tensor& only(const TensorList& tensors, const char* what) {
  if (tensors.size() != 1) invalid(what, " takes one tensor, got ", tensors.size());
  return tensors[0];
}

void check_tensor(const at::Tensor& tensor, const char* what) {
  if (has_memory(tensor)) return;
  if (!tensor.is_cpu() && !tensor.is_cuda())
    invalid(what, ": a tensor is on ", tensor.device(), "; backend ringreduce serves tensors on CPUs and CUDA GPUs");
  if (tensor.layout() != at::kStrided)
    invalid(what, ": a tensor has layout ", tensor.layout(), "; it must be strided: call its to_dense()");
  if (tensor.is_nested()) invalid(what, ": a tensor is nested; pass its parts, of its unbind(), one by one");
  if (tensor._is_zerotensor()) invalid(what, ": a tensor is a zero tensor, without memory; pass its clone()");
  if (tensor.numel() > 0)
    invalid(what, ": a tensor has no memory: it is fake, or wraps others; pass these to torch.distributed's function");
}

namespace {

// Whether two elements of a tensor may lie in the same place. Exact for what slicing, transposing and expanding make.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return false;
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // how far apart two elements can be that differ in the smaller dimensions only
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

// Whether an element of one tensor lies in the place of an element of another. All have the same dtype.
bool overlap_each_other(const TensorList& tensors) {
  struct Extent {
    const std::byte *begin, *end;  // of the memory from the first to the last element
    const at::Tensor* tensor;
  };
  std::vector<Extent> extents;
  for (const at::Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += t.stride(d) * (t.size(d) - 1);
    const auto* begin = static_cast<const std::byte*>(t.data_ptr());
    extents.push_back({begin, begin + static_cast<std::size_t>(last + 1) * t.element_size(), &t});
  }
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const std::byte* reach = nullptr;  // of all extents so far
  bool close = false;
  for (const Extent& e : extents) {
    close |= reach != nullptr && e.begin < reach;
    reach = std::max(reach, e.end);
  }
  if (!close) return false;
  // They may still be interleaved, as the columns of a matrix are: count how often each place is written.
  const auto element = static_cast<std::ptrdiff_t>(extents[0].tensor->element_size());
  const at::Tensor writes = at::zeros({(reach - extents[0].begin) / element}, at::kInt);
  for (const Extent& e : extents)
    writes.as_strided(e.tensor->sizes(), e.tensor->strides(), (e.begin - extents[0].begin) / element).add_(1);
  return writes.max().item<int>() > 1;
}

}  // namespace

void check_outputs(const TensorList& tensors, const char* what) {
  for (const at::Tensor& t : tensors)
    if (overlaps_itself(t))
      invalid(what,
              ": a tensor to be written has several elements in one place, as one that is expanded; pass a contiguous "
              "copy");
  if (tensors.size() > 1 && overlap_each_other(tensors))
    invalid(what, ": two of the tensors to be written share memory; pass separate ones");
}

void copy_repeated(TensorList& tensors) {
  std::vector<const void*> places;
  for (const at::Tensor& t : tensors)
    if (t.numel() > 0 && has_memory(t)) places.push_back(t.const_data_ptr());
  std::sort(places.begin(), places.end());
  if (std::adjacent_find(places.begin(), places.end()) == places.end()) return;
  for (auto t = tensors.begin(); t != tensors.end(); ++t)
    if (t->numel() > 0 && has_memory(*t) && std::any_of(tensors.begin(), t, [&](const at::Tensor& earlier) {
          return has_memory(earlier) && earlier.const_data_ptr() == t->const_data_ptr() &&
                 earlier.scalar_type() == t->scalar_type() && earlier.sizes() == t->sizes() &&
                 earlier.strides() == t->strides();
        }))
      *t = t->detach().clone();
}

void check_count(const char* what, std::size_t is, std::size_t must) {
  if (is != must) invalid(what, " has ", is, " elements, must have ", must);
}

void check_list(const char* what, std::size_t is, int must) {
  if (is != static_cast<std::size_t>(must)) invalid(what, " holds ", is, " tensors, must hold one per rank: ", must);
}

std::vector<std::size_t> equal_blocks(const at::Tensor& tensor, int size, const char* what) {
  const auto n = static_cast<std::size_t>(tensor.numel()), parts = static_cast<std::size_t>(size);
  if (n % parts != 0) invalid(what, " has ", n, " elements, which do not divide evenly among ", size, " ranks");
  return std::vector<std::size_t>(parts, n / parts);
}

std::vector<std::size_t> split_blocks(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                      const char* what) {
  if (splits.empty()) return equal_blocks(tensor, size, what);
  if (splits.size() != static_cast<std::size_t>(size))
    invalid(what, " has ", splits.size(), " split sizes, must have one per rank: ", size);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (std::accumulate(splits.begin(), splits.end(), int64_t{0}) != rows ||
      std::any_of(splits.begin(), splits.end(), [](int64_t n) { return n < 0; }))
    invalid(what, " has split sizes ", splits, "; they must be 0 or more and add up to the tensor's ", rows, " rows");
  std::vector<std::size_t> counts;
  for (int64_t n : splits) counts.push_back(rows == 0 ? 0 : static_cast<std::size_t>(n * (tensor.numel() / rows)));
  return counts;
}

void size_from(Call& call, const std::vector<std::size_t>& counts) {
  call.largest = *std::max_element(counts.begin(), counts.end());
  if (std::all_of(counts.begin(), counts.end(), [&](std::size_t n) { return n == counts[0]; })) {
    call.count = counts[0];
    return;
  }
  call.count = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  call.shape = 1;
  for (std::size_t n : counts) call.shape = mix(call.shape, n);
}

void write_back(const at::Tensor& target, const at::Tensor& staged) {
  const at::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> mode;
  if (target.is_inference()) mode.emplace();
  target.copy_(staged);
}

}  // namespace ringreduce
