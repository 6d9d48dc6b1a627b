#include "process_group/process_group_ring.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <utility>

#include "engine/monitored_barrier.h"
#include "engine/point_to_point_engine.h"
#include "engine/shared_memory_engine.h"
#include "process_group/arena_allocator.h"
#include "process_group/gil.h"
#include "process_group/gpu_calls.h"

namespace ringreduce {

using c10d::OpType;
using c10d::Work;

// What works with threads and locks, and must be left alone in a forked child.
struct ProcessGroupRing::Running {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<C10dPointToPoint> wire;          // null where ranks share memory
  std::shared_ptr<WorkSurroundings> surroundings;  // the queue's, the mailbox's and the completions' threads
  std::unique_ptr<GpuCalls> gpu;                   // null until the group has an engine for CUDA tensors
};

namespace {

template <class T>
std::vector<T> list_of(T&& only) {
  std::vector<T> list;
  list.push_back(std::forward<T>(only));
  return list;
}

// The groups of this process that have not been shut down.
struct LivingGroups {
  std::recursive_mutex mutex;  // shutdown_all() shuts down under it. Never waited for with the GIL held.
  std::set<ProcessGroupRing*> groups;
};

// While it lives, calls of this thread are the set-up for CUDA tensors, and errors name them so.
struct SettingUp {
  static thread_local bool here;
  SettingUp() { here = true; }
  ~SettingUp() { here = false; }
};
thread_local bool SettingUp::here = false;

// Waits for all that is in torch's current stream of a GPU, for a call that goes through the host's memory.
void synchronize(at::Device device, std::string_view what) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream stream = guard.getStream(device);
  if (cuda::capturing(device.index(), static_cast<cuda::CUstream>(guard.getStreamNativeHandle(stream))))
    invalid(what, ": the current stream is being captured, and the call goes through the host's memory, which a graph ",
            "cannot replay; make it outside of the capture");
  guard.synchronizeStream(stream);
}

// The root of a call, unless it does not even fit; whether the group has it is checked with the rest.
template <class CallOptions>
int root_of(const CallOptions& opts) {
  if (std::in_range<int>(opts.rootRank)) return static_cast<int>(opts.rootRank);
  invalid("root is ", opts.rootRank, "; it must be a rank of the group");
}

void check_pairs(const char* what, const TensorList& outputs, const TensorList& inputs) {
  if (outputs.size() != inputs.size()) invalid(what, ": ", outputs.size(), " outputs for ", inputs.size(), " inputs");
}

}  // namespace

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<const Segment> segment, Settings settings)
    : ProcessGroupRing(std::make_shared<SharedMemoryEngine>(segment, settings.engine), settings) {
  if (settings_.plans_for_root) running_->engine->ask_for_roots(settings_.plans_for_root);
  segment_ = segment;
  shared_->mailbox = std::make_shared<Mailbox>(std::move(segment), settings_.engine.patience);
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
  shared_->log = std::make_unique<CallLog>(settings_.recorded_calls, settings_.print_calls,
                                           CallLog::Group{settings_.name, "", settings_.global_ranks, getRank()});
  shared_->global_rank = static_cast<int>(settings_.global_ranks[static_cast<std::size_t>(getRank())]);
  shared_->dump_when_broken = settings_.dump_when_broken;
  running_.reset(new Running{std::move(engine), nullptr, shared_, nullptr});
  init();
  auto& living = process_wide<LivingGroups>();
  const WithoutGil no_gil;
  std::lock_guard lock(living.mutex);
  living.groups.insert(this);
}

ProcessGroupRing::~ProcessGroupRing() { release_resources(); }

void ProcessGroupRing::release_resources() {
  if (!running_) return;
  shutdown();
  if (shared_->fork.forked()) return (void)running_.release();  // left alone, on purpose
  running_.reset();
  fusion_buffer_.clear();
  segment_.reset();
  shared_.reset();
}

void ProcessGroupRing::abort() {
  shared_->throw_if_forked();
  running_->engine->abort(c10::str("rank ", getRank(), " aborted the group"));
}

