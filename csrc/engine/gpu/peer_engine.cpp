#include "engine/gpu/peer_engine.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <thread>
#include <utility>

#include "engine/gpu/memory.cuh"
#include "kernels/gpu/accumulate.h"

namespace ringreduce {
namespace {

constexpr std::size_t kBytesOfLane = 32 * 1024;  // of a chunk: for less, another block is not worth its start
constexpr std::size_t kLatest = 1024;            // calls that are remembered
constexpr int kAnyChannels = std::numeric_limits<int>::max();  // where one lane takes them in turn
constexpr Nanoseconds kWatch = kSecond / 10;                   // between two looks for whom the GPU waits for

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

std::string at(std::uint64_t channel, std::uint64_t round, std::uint64_t step) {
  return " on the GPU, in channel " + std::to_string(channel) + ", round " + std::to_string(round) + ", step " +
         std::to_string(step);
}

bool same_gpu(const cuda::Handle& a, const cuda::Handle& b) {
  return std::memcmp(a.device, b.device, sizeof(a.device)) == 0;
}

}  // namespace

std::uint64_t PeerEngine::region_bytes(int ranks, const Shape& shape) { return region_shape(ranks, shape).bytes(); }

int PeerEngine::ranks_on_gpu(const std::vector<cuda::Handle>& handles, int rank) {
  const cuda::Handle& own = handles[static_cast<std::size_t>(rank)];
  return static_cast<int>(
      std::count_if(handles.begin(), handles.end(), [&](const auto& h) { return same_gpu(h, own); }));
}

PeerEngine::PeerEngine(const Setup& setup)
    : GpuEngine(setup.host, setup.device, setup.shape.lanes == 1 ? kAnyChannels : static_cast<int>(setup.shape.lanes),
                setup.options, setup.shape.slot_bytes),
      kernels_(setup.kernels),
      own_(setup.own),
      shape_(region_shape(size(), setup.shape)),
      one_lane_(setup.shape.lanes == 1),
      arrived_(setup.device, sizeof(std::uint32_t)),
      report_(setup.device, sizeof(gpu::Report)),
      place_(setup.device, sizeof(std::uint64_t)),
      urgent_(setup.device, cuda::Stream::highest_priority),
      household_(in_common<Meeting>(setup.handles,
                                    ranks_here(setup.handles, rank(), [](const cuda::Handle&) { return true; }))),
      party_(setup.modes.at(static_cast<std::size_t>(rank())) == Mode::steps
                 ? Party::of(setup.device, setup.handles, rank())
                 : nullptr),
      last_(setup.device) {
  const cuda::DevicePtr& device = setup.device;
  const std::vector<cuda::Handle>& handles = setup.handles;
  const std::vector<Mode>& modes = setup.modes;
  const auto refuse = [](const std::string& what) { throw Error(ErrorKind::invalid_argument, what); };
  if (size() > gpu::kMostRanks)
    refuse("the group has " + std::to_string(size()) + " ranks; GPUs can be shared by at most " +
           std::to_string(gpu::kMostRanks));
  if (static_cast<int>(handles.size()) != size() || handles.size() != modes.size() || own_->bytes() < shape_.bytes())
    refuse("handles, modes or bytes of the regions do not fit the group");
  if (std::count(modes.begin(), modes.end(), Mode::steps) > 0 && !one_lane_)
    refuse("where ranks take steps, there is one lane");
  if (const int ranks = ranks_on_gpu(handles, rank());
      party_ == nullptr && static_cast<int>(shape_.lanes) * ranks > device->multiprocessors())
    refuse(std::to_string(shape_.lanes) + " blocks of each of " + std::to_string(ranks) + " ranks must run at once; " +
           device->describe() + " has room for " + std::to_string(device->multiprocessors()));
  if (party_ != nullptr && !device->has_stream_values())
    throw Error(ErrorKind::system,
                device->describe() +
                    ": streams cannot wait for values (cuStreamBatchMemOp), which ranks that share a "
                    "GPU need");
  // So that a rank that has no kernels says so before others wait for it.
  (void)kernels_->get("interpreter", "run_", gpu::kernel_for(DType::float32, ReduceOp::sum).name);
  if (party_ == nullptr) copied_words_.emplace(device, shape_.word_bytes());
  map(handles, modes);
}

// Where the words and regions of all ranks are.
void PeerEngine::map(const std::vector<cuda::Handle>& handles, const std::vector<Mode>& modes) {
  mappings_.reserve(handles.size());
  for (int r = 0; r < size(); ++r) {
    const cuda::Handle& handle = handles[static_cast<std::size_t>(r)];
    cuda::CUdeviceptr region = own_->pointer();
    if (r != rank()) {
      mappings_.emplace_back(device(), handle, describe(r));
      if (mappings_.back().bytes() < shape_.bytes())
        throw Error(ErrorKind::invalid_argument, "the region of " + describe(r) + " is too small");
      region = mappings_.back().pointer();
    }
    cuda::CUdeviceptr words = region;
    if (modes[static_cast<std::size_t>(r)] == Mode::steps)
      words = shared_words_.try_emplace(r, device(), handle, shape_.word_bytes(), describe(r)).first->second.pointer();
    regions_.push_back(reinterpret_cast<char*>(region));
    words_.push_back(reinterpret_cast<char*>(words));
  }
}

std::unique_ptr<const PeerEngine::Loaded> PeerEngine::load(const Call& call, const Choice& choice,
                                                           const Program& program) const {
  const gpu::FlatProgram::Options options{rank(), shape_.depth, one_lane_};
  auto loaded =
      std::make_unique<Loaded>(device(), gpu::FlatProgram(program, batches_of(program, shape_.depth), options));
  const std::vector<std::byte>& image = loaded->flat.image();
  urgent_.copy(loaded->image.pointer(), reinterpret_cast<cuda::CUdeviceptr>(image.data()), image.size());
  urgent_.synchronize();
  if (party_ != nullptr) {
    std::vector<Program> all;
    std::vector<std::vector<Batches>> batches;
    for (int r = 0; r < size(); ++r) {
      all.push_back(program_of(r, call, choice.plan));
      batches.push_back(batches_of(all.back(), shape_.depth));
    }
    loaded->turns = order_of_turns(all, batches, shape_.depth);
  }
  return loaded;
}

// Launches the kernel, which does nothing: the driver leaves some of what a kernel needs to its first launch.
const cuda::Function& PeerEngine::load_kernel(const std::string& row, const Loaded& loaded) const {
  const cuda::Function& kernel = kernels_->get("interpreter", "run_", row);
  gpu::Run run{};
  run.lanes = 1;
  const cuda::HostMemory region(device(), run.shape.bytes());
  std::memset(region.data() + run.shape.broken(), 1, sizeof(std::uint64_t));
  run.regions[0] = reinterpret_cast<char*>(region.pointer());
  run.report = reinterpret_cast<gpu::Report*>(report_.pointer());
  run.program = loaded.on_gpu();
  urgent_.launch(kernel, {1, gpu::kBlockThreads}, run);
  urgent_.synchronize();
  return kernel;
}

// Has the call's plan and kernel on the GPU. To get them there may take calls of CUDA that wait for what runs on the
// GPUs, and so for ever if that waits for a rank of this process that has yet to launch its part. So where a plan or a
// kernel is new, the ranks of this process meet: all that they launched before can end then, and none launches what
// comes before all are ready.
void PeerEngine::prepare(const Call& call, const Choice& choice, const std::string& row, const Meeting::Call& meeting) {
  const Program& program = program_for(call, choice.plan);
  if (loaded_.contains(&program) && kernels_loaded_.contains(row)) return;
  std::exception_ptr refusal;
  household_->meet(*this, meeting, [&] {
    try {
      const cuda::RelaxedCapture relaxed;
      if (!loaded_.contains(&program)) loaded_.emplace(&program, load(call, choice, program));
      if (!kernels_loaded_.contains(row)) kernels_loaded_.emplace(row, &load_kernel(row, *loaded_.at(&program)));
    } catch (...) {
      refusal = std::current_exception();
    }
  });
  if (refusal != nullptr) std::rethrow_exception(refusal);
}

gpu::Run PeerEngine::run_of(const Call& call, const Buffers& buffers, const Choice& choice,
                            const Program& program) const {
  const std::size_t element = size_of(call.dtype);
  const std::size_t chunk = call.largest * element / (program.channels.size() * program.channels[0].chunks);
  const std::size_t most = one_lane_ ? 1 : shape_.lanes / program.channels.size();
  gpu::Run run{};
  run.shape = shape_;
  std::copy(words_.begin(), words_.end(), run.words);
  std::copy(regions_.begin(), regions_.end(), run.regions);
  run.report = reinterpret_cast<gpu::Report*>(report_.pointer());
  run.arrived = reinterpret_cast<std::uint32_t*>(arrived_.pointer());
  run.input = tensors_of(buffers.input);
  run.output = tensors_of(buffers.output);
  run.largest = call.largest;
  run.timeout = static_cast<std::uint64_t>(call.timeout);
  run.factor = call.factor;
  run.scaled = reduces(call.operation) && call.reduce_op == ReduceOp::premul_sum;
  const bool averages = reduces(call.operation) && call.reduce_op == ReduceOp::avg;
  run.weighs = averages && narrow_float(call.dtype);
  run.divisor = averages ? size() : 1;
  run.element = static_cast<std::uint32_t>(element);
  run.rank = static_cast<std::uint32_t>(rank());
  run.lanes = static_cast<std::uint32_t>(std::clamp<std::size_t>(chunk / kBytesOfLane, 1, most));
  Call of_lane = call;
  of_lane.largest = ceil_div(call.largest, run.lanes);
  // A stream of steps does nothing else while it waits: fewer slices are better.
  const std::size_t chosen = one_lane_ && choice.slice_bytes == 0 ? shape_.slot_bytes : choice.slice_bytes;
  run.slice = slice_bytes(of_lane, program, chosen) / element;
  run.mode = gpu::Mode::run;
  return run;
}

void PeerEngine::enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) {
  throw_if_aborted();
  check(call, size());
  std::lock_guard lock(mutex_);
  const std::uint64_t seq = next_call();
  const std::string what = title(call, call.number != 0 ? call.number : seq);
  try {
    put(call, seq, what, buffers, stream);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::system) fail(Error(ErrorKind::system, what + ": " + error.what(), rank()));
    throw;
  } catch (const std::exception& error) {  // the peers must not wait for this rank
    fail(Error(ErrorKind::system, what + ": " + error.what(), rank()));
    throw;
  }
}

