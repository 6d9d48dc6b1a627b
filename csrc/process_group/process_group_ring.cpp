#include "process_group/process_group_ring.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "engine/history.h"
#include "engine/monitored_barrier.h"
#include "engine/point_to_point_engine.h"
#include "engine/slot_engine.h"
#include "process_group/arena_allocator.h"
#include "process_group/gil.h"
#include "process_group/no_calls.h"
#include "process_group/running.h"

namespace ringreduce {

using c10d::OpType;

namespace {

// The running parts of this process's groups that have not been shut down.
template <class Running>
struct LivingGroups {
  std::mutex mutex;  // never waited for with the GIL held
  std::set<std::shared_ptr<Running>> groups;
};

// Where nothing can be thrown.
void warn_of(const std::optional<Error>& error) {
  if (error) TORCH_WARN(error->what());
}

}  // namespace

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<Team> team, Settings settings)
    : ProcessGroupRing(std::make_shared<SlotEngine>(team, settings.engine), settings) {
  running_->team = team_ = team;
  shared_->mailbox = std::make_shared<Mailbox>(std::move(team), settings_.engine.patience);
}

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<C10dPointToPoint> wire, int channels, Settings settings)
    : ProcessGroupRing(std::make_shared<PointToPointEngine>(wire, channels, settings.engine), settings) {
  running_->wire = std::move(wire);
}

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<Engine> engine, const Settings& settings)
    : Backend(engine->rank(), engine->size()),
      settings_(settings),
      shared_(std::make_shared<WorkSurroundings>()),
      timeout_(settings_.timeout) {
  shared_->engine = engine;
  engine->ask_for_plans(settings_.ask);
  shared_->log = std::make_unique<CallLog>(
      settings_.recorded_calls, settings_.print_calls,
      CallLog::Group{settings_.name, "", settings_.global_ranks, getRank(), settings_.id, settings_.job});
  shared_->dump_when_broken = settings_.dump_when_broken;
  running_ = std::make_shared<Running>(std::move(engine));
  running_->surroundings = shared_;
  init();
  auto& living = process_wide<LivingGroups<Running>>();
  const WithoutGil no_gil;
  std::lock_guard lock(living.mutex);
  living.groups.insert(running_);
}

ProcessGroupRing::~ProcessGroupRing() { release_resources(); }

void ProcessGroupRing::release_resources() {
  if (!running_) return;
  if (shared_->fork.forked()) return (void)new std::shared_ptr(std::move(running_));  // left alone, on purpose
  {
    const WithoutGil no_gil;
    try {
      warn_of(running_->end());
    } catch (const std::bad_alloc&) {  // of the warning
    }
  }
  running_.reset();
  fusion_buffer_.clear();
  team_.reset();
  shared_.reset();
  settings_ = {};  // whose functions hold the ledger: weak references may keep this object for long
}

void ProcessGroupRing::abort() {
  shared_->throw_if_forked();
  running_->engine->abort(c10::str(running_->engine->number(getRank()), " aborted the group"));
}

std::map<int, std::string> ProcessGroupRing::ended() const {
  std::map<int, std::string> found;
  for (const int rank : team_ ? team_->fate().ended() : std::vector<int>()) found[rank] = team_->fate().how_gone(rank);
  return found;
}

void ProcessGroupRing::throw_own_failure() const {
  if (team_ && team_->fate().failed_itself()) team_->fate().throw_if_aborted();
}

void ProcessGroupRing::set_least_slice_bytes(std::size_t bytes) { running_->engine->set_least_slice_bytes(bytes); }

void ProcessGroupRing::fail(const std::string& why) {
  shared_->throw_if_forked();
  running_->engine->fail(Error(ErrorKind::system, why, getRank()));
}

void ProcessGroupRing::notice() {
  shared_->throw_if_forked();
  if (!team_) return;
  try {
    team_->fate().throw_if_over();
  } catch (const Error&) {  // calls raise it
  }
}

