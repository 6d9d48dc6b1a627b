#include "engine/gpu/peer_engine.h"

#include <algorithm>
#include <cstring>

#include "engine/gpu/memory.cuh"
#include "kernels/gpu/accumulate.h"

namespace ringreduce {
namespace {

constexpr unsigned kThreads = 512;               // of a block; the kernel is compiled for at most so many
constexpr std::size_t kBytesOfLane = 32 * 1024;  // of a chunk: for less, another block is not worth its start
constexpr std::size_t kTitles = 64;

gpu::RegionShape region_shape(int ranks, const PeerEngine::Shape& shape) {
  return {static_cast<std::uint32_t>(ranks), shape.lanes, shape.depth, shape.slot_bytes};
}

gpu::Tensors tensors_of(const Tensors& from) {
  gpu::Tensors to{};
  for (std::size_t i = 0; i < from.data.size(); ++i) {
    to.data[i] = reinterpret_cast<char*>(from.data[i]);
    to.count[i] = from.count[i];
  }
  return to;
}

bool same_gpu(const cuda::Handle& a, const cuda::Handle& b) {
  return std::memcmp(a.device, b.device, sizeof(a.device)) == 0;
}

}  // namespace

std::uint64_t PeerEngine::region_bytes(int ranks, const Shape& shape) { return region_shape(ranks, shape).bytes(); }

PeerEngine::Mode PeerEngine::mode_for(const std::vector<cuda::Handle>& handles, int rank) {
  const cuda::Handle& own = handles[static_cast<std::size_t>(rank)];
  const auto on_it = std::count_if(handles.begin(), handles.end(), [&](const auto& h) { return same_gpu(h, own); });
  return on_it > 1 ? Mode::steps : Mode::run;
}

PeerEngine::PeerEngine(std::shared_ptr<Engine> host, std::shared_ptr<cuda::Kernels> kernels, cuda::DevicePtr device,
                       std::shared_ptr<const cuda::OwnMemory> own, const std::vector<cuda::Handle>& handles,
                       const Shape& shape, Mode mode, const Options& options)
    : GpuEngine(std::move(host), device, static_cast<int>(shape.lanes), options, shape.slot_bytes),
      kernels_(std::move(kernels)),
      own_(std::move(own)),
      shape_(region_shape(size(), shape)),
      one_lane_(shape.one_lane),
      report_(device, sizeof(gpu::Report)),
      words_(device, shape_.payload(0, 0)),
      urgent_(device, cuda::Stream::highest_priority),
      party_(mode == Mode::steps ? Party::of(device, handles, rank()) : nullptr),
      last_(device) {
  const auto refuse = [](const std::string& what) { throw Error(ErrorKind::invalid_argument, what); };
  if (size() > gpu::kMostRanks)
    refuse("the group has " + std::to_string(size()) + " ranks; GPUs can be shared by at most " +
           std::to_string(gpu::kMostRanks));
  if (static_cast<int>(handles.size()) != size() || own_->bytes() < shape_.bytes())
    refuse("handles or bytes of the regions do not fit the group");
  if (mode == Mode::steps && !one_lane_) refuse("ranks that take steps have channels of one lane");
  if (mode == Mode::run && static_cast<int>(shape_.lanes) > device->multiprocessors())
    refuse(std::to_string(shape_.lanes) + " blocks must run at once; " + device->describe() + " has room for " +
           std::to_string(device->multiprocessors()));
  if (mode == Mode::steps && !device->has_stream_values())
    throw Error(ErrorKind::system,
                device->describe() +
                    ": streams cannot wait for values (cuStreamWaitValue64), which ranks that share a "
                    "GPU need");
  mappings_.reserve(handles.size());
  for (int r = 0; r < size(); ++r) {
    const cuda::Handle& handle = handles[static_cast<std::size_t>(r)];
    if (r == rank()) {
      regions_.push_back(reinterpret_cast<char*>(own_->pointer()));
      continue;
    }
    mappings_.emplace_back(device, handle, describe(r));
    if (mappings_.back().bytes() < shape_.bytes()) refuse("the region of " + describe(r) + " is too small");
    regions_.push_back(reinterpret_cast<char*>(mappings_.back().pointer()));
  }
}

const PeerEngine::Loaded& PeerEngine::load(const Call& call, const Choice& choice, const Program& program) {
  const auto known = loaded_.find(&program);
  if (known != loaded_.end()) return known->second;
  const cuda::RelaxedCapture relaxed;
  Loaded& loaded = loaded_.try_emplace(&program, device(), program).first->second;
  const std::vector<std::byte>& image = loaded.flat.image();
  urgent_.copy(loaded.image.pointer(), reinterpret_cast<cuda::CUdeviceptr>(image.data()), image.size());
  urgent_.synchronize();
  if (party_ != nullptr) {
    std::vector<Program> all;
    for (int r = 0; r < size(); ++r) all.push_back(program_of(r, call, choice.plan));
    loaded.turns = order_of_steps(all, shape_.depth);
  }
  return loaded;
}

gpu::Run PeerEngine::run_of(const Call& call, const Buffers& buffers, const Choice& choice,
                            const Program& program) const {
  const std::size_t element = size_of(call.dtype);
  const std::size_t chunk = call.largest * element / (program.channels.size() * program.channels[0].chunks);
  const std::size_t most = one_lane_ ? 1 : shape_.lanes / program.channels.size();
  gpu::Run run{};
  run.shape = shape_;
  std::copy(regions_.begin(), regions_.end(), run.regions);
  run.report = reinterpret_cast<gpu::Report*>(report_.pointer());
  run.input = tensors_of(buffers.input);
  run.output = tensors_of(buffers.output);
  run.largest = call.largest;
  run.timeout = static_cast<std::uint64_t>(call.timeout);
  run.factor = call.factor;
  run.scaled = reduces(call.operation) && call.reduce_op == ReduceOp::premul_sum;
  run.divisor = reduces(call.operation) && call.reduce_op == ReduceOp::avg ? size() : 1;
  run.element = static_cast<std::uint32_t>(element);
  run.rank = static_cast<std::uint32_t>(rank());
  run.lanes = static_cast<std::uint32_t>(std::clamp<std::size_t>(chunk / kBytesOfLane, 1, most));
  Call of_lane = call;
  of_lane.largest = ceil_div(call.largest, run.lanes);
  run.slice = slice_bytes(of_lane, program, choice.slice_bytes) / element;
  run.mode = gpu::Mode::run;
  return run;
}

void PeerEngine::enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) {
  throw_if_aborted();
  check(call);
  std::lock_guard lock(mutex_);
  const Choice& choice = choice_for(call);
  const Program& program = program_for(call, choice.plan);
  const Loaded& loaded = load(call, choice, program);
  const gpu::Kernel row = reduces(call.operation) ? gpu::kernel_for(call.dtype, call.reduce_op) : gpu::copy_kernel();
  const cuda::Function& kernel = [&]() -> const cuda::Function& {
    const cuda::RelaxedCapture relaxed;
    return kernels_->get("interpreter", "run_", row.name);
  }();

  gpu::Run run = run_of(call, buffers, choice, program);
  run.program = loaded.on_gpu();
  run.parts = row.parts;
  const std::uint64_t seq = next_call();
  run.fingerprint = fingerprint(call, seq, program.digest);
  const std::string what = title(call, call.number != 0 ? call.number : seq);
  remember(run.fingerprint, what);

  const bool captured = stream.capturing();
  if (!captured && last_stream_ != stream.handle()) stream.wait(last_);
  try {
    if (party_ == nullptr)
      stream.launch(kernel, {static_cast<unsigned>(program.channels.size()) * run.lanes, kThreads}, run);
    else
      party_->enqueue(*this, {run, loaded.on_host(), &kernel, &loaded.turns}, stream, what, call.timeout);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::system) fail(Error(ErrorKind::system, error.what(), rank()));
    throw;
  }
  if (captured) return;
  stream.record(last_);
  last_stream_ = stream.handle();
}

