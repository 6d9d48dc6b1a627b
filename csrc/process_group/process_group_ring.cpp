#include "process_group/process_group_ring.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <Python.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <numeric>

namespace ringreduce {
namespace {

using c10d::OpType;
using c10d::Work;
using TensorList = std::vector<at::Tensor>;

template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Error(ErrorKind::invalid_argument, c10::str(parts...));
}

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return DType::float64;
    case at::kFloat:
      return DType::float32;
    case at::kHalf:
      return DType::float16;
    case at::kBFloat16:
      return DType::bfloat16;
    case at::kFloat8_e4m3fn:
      return DType::float8_e4m3fn;
    case at::kFloat8_e5m2:
      return DType::float8_e5m2;
    case at::kChar:
      return DType::int8;
    case at::kShort:
      return DType::int16;
    case at::kInt:
      return DType::int32;
    case at::kLong:
      return DType::int64;
    case at::kByte:
      return DType::uint8;
    case at::kBool:
      return DType::boolean;
    case at::kComplexFloat:
      return DType::complex64;
    case at::kComplexDouble:
      return DType::complex128;
    default:
      invalid("tensors of dtype ", c10::toString(type),
              " are not supported; convert the tensor, or view it as an integer type");
  }
}

ReduceOp reduce_op_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::sum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::avg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::product;
    case c10d::ReduceOp::MIN:
      return ReduceOp::min;
    case c10d::ReduceOp::MAX:
      return ReduceOp::max;
    case c10d::ReduceOp::BAND:
      return ReduceOp::band;
    case c10d::ReduceOp::BOR:
      return ReduceOp::bor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::bxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::premul_sum;
    default:
      invalid("reduce op ", static_cast<int>(op.op_), " is not one of c10d's");
  }
}

double factor_of(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1.0;
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (supplement == nullptr) invalid("premul_sum comes without its factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>() : supplement->double_factor;
}

const at::Tensor& only(const TensorList& tensors, const char* what) {
  if (tensors.size() != 1) invalid(what, " takes one tensor, got ", tensors.size());
  return tensors[0];
}

void check_device(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu()) invalid("tensor is on ", tensor.device(), "; backend ringreduce serves CPU tensors");
  if (tensor.layout() != at::kStrided)
    invalid("tensor has layout ", tensor.layout(), "; backend ringreduce serves strided tensors");
}

void check_output(const at::Tensor& tensor) {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    invalid("a tensor to be written has several elements in one place (it is expanded); pass a contiguous copy");
}

bool is_plain(const at::Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }
at::Tensor plain(const at::Tensor& t) { return is_plain(t) ? t : t.resolve_conj().resolve_neg().contiguous(); }

// A finished or pending collective.
class CallWork : public Work {
 public:
  CallWork(int rank, OpType type, TensorList outputs) : Work(rank, type), outputs_(std::move(outputs)) {}

  // Ends the work: waiters first, then what hangs on its future, for which `completions` lends a thread.
  void end(std::exception_ptr error, Completions* completions = nullptr) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      std::lock_guard<std::mutex> lock(future_mutex_);
      ended_ = true;
      error_ = error;
      future = future_;
    }
    finish(error);
    if (!future) return;
    const auto self = c10::intrusive_ptr<CallWork>::unsafe_reclaim_from_nonowning(this);
    completions->post([self, future, error] { self->settle(*future, error); });
  }

  std::vector<at::Tensor> result() override { return outputs_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (ended_) settle(*future_, error_);  // otherwise end() does
    }
    return future_;
  }

 private:
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
    if (error)
      future.setError(error);
    else
      future.markCompleted(at::IValue(outputs_));
  }

  const TensorList outputs_;
  std::mutex future_mutex_;
  bool ended_ = false;
  std::exception_ptr error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message; whoever waits for it drives the mailbox, which lives as long as any of its works.
