// The torch.distributed backend "ringreduce": tensors and c10d options in, calls of the engine out.
//
// Every collective is the same list: check the arguments, describe the call, lay out the tensors (staging those that
// are not contiguous), queue it, and give back a Work. What c10d may call from several threads is thread-safe; but a
// collective that begins while another thread is in one of the same group throws mismatch, and breaks the group.
//
// Synchronous calls (opts.asyncOp false) have ended when they return, and throw. The common ones return no Work, since
// there is nothing left to wait for. Asynchronous ones run in the group's progress thread; their Work throws from
// wait(). The tensors of a call under way must not be touched.
//
// In a process that was forked after the group was made, calls throw, and the group's destruction leaves the parent's
// alone.
//
// What is made of several calls of the engine (a coalesced list, a sparse sum, an all_to_all) has its timeout for each.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "engine/engine.h"
#include "process_group/c10d_point_to_point.h"
#include "process_group/call_log.h"
#include "process_group/compat.h"
#include "process_group/fusion.h"
#include "process_group/job.h"
#include "process_group/work.h"
#include "transport/links.h"

namespace ringreduce {

class GpuCalls;

class ProcessGroupRing : public c10d::Backend {
 public:
  // Makes the group of some of this group's ranks, in all of them; takes the group, their ranks in it, in the order
  // they are to have there, and why.
  using Regroup =
      std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Backend>&, const std::vector<int>&,
                                                      const std::string&, std::chrono::milliseconds)>;

  // Called once, in all ranks, when the group first sees CUDA tensors: takes the group, the index of this rank's
  // device, and an NCCL communicator that it is to use, or 0. Gives the group an engine for them by use(), or does not:
  // then such tensors go through the host's memory.
  using JoinGpus = std::function<void(const c10::intrusive_ptr<c10d::Backend>&, int, std::uint64_t)>;

  struct Settings {
    Engine::Options engine;
    Packing packing = Packing::none;  // of what all_reduce of float32 sends to other hosts
    std::chrono::milliseconds timeout{0};
    std::string name;                        // as torch knows the group
    std::string id, job;                     // see CallLog::Group
    std::vector<std::int64_t> global_ranks;  // of the group's ranks
    std::size_t recorded_calls = 0;          // how many the flight recorder keeps
    bool dump_when_broken = false;           // whether it writes them when the group breaks
    bool print_calls = false;                // whether each call gives a line on standard error
    Regroup regroup;
    JoinGpus join_gpus;
    Engine::Ask ask;           // for plans when a call first needs one
    std::string topology;      // what was planned over the machine's links, as Python wrote it; kept for Python
    std::uint64_t number = 0;  // which of the process's groups it is; kept for Python
  };

  // A group of ranks that share memory.
  ProcessGroupRing(std::shared_ptr<Team> team, Settings settings);
  // A group of ranks that another backend joins. Plans may have up to `channels` channels. Messages go through that
  // backend; there is no shared memory and no monitored barrier.
  ProcessGroupRing(std::shared_ptr<C10dPointToPoint> wire, int channels, Settings settings);
  ~ProcessGroupRing() override;

  const std::string getBackendName() const override { return "ringreduce"; }
  const std::string& topology() const { return settings_.topology; }
  std::uint64_t number() const { return settings_.number; }
  const std::string& job_id() const { return settings_.job; }
  // The ranks that have ended or are out of reach, with which of these it is: see Fate::how_gone(). Empty where ranks
  // share no memory: there deaths show only as errors of calls.
  std::map<int, std::string> ended() const;
  // Throws the group's error if the system has refused this rank something: the others may take it for ended.
  void throw_own_failure() const;
  // See Engine::set_least_slice_bytes().
  void set_least_slice_bytes(std::size_t bytes);
  // Makes `why` the group's error: the system has refused this rank something for a call in which the others wait.
  void fail(const std::string& why);
  // Makes the death of a rank the group's error now, and not when somebody who waits looks for it.
  void notice();
  // When the group breaks, its survivors will make another one by themselves, and at once. To write the flight record
  // takes as much of a core as that does, so it is written 100 ms later. A process that ends before writes it then; one
  // that is killed does not.
  void survivors_go_on();