void PeerEngine::put(const Call& call, std::uint64_t seq, const std::string& what, const Buffers& buffers,
                     const cuda::Stream& stream) {
  const Choice& choice = choice_for(call);
  const Program& program = program_for(call, choice.plan);
  const gpu::Kernel row = reduces(call.operation) ? gpu::kernel_for(call.dtype, call.reduce_op) : gpu::copy_kernel();
  const Meeting::Call meeting{what, seq, fingerprint(call, seq, program.digest), call.timeout};
  household_->compare(*this, meeting);
  prepare(call, choice, row.name, meeting);
  const Loaded& loaded = *loaded_.at(&program);
  const cuda::Function& kernel = *kernels_loaded_.at(row.name);
  gpu::Run run = run_of(call, buffers, choice, program);
  run.program = loaded.on_gpu();
  run.parts = row.parts;
  run.fingerprint = meeting.fingerprint;
  const bool captured = stream.capturing();
  remember({seq, run.fingerprint, what, call.timeout, captured, &loaded});

  if (!captured) stream.wait(last_);
  if (party_ == nullptr)
    stream.launch(kernel, {loaded.flat.channels() * run.lanes, gpu::kBlockThreads}, run);
  else
    party_->enqueue(*this, {run, loaded.on_host(), &kernel, &loaded.turns, seq, place_.pointer()}, stream, meeting);
  if (!captured) stream.record(last_);
}