void ProcessGroupRing::survivors_go_on() {
  shared_->throw_if_forked();
  shared_->dump_after = 100 * kMillisecond;
  if (shared_->dump_when_broken) CallLog::get_ready_to_dump();
}

void ProcessGroupRing::shutdown() {
  if (shared_->fork.forked()) return;
  NoCalls::check();
  const WithoutGil no_gil;  // works under way may run Python callbacks
  if (const auto error = running_->end()) throw *error;
}

std::optional<Error> ProcessGroupRing::Running::end() {
  if (gpu) gpu->stop();
  if (surroundings->queue.busy()) engine->fail(broken_off);
  surroundings->queue.stop();
  if (wire) wire->leave();
  if (surroundings->mailbox) surroundings->mailbox->stop();
  surroundings->completions.stop();
  if (team) team->leave();
  auto& living = process_wide<LivingGroups<Running>>();
  {
    std::lock_guard lock(living.mutex);
    const auto own = std::find_if(living.groups.begin(), living.groups.end(),
                                  [this](const auto& running) { return running.get() == this; });
    if (own != living.groups.end()) living.groups.erase(own);
  }
  if (ended.exchange(true) || !team || team->fate().error() != nullptr) return std::nullopt;
  return difference_at_the_end(*team);
}

void ProcessGroupRing::shutdown_all() {
  auto& living = process_wide<LivingGroups<Running>>();
  const WithoutGil no_gil;
  while (true) {
    std::shared_ptr<Running> running;
    {
      std::lock_guard lock(living.mutex);
      if (living.groups.empty()) break;
      running = *living.groups.begin();
    }
    warn_of(running->end());  // without the lock: it waits for callbacks, which may shut down groups themselves
  }
  Completions::wait_for_detached(10 * kSecond);
  CallLog::finish_dumps(10 * kSecond);
}

void ProcessGroupRing::add_plan(const Engine::PlanFor& plan) {
  shared_->throw_if_forked();
  shared_->queue.run([&] { running_->engine->add(plan); });
}

void ProcessGroupRing::register_plan(Engine::PlanFor plan) {
  add_plan(plan);
  std::lock_guard lock(gpu_mutex_);
  if (running_->gpu) running_->gpu->add(plan);
  registered_.push_back(std::move(plan));
}

std::shared_ptr<Engine> ProcessGroupRing::engine() const { return running_->engine; }

void ProcessGroupRing::use(std::shared_ptr<GpuEngine> gpu) {
  for (const Engine::PlanFor& plan : registered_) gpu->add(plan);
  gpu->set_host(running_->engine);
  const auto index = static_cast<at::DeviceIndex>(gpu->device()->ordinal());
  running_->gpu = std::make_unique<GpuCalls>(std::move(gpu), at::Device(at::kCUDA, index), shared_);
}

// With the lock held.
void ProcessGroupRing::join_gpus(int index, std::uint64_t communicator) {
  std::optional<cuda::RelaxedCapture> relaxed;  // the call may be the first, and in a capture
  if (cuda::unavailable().empty()) relaxed.emplace();
  const SettingUp setting_up;
  settings_.join_gpus(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this), index, communicator);
  gpus_joined_ = true;
}

void ProcessGroupRing::use_nccl(int index, std::uint64_t communicator) {
  shared_->throw_if_forked();
  const WithoutGil no_gil;
  std::lock_guard lock(gpu_mutex_);
  if (gpus_joined_)
    invalid("use_nccl: the group has decided how its CUDA tensors go; call it once, before its first call on them");
  join_gpus(index, communicator);
}