void ProcessGroupRing::shutdown() {
  if (shared_->fork.forked()) return;
  const WithoutGil no_gil;  // works under way may run Python callbacks
  if (running_->gpu) running_->gpu->stop();
  if (shared_->queue.busy())
    running_->engine->abort(c10::str("rank ", getRank(), " destroyed the group while calls were under way"));
  shared_->queue.stop();
  if (running_->wire) running_->wire->leave();
  if (shared_->mailbox)
    shared_->mailbox->stop(Error(ErrorKind::aborted, "the group was destroyed before the message was done"));
  shared_->completions.stop();
  if (segment_) segment_->leave();
  auto& living = process_wide<LivingGroups>();
  std::lock_guard lock(living.mutex);
  living.groups.erase(this);
}

void ProcessGroupRing::shutdown_all() {
  auto& living = process_wide<LivingGroups>();
  const WithoutGil no_gil;
  std::lock_guard lock(living.mutex);
  while (!living.groups.empty()) (*living.groups.begin())->shutdown();
  Completions::wait_for_detached(10 * kSecond);
}

void ProcessGroupRing::add_plan(const PlanFor& plan) {
  shared_->throw_if_forked();
  shared_->queue.run([&] { plan.add_to(*running_->engine); });
}

void ProcessGroupRing::register_plan(PlanFor plan) {
  add_plan(plan);
  std::lock_guard lock(gpu_mutex_);
  if (running_->gpu) running_->gpu->add(plan);
  registered_.push_back(std::move(plan));
}

std::shared_ptr<Engine> ProcessGroupRing::engine() const { return running_->engine; }