void PeerEngine::remember(std::uint64_t fingerprint, std::string title) {
  std::lock_guard lock(titles_mutex_);
  titles_.emplace_back(fingerprint, std::move(title));
  if (titles_.size() > kTitles) titles_.pop_front();
}

void PeerEngine::look() noexcept {
  try {
    auto* const report = reinterpret_cast<gpu::Report*>(report_.data());
    if (gpu::load_acquire(&report->gave_up) != 0 && !std::exchange(told_, true)) tell(*report);
    try {
      throw_if_aborted();
    } catch (const Error&) {
      gpu::store_release(&report->abort, std::uint32_t{1});                       // for what runs
      urgent_.fill(own_->pointer() + shape_.broken(), 1, sizeof(std::uint64_t));  // and what is to come
      if (party_ != nullptr) stop_waiting();
    }
  } catch (const std::exception&) {  // the driver has failed: nothing more runs on this GPU, and nothing waits
  }
}

// Makes what the kernel said the group's error.
void PeerEngine::tell(const gpu::Report& report) {
  const int peer = static_cast<int>(report.peer);
  const std::string where = " on the GPU, in channel " + std::to_string(report.channel) + ", round " +
                            std::to_string(report.round) + ", step " + std::to_string(report.step);
  std::string call = "a call";
  {
    std::lock_guard lock(titles_mutex_);
    for (const auto& [fingerprint, title] : titles_)
      if (fingerprint == report.fingerprint) call = title;
  }
  const std::string own = call + ": rank " + std::to_string(rank());
  switch (static_cast<gpu::GaveUp>(report.gave_up)) {
    case gpu::GaveUp::timeout:
      return fail(Error(ErrorKind::timeout, own + " waited in vain for " + describe(peer) + where, peer));
    case gpu::GaveUp::mismatch:
      return fail(Error(ErrorKind::mismatch,
                        own + " found that " + describe(peer) + " made another call" + where +
                            ". All ranks of a group must make the same calls in the same order",
                        peer));
    case gpu::GaveUp::wrong_size:
      return fail(Error(ErrorKind::mismatch,
                        own + " got a value of the wrong size from " + describe(peer) + where +
                            ". Tensors must have the same sizes on all ranks",
                        peer));
    case gpu::GaveUp::aborted:
    case gpu::GaveUp::no:
      return;  // the group is broken already, and that is why
  }
}

// Gives the words of this rank's region the values that streams wait for. What then begins sees that it must not.
void PeerEngine::stop_waiting() {
  std::memset(words_.data(), 0, words_.bytes());
  const std::uint64_t notices = shape_.taken(0, 0, 0);
  for (std::uint64_t at = 0; at < notices; at += sizeof(gpu::Notice))
    reinterpret_cast<gpu::Notice*>(words_.data() + at)->full = 1;
  urgent_.copy(own_->pointer(), words_.pointer(), shape_.broken());
  urgent_.synchronize();
}

bool PeerEngine::quiet() {
  const std::uint64_t taken = shape_.taken(0, 0, 0);
  urgent_.copy(words_.pointer() + taken, own_->pointer() + taken, shape_.broken() - taken);
  urgent_.synchronize();
  return std::all_of(words_.data() + taken, words_.data() + shape_.broken(),
                     [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace ringreduce