// Returns the object that makes the group's calls on tensors of a GPU; null if they go through the host's memory.
GpuCalls* ProcessGroupRing::gpu_calls(at::Device device) {
  shared_->throw_if_forked();
  const WithoutGil no_gil;
  std::lock_guard lock(gpu_mutex_);
  if (!gpus_joined_) join_gpus(device.index(), 0);
  if (running_->gpu && running_->gpu->device() != device)
    invalid("this rank's calls of the group are on ", running_->gpu->device(), "; a tensor is on ", device,
            ". A rank has one GPU: torch.cuda.set_device(", static_cast<int>(device.index()),
            ") before its first call, or a group of its own");
  return running_->gpu.get();
}

at::Tensor ProcessGroupRing::allocateTensor(long size, at::TensorOptions options) {
  const at::Tensor tensor = allocate(size, options);
  return tensor.is_complex() ? at::view_as_real(tensor).flatten() : tensor;
}

at::Tensor ProcessGroupRing::allocate(long size, const at::TensorOptions& options) {
  shared_->throw_if_forked();
  if (size < 0) invalid("allocateTensor: size is ", size, "; it must be 0 or more");
  if (!options.device().is_cpu()) invalid("allocateTensor: device is ", options.device(), "; it must be the CPU");
  const auto type = c10::optTypeMetaToScalarType(options.dtype_opt()).value_or(at::kFloat);
  if (!supportsTensorAlloc(0)) return at::empty({size}, type);  // the group has no arena
  return empty_in_arena({size}, type);
}

std::shared_ptr<c10::Allocator> ProcessGroupRing::getMemAllocator() {
  if (!supportsTensorAlloc(0)) return nullptr;
  return {std::shared_ptr<void>(), arena_allocator()};  // nobody owns it
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupRing::getBackendOptions() {
  auto options = c10::make_intrusive<Options>(getBackendName(), timeout_.load());
  options->group_name = getGroupUid();
  options->group_desc = getGroupDesc();
  options->global_ranks_in_group.assign(settings_.global_ranks.begin(), settings_.global_ranks.end());
  return options;
}

c10d::ErrorType ProcessGroupRing::getError() {
  shared_->throw_if_forked();
  try {
    running_->engine->throw_if_aborted();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::timeout) return c10d::ErrorType::TIMEOUT;
    const bool ours =
        error.kind() == ErrorKind::aborted ? running_->engine->reporter() == getRank() : error.culprit() == getRank();
    return ours ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::REMOTE_ERROR;
  }
  return c10d::ErrorType::SUCCESS;
}

void ProcessGroupRing::registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (shared_->hooked) invalid("registerOnCompletionHook: the group has a hook already");
  onCompletionHook_ = hook;
  shared_->on_completion = std::move(hook);
  shared_->hooked.store(true, std::memory_order_release);
}

void ProcessGroupRing::waitForPendingWorks() {
  shared_->throw_if_forked();
  if (running_->gpu) running_->gpu->drain();
  shared_->queue.drain();
  shared_->completions.drain();
}

void ProcessGroupRing::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  shared_->throw_if_forked();
  if (!team_)
    invalid(
        "monitored_barrier: the group's ranks share no memory, which it needs; use barrier(), whose timeout names the "
        "rank that was waited for");
  RECORD_FUNCTION("ringreduce:monitored_barrier", std::vector<c10::IValue>{});
  std::lock_guard lock(barrier_mutex_);
  monitored_barrier(*team_, settings_.engine.patience, nanoseconds(timeout_or_default(opts.timeout)), wait_all_ranks);
}

std::chrono::milliseconds ProcessGroupRing::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

void ProcessGroupRing::begin_call() {
  shared_->throw_if_forked();
  NoCalls::check();
  if (!described_.exchange(true, std::memory_order_relaxed)) shared_->log->describe(getGroupDesc());
}

CallLog::Call ProcessGroupRing::begin_call(const Collective& collective) {
  begin_call();
  CallLog::Call call{.type = collective.type,
                     .sequence = ++collectives_,
                     .timeout = timeout_or_default(collective.timeout),
                     .splits = collective.splits};
  if (has_root(collective.operation)) call.root = collective.root;
  if (collective.op != nullptr) call.reduce_op = name(reduce_op_of(*collective.op));
  if (collective.own_op != nullptr) call.own_op = collective.own_op->digest;
  return call;
}

