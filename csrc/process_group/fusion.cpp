#include "process_group/fusion.h"

#include <algorithm>
#include <cstring>

namespace ringreduce {
Fusion::Fusion(const TensorList& tensors) : tensors_(tensors) {
  for (const at::Tensor& t : tensors_) check_tensor(t, "all_reduce_coalesced");
  const auto by_dtype = [](const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() < b.scalar_type(); };
  if (!std::is_sorted(tensors_.begin(), tensors_.end(), by_dtype))
    std::stable_sort(tensors_.begin(), tensors_.end(), by_dtype);
  check_outputs(tensors_, "all_reduce_coalesced");

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
      copy_elements(at::from_blob(buffer, t.sizes(), t.options()), t);
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
      copy_elements(t, at::from_blob(buffer, t.sizes(), t.options()));
    }
    buffer += t.nbytes();
  }
}

}  // namespace ringreduce