void ProcessGroupRing::use(std::shared_ptr<GpuEngine> gpu) {
  for (const PlanFor& plan : registered_) plan.add_to(*gpu);
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

// What makes the group's calls on tensors of a GPU; null if they go through the host's memory.
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
  if (!supportsTensorAlloc(0))
    invalid(
        "allocateTensor: the group has no arena: its option arena_bytes is 0, "
        "or its ranks share no memory");
  const auto type = c10::optTypeMetaToScalarType(options.dtype_opt()).value_or(at::kFloat);
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

std::chrono::milliseconds ProcessGroupRing::timeout_or_default(std::chrono::milliseconds timeout) const {
  constexpr std::chrono::hours kLongest{24 * 365 * 10};  // no nanosecond count overflows
  return std::min<std::chrono::milliseconds>(timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout, kLongest);
}

// Where this rank's GPU serves the group, the job is one for it; otherwise one for the CPU.
Job ProcessGroupRing::job(Collective collective, const TensorList& inputs, const TensorList& outputs) {
  collective.timeout = timeout_or_default(collective.timeout);
  at::Device device = at::kCPU;
  if (collective.operation != Operation::barrier) {
    device = device_of(inputs, outputs, name(collective.operation).data());
    if (device.is_cuda() && gpu_calls(device) == nullptr) {
      synchronize(device, name(collective.operation));  // what is under way may still read the outputs
      device = at::kCPU;
    }
  }
  Job job(collective, inputs, outputs, getRank(), getSize(), device);
  if (SettingUp::here) job.call.part_of = Operation::gpu_setup;
  return job;
}

template <class CallOptions>
c10::intrusive_ptr<Work> ProcessGroupRing::submit(OpType type, const CallOptions& opts, std::vector<Job> jobs) {
  TensorList inputs, outputs;
  for (const Job& job : jobs) {
    inputs.insert(inputs.end(), job.inputs.begin(), job.inputs.end());
    outputs.insert(outputs.end(), job.targets.begin(), job.targets.end());
  }
  for (const Job& job : jobs)
    if (job.device != jobs[0].device)
      invalid(name_of(type), ": tensors are on different devices: ", jobs[0].device, " and ", job.device,
              "; move them to one");
  if (!jobs.empty() && jobs[0].device.is_cuda())
    return submit_to_gpu({.type = type, .timeout = timeout_or_default(opts.timeout)}, opts.asyncOp, inputs,
                         std::move(outputs), std::move(jobs));
  return submit({.type = type, .timeout = timeout_or_default(opts.timeout)}, opts.asyncOp, inputs, std::move(outputs),
                [this, jobs = std::move(jobs)](std::uint64_t number) mutable {
                  Tally tally;
                  for (Job& job : jobs) {
                    job.call.number = number;
                    tally += job.agree(*running_->engine);
                    tally += job.run(*running_->engine);
                  }
                  return tally;
                });
}

c10::intrusive_ptr<Work> ProcessGroupRing::submit_to_gpu(CallLog::Call call, bool async, const TensorList& inputs,
                                                         TensorList outputs, std::vector<Job> jobs) {
  begin_call();
  call.sequence = ++collectives_;
  TensorList kept = inputs;
  for (Job& job : jobs) {
    job.call.number = call.sequence;
    if (!job.agreed) shared_->queue.run([&] { job.agree(*running_->engine); });
    for (const TensorList* tensors : {&job.inputs, &job.outputs, &job.targets})
      kept.insert(kept.end(), tensors->begin(), tensors->end());
  }
  GpuCalls& gpu = *running_->gpu;
  auto work = gpu.submit(call, async, inputs, std::move(outputs), std::move(kept), [&](const cuda::Stream& stream) {
    const at::NoGradGuard no_grad;
    for (Job& job : jobs) job.enqueue(gpu.engine(), stream);
  });
  if (async) coalesce(work);
  return work;
}

// What every call begins with.
void ProcessGroupRing::begin_call() {
  shared_->throw_if_forked();
  if (!described_.exchange(true, std::memory_order_relaxed)) shared_->log->describe(getGroupDesc());
}

// Calls `run`, which takes the call's number and returns a Tally, in its turn.
template <class Run>
c10::intrusive_ptr<Work> ProcessGroupRing::submit(CallLog::Call call, bool async, const TensorList& inputs,
                                                  TensorList outputs, Run run) {
  begin_call();
  call.sequence = ++collectives_;
  struct Task {
    c10::intrusive_ptr<CallWork> work;
    Run run;
    Tally tally;
    std::exception_ptr error;

    void attempt() {
      const at::NoGradGuard no_grad;
      try {
        work->start();
        tally = run(work->getSequencenumber());
      } catch (...) {
        error = std::current_exception();
      }
    }
  };
  Task task{
      c10::make_intrusive<CallWork>(shared_, getRank(), call, inputs, std::move(outputs)), std::move(run), {}, {}};
  const auto work = task.work;
  try {
    if (async) {
      const auto posted = std::make_shared<Task>(std::move(task));
      work->set_turn(shared_->queue.post([posted] { posted->attempt(); },
                                         [posted] { posted->work->end(posted->error, posted->tally); }));
      coalesce(work);
      return work;
    }
    shared_->queue.run([&] { task.attempt(); });
    if (task.error) std::rethrow_exception(task.error);
    work->end(nullptr, task.tally);
    return work;
  } catch (...) {
    work->end(std::current_exception());
    throw;
  }
}

bool ProcessGroupRing::call_now(OpType type, const Collective& collective, const at::Tensor& output,
                                const at::Tensor& input) {
  constexpr std::size_t kMostBlocks = 64;
  const auto suits = [](const at::Tensor& t) { return t.is_cpu() && has_memory(t) && is_plain(t); };
  const bool in_place = !collective.flat_input && !collective.flat_output;  // one tensor is both
  if (!suits(output) || (!in_place && !suits(input))) return false;
  if (collective.op != nullptr && *collective.op == c10d::ReduceOp::PREMUL_SUM) return false;
  if (at::hasCallbacks() || shared_->hooked || shared_->timing) return false;
  if (collective.root < 0 || collective.root >= getSize()) return false;
  const auto size = static_cast<std::size_t>(getSize());
  const std::size_t ins = collective.flat_input ? size : 1, outs = collective.flat_output ? size : 1;
  const std::size_t count = static_cast<std::size_t>(input.numel()) / ins, element = input.element_size();
  auto* const from = static_cast<std::byte*>(input.mutable_data_ptr());
  auto* const to = static_cast<std::byte*>(output.mutable_data_ptr());
  if (!in_place && (size > kMostBlocks || output.scalar_type() != input.scalar_type() ||
                    static_cast<std::size_t>(input.numel()) != count * ins ||
                    static_cast<std::size_t>(output.numel()) != count * outs ||
                    overlap(from, count * ins * element, to, count * outs * element)))
    return false;

  Call call;
  call.operation = collective.operation;
  call.root = collective.root;
  call.dtype = dtype_of(input.scalar_type(), name(call.operation).data());
  if (collective.op != nullptr) call.reduce_op = reduce_op_of(*collective.op);
  call.count = call.largest = count;
  const auto timeout = timeout_or_default(collective.timeout);
  call.timeout = std::chrono::nanoseconds(timeout).count();
  Engine::check(call, getSize());
  std::array<std::byte*, kMostBlocks> input_blocks, output_blocks;
  std::array<std::size_t, kMostBlocks> counts;
  for (std::size_t b = 0; b < std::max(ins, outs); ++b) {
    input_blocks[b] = from + b * count * element;
    output_blocks[b] = to + b * count * element;
    counts[b] = count;
  }
  const Buffers buffers{{{input_blocks.data(), ins}, {counts.data(), ins}},
                        {{output_blocks.data(), outs}, {counts.data(), outs}}};

  begin_call();
  call.number = ++collectives_;
  CallLog& log = *shared_->log;
  CallQueue::Turn turn(shared_->queue);
  const std::uint64_t id = log.begin({type, call.number, -1, timeout}, input, output, turn.came());
  Tally tally;
  try {
    if (!turn.came()) {
      turn.await();
      log.start(id);
    }
    tally = running_->engine->run(call, buffers);
  } catch (...) {
    log.end(id, type, false, tally);
    shared_->completions.post([shared = shared_] { shared->work_failed(); });
    throw;
  }
  log.end(id, type, true, tally);
  return true;
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  const Collective collective{.operation = Operation::all_reduce, .timeout = opts.timeout, .op = &opts.reduceOp};
  if (!opts.asyncOp && call_now(OpType::ALLREDUCE, collective, tensor, tensor)) return nullptr;
  return submit(OpType::ALLREDUCE, opts, list_of(job(collective, {tensor}, {tensor})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_coalesced(TensorList& given,
                                                               const c10d::AllreduceCoalescedOptions& opts) {
  TensorList tensors = given;
  copy_repeated(tensors);
  const Collective collective{.operation = Operation::all_reduce, .timeout = opts.timeout, .op = &opts.reduceOp};
  if (!tensors.empty() && device_of(tensors, {}, "all_reduce_coalesced").is_cuda()) {
    check_outputs(tensors, "all_reduce_coalesced");
    std::vector<Job> each;
    for (const at::Tensor& tensor : tensors) each.push_back(job(collective, {tensor}, {tensor}));
    return submit(OpType::ALLREDUCE_COALESCED, opts, std::move(each));
  }
  Fusion fusion(tensors);
  std::vector<Job> jobs;  // one a bundle
  for (const Fusion::Bundle& bundle : fusion.bundles()) {
    const at::Tensor& first = fusion.tensors()[bundle.first];
    jobs.push_back(job(collective, {first}, {first}));
    Call& call = jobs.back().call;
    call.count = call.largest = bundle.count;
    if (tensors.size() > 1) call.shape = fusion.shape();
  }
  return submit({.type = OpType::ALLREDUCE_COALESCED, .timeout = timeout_or_default(opts.timeout)}, opts.asyncOp,
                tensors, tensors,
                [this, fusion = std::move(fusion), jobs = std::move(jobs)](std::uint64_t number) mutable {
                  return sum_fused(fusion, jobs, number);
                });
}

// Bundles of several tensors go through memory of the group's; calls take turns, so that there is only one of it.
Tally ProcessGroupRing::sum_fused(const Fusion& fusion, std::vector<Job>& jobs, std::uint64_t number) {
  if (fusion_buffer_bytes_ < fusion.buffer_bytes()) {
    fusion_buffer_ = staging_memory(fusion.buffer_bytes());
    fusion_buffer_bytes_ = fusion.buffer_bytes();
  }
  Tally tally;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const Fusion::Bundle& bundle = fusion.bundles()[i];
    jobs[i].call.number = number;
    if (bundle.size() == 1) {
      tally += jobs[i].run(*running_->engine);
      continue;
    }
    auto* data = static_cast<std::byte*>(fusion_buffer_.get());
    fusion.pack(bundle, data);
    tally += running_->engine->run(jobs[i].call, {{{&data, 1}, {&bundle.count, 1}}, {{&data, 1}, {&bundle.count, 1}}});
    fusion.unpack(bundle, data);
  }
  return tally;
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu())
    invalid("all_reduce of a sparse tensor: it has layout ", tensor.layout(), " on ", tensor.device(),
            "; it must be sparse COO on the CPU");
  if (opts.reduceOp.op_ != c10d::ReduceOp::SUM)
    invalid("all_reduce of a sparse tensor: reduce op ", static_cast<int>(opts.reduceOp.op_), "; only SUM is defined");
  dtype_of(tensor.scalar_type(), "all_reduce of a sparse tensor");  // throws for those that are not supported
  const auto timeout = timeout_or_default(opts.timeout);
  return submit({.type = OpType::_ALLREDUCE_SPARSE, .timeout = timeout}, opts.asyncOp, {tensor}, {tensor},
                [this, tensor, timeout](std::uint64_t number) { return sum_sparse(tensor, timeout, number); });
}

// All ranks tell each other how many elements they have, then which, and each sums them all.
Tally ProcessGroupRing::sum_sparse(const at::Tensor& tensor, std::chrono::milliseconds timeout, std::uint64_t number) {
  const auto n = static_cast<std::size_t>(getSize());
  const at::Tensor own = tensor.coalesce();
  const auto gather = [&](const at::Tensor& input, TensorList outputs, Tally& tally) {
    Job j = job({.operation = Operation::all_gather, .timeout = timeout}, {input}, outputs);
    // The tensors' dimensions are part of the call, so that ranks that differ in them find out.
    for (int64_t d : own.sizes()) j.call.shape = mix(j.call.shape, static_cast<std::uint64_t>(d));
    j.call.shape = mix(j.call.shape, static_cast<std::uint64_t>(own.sparse_dim()) << 8 |
                                         static_cast<std::uint64_t>(own.scalar_type()));
    j.call.part_of = Operation::all_reduce;
    j.call.number = number;
    tally += j.run(*running_->engine);
    return outputs;
  };
  Tally tally;
  TensorList counts, indices, values;
  for (std::size_t r = 0; r < n; ++r) counts.push_back(at::empty({1}, at::kLong));
  gather(at::full({1}, own._nnz(), at::kLong), counts, tally);
  for (const at::Tensor& count : counts) {
    auto value_sizes = own.values().sizes().vec();
    value_sizes[0] = count.item<int64_t>();
    indices.push_back(at::empty({own.sparse_dim(), value_sizes[0]}, at::kLong));
    values.push_back(at::empty(value_sizes, own.values().options()));
  }
  gather(own.indices(), indices, tally);
  gather(own.values(), values, tally);
  write_back(tensor, at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), own.sizes()).coalesce());
  return tally;
}