void ProcessGroupRing::add_link(int peer, int socket, std::string path) {
  if (!team_ || peer < 0 || peer >= getSize() || !team_->elsewhere(peer)) {
    close(socket);
    invalid(c10::str("add_link: peer is ", peer, ", which is no rank of this group on another host"));
  }
  team_->links()->add(peer, socket, std::move(path));
}

std::vector<Links::Counters> ProcessGroupRing::links() const {
  if (!team_ || team_->links() == nullptr) return {};
  return team_->links()->counters();
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRing::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                          const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<Options>& opts) {
  shared_->throw_if_forked();
  for (int r : ranks)
    if (r < 0 || r >= getSize() || std::count(ranks.begin(), ranks.end(), r) > 1)
      invalid("split: the ranks are ", ranks, "; they must be different ones of 0 to ", getSize() - 1);
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
  return regroup(ranks, "split", opts);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRing::shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                                           const c10::intrusive_ptr<Options>& opts) {
  constexpr int kAbort = 1;  // torch.distributed.distributed_c10d.SHRINK_ABORT
  shared_->throw_if_forked();
  if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), getRank()) != ranks_to_exclude.end())
    invalid("shrink: the ranks to exclude are ", ranks_to_exclude, ", this one, ", getRank(), ", among them");
  if ((flags & kAbort) != 0) abort();
  std::vector<int> ranks;
  for (int r = 0; r < getSize(); ++r)
    if (std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), r) == ranks_to_exclude.end()) ranks.push_back(r);
  return regroup(ranks, "shrink", opts);
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRing::regroup(const std::vector<int>& ranks, const char* why,
                                                            const c10::intrusive_ptr<Options>& opts) {
  auto made = settings_.regroup(c10::intrusive_ptr<c10d::Backend>::reclaim_copy(this), ranks, why,
                                opts ? opts->timeout : timeout_.load());
  if (auto* const ring = dynamic_cast<ProcessGroupRing*>(made.get())) ring->shared_->as_gloo = shared_->as_gloo;
  return made;
}

// ---- messages between two ranks, and several calls as one Work ----

WorkPtr ProcessGroupRing::post(TensorList& tensors, OpType type, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const char* const what = sends ? "send" : "recv";
  return heard(what, [&]() -> WorkPtr {
    begin_call();
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    if (type != OpType::RECVANYSOURCE && (peer < 0 || peer >= getSize() || peer == getRank()))
      invalid(what, ": the peer is rank ", peer, "; it must be another rank of the group, 0 to ", getSize() - 1);
    if (getSize() == 1) invalid(what, ": the group has no other rank");
    if (tag < 0) invalid(what, ": the tag is ", tag, "; it must be 0 or more");
    if (!sends) check_outputs(tensors, what);
    if (running_->wire && !tensor.is_cpu())
      invalid(what, ": the tensor is on ", tensor.device(),
              "; over transport='gloo' messages are of CPU tensors: pass its cpu()");
    const DType dtype = dtype_of(tensor.scalar_type(), what);
    const at::NoGradGuard no_grad;
    const bool staged = !is_plain(tensor, at::kCPU);
    if (staged && tensor.is_cuda()) synchronize(tensor.device(), what);
    const at::Tensor buffer = !staged ? tensor
                              : sends ? plain(tensor, at::kCPU)
                                      : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    const WorkPtr work = running_->wire ? pass_on(type, peer, tag, tensor, buffer)
                                        : put_in_mailbox(type, peer, tag, tensor, buffer, dtype);
    coalesce(work);
    return work;
  });
}

