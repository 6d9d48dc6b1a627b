#include "engine/gpu/nccl_engine.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>

namespace ringreduce {
namespace {

// The most memory that a slice takes on the GPU. The value is not measured. A slice should take longer to send than an
// exchange takes to launch, and a plan needs one slice per phase.
constexpr std::size_t kMostSliceBytes = std::size_t{8} << 20;
// How long a thread in NCCL is given to return before its communicators are aborted under it.
constexpr std::chrono::seconds kCallPatience{1};
constexpr Nanoseconds kEndPatience = 5 * kSecond;
constexpr std::size_t kTokenBytes = 64;

}  // namespace

// Messages over one communicator, on one stream.
class NcclWire final : public PointToPoint {
 public:
  NcclWire(const Engine& host, const nccl::Communicator& communicator, const cuda::Stream& stream)
      : host_(host), communicator_(communicator), stream_(stream) {}

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }
  std::string number(int rank) const override { return host_.number(rank); }
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

struct NcclEngine::Lane {
  Lane(const Engine& host, const cuda::DevicePtr& gpu, const nccl::Communicator& communicator,
       std::function<const cuda::Function&(const std::string&)> kernel)
      : stream(gpu), wire(host, communicator, stream), device(stream, std::move(kernel)), done(gpu) {}

  cuda::Stream stream;
  NcclWire wire;
  StreamDevice device;
  cuda::Event done;
};

NcclEngine::NcclEngine(std::shared_ptr<Engine> host, std::shared_ptr<cuda::Kernels> kernels, cuda::DevicePtr device,
                       std::vector<nccl::CommunicatorPtr> communicators, int channels, const Options& options)
    : GpuEngine(std::move(host), std::move(device), channels, options, kMostSliceBytes),
      kernels_(std::move(kernels)),
      communicators_(std::move(communicators)),
      token_(this->device(), kTokenBytes),
      forked_(this->device()) {
  for (const nccl::CommunicatorPtr& communicator : communicators_)
    lanes_.push_back(
        std::make_unique<Lane>(*this, this->device(), *communicator, [this](const std::string& row) -> const auto& {
          const cuda::RelaxedCapture relaxed;
          return kernels_->get("accumulate", "accumulate_", row);
        }));
}

NcclEngine::~NcclEngine() { NcclEngine::leave(); }

bool NcclEngine::all_ended() const {
  try {
    const cuda::RelaxedCapture relaxed;
    return std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->stream.done(); });
  } catch (const Error&) {  // nothing more runs on this device
    return false;
  }
}

void NcclEngine::leave() noexcept {
  if (left_.exchange(true)) return;
  const Nanoseconds deadline = now() + kEndPatience;
  while (!all_ended() && now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (all_ended())
    std::call_once(freed_, [&] { nccl::destroy(communicators_); });
  else
    abort_communicators();
}

std::string NcclEngine::hint() const {
  return ". NCCL does not tell which rank it waits for, nor whether ranks made different calls: see that all of them "
         "made this one, with the same sizes, and what NCCL_DEBUG=INFO says. If it only needs longer, give "
         "init_process_group a larger timeout";
}

void NcclEngine::enqueue(const Call& asked, const Buffers& given, const cuda::Stream& stream) {
  throw_if_aborted();
  Engine::check(asked, size());
  Call call = asked;
  Buffers buffers = given;
  // An empty tensor would produce no message, so a barrier reduces one byte.
  std::byte* const token = reinterpret_cast<std::byte*>(token_.pointer());
  const std::size_t token_count = 1;
  if (call.operation == Operation::barrier) {
    call.count = call.largest = token_count;
    buffers.input = buffers.output = {{&token, 1}, {&token_count, 1}};
  }
  const auto [program, slice] = or_tell_the_others(call, [&] { return plan_of(call); });
  const std::uint64_t seq = next_call();
  const std::string what = title(call, call.number != 0 ? call.number : seq);
  try {
    std::lock_guard lock(calling_);
    put(call, buffers, *program, slice, stream);
  } catch (const Error& error) {
    fail(Error(error.kind(), what + ": " + error.what(), error.culprit()));
    throw_if_aborted();  // the group's first error, which need not be this one
    throw;
  } catch (const std::exception& error) {  // out of memory: the peers must not wait for this rank
    fail(Error(ErrorKind::system, what + ": " + error.what(), rank()));
    throw;
  }
}

void NcclEngine::put(const Call& call, const Buffers& buffers, const Program& program, std::size_t slice_bytes,
                     const cuda::Stream& stream) {
  const cuda::Device::Use use(*device());
  const Timetable& timetable = timetables_.try_emplace(&program, program).first->second;
  const std::size_t lanes = std::min(lanes_.size(), program.channels.size());
  stream.record(forked_);
  for (std::size_t l = 0; l < lanes; ++l) lanes_[l]->stream.wait(forked_);
  std::deque<Exchange> exchanges;
  for (std::size_t l = 0; l < lanes; ++l)
    exchanges.emplace_back(lanes_[l]->wire, lanes_[l]->device,
                           BoundProgram{program, timetable, call, buffers, slice_bytes}, Channels{l, lanes});
  try {
    for (bool more = true; more;) {
      more = false;
      for (Exchange& exchange : exchanges) more |= exchange.advance(kForever);
    }
  } catch (...) {
    join(lanes, stream);  // so that the caller's stream does not run ahead of what was put already
    throw;
  }
  join(lanes, stream);
}

void NcclEngine::join(std::size_t lanes, const cuda::Stream& stream) {
  for (std::size_t l = 0; l < lanes; ++l) {
    lanes_[l]->stream.record(lanes_[l]->done);
    stream.wait(lanes_[l]->done);
  }
}

void NcclEngine::fail(const Error& error) {
  GpuEngine::fail(error);
  abort_communicators();
}

void NcclEngine::abort_communicators() {
  std::call_once(freed_, [this] {
    // NCCL lets a communicator be aborted while another thread calls it, which may be stuck there; but first it is
    // given time to come back by itself.
    const std::unique_lock lock(calling_, kCallPatience);
    const cuda::RelaxedCapture relaxed;
    nccl::abort(communicators_);
  });
}

void NcclEngine::look() noexcept {
  try {
    throw_if_aborted();
    for (const nccl::CommunicatorPtr& communicator : communicators_) communicator->check();
  } catch (const Error& error) {
    fail(error);
  }
}

}  // namespace ringreduce
