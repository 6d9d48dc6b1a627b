#include "engine/gpu/nccl_engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace ringreduce {
namespace {

// Of the memory that a slice takes on the GPU. Not measured: a slice is to take longer to send than an exchange takes
// to launch, and there are as many of them as a plan has phases.
constexpr std::size_t kMostSliceBytes = std::size_t{8} << 20;
// How long a thread in NCCL is given to return before its communicators are aborted under it.
constexpr std::chrono::seconds kCallPatience{1};
constexpr Nanoseconds kEndPatience = 5 * kSecond;
constexpr std::size_t kTokenBytes = 64;

// Messages over one communicator, on one stream.
class Wire final : public PointToPoint {
 public:
  Wire(const Engine& host, const nccl::Communicator& communicator, const cuda::Stream& stream)
      : host_(host), communicator_(communicator), stream_(stream) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string describe(int rank) const override { return host_.describe(rank); }
  int reporter() const override { return host_.reporter(); }
  void throw_if_aborted() const override { host_.throw_if_aborted(); }
  void abort(const Error&) override {}  // is for the engine, which has more than one wire

  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Nanoseconds) override {
    throw_if_aborted();
    const nccl::Library& nccl = nccl::library();
    const nccl::ncclComm_t handle = communicator_.handle();
    nccl::ncclResult_t result = nccl.ncclGroupStart();
    const char* function = "ncclGroupStart";
    const auto attempt = [&](const char* name, auto call) {
      if (result == nccl::kSuccess || result == nccl::kInProgress) function = name, result = call();
    };
    for (const Outgoing& out : outgoing)
      attempt("ncclSend",
              [&] { return nccl.ncclSend(out.data, out.bytes, nccl::kInt8, out.peer, handle, stream_.handle()); });
    for (const Incoming& in : incoming)
      attempt("ncclRecv",
              [&] { return nccl.ncclRecv(in.data, in.bytes, nccl::kInt8, in.peer, handle, stream_.handle()); });
    const nccl::ncclResult_t end = nccl.ncclGroupEnd();  // in any case: it ends the group
    attempt("ncclGroupEnd", [&] { return end; });
    communicator_.require(result, function);
  }

 private:
  const Engine& host_;
  const nccl::Communicator& communicator_;
  const cuda::Stream& stream_;
};

std::uint64_t word(const cuda::HostMemory& memory, std::size_t index) {
  return std::atomic_ref(reinterpret_cast<std::uint64_t*>(memory.data())[index]).load(std::memory_order_acquire);
}

}  // namespace

struct NcclEngine::Lane {
  Lane(const Engine& host, const cuda::DevicePtr& gpu, const nccl::Communicator& communicator,
       std::function<const cuda::Function&(const std::string&)> kernel)
      : stream(gpu), wire(host, communicator, stream), device(stream, std::move(kernel)), done(gpu) {}

  cuda::Stream stream;
  Wire wire;
  StreamDevice device;
  cuda::Event done;
};

NcclEngine::NcclEngine(std::shared_ptr<Engine> host, std::shared_ptr<cuda::Kernels> kernels, cuda::DevicePtr device,
                       std::vector<nccl::CommunicatorPtr> communicators, int channels, const Options& options)
    : GpuEngine(std::move(host), std::move(device), channels, options, kMostSliceBytes),
      kernels_(std::move(kernels)),
      communicators_(std::move(communicators)),
      token_(this->device(), kTokenBytes),
      progress_(this->device(), 2 * sizeof(std::uint64_t)),
      forked_(this->device()) {
  if (!this->device()->has_stream_values())
    throw Error(ErrorKind::system, this->device()->describe() +
                                       " has no stream memory operations, which tell how far calls are; install a "
                                       "newer NVIDIA driver");
  for (const nccl::CommunicatorPtr& communicator : communicators_)
    lanes_.push_back(std::make_unique<Lane>(
        *this, this->device(), *communicator,
        [this](const std::string& row) -> const auto& { return kernels_->get("accumulate", "accumulate_", row); }));
}