class MessageWork : public CallWork {
 public:
  MessageWork(int rank, OpType type, TensorList tensors, std::shared_ptr<Mailbox> mailbox,
              std::shared_ptr<Message> message)
      : CallWork(rank, type, std::move(tensors)), mailbox_(std::move(mailbox)), message_(std::move(message)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Nanoseconds patience = timeout == kNoTimeout ? kForever : std::chrono::nanoseconds(timeout).count();
    if (!isCompleted()) mailbox_->wait(message_, patience);
    return Work::wait(kNoTimeout);
  }
  int sourceRank() const override { return message_->peer; }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<Message> message_;
};

}  // namespace

// A call with its tensors, laid out for the engine.
struct ProcessGroupRing::Job {
  Call call;
  bool uneven = false;         // all_to_all: ranks must first agree on the blocks
  TensorList inputs, outputs;  // contiguous
  TensorList targets;          // the user's outputs; those that are not outputs[i] itself are filled at the end
  std::vector<std::byte*> input_data, output_data;
  std::vector<std::size_t> input_count, output_count;

  // One flat tensor as the blocks whose sizes are `counts`.
  void blocks_of(const at::Tensor& flat, std::vector<std::size_t> counts, std::vector<std::byte*>& data,
                 std::vector<std::size_t>& count) const {
    auto* at = static_cast<std::byte*>(flat.mutable_data_ptr());
    data.clear();
    for (std::size_t n : counts) {
      data.push_back(at);
      at += n * size_of(call.dtype);
    }
    count = std::move(counts);
  }
};

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<const Segment> segment, const Engine::Options& options,
                                   std::chrono::milliseconds timeout)
    : Backend(segment->rank(), segment->size()),
      segment_(std::move(segment)),
      engine_(segment_, options),
      timeout_(timeout),
      mailbox_(std::make_shared<Mailbox>(segment_, options.spins)) {
  init();
}

ProcessGroupRing::~ProcessGroupRing() { shutdown(); }

void ProcessGroupRing::abort() { engine_.abort(c10::str("rank ", getRank(), " aborted the group")); }

void ProcessGroupRing::shutdown() {
  // Works under way may run Python callbacks: do not keep the interpreter from them while waiting for their end.
  const bool has_gil = Py_IsInitialized() != 0 && PyGILState_Check() != 0;
  PyThreadState* saved = has_gil ? PyEval_SaveThread() : nullptr;
  if (queue_.busy()) engine_.abort(c10::str("rank ", getRank(), " destroyed the group while calls were under way"));
  queue_.stop();
  mailbox_->stop(Error(ErrorKind::aborted, "the group was destroyed before the message was done"));
  completions_.stop();
  if (saved != nullptr) PyEval_RestoreThread(saved);
}

void ProcessGroupRing::add_plan(const std::string& collective, std::vector<std::int32_t> lowered, std::uint64_t digest,
                                std::uint64_t most_bytes) {
  const Operation operation = operation_named(collective);
  queue_.run([&] { engine_.choose(operation, most_bytes, engine_.add_plan(operation, std::move(lowered), digest)); });
}

