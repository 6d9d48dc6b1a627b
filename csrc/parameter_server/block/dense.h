// A dense block: a part of a tensor, in the server's values, where workers on the same host read it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "parameter_server/block/block.h"

namespace ringreduce::parameter_server {

class Dense final : public Block {
 public:
  // Makes a block at `at`, where `left` bytes of the server's `capacity` are left. Throws Error(invalid_argument) if it
  // needs more.
  Dense(BlockSpec spec, std::byte* at, std::size_t left, std::size_t capacity);

  bool fits(const RequestSlot& slot) const override;
  void apply(const Operation& operation, const Means& means) override;
  void publish() override;
  std::size_t value_bytes(std::size_t) const override { return spec.bytes(); }
  std::uint64_t read(const std::byte* ids, std::size_t rows, std::byte* out) override;
  bool has_value() const override { return words_->published.load(std::memory_order_relaxed) > 0; }
  const std::byte* place() const override { return reinterpret_cast<const std::byte*>(words_); }
  void adopt(const BlockWords& from) override;
  void visit(Archive& archive, std::size_t piece) override;
  Snapshot::Piece copy(BlockId id, std::size_t piece) const override;
  Watch& watch() override { return watch_; }

  std::size_t bytes() const { return block_bytes(spec.bytes()) + (spec.two_states ? 2 : 1) * aligned(state_bytes_); }

 private:
  // The optimizer state of version `published - 1`.
  std::byte* state(const BlockWords* words, std::uint64_t published) const;
  void update(const Operation& operation, const Means& means);
  void update_by_python(const Operation& operation, const Means& means);

  BlockWords* const words_;
  std::size_t state_bytes_ = 0;
  Watch watch_;
};

}  // namespace ringreduce::parameter_server