// Calls end in order, so all before the one that the stream waits in may be forgotten; without that one nobody could
// say whom it waits for.
void PeerEngine::remember(Known call) {
  std::lock_guard lock(known_mutex_);
  std::deque<Known>& known = call.captured ? captured_ : latest_;
  known.push_back(std::move(call));
  while (known.size() > kLatest && !Party::Place::of(place()).is_of(known.front().number)) known.pop_front();
}

// The remembered call of which `is` is true.
template <class Is>
std::optional<PeerEngine::Known> PeerEngine::find(Is is) const {
  std::lock_guard lock(known_mutex_);
  if (const auto call = std::find_if(latest_.begin(), latest_.end(), is); call != latest_.end()) return *call;
  if (const auto call = std::find_if(captured_.begin(), captured_.end(), is); call != captured_.end()) return *call;
  return std::nullopt;
}

void PeerEngine::throw_if_aborted() const {
  if (gpu::load_acquire(&report().gave_up) != 0) tell();
  GpuEngine::throw_if_aborted();
}

bool PeerEngine::broken() const {
  try {
    throw_if_aborted();
  } catch (const Error&) {
    return true;
  }
  return false;
}

void PeerEngine::look() noexcept {
  try {
    if (!broken()) return watch();
    gpu::store_release(&report().abort, std::uint32_t{1});
    if (party_ != nullptr) stop_waiting();
  } catch (const std::exception&) {  // out of memory: the next look may find some
  }
}