c10::intrusive_ptr<Work> ProcessGroupRing::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  const Collective collective{.operation = Operation::broadcast, .timeout = opts.timeout, .root = root_of(opts)};
  if (!opts.asyncOp && call_now(OpType::BROADCAST, collective, tensor, tensor)) return nullptr;
  return submit(OpType::BROADCAST, opts, list_of(job(collective, {tensor}, {tensor})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "reduce");
  const Collective collective{
      .operation = Operation::reduce, .timeout = opts.timeout, .root = root_of(opts), .op = &opts.reduceOp};
  return submit(OpType::REDUCE, opts, list_of(job(collective, {tensor}, {tensor})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only(inputs, "all_gather");
  check_list("all_gather: output_tensors", outputs.size(), 1);
  check_list("all_gather: tensor_list", outputs[0].size(), getSize());
  return submit(OpType::ALLGATHER, opts,
                list_of(job({.operation = Operation::all_gather, .timeout = opts.timeout}, {input}, outputs[0])));
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  check_list("all_gather_coalesced: output_tensor_lists", outputs.size(), getSize());
  for (const TensorList& of_rank : outputs) check_pairs("all_gather_coalesced", of_rank, inputs);
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TensorList blocks;
    for (const TensorList& of_rank : outputs) blocks.push_back(of_rank[i]);
    jobs.push_back(job({.operation = Operation::all_gather, .timeout = opts.timeout}, {inputs[i]}, blocks));
  }
  return submit(OpType::ALLGATHER_COALESCED, opts, std::move(jobs));
}

c10::intrusive_ptr<Work> ProcessGroupRing::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& opts) {
  const Collective collective{.operation = Operation::all_gather, .timeout = opts.timeout, .flat_output = true};
  if (!opts.asyncOp && call_now(OpType::_ALLGATHER_BASE, collective, output, input)) return nullptr;
  TensorList outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::AllgatherOptions& opts) {
  check_pairs("all_gather", outputs, inputs);
  const Collective collective{.operation = Operation::all_gather, .timeout = opts.timeout, .flat_output = true};
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) jobs.push_back(job(collective, {inputs[i]}, {outputs[i]}));
  return submit(OpType::_ALLGATHER_BASE, opts, std::move(jobs));
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  check_list("reduce_scatter: input_tensors", inputs.size(), 1);
  check_list("reduce_scatter: input_list", inputs[0].size(), getSize());
  const Collective collective{.operation = Operation::reduce_scatter, .timeout = opts.timeout, .op = &opts.reduceOp};
  return submit(OpType::REDUCE_SCATTER, opts, list_of(job(collective, inputs[0], {output})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  const Collective collective{
      .operation = Operation::reduce_scatter, .timeout = opts.timeout, .op = &opts.reduceOp, .flat_input = true};
  if (!opts.asyncOp && call_now(OpType::_REDUCE_SCATTER_BASE, collective, output, input)) return nullptr;
  TensorList outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::ReduceScatterOptions& opts) {
  check_pairs("reduce_scatter", outputs, inputs);
  const Collective collective{
      .operation = Operation::reduce_scatter, .timeout = opts.timeout, .op = &opts.reduceOp, .flat_input = true};
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) jobs.push_back(job(collective, {inputs[i]}, {outputs[i]}));
  return submit(OpType::_REDUCE_SCATTER_BASE, opts, std::move(jobs));
}

