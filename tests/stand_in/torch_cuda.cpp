// A stand-in for torch's "cuda" device in a torch that was built without CUDA: registers one for the device type CUDA
// itself, over the driver that RINGREDUCE_LIBCUDA names (libcuda.cpp). torch_cuda.py builds it and gives torch.cuda
// what it lacks; with both, ordinary torch code for device "cuda" runs on a machine without a GPU.
//
// What holds as on a GPU, so that what waits for nothing is seen to wait for nothing
//   operators       are queued in the current stream and run there later, on the CPU, over the tensors' memory alone:
//                   neither the tensors nor their storage are kept alive. Those that make their result, rather than
//                   write an argument of the right shape (most do below), first wait for the current stream
//   copies          from pageable memory are staged, from and to pinned memory asynchronous if `non_blocking`
//   memory          is cut from large pieces; a freed block is at once reused by the stream that it was made for, and
//                   at its end, in that stream's order, overwritten with 0xA5. record_stream delays that
//   graphs          hold what was queued; memory made during a capture stays theirs for ever
// An operator that fails in its stream makes the next wait of the host fail.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <array>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "kernel.h"

namespace py = pybind11;

namespace {

namespace cuda = ringreduce::cuda;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;

using Operation = std::function<void()>;

// ---- devices and streams --------------------------------------------------------------------------------------------

// The parameter of the one kernel, which calls `operation` and, if it is run only once, destroys it.
struct Call {
  Operation* operation;
  bool once;
};

std::string this_library() {
  Dl_info info{};
  dladdr(reinterpret_cast<void*>(&this_library), &info);
  return info.dli_fname;
}

// As in torch, a pool that is gone through in turn.
constexpr std::size_t kStreams = 32;

struct Gpu {
  explicit Gpu(int ordinal)
      : device(std::make_shared<cuda::Device>(ordinal)),
        module(device, ("so:" + this_library()).c_str()),
        call(module.function("call")),
        default_stream(cuda::Stream::borrowed(device, nullptr)) {
    for (auto& stream : pool) stream = std::make_unique<cuda::Stream>(device);
  }
  cuda::DevicePtr device;
  cuda::Module module;
  cuda::Function call;
  cuda::Stream default_stream;
  std::array<std::unique_ptr<cuda::Stream>, kStreams> pool;
  std::atomic<std::size_t> taken{0};
};

DeviceIndex device_count() { return cuda::unavailable().empty() ? static_cast<DeviceIndex>(cuda::Device::count()) : 0; }

// Never destroyed, as all that streams may use: they may still run when the process ends.
Gpu& gpu(DeviceIndex index) {
  static auto& mutex = *new std::mutex;
  static auto& gpus = *new std::map<DeviceIndex, std::unique_ptr<Gpu>>;
  std::lock_guard lock(mutex);
  auto& found = gpus[index];
  if (found == nullptr) found = std::make_unique<Gpu>(index);
  return *found;
}

thread_local DeviceIndex current_device = 0;
thread_local std::map<DeviceIndex, c10::StreamId> current_streams;

Device cuda_device(DeviceIndex index) { return {c10::DeviceType::CUDA, index < 0 ? current_device : index}; }

// 0 is the default stream, the others count the pool from 1.
c10::Stream current_stream(DeviceIndex index) {
  const Device device = cuda_device(index);
  return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
}

const cuda::Stream& native(const c10::Stream& stream) {
  Gpu& owner = gpu(stream.device_index());
  return stream.id() == 0 ? owner.default_stream : *owner.pool.at(static_cast<std::size_t>(stream.id() - 1));
}

c10::Stream next_stream(DeviceIndex index) {
  const Device device = cuda_device(index);
  const std::size_t turn = gpu(device.index()).taken++ % kStreams;
  return c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(turn + 1));
}

std::mutex& failure_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

std::string& failure() {
  static auto& text = *new std::string;
  return text;
}

