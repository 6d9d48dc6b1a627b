#include "process_group/arena_allocator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "transport/arena.h"

namespace ringreduce {
namespace {

// Staged values of this size and more are lent: a piece takes a page at least and a lock.
constexpr std::size_t kLeastStaged = std::size_t{64} << 10;

// The allocator that share_allocations() has replaced. Set once.
std::atomic<c10::Allocator*> replaced{nullptr};

// The context of all that it hands out is the memory itself, as torch's raw interface demands (oneDNN uses it). So the
// address alone says where memory came from, also memory that is older than this allocator.
void give_back(void* data) {
  if (data == nullptr) return;
  if (Arena* const arena = Arena::around(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
    return arena->release(static_cast<std::byte*>(data));
  }
  c10::Allocator* const others = replaced.load();
  (others != nullptr ? others : c10::GetDefaultCPUAllocator())->raw_deleter()(data);
}

// Hands out pieces of the process's arena for sizes from `least_bytes` on, and lets `others` serve what is smaller or
// finds no room. Without `others` it throws where there is no room.
class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::size_t least_bytes, c10::Allocator* others = nullptr)
      : least_bytes_(least_bytes), others_(others) {}

  void set_least_bytes(std::size_t bytes) { least_bytes_.store(bytes, std::memory_order_relaxed); }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes >= least_bytes_.load(std::memory_order_relaxed)) {
      const std::shared_ptr<Arena> arena = Arena::of_process();
      if (arena == nullptr && others_ == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);  // a child
      if (std::byte* const piece = arena == nullptr ? nullptr : arena->try_allocate(bytes)) {
        c10::profiledCPUMemoryReporter().New(piece, bytes);
        return {piece, piece, &give_back, at::kCPU};
      }
      if (others_ == nullptr) arena->allocate(bytes);  // throws
    }
    return others_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return others_ == nullptr || others_->raw_deleter() != nullptr ? &give_back : nullptr;
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return others_ == nullptr || Arena::around(data.get()) != nullptr ? data.get() == data.get_context()
                                                                      : others_->is_simple_data_ptr(data);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  std::atomic<std::size_t> least_bytes_;
  c10::Allocator* const others_;
};

at::Tensor empty(c10::Allocator* allocator, at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_generic(sizes, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

// The allocators are never destroyed, since tensors may live longer than statics.
c10::Allocator* staging_allocator() {
  static auto* const allocator = new ArenaAllocator(kLeastStaged, c10::GetDefaultCPUAllocator());
  return allocator;
}

}  // namespace

c10::Allocator* arena_allocator() {
  static auto* const allocator = new ArenaAllocator(0);
  return allocator;
}

at::Tensor empty_in_arena(at::IntArrayRef sizes, at::ScalarType type) { return empty(arena_allocator(), sizes, type); }

c10::DataPtr staging_memory(std::size_t bytes) { return staging_allocator()->allocate(bytes); }

at::Tensor empty_for_staging(at::IntArrayRef sizes, at::ScalarType type) {
  return empty(staging_allocator(), sizes, type);
}

void share_allocations(std::size_t least_bytes) {
  static std::mutex mutex;
  static ArenaAllocator* allocator = nullptr;
  std::lock_guard lock(mutex);
  if (allocator == nullptr) {
    if (least_bytes == kNever) return;
    c10::Allocator* const before = c10::GetCPUAllocator();
    auto* const ours = new ArenaAllocator(kNever, before);
    replaced = before;
    c10::SetCPUAllocator(ours);
    if (c10::GetCPUAllocator() != ours) {  // it was set with a higher priority
      delete ours;
      throw Error(
          ErrorKind::system,
          "another library has set torch's CPU allocator and does not let it be replaced; use ringreduce.empty");
    }
    allocator = ours;  // and remains, with nothing to do, when sharing ends: memory of its tensors is given back by it
  }
  allocator->set_least_bytes(least_bytes);
}

}  // namespace ringreduce
