#include "process_group/fusion.h"

#include <algorithm>
#include <cstring>

namespace ringreduce {
namespace {

// The same memory with bytes for elements, so that tensors of different dtypes can be compared.
TensorList as_bytes(const TensorList& tensors) {
  TensorList bytes;
  for (const at::Tensor& t : tensors) {
    if (t.numel() == 0) continue;
    std::vector<int64_t> sizes = t.sizes().vec(), strides = t.strides().vec();
    const auto element = static_cast<int64_t>(t.element_size());
    for (int64_t& stride : strides) stride *= element;
    sizes.push_back(element);
    strides.push_back(1);
    bytes.push_back(at::from_blob(t.data_ptr(), sizes, strides, at::kByte));
  }
  return bytes;
}

}  // namespace

Fusion::Fusion(const TensorList& tensors) : tensors_(tensors) {
  for (const at::Tensor& t : tensors_) check_tensor(t, "all_reduce_coalesced");
  const auto by_dtype = [](const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() < b.scalar_type(); };
  if (!std::is_sorted(tensors_.begin(), tensors_.end(), by_dtype))
    std::stable_sort(tensors_.begin(), tensors_.end(), by_dtype);
  const bool mixed = !tensors_.empty() && by_dtype(tensors_.front(), tensors_.back());
  check_outputs(mixed ? as_bytes(tensors_) : tensors_, "all_reduce_coalesced");

  bool open = false;  // whether the last bundle may take more
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const at::Tensor& t = tensors_[i];
    shape_ = mix(shape_, static_cast<std::uint64_t>(t.numel()) << 8 | static_cast<std::uint64_t>(t.scalar_type()));
    const bool alone = t.nbytes() >= kAloneBytes;
    if (!open || alone || bytes + t.nbytes() > kBundleBytes || t.scalar_type() != tensors_[i - 1].scalar_type()) {
      bundles_.push_back({i, i, 0});
      bytes = 0;
    }
    Bundle& bundle = bundles_.back();
    bundle.last = i + 1;
    bundle.count += static_cast<std::size_t>(t.numel());
    bytes += t.nbytes();
    open = !alone;
    if (bundle.size() > 1) buffer_bytes_ = std::max(buffer_bytes_, bytes);
  }
}

void Fusion::pack(const Bundle& bundle, std::byte* buffer) const {
  for (std::size_t i = bundle.first; i < bundle.last; ++i) {
    const at::Tensor& t = tensors_[i];
    if (is_plain(t)) {
      if (t.nbytes() > 0) std::memcpy(buffer, t.const_data_ptr(), t.nbytes());
    } else {
      at::from_blob(buffer, t.sizes(), t.options()).copy_(t);
    }
    buffer += t.nbytes();
  }
}

void Fusion::unpack(const Bundle& bundle, std::byte* buffer) const {
  for (std::size_t i = bundle.first; i < bundle.last; ++i) {
    const at::Tensor& t = tensors_[i];
    if (is_plain(t)) {
      if (t.nbytes() > 0) std::memcpy(t.mutable_data_ptr(), buffer, t.nbytes());
    } else {
      write_back(t, at::from_blob(buffer, t.sizes(), t.options()));
    }
    buffer += t.nbytes();
  }
}

}  // namespace ringreduce