void check_failure() {
  std::string text;
  {
    std::lock_guard lock(failure_mutex());
    text.swap(failure());
  }
  TORCH_CHECK(text.empty(), "stand-in for CUDA: an operator failed in its stream: ", text);
}

void enqueue(const c10::Stream& stream, Operation operation) {
  const cuda::Stream& queue = native(stream);
  // A graph may be launched as long as the process lives, so its operations are never destroyed.
  const Call call{new Operation(std::move(operation)), !queue.capturing()};
  queue.launch(gpu(stream.device_index()).call, {}, call);
}

void synchronize(const c10::Stream& stream) {
  native(stream).synchronize();
  check_failure();
}

void synchronize_device(DeviceIndex index) {
  const Device device = cuda_device(index);
  for (std::size_t id = 0; id <= kStreams; id++)
    native(c10::Stream(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(id))).synchronize();
  check_failure();
}

// ---- memory ---------------------------------------------------------------------------------------------------------

constexpr unsigned char kRubbish = 0xA5;
constexpr DeviceIndex kHost = -1;

using PoolId = std::pair<std::uint64_t, std::uint64_t>;  // {0, 0}: memory that is no graph's

// Which pool a capture takes memory from; one capture at a time.
struct Capturing {
  std::mutex mutex;
  PoolId pool{};
  bool active = false;
};

Capturing& capturing() {
  static auto& one = *new Capturing;
  return one;
}

PoolId pool_of(const c10::Stream& stream) {
  if (!native(stream).capturing()) return {};
  std::lock_guard lock(capturing().mutex);
  return capturing().pool;
}

// Memory of devices and, as device -1, pinned memory of the host.
class Memory {
 public:
  void* allocate(std::size_t wanted, DeviceIndex device, const c10::Stream& stream) {
    const std::size_t bytes = wanted <= (1 << 20) ? round_up(wanted, 512) : round_up(wanted, 2 << 20);
    const PoolId pool = device == kHost ? PoolId{} : pool_of(stream);
    std::lock_guard lock(mutex_);
    take_back();
    const c10::StreamId owner = device == kHost ? 0 : stream.id();
    std::vector<void*>& free = free_[{pool, device, owner, bytes}];
    void* pointer = nullptr;
    if (free.empty()) {
      pointer = cut(bytes, device, pool);
      spoil(pointer, bytes, device, owner);
    } else {
      pointer = free.back();
      free.pop_back();
    }
    blocks_[pointer] = {bytes, device, owner, pool, {}};
    return pointer;
  }

  void release(void* pointer) {
    if (pointer == nullptr || cuda::driver_in_use() == nullptr) return;
    std::lock_guard lock(mutex_);
    const auto found = blocks_.find(pointer);
    Returning block{pointer, std::move(found->second), {}};
    blocks_.erase(found);
    for (const auto& [device, id] : block.block.users) {
      const c10::Stream its_stream(c10::Stream::UNSAFE, cuda_device(device), id);
      const cuda::Stream& user = native(its_stream);
      if (user.capturing()) return;  // a graph uses it
      block.events.push_back(std::make_unique<cuda::Event>(user.device()));
      user.record(*block.events.back());
    }
    if (block.events.empty())
      give_back(block);
    else
      returning_.push_back(std::move(block));
  }

  // `stream` uses the block that holds `pointer`, if there is one: it is not to be reused before what is queued there.
  void record(const void* pointer, const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    auto next = blocks_.upper_bound(const_cast<void*>(pointer));
    if (next == blocks_.begin()) return;
    auto& [start, block] = *--next;
    if (static_cast<const char*>(pointer) >= static_cast<char*>(start) + block.bytes) return;
    if (block.device != stream.device_index() || block.stream != stream.id())
      block.users.insert({stream.device_index(), stream.id()});
  }