// Inputs and outputs block by block, in c10d's order. All blocks of a call have one dtype.
ProcessGroupRing::Job ProcessGroupRing::job(Operation operation, TensorList inputs, TensorList outputs,
                                            std::chrono::milliseconds timeout) const {
  Job job;
  job.call.operation = operation;
  job.call.timeout = std::chrono::nanoseconds(timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout).count();
  const at::Tensor* first = !inputs.empty() ? &inputs[0] : !outputs.empty() ? &outputs[0] : nullptr;
  if (first == nullptr) return job;
  for (const TensorList* side : {&inputs, &outputs})
    for (const at::Tensor& t : *side) {
      check_device(t);
      if (t.scalar_type() != first->scalar_type())
        invalid(name(operation), ": tensors have different dtypes: ", t.scalar_type(), " and ", first->scalar_type());
    }
  const at::NoGradGuard no_grad;
  job.call.dtype = dtype_of(first->scalar_type());
  for (const at::Tensor& t : outputs) check_output(t);
  if (operation == Operation::all_to_all)  // a block may be overwritten before it is sent
    for (at::Tensor& t : inputs)
      if (std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& o) { return o.is_alias_of(t); }))
        t = t.clone();
  job.targets = outputs;
  for (const at::Tensor& t : outputs) {
    const bool in_place = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& i) { return i.is_same(t); });
    job.outputs.push_back(is_plain(t) ? t : in_place ? plain(t) : at::empty(t.sizes(), t.options()));
  }
  for (const at::Tensor& t : inputs) {
    const auto same =
        std::find_if(job.targets.begin(), job.targets.end(), [&](const at::Tensor& o) { return o.is_same(t); });
    job.inputs.push_back(same == job.targets.end() ? plain(t)
                                                   : job.outputs[static_cast<std::size_t>(same - job.targets.begin())]);
  }
  const auto lay_out = [](const TensorList& tensors, std::vector<std::byte*>& data, std::vector<std::size_t>& count) {
    for (const at::Tensor& t : tensors) {
      data.push_back(static_cast<std::byte*>(t.mutable_data_ptr()));
      count.push_back(static_cast<std::size_t>(t.numel()));
    }
  };
  lay_out(job.inputs, job.input_data, job.input_count);
  lay_out(job.outputs, job.output_data, job.output_count);
  return job;
}

namespace {

// The call's size from the blocks that this rank knows all of.
void size_from(Call& call, const std::vector<std::size_t>& counts) {
  call.largest = *std::max_element(counts.begin(), counts.end());
  if (std::all_of(counts.begin(), counts.end(), [&](std::size_t n) { return n == counts[0]; })) {
    call.count = counts[0];
    return;
  }
  call.count = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  call.shape = 1;
  for (std::size_t n : counts) call.shape = mix(call.shape, n);
}

std::vector<std::size_t> equal_blocks(const at::Tensor& tensor, int size, const char* what) {
  const auto n = static_cast<std::size_t>(tensor.numel());
  if (n % static_cast<std::size_t>(size) != 0)
    invalid(what, " has ", n, " elements, which do not divide evenly among ", size, " ranks");
  return std::vector<std::size_t>(static_cast<std::size_t>(size), n / static_cast<std::size_t>(size));
}

void check_count(const char* what, std::size_t is, std::size_t must) {
  if (is != must) invalid(what, " has ", is, " elements, must have ", must);
}

void check_list(const char* what, std::size_t is, int must) {
  if (is != static_cast<std::size_t>(must)) invalid(what, " holds ", is, " tensors, must hold one per rank: ", must);
}

}  // namespace

void ProcessGroupRing::set_reduction(Job& job, const c10d::ReduceOp& op) const {
  job.call.reduce_op = reduce_op_of(op);
  job.call.factor = factor_of(op);
  Engine::check_reduction(job.call);  // here already, so that no call of several begins before all are right
}

void ProcessGroupRing::run(Job& job) {
  const at::NoGradGuard no_grad;
  if (job.uneven) agree_on_blocks(job);
  const Buffers buffers{{job.input_data, job.input_count}, {job.output_data, job.output_count}};
  engine_.run(job.call, buffers);
  for (std::size_t i = 0; i < job.targets.size(); ++i)
    if (!job.targets[i].is_same(job.outputs[i])) job.targets[i].copy_(job.outputs[i]);
}