std::string PeerEngine::said(const std::optional<Known>& call) const {
  return (call ? call->title : "a call") + ": " + number(rank());
}

// Makes what the kernel said the group's error.
void PeerEngine::tell() const {
  std::lock_guard lock(tell_mutex_);  // who comes second finds the group broken
  if (told_) return;
  const gpu::Report& report = this->report();
  const int peer = static_cast<int>(report.peer), lost = lost_;
  const std::string where = at(report.channel, report.round, report.step);
  const std::string own = said(find([&](const Known& call) { return call.fingerprint == report.fingerprint; }));
  switch (static_cast<gpu::GaveUp>(report.gave_up)) {
    case gpu::GaveUp::timeout:
      host().fail(timed_out(own, peer, where));
      break;
    case gpu::GaveUp::mismatch:
      host().fail(Error(ErrorKind::mismatch,
                        own + " found that " + describe(peer) + " made another call" + where +
                            ". All ranks of a group must make the same calls in the same order",
                        peer));
      break;
    case gpu::GaveUp::wrong_size:
      host().fail(Error(ErrorKind::mismatch,
                        own + " got a value of the wrong size from " + describe(peer) + where +
                            ". Tensors must have the same sizes on all ranks",
                        peer));
      break;
    case gpu::GaveUp::aborted:
      if (lost >= 0) host().fail(gone_for_good(own, lost, where));
      break;  // else the group is broken already, and that is why
    case gpu::GaveUp::no:
      break;
  }
  told_ = true;  // last: where memory was short before, the next look tries again
}

Error PeerEngine::timed_out(const std::string& own, int peer, const std::string& where) const {
  const int culprit = host().kept_waiting_by(peer);
  std::string text = own + " waited in vain for " + describe(peer) + where;
  if (culprit != peer) text += "; " + describe(culprit) + " is what the group waits for";
  return {ErrorKind::timeout, text, culprit};
}

Error PeerEngine::gone_for_good(const std::string& own, int peer, const std::string& where) const {
  return {ErrorKind::peer_lost, own + " waited for " + describe(peer) + ", which is gone," + where, peer};
}

std::uint64_t PeerEngine::place() const {
  return gpu::load_acquire(reinterpret_cast<const std::uint64_t*>(place_.data()));
}

bool PeerEngine::idle() const { return place() == 0; }