  // So that a capture, during which the driver makes no memory, has some.
  void reserve(DeviceIndex device, PoolId pool) {
    std::lock_guard lock(mutex_);
    if (pieces_[{pool, device}].left < kPiece / 2) pieces_[{pool, device}] = make_piece(kPiece, device);
  }

 private:
  struct Block {
    std::size_t bytes;
    DeviceIndex device;
    c10::StreamId stream;
    PoolId pool;
    std::set<std::pair<DeviceIndex, c10::StreamId>> users;  // other streams that use it
  };
  struct Returning {
    void* pointer;
    Block block;
    std::vector<std::unique_ptr<cuda::Event>> events;
  };
  struct Piece {
    std::byte* next = nullptr;
    std::size_t left = 0;
  };
  static constexpr std::size_t kPiece = 64 << 20;

  static std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

  static Piece make_piece(std::size_t bytes, DeviceIndex device) {
    const cuda::Driver& driver = cuda::driver();
    const cuda::Device::Use use(*gpu(device == kHost ? 0 : device).device);
    if (device == kHost) {
      void* pointer = nullptr;
      driver.cuMemHostAlloc(&pointer, bytes, cuda::kMemHostAllocPortable | cuda::kMemHostAllocDeviceMap);
      return {static_cast<std::byte*>(pointer), bytes};
    }
    cuda::CUdeviceptr pointer = 0;
    const cuda::CUresult result = driver.cuMemAlloc.attempt(&pointer, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, result == cuda::kSuccess, "stand-in for CUDA: no ", cuda::in_bytes(bytes),
                     " on device ", static_cast<int>(device), ": ", driver.text(result));
    return {reinterpret_cast<std::byte*>(pointer), bytes};
  }

  void* cut(std::size_t bytes, DeviceIndex device, PoolId pool) {
    Piece own;
    Piece& piece = bytes > kPiece / 4 && pool == PoolId{} ? own : pieces_[{pool, device}];
    if (piece.left < bytes) piece = make_piece(std::max(bytes, &piece == &own ? 0 : kPiece), device);
    piece.left -= bytes;
    return std::exchange(piece.next, piece.next + bytes);
  }

  static void spoil(void* pointer, std::size_t bytes, DeviceIndex device, c10::StreamId stream) {
    if (device == kHost)
      std::memset(pointer, kRubbish, bytes);
    else
      native(c10::Stream(c10::Stream::UNSAFE, cuda_device(device), stream))
          .fill(reinterpret_cast<cuda::CUdeviceptr>(pointer), kRubbish, bytes);
  }

  void give_back(const Returning& returning) {
    const Block& block = returning.block;
    const PoolId now = block.device == kHost
                           ? PoolId{}
                           : pool_of(c10::Stream(c10::Stream::UNSAFE, cuda_device(block.device), block.stream));
    if (block.pool == now)
      spoil(returning.pointer, block.bytes, block.device, block.stream);
    else if (block.pool != PoolId{})
      return;  // the graph goes on writing it
    free_[{block.pool, block.device, block.stream, block.bytes}].push_back(returning.pointer);
  }

  void take_back() {
    {
      std::lock_guard lock(capturing().mutex);
      if (capturing().active) return;  // asking for an event would make it invalid
    }
    std::erase_if(returning_, [this](const Returning& returning) {
      for (const auto& event : returning.events)
        if (!event->done()) return false;
      give_back(returning);
      return true;
    });
  }

  std::mutex mutex_;
  std::map<void*, Block> blocks_;
  std::vector<Returning> returning_;
  std::map<std::tuple<PoolId, DeviceIndex, c10::StreamId, std::size_t>, std::vector<void*>> free_;
  std::map<std::pair<PoolId, DeviceIndex>, Piece> pieces_;
};

Memory& memory() {
  static auto& one = *new Memory;
  return one;
}

