// The torch.distributed backend "ringreduce": tensors and c10d options in, calls of the engine out.
//
// Every collective is the same list: check the arguments, describe the call, lay out the tensors (staging those that
// are not contiguous), queue it, and give back a Work. What c10d may call from several threads is thread-safe; calls
// of one group from several threads are brought into some order, which must then be the same on all ranks.
//
// Synchronous calls (opts.asyncOp false) have ended when they return, and throw. Asynchronous ones run in the group's
// progress thread; their Work throws from wait(). The tensors of a call under way must not be touched.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "engine/completions.h"
#include "engine/engine.h"
#include "engine/mailbox.h"
#include "engine/queue.h"

namespace ringreduce {

class ProcessGroupRing : public c10d::Backend {
 public:
  ProcessGroupRing(std::shared_ptr<const Segment> segment, const Engine::Options& options,
                   std::chrono::milliseconds timeout);
  ~ProcessGroupRing() override;

  const std::string getBackendName() const override { return "ringreduce"; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  void setSequenceNumberForGroup() override {}  // all ranks count from the group's birth
  uint64_t getSequenceNumberForGroup() override { return calls_; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void abort() override;
  void shutdown() override;

  // Adds a plan and makes it the one for calls up to `most_bytes`. Collective: all ranks must do it in the same order.
  void add_plan(const std::string& collective, std::vector<std::int32_t> lowered, std::uint64_t digest,
                std::uint64_t most_bytes);

 private:
  struct Job;

  c10::intrusive_ptr<c10d::Work> submit(std::vector<Job> jobs, c10d::OpType type, bool async);
  Job job(Operation operation, std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
          std::chrono::milliseconds timeout) const;
  c10::intrusive_ptr<c10d::Work> post(std::vector<at::Tensor>& tensors, c10d::OpType type, int peer, int tag);
  void set_reduction(Job& job, const c10d::ReduceOp& op) const;
  void run(Job& job);
  void agree_on_blocks(Job& job);

  const std::shared_ptr<const Segment> segment_;
  Engine engine_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> calls_{0};
  Completions completions_;
  CallQueue queue_;
  const std::shared_ptr<Mailbox> mailbox_;
};

}  // namespace ringreduce