c10::intrusive_ptr<Work> ProcessGroupRing::gather(std::vector<TensorList>& outputs, TensorList& inputs,
                                                  const c10d::GatherOptions& opts) {
  const at::Tensor& input = only(inputs, "gather");
  const bool is_root = getRank() == opts.rootRank;
  if (is_root) {
    check_list("gather: output_tensors", outputs.size(), 1);
    check_list("gather: gather_list", outputs[0].size(), getSize());
  } else if (!outputs.empty() && !outputs[0].empty()) {
    invalid("gather: gather_list must be given on the destination rank only");
  }
  const Collective collective{.operation = Operation::gather, .timeout = opts.timeout, .root = root_of(opts)};
  return submit(OpType::GATHER, opts, list_of(job(collective, {input}, is_root ? outputs[0] : TensorList{})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                                   const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "scatter");
  const bool is_root = getRank() == opts.rootRank;
  if (is_root) {
    check_list("scatter: input_tensors", inputs.size(), 1);
    check_list("scatter: scatter_list", inputs[0].size(), getSize());
  } else if (!inputs.empty() && !inputs[0].empty()) {
    invalid("scatter: scatter_list must be given on the source rank only");
  }
  const Collective collective{.operation = Operation::scatter, .timeout = opts.timeout, .root = root_of(opts)};
  return submit(OpType::SCATTER, opts, list_of(job(collective, is_root ? inputs[0] : TensorList{}, {output})));
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                         std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits,
                                                         const c10d::AllToAllOptions& opts) {
  // Either all ranks give split sizes or none does, so without any, all know that their blocks are equal.
  const bool equal = output_splits.empty() && input_splits.empty();
  const Collective collective{
      .operation = Operation::all_to_all, .timeout = opts.timeout, .flat_input = equal, .flat_output = equal};
  if (equal && !opts.asyncOp && call_now(OpType::ALLTOALL_BASE, collective, output, input)) return nullptr;
  if (equal) return submit(OpType::ALLTOALL_BASE, opts, list_of(job(collective, {input}, {output})));
  Job j = job(collective, {input}, {output});
  j.input = cut(j.inputs[0], split_blocks(input, input_splits, getSize(), "all_to_all: input"));
  j.output = cut(j.outputs[0], split_blocks(output, output_splits, getSize(), "all_to_all: output"));
  return submit(OpType::ALLTOALL_BASE, opts, list_of(std::move(j)));
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall(TensorList& outputs, TensorList& inputs,
                                                    const c10d::AllToAllOptions& opts) {
  check_list("all_to_all: input_tensor_list", inputs.size(), getSize());
  check_list("all_to_all: output_tensor_list", outputs.size(), getSize());
  return submit(OpType::ALLTOALL, opts,
                list_of(job({.operation = Operation::all_to_all, .timeout = opts.timeout}, inputs, outputs)));
}

c10::intrusive_ptr<Work> ProcessGroupRing::barrier(const c10d::BarrierOptions& opts) {
  return submit(OpType::BARRIER, opts,
                list_of(job({.operation = Operation::barrier, .timeout = opts.timeout}, {}, {})));
}

void ProcessGroupRing::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  shared_->throw_if_forked();
  if (!segment_)
    invalid(
        "monitored_barrier: the group's ranks share no memory, which it needs; use barrier(), whose timeout names the "
        "rank that was waited for");
  RECORD_FUNCTION("ringreduce:monitored_barrier", std::vector<c10::IValue>{});
  std::lock_guard lock(barrier_mutex_);
  monitored_barrier(*segment_, settings_.engine.patience,
                    std::chrono::nanoseconds(timeout_or_default(opts.timeout)).count(), wait_all_ranks);
}

void ProcessGroupRing::add_link(int peer, int socket, std::string path) {
  if (!segment_ || peer < 0 || peer >= getSize() || !segment_->elsewhere(peer)) {
    close(socket);
    invalid(c10::str("add_link: peer is ", peer, ", which is no rank of this group on another host"));
  }
  segment_->links()->add(peer, socket, std::move(path));
}

std::vector<Links::Counters> ProcessGroupRing::links() const {
  if (!segment_ || segment_->links() == nullptr) return {};
  return segment_->links()->counters();
}

void ProcessGroupRing::startCoalescing() {
  shared_->throw_if_forked();
  std::lock_guard lock(coalescing_mutex_);
  coalescing_[std::this_thread::get_id()].clear();
}

void ProcessGroupRing::coalesce(c10::intrusive_ptr<Work> work) {
  std::lock_guard lock(coalescing_mutex_);
  const auto works = coalescing_.find(std::this_thread::get_id());
  if (works != coalescing_.end()) works->second.push_back(std::move(work));
}

c10::intrusive_ptr<Work> ProcessGroupRing::endCoalescing() {
  std::lock_guard lock(coalescing_mutex_);
  const auto works = coalescing_.extract(std::this_thread::get_id());
  if (works.empty()) invalid("endCoalescing: this thread has not called startCoalescing before");
  return c10::make_intrusive<CoalescedWork>(getRank(), std::move(works.mapped()));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupRing::split(const c10::intrusive_ptr<c10d::Store>& /*store*/,
                                                          const std::vector<int>& ranks,
                                                          const c10::intrusive_ptr<Options>& opts) {
  shared_->throw_if_forked();
  for (int r : ranks)
    if (r < 0 || r >= getSize() || std::count(ranks.begin(), ranks.end(), r) > 1)
      invalid("split: the ranks are ", ranks, "; they must be different ones of 0 to ", getSize() - 1);
  if (std::find(ranks.begin(), ranks.end(), getRank()) == ranks.end()) return nullptr;
  const auto timeout = opts ? opts->timeout : timeout_.load();
  return settings_.regroup(ranks, "split", timeout);
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
  return settings_.regroup(ranks, "shrink", opts ? opts->timeout : timeout_.load());
}

c10::intrusive_ptr<Work> ProcessGroupRing::post(TensorList& tensors, OpType type, int peer, int tag) {
  begin_call();
  const bool sends = type == OpType::SEND;
  const char* what = sends ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, what);
  check_tensor(tensor, what);
  if (type != OpType::RECVANYSOURCE && (peer < 0 || peer >= getSize() || peer == getRank()))
    invalid(what, ": the peer is rank ", peer, "; it must be another rank of the group, 0 to ", getSize() - 1);
  if (getSize() == 1) invalid(what, ": the group has no other rank");
  if (tag < 0) invalid(what, ": the tag is ", tag, "; it must be 0 or more");
  if (!sends) check_outputs(tensors, what);
  if (running_->wire) return delegate(tensors, type, peer, tag);
  const at::NoGradGuard no_grad;
  const bool staged = !is_plain(tensor, at::kCPU);
  if (staged && tensor.is_cuda()) synchronize(tensor.device(), what);
  const at::Tensor buffer = !staged ? tensor
                            : sends ? plain(tensor, at::kCPU)
                                    : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));

  auto message = std::make_shared<Message>();
  message->sends = sends;
  message->peer = peer;
  message->tag = static_cast<std::uint64_t>(tag);
  message->dtype = dtype_of(tensor.scalar_type(), what);
  message->data = static_cast<std::byte*>(buffer.mutable_data_ptr());
  message->bytes = buffer.nbytes();
  message->timeout = std::chrono::nanoseconds(timeout_.load()).count();
  const CallLog::Call call{.type = type, .sequence = ++messages_, .peer = peer, .timeout = timeout_};
  auto work = c10::make_intrusive<MessageWork>(shared_, getRank(), call, tensors, message);
  work->start();
  message->on_done = [work, tensor, buffer, copy_back = staged && !sends](std::exception_ptr error) {
    try {
      if (copy_back && !error) write_back(tensor, buffer);
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
  coalesce(work);
  return work;
}

// A message of the backend beneath, whose Work it gives, and whose errors.
c10::intrusive_ptr<Work> ProcessGroupRing::delegate(TensorList& tensors, OpType type, int peer, int tag) {
  if (!tensors[0].is_cpu())
    invalid(type == OpType::SEND ? "send" : "recv", ": the tensor is on ", tensors[0].device(),
            "; over transport='gloo' messages are of CPU tensors: pass its cpu()");
  if (tag == C10dPointToPoint::kTag) invalid("the tag ", tag, " is that of collectives; take another");
  const auto backend = running_->wire->backend();
  auto work = type == OpType::SEND   ? backend->send(tensors, peer, tag)
              : type == OpType::RECV ? backend->recv(tensors, peer, tag)
                                     : backend->recvAnysource(tensors, tag);
  coalesce(work);
  return work;
}

c10::intrusive_ptr<Work> ProcessGroupRing::send(TensorList& tensors, int destination, int tag) {
  return post(tensors, OpType::SEND, destination, tag);
}

c10::intrusive_ptr<Work> ProcessGroupRing::recv(TensorList& tensors, int source, int tag) {
  return post(tensors, OpType::RECV, source, tag);
}

c10::intrusive_ptr<Work> ProcessGroupRing::recvAnysource(TensorList& tensors, int tag) {
  return post(tensors, OpType::RECVANYSOURCE, kAnySource, tag);
}

}  // namespace ringreduce