void release(void* pointer) {
  try {
    memory().release(pointer);
  } catch (const std::exception& error) {  // torch frees in destructors
    std::lock_guard lock(failure_mutex());
    failure() = error.what();
  }
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(bool host) : host_(host) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    const Device device = host_ ? Device(c10::DeviceType::CPU) : cuda_device(-1);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    void* const pointer = memory().allocate(bytes, host_ ? kHost : device.index(), current_stream(-1));
    return {pointer, pointer, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    if (host_)
      std::memcpy(to, from, bytes);
    else
      native(current_stream(-1))
          .copy(reinterpret_cast<cuda::CUdeviceptr>(to), reinterpret_cast<cuda::CUdeviceptr>(from), bytes);
  }

 private:
  bool host_;
};

Allocator& device_allocator() {
  static auto& one = *new Allocator(false);
  return one;
}

Allocator& pinned_allocator() {
  static auto& one = *new Allocator(true);
  return one;
}

unsigned memory_type(const void* pointer) {
  unsigned type = 0;
  const auto address = reinterpret_cast<cuda::CUdeviceptr>(pointer);
  const auto result = cuda::driver().cuPointerGetAttribute.attempt(&type, cuda::kPointerAttributeMemoryType, address);
  return result == cuda::kSuccess ? type : 0;
}

