#include "process_group/arguments.h"

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cctype>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "core/float_environment.h"
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
    case at::kComplexHalf:
      return *find_dtype("complex32");
    default:
      // c10 names the others as torch does, but for capitals.
      std::string lower = c10::toString(type);
      std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
      if (const auto moved = find_dtype(lower)) return *moved;
      invalid(what, ": tensors of dtype ", c10::toString(type), " are not supported; ",
              c10::isQIntType(type) ? "pass the tensor's dequantize()" : "convert the tensor to another dtype");
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
  const DefaultFloatEnvironment environment;
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
  if (tensor.layout() == at::kJagged) invalid(what, ": a tensor is a nested one of layout Jagged; pass its values()");
  if (tensor.layout() != at::kStrided)
    invalid(what, ": a tensor has layout ", tensor.layout(), "; it must be strided: call its to_dense()");
  if (tensor.is_nested()) invalid(what, ": a tensor is nested; pass its parts, of its unbind(), one by one");
  if (tensor._is_zerotensor()) invalid(what, ": a tensor is a zero tensor, without memory; pass its clone()");
  if (tensor.numel() > 0)
    invalid(
        what,
        ": a tensor has no memory: it is fake, its storage was freed, or it stands for other tensors; pass those, such "
        "as a DTensor's to_local() or a MaskedTensor's get_data()");
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

// Marks the places of a tensor's elements, the first of which is `place`; false if one has a mark already.
bool mark(std::vector<bool>& marks, int64_t place, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const int64_t count = sizes.empty() ? 1 : sizes[0], stride = sizes.empty() ? 0 : strides[0];
  for (int64_t i = 0; i < count; ++i, place += stride) {
    if (sizes.size() > 1) {
      if (!mark(marks, place, sizes.slice(1), strides.slice(1))) return false;
    } else if (auto marked = marks[static_cast<std::size_t>(place)]; marked) {
      return false;
    } else {
      marked = true;
    }
  }
  return true;
}

// Whether an element of one tensor lies in the place of an element of another.
bool overlap_each_other(const TensorList& tensors) {
  std::vector<std::pair<Extent, const at::Tensor*>> extents;
  for (const at::Tensor& t : tensors)
    if (t.numel() > 0) extents.emplace_back(extent_of(t), &t);
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  const std::byte* reach = nullptr;  // of all extents so far
  bool close = false;
  for (const auto& [extent, tensor] : extents) {
    close |= reach != nullptr && extent.begin < reach;
    reach = std::max(reach, extent.end);
  }
  if (!close) return false;
  // They may still be interleaved, as the columns of a matrix are: mark every place that is written. A place is an
  // element, or a byte where elements differ in size or alignment.
  const std::byte* const first = extents[0].first.begin;
  const auto element = static_cast<int64_t>(extents[0].second->element_size());
  const bool alike = std::all_of(extents.begin(), extents.end(), [&](const auto& each) {
    return each.second->element_size() == element && (each.first.begin - first) % element == 0;
  });
  const int64_t place = alike ? element : 1;
  std::vector<bool> marks(static_cast<std::size_t>((reach - first) / place));  // a bit for each place keeps this cheap
  for (const auto& [extent, tensor] : extents) {
    std::vector<int64_t> sizes = tensor->sizes().vec(), strides = tensor->strides().vec();
    const int64_t places = static_cast<int64_t>(tensor->element_size()) / place;
    for (int64_t& stride : strides) stride *= places;
    if (places > 1) {
      sizes.push_back(places);
      strides.push_back(1);
    }
    if (!mark(marks, (extent.begin - first) / place, sizes, strides)) return true;
  }
  return false;
}

}  // namespace

Extent extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += tensor.stride(d) * (tensor.size(d) - 1);
  const auto* begin = static_cast<const std::byte*>(tensor.data_ptr());
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.element_size()};
}

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

void check_pairs(std::string_view what, const TensorList& outputs, const TensorList& inputs) {
  if (outputs.size() != inputs.size()) invalid(what, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs");
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

void set_operator(Call& call, const Operator& op, std::size_t count) {
  call.op = &op;
  call.dtype = DType::uint8;
  call.packing = Packing::none;
  call.shape = op.digest;
  call.count = call.largest = count;
}

at::Tensor plain(const at::Tensor& t, at::Device device) {
  if (is_plain(t, device)) return t;
  const at::Tensor copy = at::empty(t.sizes(), t.options().device(device));
  copy_elements(copy, t);
  return copy;
}

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  std::optional<c10::InferenceMode> mode;
  if (to.is_inference()) mode.emplace();
  const auto as_bytes = [](const at::Tensor& t) {
    return t.layout() == at::kStrided && t.element_size() == 1 && !t.is_neg();
  };
  if (as_bytes(to) && as_bytes(from))
    to.view(at::kByte).copy_(from.view(at::kByte));  // torch copies no integers of less than a byte
  else
    to.copy_(from);
}

}  // namespace ringreduce
