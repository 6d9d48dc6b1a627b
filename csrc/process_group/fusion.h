// Fusion: a list of tensors is reduced in few calls of the engine, each of many tensors packed one after the other.
//
// Tensors are sorted by dtype. A tensor of kAloneBytes or more is a call of its own; the others of its dtype, in the
// list's order, are packed into bundles of at most kBundleBytes, which is small enough for a bundle to be still in the
// cache when the engine reads it and when it is unpacked. How a list is cut depends on its dtypes and counts alone,
// so that all ranks cut it alike; those and their order are in the fingerprint of each call.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "process_group/arguments.h"

namespace ringreduce {

class Fusion {
 public:
  // Measured with bundles of 128 KB to 4 MB and 8 to 256 KB alone, by 2 and 4 ranks on 2 cores with 2 MB of
  // L2 each (Xeon, November 2026): 2 ranks took for 1000 tensors of 4 KB 1.4 ms in bundles of 128 to 512 KB, 1.6 of
  // 1 MB and 1.9 of 4 MB; for 100 of 64 KB 1.2 ms one by one and 1.4 fused; for 200 of 32 KB 1.6 and 1.5.
  static constexpr std::size_t kBundleBytes = std::size_t{512} << 10;
  static constexpr std::size_t kAloneBytes = std::size_t{64} << 10;

  // Tensors of one dtype, to be reduced as one; or one alone.
  struct Bundle {
    std::size_t first = 0, last = 0;  // of tensors()
    std::size_t count = 0;            // elements of all
    std::size_t size() const { return last - first; }
  };

  // Throws invalid_argument for tensors that share memory with each other, or with themselves.
  explicit Fusion(const TensorList& tensors);

  // The list, sorted by dtype.
  const TensorList& tensors() const { return tensors_; }
  const std::vector<Bundle>& bundles() const { return bundles_; }
  // A hash of all dtypes and counts.
  std::uint64_t shape() const { return shape_; }
  // The bytes of the largest bundle; 0 if all tensors are alone.
  std::size_t buffer_bytes() const { return buffer_bytes_; }

  void pack(const Bundle& bundle, std::byte* buffer) const;
  void unpack(const Bundle& bundle, std::byte* buffer) const;

 private:
  TensorList tensors_;
  std::vector<Bundle> bundles_;
  std::uint64_t shape_ = 0;
  std::size_t buffer_bytes_ = 0;
};

}  // namespace ringreduce