// ---- what torch asks of a device ------------------------------------------------------------------------------------

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return cuda_device(-1); }
  void setDevice(Device device) const override {
    if (device.index() < 0) return;
    TORCH_CHECK(device.index() < device_count(), "stand-in for CUDA: there is no ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Stream getStream(Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, cuda_device(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return next_stream(device.index()); }
  c10::Stream getNewStream(Device device, int) const override { return next_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native(stream).handle(); }
  bool queryStream(const c10::Stream& stream) const override { return native(stream).done(); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return native(stream).capturing(); }
  void synchronizeDevice(DeviceIndex index) const override { synchronize_device(index); }

  void record(void** event, const c10::Stream& stream, DeviceIndex index, c10::EventFlag flag) const override {
    TORCH_CHECK(index < 0 || index == stream.device_index(), "event of device ", static_cast<int>(index),
                " recorded in ", stream);
    const cuda::Stream& queue = native(stream);
    if (*event == nullptr) *event = new cuda::Event(queue.device(), flag == c10::EventFlag::BACKEND_DEFAULT);
    queue.record(*static_cast<cuda::Event*>(*event));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) native(stream).wait(*static_cast<cuda::Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<cuda::Event*>(event)->done(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) static_cast<cuda::Event*>(event)->synchronize();
    check_failure();
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<cuda::Event*>(event); }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    return static_cast<cuda::Event*>(end)->milliseconds_since(*static_cast<cuda::Event*>(start));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    memory().record(pointer.get(), stream);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks() = default;
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex deviceCount() const override { return device_count(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { GuardImpl{}.setDevice(cuda_device(index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return GuardImpl{}.exchangeDevice(cuda_device(index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return memory_type(data) == cuda::kMemoryTypeHost; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  Device getDeviceFromPtr(void* data) const override {
    int ordinal = 0;
    cuda::driver().cuPointerGetAttribute(&ordinal, cuda::kPointerAttributeDeviceOrdinal,
                                         reinterpret_cast<cuda::CUdeviceptr>(data));
    return cuda_device(static_cast<DeviceIndex>(ordinal));
  }
  void deviceSynchronize(DeviceIndex index) const override { synchronize_device(index); }
};

// ---- operators ------------------------------------------------------------------------------------------------------

// The same elements as a tensor of the CPU, which owns nothing.
Tensor on_host(const Tensor& tensor) {
  Tensor same = at::for_blob(tensor.data_ptr(), tensor.sizes())
                    .strides(tensor.strides())
                    .options(tensor.options().device(c10::kCPU).pinned_memory(false))
                    .target_device(c10::kCPU)
                    .make_tensor();
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

// Queues a copy between two tensors of the CPU, which it keeps.
void enqueue_copy(const c10::Stream& stream, Tensor to, Tensor from) {
  enqueue(stream, [to = std::move(to), from = std::move(from)] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    to.copy_(from);
  });
}

Tensor& copy_(Tensor& to, const Tensor& source, bool non_blocking) {
  if (to.is_same(source)) return to;
  const Tensor from = source.expand_as(to);
  if (to.numel() == 0) return to;
  TORCH_CHECK((to.is_cuda() || to.is_cpu()) && (from.is_cuda() || from.is_cpu()), "stand-in for CUDA: no copy from ",
              from.device(), " to ", to.device());
  const Tensor& resident = from.is_cuda() ? from : to;
  const c10::Stream stream = current_stream(resident.device().index());
  if (to.is_cuda() && from.is_cuda()) {
    const c10::Stream other = current_stream(to.device().index());
    const auto wait = [](const c10::Stream& waiting, const c10::Stream& awaited) {
      const cuda::Event event(native(awaited).device());
      native(awaited).record(event);
      native(waiting).wait(event);
    };
    const bool apart = to.device() != from.device();
    if (apart) wait(stream, other);
    enqueue_copy(stream, on_host(to), on_host(from));
    if (apart) wait(other, stream);
    return to;
  }
  const Tensor& host = from.is_cuda() ? to : from;
  const bool pinned = memory_type(host.data_ptr()) == cuda::kMemoryTypeHost;
  if (non_blocking && pinned) {
    memory().record(host.data_ptr(), stream);
    enqueue_copy(stream, on_host(to), on_host(from));
  } else if (non_blocking && to.is_cuda()) {
    enqueue_copy(stream, on_host(to), from.clone());
  } else {
    enqueue_copy(stream, on_host(to), on_host(from));
    synchronize(stream);
  }
  return to;
}

template <class Convert>
IValue convert_tensors(const IValue& value, c10::DeviceType device, const Convert& convert) {
  const auto one = [&](const Tensor& tensor) { return tensor.defined() ? convert(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor.has_value() ? std::optional(one(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return Device(device);
  return value;
}

void visit_tensors(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  convert_tensors(value, c10::DeviceType::CPU, [&](const Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// One call of an operator that has no kernel of its own here.
class FallBack {
 public:
  FallBack(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), arguments_(torch::jit::pop(stack, schema_.arguments().size())) {
    std::optional<Device> named;
    for (const IValue& argument : arguments_) {
      visit_tensors(argument, [&](const Tensor& tensor) {
        if (tensor.is_cuda() && !device_) device_ = tensor.device();
      });
      if (argument.isDevice()) named = cuda_device(argument.toDevice().index());
    }
    if (!device_) device_ = named.value_or(cuda_device(-1));
    for (const IValue& argument : arguments_)
      visit_tensors(argument, [&](const Tensor& tensor) {
        host_indices_ = host_indices_ || (tensor.is_cpu() && tensor.dim() > 0);
        TORCH_CHECK(tensor.is_cpu() ? tensor.dim() == 0 || takes_indices() : tensor.device() == *device_,
                    schema_.name(), ": expected all tensors to be on ", *device_, ", but found one on ",
                    tensor.device());
      });
  }

  void run() {
    const c10::DeviceGuard guard(*device_);
    if (only_writes_arguments() && !host_indices_)
      run_in_stream();
    else
      run_at_once();
  }

 private:
  // Which may be on the host.
  bool takes_indices() const { return schema_.name().find("index") != std::string::npos; }

  bool writes(std::size_t argument) const {
    const auto* const about = schema_.arguments()[argument].alias_info();
    return about != nullptr && about->isWrite();
  }

  // Whether results are arguments that are there to be written; the shape of an empty `out` is not known yet.
  bool only_writes_arguments() const {
    for (std::size_t i = 0; i < schema_.returns().size(); i++)
      if (written(i) == nullptr) return false;
    bool any = false;
    for (std::size_t j = 0; j < arguments_.size(); j++) {
      if (!writes(j)) continue;
      any = true;
      if (!schema_.arguments()[j].kwarg_only()) continue;
      bool empty = false;
      visit_tensors(arguments_[j], [&](const Tensor& tensor) { empty = empty || tensor.numel() == 0; });
      if (empty) return false;
    }
    return any;
  }

  // The argument that the operator writes and returns as its result `i`, or null.
  const IValue* written(std::size_t i) const {
    const auto* const about = schema_.returns()[i].alias_info();
    if (about == nullptr) return nullptr;
    TORCH_CHECK(about->isWrite(), "stand-in for CUDA: no ", schema_.name(), ", which is a view");
    for (std::size_t j = 0; j < arguments_.size(); j++)
      if (writes(j) && schema_.arguments()[j].alias_info()->beforeSets() == about->beforeSets()) return &arguments_[j];
    return nullptr;
  }

  Stack for_cpu() const {
    Stack stack;
    for (const IValue& argument : arguments_)
      stack.push_back(convert_tensors(argument, c10::DeviceType::CPU, [](const Tensor& tensor) {
        Tensor same = tensor.is_cuda() ? on_host(tensor) : tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) same.unsafeGetTensorImpl()->set_wrapped_number(true);
        return same;
      }));
    return stack;
  }

  void run_in_stream() {
    enqueue(current_stream(device_->index()), [op = op_, arguments = for_cpu()] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      Stack stack = arguments;
      op.callBoxed(&stack);
    });
    for (std::size_t i = 0; i < schema_.returns().size(); i++) stack_.push_back(*written(i));
  }

  void run_at_once() {
    const c10::Stream stream = current_stream(device_->index());
    synchronize(stream);
    Stack stack = for_cpu();
    std::vector<std::pair<Tensor, Tensor>> outputs;  // and what the operator writes instead, and may resize
    for (std::size_t j = 0; j < stack.size(); j++)
      if (writes(j) && arguments_[j].isTensor() && arguments_[j].toTensor().defined()) {
        stack[j] = stack[j].toTensor().clone();
        outputs.emplace_back(arguments_[j].toTensor(), stack[j].toTensor());
      }
    op_.callBoxed(&stack);
    for (const auto& [output, made] : outputs) {
      at::native::resize_output(output, made.sizes());
      enqueue_copy(stream, on_host(output), made);
    }
    for (std::size_t i = 0; i < stack.size(); i++) {
      const IValue* const argument = written(i);
      stack_.push_back(
          argument != nullptr ? *argument : convert_tensors(stack[i], c10::DeviceType::CUDA, [&](const Tensor& made) {
            const Tensor result = at::empty_strided(made.sizes(), made.strides(), made.options().device(*device_));
            enqueue_copy(stream, on_host(result), made);
            return result;
          }));
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const Stack arguments_;
  std::optional<Device> device_;
  bool host_indices_ = false;
};

void fall_back(const c10::OperatorHandle& op, Stack* stack) { FallBack(op, *stack).run(); }

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(cuda_device(-1)));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(cuda_device(-1)));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void resize_storage(const Tensor& tensor, std::size_t bytes) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr memory = device_allocator().allocate(bytes);
  if (const std::size_t kept = std::min(bytes, storage.nbytes()); kept > 0)
    device_allocator().copy_data(memory.get(), storage.data(), kept);
  storage.set_data_ptr(std::move(memory));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "stand-in for CUDA: no resize_ to ", *format);
  const auto bytes = at::detail::computeStorageNbytesContiguous(size, tensor.element_size(),
                                                                static_cast<std::size_t>(tensor.storage_offset()));
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor, bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage, std::int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  at::native::checkSetStorage(tensor, std::move(storage), offset, size, stride);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr)
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

void record_stream(Tensor& tensor, c10::Stream stream) { memory().record(tensor.storage().data(), stream); }

bool is_set_to(const Tensor& tensor, const Tensor& other) {
  return tensor.storage().is_alias_of(other.storage()) && tensor.storage_offset() == other.storage_offset() &&
         tensor.sizes() == other.sizes() && tensor.strides() == other.strides();
}

// ---- graphs ---------------------------------------------------------------------------------------------------------

// A function of the driver that only torch calls.
template <class... Parameters>
void call_driver(const char* name, Parameters... parameters) {
  static void* const library = dlopen(std::getenv("RINGREDUCE_LIBCUDA"), RTLD_NOW | RTLD_LOCAL);
  auto* const function = reinterpret_cast<cuda::CUresult (*)(Parameters...)>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, "stand-in for CUDA: the driver has no ", name);
  const cuda::CUresult result = function(parameters...);
  TORCH_CHECK(result == cuda::kSuccess, name, ": ", cuda::driver().text(result));
}

PoolId new_pool() {
  static std::atomic<std::uint64_t> next{1};
  return {0, next++};
}

class Graph {
 public:
  explicit Graph(bool) {}
  ~Graph() {
    try {
      reset();
    } catch (const std::exception&) {  // the process ends
    }
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void capture_begin(std::optional<PoolId> pool, const std::string& mode) {
    TORCH_CHECK(executable_ == nullptr, "this graph has been captured; reset() it first");
    pool_ = pool.value_or(new_pool());
    stream_ = current_stream(-1);
    memory().reserve(stream_->device_index(), pool_);
    {
      std::lock_guard lock(capturing().mutex);
      TORCH_CHECK(!capturing().active, "stand-in for CUDA: one capture at a time");
      capturing().pool = pool_;
      capturing().active = true;
    }
    try {
      const cuda::Device::Use use(*native(*stream_).device());
      const int number = mode == "global" ? 0 : mode == "thread_local" ? 1 : 2;
      call_driver("cuStreamBeginCapture_v2", native(*stream_).handle(), number);
    } catch (...) {
      end();
      throw;
    }
  }

  void capture_end() {
    TORCH_CHECK(stream_ && current_stream(-1) == *stream_, "capture must end on the stream it began on");
    struct Ending {
      ~Ending() { end(); }
    } const ending;
    const cuda::Device::Use use(*native(*stream_).device());
    void* graph = nullptr;
    call_driver("cuStreamEndCapture", native(*stream_).handle(), &graph);
    call_driver("cuGraphInstantiateWithFlags", &executable_, graph, 0ULL);
    call_driver("cuGraphDestroy", graph);
  }

  void replay() {
    TORCH_CHECK(executable_ != nullptr, "replay of a graph that was not captured");
    const c10::Stream current = current_stream(stream_->device_index());
    const cuda::Stream& stream = native(current);
    const cuda::Device::Use use(*stream.device());
    call_driver("cuGraphLaunch", executable_, stream.handle());
  }

  void reset() {
    if (executable_ == nullptr || cuda::driver_in_use() == nullptr) return;
    const cuda::Device::Use use(*native(*stream_).device());
    call_driver("cuGraphExecDestroy", std::exchange(executable_, nullptr));
  }

  PoolId pool() const { return pool_; }

 private:
  static void end() {
    std::lock_guard lock(capturing().mutex);
    capturing().active = false;
  }

  PoolId pool_{};
  std::optional<c10::Stream> stream_;
  void* executable_ = nullptr;
};

using StreamData = std::tuple<c10::StreamId, int, int>;  // id, device index, device type: as torch's Python hands it on

StreamData data_of(const c10::Stream& stream) {
  return {stream.id(), stream.device_index(), static_cast<int>(stream.device_type())};
}

c10::Stream stream_of(c10::StreamId id, int index) {
  return c10::Stream(c10::Stream::UNSAFE, cuda_device(static_cast<DeviceIndex>(index)), id);
}

int exchange_device(int index) {
  return index < 0 ? -1 : GuardImpl{}.exchangeDevice(cuda_device(static_cast<DeviceIndex>(index))).index();
}

}  // namespace

// What DDP takes the times of its steps with. On a GPU these are events; none of DDP's results depends on them.
namespace c10d {
namespace {

class StandInTimer : public Timer {
 public:
  explicit StandInTimer(c10::Device /*device*/) {}
  std::optional<std::int64_t> measureDifference(Event /*start*/, Event /*end*/) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, StandInTimer);

}  // namespace
}  // namespace c10d

STAND_IN_KERNEL(call, Call, 1) {
  const Call& call = parameters;
  try {
    (*call.operation)();
  } catch (const std::exception& error) {
    std::lock_guard lock(failure_mutex());
    failure() = error.what();
  }
  if (call.once) delete call.operation;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("is_set_to", &is_set_to);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
}

// Functions have the names under which torch.cuda looks for them in torch._C.
PYBIND11_MODULE(torch_cuda_stand_in, module) {
  static const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new GuardImpl);
  c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator());
  // torch has made its hooks by now, of a class without members; ours take their place.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;

  using released = py::call_guard<py::gil_scoped_release>;
  module.def("_cuda_init", [] {});
  module.def("_cuda_getDeviceCount", [] { return static_cast<int>(device_count()); });
  module.def("_cuda_getDevice", [] { return static_cast<int>(current_device); });
  module.def("_cuda_setDevice", [](int index) { exchange_device(index); });
  module.def("_cuda_exchangeDevice", &exchange_device);
  module.def("_cuda_maybeExchangeDevice", &exchange_device);
  module.def("_cuda_canDeviceAccessPeer", [](int index, int peer) {
    return gpu(static_cast<DeviceIndex>(index)).device->can_access(*gpu(static_cast<DeviceIndex>(peer)).device);
  });
  module.def("_cuda_getCurrentStream",
             [](int index) { return data_of(current_stream(static_cast<DeviceIndex>(index))); });
  module.def("_cuda_getDefaultStream", [](int index) { return data_of(stream_of(0, index)); });
  module.def(
      "_cuda_setStream",
      [](c10::StreamId id, int index, int) {
        exchange_device(index);
        GuardImpl{}.exchangeStream(stream_of(id, index));
      },
      py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
  module.def("_cuda_synchronize", [] { synchronize_device(-1); }, released());
  module.def("_cuda_emptyCache", [] {});
  module.def("_host_emptyCache", [] {});
  module.def("_cuda_ipc_collect", [] {});
  module.def("_cuda_isCurrentStreamCapturing", [] { return native(current_stream(-1)).capturing(); });
  module.def("_graph_pool_handle", &new_pool);
  module.def("_cuda_getCurrentRawStream", [](int index) {
    return reinterpret_cast<std::uintptr_t>(native(current_stream(static_cast<DeviceIndex>(index))).handle());
  });
  module.def("stream_handle", [](c10::StreamId id, int index) {
    return reinterpret_cast<std::uintptr_t>(native(stream_of(id, index)).handle());
  });
  module.def("resize_storage", &resize_storage);
  module.def("milliseconds", [](std::uintptr_t start, std::uintptr_t end) {
    return GuardImpl{}.elapsedTime(reinterpret_cast<void*>(start), reinterpret_cast<void*>(end), -1);
  });
  module.def("device_facts", [](int index) {
    const cuda::Device& device = *gpu(static_cast<DeviceIndex>(index)).device;
    return std::tuple(device.name(), device.capability(), device.multiprocessors());
  });
  module.def("delay", [](double milliseconds) {
    enqueue(current_stream(-1),
            [=] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(milliseconds)); });
  });
  py::class_<Graph>(module, "_CUDAGraph")
      .def(py::init<bool>(), py::arg("keep_graph") = false)
      .def("capture_begin", &Graph::capture_begin, py::arg("pool") = py::none(),
           py::arg("capture_error_mode") = "global")
      .def("capture_end", &Graph::capture_end)
      .def("instantiate", [](Graph&) {})
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("pool", &Graph::pool);
}