// All ranks tell each other what they send to and expect from whom. So that a disagreement is an error on every rank,
// naming it, and that all ranks count the same rounds.
void ProcessGroupRing::agree_on_blocks(Job& job) {
  const auto n = static_cast<std::size_t>(getSize());
  std::vector<std::size_t> own = job.input_count, all(2 * n * n);
  own.insert(own.end(), job.output_count.begin(), job.output_count.end());
  std::vector<std::byte*> rows;
  for (std::size_t r = 0; r < n; ++r) rows.push_back(reinterpret_cast<std::byte*>(&all[2 * n * r]));
  const std::vector<std::size_t> row_counts(n, 2 * n);
  auto* own_data = reinterpret_cast<std::byte*>(own.data());
  const std::size_t own_count = 2 * n;
  Call call = job.call;
  call.operation = Operation::all_gather;
  call.dtype = DType::int64;
  call.count = call.largest = own_count;
  call.shape = mix(static_cast<std::uint64_t>(job.call.operation), static_cast<std::uint64_t>(job.call.dtype));
  engine_.run(call, {{{&own_data, 1}, {&own_count, 1}}, {rows, row_counts}});

  for (std::size_t from = 0; from < n; ++from)
    for (std::size_t to = 0; to < n; ++to) {
      const std::size_t sent = all[2 * n * from + to], expected = all[2 * n * to + n + from];
      if (sent != expected)
        throw Error(ErrorKind::mismatch, c10::str("all_to_all: rank ", from, " sends ", sent, " elements to rank ", to,
                                                  ", which expects ", expected));
      job.call.largest = std::max<std::uint64_t>(job.call.largest, sent);
    }
  job.call.count = job.call.largest;
}