// Looks whom the GPU waits for, and whether that is in vain.
void PeerEngine::watch() {
  const Nanoseconds t = now();
  if (t - watched_ < kWatch) return;
  watched_ = t;
  const std::uint64_t sign = party_ == nullptr ? gpu::load_relaxed(&report().waited) : place();
  const bool same = sign == std::exchange(seen_, sign);
  if (!same) since_ = t;
  if (party_ == nullptr && !same && sign >= kWatch)
    watch_kernel();
  else if (party_ != nullptr && same && sign != 0)
    watch_stream(t - since_);
  else
    gone_.clear();
}

// Tells the peers that this rank waits for `peer`. Whether that has no end: it was gone already when the watcher last
// looked, so that all it has done has been seen.
bool PeerEngine::is_lost(int peer) {
  host().waits_for(peer);
  const std::vector<int> before = std::exchange(gone_, gone());
  return std::find(before.begin(), before.end(), peer) != before.end();
}

// A kernel has waited for long, and does so still. It knows best where.
void PeerEngine::watch_kernel() {
  const int peer = static_cast<int>(gpu::load_relaxed(&report().waiting_for));
  if (!is_lost(peer)) return;
  lost_ = peer;
  gpu::store_release(&report().abort, std::uint32_t{1});
}

// A stream has been at one place for `time`. How long it may be is known of calls that are no part of a graph: a replay
// looks like the one before it.
void PeerEngine::watch_stream(Nanoseconds time) {
  const Party::Place place = Party::Place::of(seen_);
  const std::optional<Known> call = find([&](const Known& known) { return place.is_of(known.number); });
  if (!call) return;
  const Turn& turn = call->loaded->turns[place.turn];
  gpu::Run run{};
  run.program = call->loaded->on_host();
  run.shape = shape_;
  run.rank = static_cast<std::uint32_t>(rank());
  run.lanes = 1;
  const gpu::LaneBatch batch = gpu::lane_batch(run, 0, 0, static_cast<std::uint32_t>(place.round), turn.batch);
  std::optional<gpu::Wait> lacks;
  gpu::for_each_wait(run, batch, [&](const gpu::Wait& wait) {
    if (gpu::load_acquire(own_word(wait.offset)) != wait.value && !lacks) lacks = wait;
  });
  if (this->place() != seen_) return;
  if (!lacks) return gone_.clear();
  const gpu::FlatStep& step = gpu::step_of(run, batch, lacks->step);
  const int peer = static_cast<int>(lacks->peer);
  const std::string own = said(call), where = at(gpu::stripe_of(run, batch, step).channel, place.round, step.number);
  if (is_lost(peer))
    fail(gone_for_good(own, peer, where));
  else if (!call->captured && time >= call->timeout)
    fail(timed_out(own, peer, where));
}

// The word at `offset` of this rank, which takes steps.
std::uint64_t* PeerEngine::own_word(std::uint64_t offset) const {
  return reinterpret_cast<std::uint64_t*>(shared_words_.at(rank()).data() + offset);
}

// Gives this rank's words the values that streams wait for. What then begins sees that it must not.
void PeerEngine::stop_waiting() {
  const std::uint64_t notices = shape_.taken(0, 0, 0);
  for (std::uint64_t at = 0; at < notices; at += sizeof(gpu::Notice))
    gpu::store_release(own_word(at), std::uint64_t{1});
  for (std::uint64_t at = notices; at < shape_.word_bytes(); at += sizeof(std::uint64_t))
    gpu::store_release(own_word(at), std::uint64_t{0});
}

bool PeerEngine::quiet() {
  const std::uint64_t taken = shape_.taken(0, 0, 0), bytes = shape_.word_bytes() - taken;
  const std::byte* words = nullptr;
  if (party_ == nullptr) {
    urgent_.copy(copied_words_->pointer(), own_->pointer() + taken, bytes);
    // For a while only: nobody knows what the driver lets copies wait behind.
    for (const Nanoseconds deadline = now() + kSecond; !urgent_.done(); std::this_thread::yield())
      if (now() >= deadline) return false;
    words = copied_words_->data();
  } else {
    words = reinterpret_cast<const std::byte*>(own_word(taken));
  }
  return std::all_of(words, words + bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace ringreduce