WorkPtr ProcessGroupRing::pass_on(OpType type, int peer, int tag, const at::Tensor& tensor, const at::Tensor& buffer) {
  TensorList passed{buffer};
  return c10::make_intrusive<PassedMessage>(
      getRank(), type, running_->wire->pass_on(passed, type, peer, tag), timeout_.load(), tensor, buffer,
      [wire = running_->wire, sends = type == OpType::SEND, peer](const std::string& reason, bool late) {
        return wire->failure(sends, peer, reason, late);
      });
}

WorkPtr ProcessGroupRing::put_in_mailbox(OpType type, int peer, int tag, const at::Tensor& tensor,
                                         const at::Tensor& buffer, DType dtype) {
  auto message = std::make_shared<Message>();
  message->sends = type == OpType::SEND;
  message->peer = peer;
  message->tag = static_cast<std::uint64_t>(tag);
  message->dtype = dtype;
  message->data = static_cast<std::byte*>(buffer.mutable_data_ptr());
  message->bytes = buffer.nbytes();
  message->timeout = nanoseconds(timeout_.load());
  const CallLog::Call call{.type = type, .sequence = ++messages_, .peer = peer, .timeout = timeout_};
  auto work = c10::make_intrusive<MessageWork>(shared_, getRank(), call, TensorList{tensor}, message);
  work->start();
  message->on_done = [work, tensor, buffer,
                      copy_back = !message->sends && !buffer.is_same(tensor)](std::exception_ptr error) {
    try {
      if (copy_back && !error) copy_elements(tensor, buffer);
    } catch (...) {
      error = std::current_exception();
    }
    work->end(error);
  };
  try {
    shared_->mailbox->post(message);
  } catch (...) {
    message->on_done = nullptr;  // which holds the work, which holds the message
    work->end(std::current_exception());
    throw;
  }
  return work;
}

WorkPtr ProcessGroupRing::send(TensorList& tensors, int destination, int tag) {
  return post(tensors, OpType::SEND, destination, tag);
}

WorkPtr ProcessGroupRing::recv(TensorList& tensors, int source, int tag) {
  return post(tensors, OpType::RECV, source, tag);
}

WorkPtr ProcessGroupRing::recvAnysource(TensorList& tensors, int tag) {
  return post(tensors, OpType::RECVANYSOURCE, kAnySource, tag);
}

void ProcessGroupRing::startCoalescing() {
  shared_->throw_if_forked();
  std::lock_guard lock(coalescing_mutex_);
  coalescing_[std::this_thread::get_id()].clear();
}

void ProcessGroupRing::coalesce(WorkPtr work) {
  std::lock_guard lock(coalescing_mutex_);
  const auto works = coalescing_.find(std::this_thread::get_id());
  if (works != coalescing_.end()) works->second.push_back(std::move(work));
}

WorkPtr ProcessGroupRing::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  const auto works = coalescing_.extract(std::this_thread::get_id());
  if (works.empty()) invalid("endCoalescing: this thread has not called startCoalescing before");
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(works.mapped()));
}

std::string ProcessGroupRing::why_not(std::size_t element_bytes) const {
  if (team_ == nullptr) return "its calls go through another backend";
  if (team_->links() != nullptr) return "its ranks share no memory";
  const std::size_t slot = team_->geometry().slot_bytes;
  if (element_bytes <= slot) return "";
  return c10::str("an element has ", element_bytes, " bytes, and a slot ", slot);
}

void ProcessGroupRing::allreduce_by(const Operator& op, const at::Tensor& tensor) {
  heard("all_reduce", [&] {
    if (const std::string reason = why_not(op.element_bytes); !reason.empty())
      invalid("all_reduce by ", op.name, ": ", reason);
    if (tensor.nbytes() % op.element_bytes != 0)
      invalid("all_reduce by ", op.name, ": the tensor has ", tensor.nbytes(), " bytes, no multiple of ",
              op.element_bytes);
    call({.type = c10d::OpType::ALLREDUCE, .operation = Operation::all_reduce, .own_op = &op}, tensor, tensor);
  });
}

}  // namespace ringreduce