c10::intrusive_ptr<Work> ProcessGroupRing::submit(std::vector<Job> jobs, OpType type, bool async) {
  TensorList outputs;
  for (const Job& job : jobs) outputs.insert(outputs.end(), job.targets.begin(), job.targets.end());
  calls_ += 1;
  auto work = c10::make_intrusive<CallWork>(getRank(), type, std::move(outputs));
  if (!async) {
    queue_.run([&] {
      for (Job& job : jobs) run(job);
    });
    work->end(nullptr);
    return work;
  }
  struct Posted {
    std::vector<Job> jobs;
    std::exception_ptr error;
  };
  auto posted = std::make_shared<Posted>(Posted{std::move(jobs), nullptr});
  queue_.post(
      [this, posted] {
        try {
          for (Job& job : posted->jobs) run(job);
        } catch (...) {
          posted->error = std::current_exception();
        }
      },
      [this, work, posted] { work->end(posted->error, &completions_); });
  return work;
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce(TensorList& tensors, const c10d::AllreduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "all_reduce");
  Job j = job(Operation::all_reduce, {tensor}, {tensor}, opts.timeout);
  set_reduction(j, opts.reduceOp);
  size_from(j.call, j.input_count);
  std::vector<Job> jobs;
  jobs.push_back(std::move(j));
  return submit(std::move(jobs), OpType::ALLREDUCE, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::allreduce_coalesced(TensorList& tensors,
                                                               const c10d::AllreduceCoalescedOptions& opts) {
  std::vector<Job> jobs;
  for (const at::Tensor& tensor : tensors) {
    jobs.push_back(job(Operation::all_reduce, {tensor}, {tensor}, opts.timeout));
    set_reduction(jobs.back(), opts.reduceOp);
    size_from(jobs.back().call, jobs.back().input_count);
  }
  return submit(std::move(jobs), OpType::ALLREDUCE_COALESCED, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::broadcast(TensorList& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(tensors, "broadcast");
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::broadcast, {tensor}, {tensor}, opts.timeout));
  jobs[0].call.root = static_cast<int>(opts.rootRank);
  size_from(jobs[0].call, jobs[0].input_count);
  return submit(std::move(jobs), OpType::BROADCAST, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce(TensorList& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(tensors, "reduce");
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::reduce, {tensor}, {tensor}, opts.timeout));
  jobs[0].call.root = static_cast<int>(opts.rootRank);
  set_reduction(jobs[0], opts.reduceOp);
  size_from(jobs[0].call, jobs[0].input_count);
  return submit(std::move(jobs), OpType::REDUCE, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather(std::vector<TensorList>& outputs, TensorList& inputs,
                                                     const c10d::AllgatherOptions& opts) {
  const at::Tensor& input = only(inputs, "all_gather");
  check_list("all_gather: output_tensors", outputs.size(), 1);
  check_list("all_gather: tensor_list", outputs[0].size(), getSize());
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::all_gather, {input}, outputs[0], opts.timeout));
  check_count("all_gather: the output of this rank", jobs[0].output_count[static_cast<std::size_t>(getRank())],
              jobs[0].input_count[0]);
  size_from(jobs[0].call, jobs[0].output_count);
  return submit(std::move(jobs), OpType::ALLGATHER, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                           const c10d::AllgatherOptions& opts) {
  TensorList outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupRing::allgather_into_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::AllgatherOptions& opts) {
  if (outputs.size() != inputs.size())
    invalid("all_gather: ", outputs.size(), " outputs for ", inputs.size(), " inputs");
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Job j = job(Operation::all_gather, {inputs[i]}, {outputs[i]}, opts.timeout);
    j.blocks_of(j.outputs[0], equal_blocks(outputs[i], getSize(), "all_gather: output"), j.output_data, j.output_count);
    check_count("all_gather: each rank's part of the output", j.output_count[0], j.input_count[0]);
    size_from(j.call, j.output_count);
    jobs.push_back(std::move(j));
  }
  return submit(std::move(jobs), OpType::_ALLGATHER_BASE, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter(TensorList& outputs, std::vector<TensorList>& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(outputs, "reduce_scatter");
  check_list("reduce_scatter: input_tensors", inputs.size(), 1);
  check_list("reduce_scatter: input_list", inputs[0].size(), getSize());
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::reduce_scatter, inputs[0], {output}, opts.timeout));
  set_reduction(jobs[0], opts.reduceOp);
  check_count("reduce_scatter: output", jobs[0].output_count[0],
              jobs[0].input_count[static_cast<std::size_t>(getRank())]);
  size_from(jobs[0].call, jobs[0].input_count);
  return submit(std::move(jobs), OpType::REDUCE_SCATTER, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::ReduceScatterOptions& opts) {
  TensorList outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupRing::reduce_scatter_tensor_coalesced(TensorList& outputs, TensorList& inputs,
                                                                           const c10d::ReduceScatterOptions& opts) {
  if (outputs.size() != inputs.size())
    invalid("reduce_scatter: ", outputs.size(), " outputs for ", inputs.size(), " inputs");
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Job j = job(Operation::reduce_scatter, {inputs[i]}, {outputs[i]}, opts.timeout);
    j.blocks_of(j.inputs[0], equal_blocks(inputs[i], getSize(), "reduce_scatter: input"), j.input_data, j.input_count);
    check_count("reduce_scatter: output", j.output_count[0], j.input_count[0]);
    set_reduction(j, opts.reduceOp);
    size_from(j.call, j.input_count);
    jobs.push_back(std::move(j));
  }
  return submit(std::move(jobs), OpType::_REDUCE_SCATTER_BASE, opts.asyncOp);
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
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::gather, {input}, is_root ? outputs[0] : TensorList{}, opts.timeout));
  for (std::size_t n : jobs[0].output_count) check_count("gather: a tensor of gather_list", n, jobs[0].input_count[0]);
  jobs[0].call.root = static_cast<int>(opts.rootRank);
  size_from(jobs[0].call, jobs[0].input_count);
  return submit(std::move(jobs), OpType::GATHER, opts.asyncOp);
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
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::scatter, is_root ? inputs[0] : TensorList{}, {output}, opts.timeout));
  for (std::size_t n : jobs[0].input_count)
    check_count("scatter: a tensor of scatter_list", n, jobs[0].output_count[0]);
  jobs[0].call.root = static_cast<int>(opts.rootRank);
  size_from(jobs[0].call, jobs[0].output_count);
  return submit(std::move(jobs), OpType::SCATTER, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                         std::vector<int64_t>& output_splits,
                                                         std::vector<int64_t>& input_splits,
                                                         const c10d::AllToAllOptions& opts) {
  // Splits count rows of the first dimension.
  const auto counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& splits, const char* what) {
    if (splits.empty()) return equal_blocks(tensor, getSize(), what);
    check_list(c10::str(what, " split sizes").c_str(), splits.size(), getSize());
    const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    if (std::accumulate(splits.begin(), splits.end(), int64_t{0}) != rows ||
        std::any_of(splits.begin(), splits.end(), [](int64_t n) { return n < 0; }))
      invalid(what, " split sizes must be 0 or more and add up to the tensor's ", rows, " rows");
    std::vector<std::size_t> result;
    for (int64_t n : splits) result.push_back(rows == 0 ? 0 : static_cast<std::size_t>(n * (tensor.numel() / rows)));
    return result;
  };
  Job j = job(Operation::all_to_all, {input}, {output}, opts.timeout);
  j.blocks_of(j.inputs[0], counts(input, input_splits, "all_to_all: input"), j.input_data, j.input_count);
  j.blocks_of(j.outputs[0], counts(output, output_splits, "all_to_all: output"), j.output_data, j.output_count);
  j.uneven = true;
  std::vector<Job> jobs;
  jobs.push_back(std::move(j));
  return submit(std::move(jobs), OpType::ALLTOALL_BASE, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::alltoall(TensorList& outputs, TensorList& inputs,
                                                    const c10d::AllToAllOptions& opts) {
  check_list("all_to_all: input_tensor_list", inputs.size(), getSize());
  check_list("all_to_all: output_tensor_list", outputs.size(), getSize());
  std::vector<Job> jobs;
  jobs.push_back(job(Operation::all_to_all, inputs, outputs, opts.timeout));
  jobs[0].uneven = true;
  return submit(std::move(jobs), OpType::ALLTOALL, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::barrier(const c10d::BarrierOptions& opts) {
  Job j = job(Operation::barrier, {}, {}, opts.timeout);
  j.input_data = j.output_data = {nullptr};
  j.input_count = j.output_count = {0};
  std::vector<Job> jobs;
  jobs.push_back(std::move(j));
  return submit(std::move(jobs), OpType::BARRIER, opts.asyncOp);
}

c10::intrusive_ptr<Work> ProcessGroupRing::post(TensorList& tensors, OpType type, int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const char* what = sends ? "send" : "recv";
  const at::Tensor& tensor = only(tensors, what);
  check_device(tensor);
  if (peer != kAnySource && (peer < 0 || peer >= getSize() || peer == getRank()))
    invalid(what, ": the peer is rank ", peer, "; it must be another rank of the group, 0 to ", getSize() - 1);
  if (tag < 0) invalid(what, ": the tag is ", tag, "; it must be 0 or more");
  if (!sends) check_output(tensor);
  const at::NoGradGuard no_grad;
  const bool staged = !is_plain(tensor);
  const at::Tensor buffer = !staged ? tensor : sends ? plain(tensor) : at::empty(tensor.sizes(), tensor.options());

  auto message = std::make_shared<Message>();
  message->sends = sends;
  message->peer = peer;
  message->tag = static_cast<std::uint64_t>(tag);
  message->dtype = dtype_of(tensor.scalar_type());
  message->data = static_cast<std::byte*>(buffer.mutable_data_ptr());
  message->bytes = buffer.nbytes();
  message->timeout = std::chrono::nanoseconds(timeout_.load()).count();
  auto work = c10::make_intrusive<MessageWork>(getRank(), type, tensors, mailbox_, message);
  message->on_done = [this, work, tensor, buffer, copy_back = staged && !sends](std::exception_ptr error) {
    try {
      const at::NoGradGuard no_grad;
      if (copy_back && !error) tensor.copy_(buffer);
    } catch (...) {
      error = std::current_exception();
    }
    work->end(error, &completions_);
  };
  mailbox_->post(message);
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
