// Memory of a rank's arena for torch's tensors, which may outlive the group.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "transport/arena.h"

namespace ringreduce {

// Hands out pieces of an arena as torch's allocators do.
class ArenaAllocator : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    auto piece = std::make_unique<Piece>(Piece{arena_, arena_->allocate(bytes)});
    std::byte* data = piece->data;
    return {data, piece.release(), &release, at::kCPU};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  struct Piece {
    std::shared_ptr<Arena> arena;
    std::byte* data;
  };
  static void release(void* context) {
    const std::unique_ptr<Piece> piece(static_cast<Piece*>(context));
    piece->arena->release(piece->data);
  }

  const std::shared_ptr<Arena> arena_;
};

}  // namespace ringreduce