  WorkPtr allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  // Of float32, float16 or bfloat16 on the CPU: what goes to other hosts is packed, by default as the group's settings
  // say. The two narrow types are reduced as float32.
  WorkPtr allreduce_packed(TensorList& tensors, std::optional<Packing> packing, std::shared_ptr<Feedback> feedback,
                           const c10d::AllreduceOptions& opts);
  // By an operator of the user's own, in the calling thread, of a tensor on the CPU whose elements lie in its bytes one
  // after the other. Throws operator_failed on the ranks that got a result on which the operator failed.
  void allreduce_by(const Operator& op, const at::Tensor& tensor);
  // Why the group cannot do that, the same on all ranks; empty if it can.
  std::string why_not(std::size_t element_bytes) const;
  // Sums sparse COO tensors; other operations are refused. Each rank gets the sum over the union of all ranks' indices,
  // coalesced.
  WorkPtr allreduce_sparse(TensorList& tensors, const c10d::AllreduceOptions& opts) override;
  // As one call for many small tensors: see process_group/fusion.h.
  WorkPtr allreduce_coalesced(TensorList& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(TensorList& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  // outputs[r][i] receives inputs[i] of rank r.
  WorkPtr allgather_coalesced(std::vector<TensorList>& outputs, TensorList& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr gather(std::vector<TensorList>& outputs, TensorList& inputs, const c10d::GatherOptions& opts) override;
#if RINGREDUCE_HAS_GATHER_SINGLE
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
#endif
  WorkPtr scatter(TensorList& outputs, std::vector<TensorList>& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(TensorList& outputs, TensorList& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  WorkPtr send(TensorList& tensors, int destination, int tag) override;
  WorkPtr recv(TensorList& tensors, int source, int tag) override;
  WorkPtr recvAnysource(TensorList& tensors, int tag) override;

  // Names the ranks that did not come; see engine/monitored_barrier.h.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // The second returns the asynchronous calls that its thread has made since the first as one Work. The first drops
  // what an exception has kept from the second. supportsCoalescing() remains false, as with Gloo: then
  // batch_isend_irecv returns a Work for every message, and the order of sends and receives does not matter in any
  // case.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Makes a smaller group. All ranks that are in it must call, and no other.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override;
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int flags,
                                           const c10::intrusive_ptr<Options>& opts) override;

  void setSequenceNumberForGroup() override {}  // all ranks count from the group's birth
  uint64_t getSequenceNumberForGroup() override { return collectives_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  c10d::ErrorType getError() override;
  void abort() override;
  // Ends what is under way, and all threads. Idempotent; throws mismatch, once, if this rank has made other calls than
  // a peer that has left before it. The group has ended then, too.
  void shutdown() override;
  // Shuts down all groups of this process, and warns where shutdown() would throw. For the process's end, while Python
  // is still there to be called back.
  static void shutdown_all();
  // Called when the last reference is gone but weak ones, such as that of direct_calls.cpp, which keep the object: the
  // memory that it shares with others is let go of at once.
  void release_resources() override;

  // Memory that collectives read in place instead of copying it first, from the process's arena.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return team_ && team_->arena() != nullptr; }
  at::Tensor allocate(long size, const at::TensorOptions& options);
  // The same for DistributedDataParallel, which puts its buckets there. It reduces complex gradients as pairs of real
  // numbers, and makes that view of its own memory, but not of memory that it got here. So it gets the view.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  // From the next call on: what Work::getDuration needs; and `hook` called, in a thread of ours, after each.
  void enableCollectivesTiming() override { shared_->timing = true; }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  // Returns when all collectives made so far, and what hangs on them, have ended.
  void waitForPendingWorks() override;

  // Profiles show the group's calls as those of Gloo. To be called before the first one.
  void show_as_gloo() { shared_->as_gloo = true; }

  // Makes a synchronous call on plain tensors, without c10d's lists and Work. False, with nothing done, if the call
  // takes more than that, or the arguments are wrong. `tells_autograd`: that the output is written. `held`: what this
  // thread releases before anything that may take long.
  bool call_now(const Collective& collective, const at::Tensor& output, const at::Tensor& input,
                bool tells_autograd = false, HeldLock* held = nullptr);
  // The rank in the group of a rank of the world; -1 if that is not in it.
  int group_rank(int global_rank) const {
    const auto& ranks = settings_.global_ranks;
    const auto found = std::find(ranks.begin(), ranks.end(), global_rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  }

  // Links to ranks on other hosts: takes over a connected socket (see Links::add; throws for a rank of this host), and
  // what went over them.
  void add_link(int peer, int socket, std::string path);
  std::vector<Links::Counters> links() const;

  // Adds a plan and makes it the one for calls on CPU tensors up to `most_bytes`, in slices of `slice_bytes` (see
  // Engine::choose). Collective: all ranks must do it in the same order.
  void add_plan(const Engine::PlanFor& plan);
  // The same for CUDA tensors too, also if the group has no engine for them yet: a user's plan.
  void register_plan(Engine::PlanFor plan);

  // Calls join_gpus with a communicator (an ncclComm_t as a number) that is on device `index`. Throws if it was called.
  void use_nccl(int index, std::uint64_t communicator);

  // For join_gpus.
  void use(std::shared_ptr<GpuEngine> gpu);
  std::shared_ptr<Engine> engine() const;

 private:
  struct Running;

  ProcessGroupRing(std::shared_ptr<Engine> engine, const Settings& settings);
  c10::intrusive_ptr<c10d::Backend> regroup(const std::vector<int>& ranks, const char* why,
                                            const c10::intrusive_ptr<Options>& opts);
  Packing packing_of(const Call& call) const;
  Call described(const Collective& collective, const at::Tensor& input, std::size_t count) const;
  Job job(Collective collective, const TensorList& inputs, const TensorList& outputs);
  void join_gpus(int index, std::uint64_t communicator);
  GpuCalls* gpu_calls(at::Device device);
  // Makes the call in its turn: of these jobs, of one job for all tensors, or (submit_each) of one job for each pair of
  // input and output.
  WorkPtr submit(const Collective& collective, std::vector<Job> jobs);
  WorkPtr submit(const Collective& collective, const TensorList& inputs, const TensorList& outputs);
  WorkPtr submit_each(const Collective& collective, const TensorList& inputs, const TensorList& outputs);
  // Makes a call with one tensor on each side, by call_now() where that is possible.
  WorkPtr call(const Collective& collective, const at::Tensor& output, const at::Tensor& input);
  WorkPtr submit_to_gpu(const Collective& collective, const TensorList& inputs, TensorList outputs,
                        std::vector<Job> jobs);
  // Calls `run`, which takes the call's number, in its turn.
  using Run = std::function<Tally(std::uint64_t)>;
  WorkPtr take_turn(const Collective& collective, const TensorList& inputs, TensorList outputs, Run run);
  // A message, whose values are, or will be, in `buffer`: over the other backend, or by the mailbox.
  WorkPtr post(TensorList& tensors, c10d::OpType type, int peer, int tag);
  WorkPtr pass_on(c10d::OpType type, int peer, int tag, const at::Tensor& tensor, const at::Tensor& buffer);
  WorkPtr put_in_mailbox(c10d::OpType type, int peer, int tag, const at::Tensor& tensor, const at::Tensor& buffer,
                         DType dtype);
  void coalesce(WorkPtr work);
  Tally sum_fused(const Fusion& fusion, std::vector<Job>& jobs, std::uint64_t number);
  Tally sum_sparse(const at::Tensor& tensor, const Collective& collective, std::uint64_t number);
  // f(), which makes a call. Where that fails before the engine has the call, or after, the group breaks: no peer may
  // wait for this rank. Wrong arguments leave the group as it is.
  template <class F>
  auto heard(const char* what, F f) const -> decltype(f());
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  // Begins a call: refuses it in a forked child, and names the group in the log. The second function also counts the
  // call and returns its entry for the log.
  void begin_call();
  CallLog::Call begin_call(const Collective& collective);

  Settings settings_;
  std::shared_ptr<WorkSurroundings> shared_;
  std::shared_ptr<Team> team_;  // null where ranks share no memory
  std::shared_ptr<Running> running_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> collectives_{0}, messages_{0};
  std::atomic<bool> described_{false};
  c10::DataPtr fusion_buffer_;
  std::size_t fusion_buffer_bytes_ = 0;
  std::mutex barrier_mutex_, coalescing_mutex_, gpu_mutex_;
  bool gpus_joined_ = false;
  std::vector<Engine::PlanFor> registered_;                     // what users have added, for an engine to come
  std::map<std::thread::id, std::vector<WorkPtr>> coalescing_;  // since startCoalescing
};

}  // namespace ringreduce