NcclEngine::~NcclEngine() {
  const Nanoseconds deadline = now() + kEndPatience;
  const auto all_ended = [&] {
    std::lock_guard lock(mutex_);
    return ended() == put_;
  };
  while (!all_ended() && now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (all_ended())
    std::call_once(aborted_, [&] { nccl::destroy(communicators_); });
  else
    abort_communicators();
}

std::uint64_t NcclEngine::begun() const { return word(progress_, 0); }
std::uint64_t NcclEngine::ended() const { return word(progress_, 1); }

void NcclEngine::enqueue(const Call& asked, const Buffers& given, const cuda::Stream& stream) {
  throw_if_aborted();
  Engine::check(asked);
  Call call = asked;
  Buffers buffers = given;
  // Of nothing nothing is sent. A barrier sums a byte.
  std::byte* const token = reinterpret_cast<std::byte*>(token_.pointer());
  const std::size_t token_count = 1;
  if (call.operation == Operation::barrier) {
    call.count = call.largest = token_count;
    buffers.input = buffers.output = {{&token, 1}, {&token_count, 1}};
  }
  const Choice& choice = choice_for(call);
  const Program& program = program_for(call, choice.plan);
  const std::string what = title(call, next_call());
  const bool captures = stream.capturing();
  try {
    std::lock_guard lock(calling_);
    put(call, buffers, program, slice_bytes(call, program, choice.slice_bytes), what, stream, captures);
  } catch (const Error& error) {
    // What is captured has not happened.
    if (captures && error.kind() == ErrorKind::invalid_argument) throw;
    fail(Error(error.kind(), what + ": " + error.what(), error.culprit()));
    throw_if_aborted();  // the group's first error, which need not be this one
    throw;
  } catch (const std::exception& error) {  // out of memory: the peers must not wait for this rank
    fail(Error(ErrorKind::system, what + ": " + error.what(), rank()));
    throw;
  }
}

void NcclEngine::put(const Call& call, const Buffers& buffers, const Program& program, std::size_t slice_bytes,
                     const std::string& title, const cuda::Stream& stream, bool captures) {
  const cuda::Device::Use use(*device());
  const Timetable& timetable = timetables_.try_emplace(&program, program).first->second;
  const std::size_t lanes = std::min(lanes_.size(), program.channels.size());
  stream.record(forked_);
  for (std::size_t l = 0; l < lanes; ++l) {
    lanes_[l]->stream.wait(forked_);
    lanes_[l]->device.capturing(captures);
  }
  if (!captures) {
    std::lock_guard lock(mutex_);
    under_way_.push_back({++put_, title, call.timeout});
    lanes_[0]->stream.write_value(progress_.pointer(), put_);
  }
  std::deque<Exchange> exchanges;
  for (std::size_t l = 0; l < lanes; ++l)
    exchanges.emplace_back(lanes_[l]->wire, lanes_[l]->device, program, timetable, call, buffers, slice_bytes,
                           Channels{l, lanes});
  try {
    for (bool more = true; more;) {
      more = false;
      for (Exchange& exchange : exchanges) more |= exchange.advance(kForever);
    }
  } catch (...) {
    join(lanes, stream, captures);  // so that the caller's stream does not run ahead of what was put already
    throw;
  }
  join(lanes, stream, captures);
}

// Lane 0 ends last.
void NcclEngine::join(std::size_t lanes, const cuda::Stream& stream, bool captures) {
  const Lane& first = *lanes_[0];
  for (std::size_t l = 1; l < lanes; ++l) {
    lanes_[l]->stream.record(lanes_[l]->done);
    first.stream.wait(lanes_[l]->done);
  }
  if (!captures) first.stream.write_value(progress_.pointer() + sizeof(std::uint64_t), put_);
  first.stream.record(first.done);
  stream.wait(first.done);
}

void NcclEngine::fail(const Error& error) {
  GpuEngine::fail(error);
  abort_communicators();
}

void NcclEngine::abort_communicators() {
  std::call_once(aborted_, [this] {
    // NCCL lets a communicator be aborted while another thread calls it, which may be stuck there; but first it is
    // given time to come back by itself.
    const std::unique_lock lock(calling_, kCallPatience);
    nccl::abort(communicators_);
  });
}

void NcclEngine::look() noexcept {
  try {
    throw_if_aborted();
    for (const nccl::CommunicatorPtr& communicator : communicators_) communicator->check();
    find_late_call();
  } catch (const Error& error) {
    fail(error);
  }
}

void NcclEngine::find_late_call() {
  std::lock_guard lock(mutex_);
  while (!under_way_.empty() && under_way_.front().number <= ended()) under_way_.pop_front();
  if (under_way_.empty() || under_way_.front().number > begun()) return;
  UnderWay& call = under_way_.front();
  if (call.began == 0) call.began = now();
  if (now() - call.began <= call.timeout) return;
  throw Error(ErrorKind::timeout,
              call.title + " timed out after " + in_seconds(call.timeout) + " on the GPU of rank " +
                  std::to_string(rank()) + ", " + device()->describe() +
                  ". NCCL does not tell which rank it waits for: see that all of them made this call, and what "
                  "NCCL_DEBUG=INFO says. If it only needs longer, give init_process_group a larger timeout");
}

}  // namespace ringreduce
