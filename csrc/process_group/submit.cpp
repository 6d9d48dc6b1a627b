// How a collective becomes jobs of the engine, and these take their turn.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <utility>

#include "process_group/running.h"

namespace ringreduce {

using c10d::Work;

namespace {

// Jobs run one after the other. An input that an earlier job will write over is copied now.
void keep_inputs(std::vector<Job>& jobs) {
  std::vector<Extent> written;
  const auto is_written = [&](const at::Tensor& input) {
    if (input.numel() == 0) return false;
    const Extent read = extent_of(input);
    return std::any_of(written.begin(), written.end(),
                       [&](const Extent& e) { return e.begin < read.end && read.begin < e.end; });
  };
  for (Job& job : jobs) {
    if (std::any_of(job.inputs.begin(), job.inputs.end(), is_written)) job.copy_inputs();
    for (const at::Tensor& t : job.targets)
      if (t.numel() > 0) written.push_back(extent_of(t));
  }
}

}  // namespace

Packing ProcessGroupRing::packing_of(const Call& call) const {
  const bool packs = call.operation == Operation::all_reduce && call.dtype == DType::float32;
  return packs ? settings_.packing : Packing::none;
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
  job.call.packing = packing_of(job.call);
  if (SettingUp::here) job.call.part_of = Operation::gpu_setup;
  return job;
}

c10::intrusive_ptr<Work> ProcessGroupRing::submit_to_gpu(const Collective& collective, const TensorList& inputs,
                                                         TensorList outputs, std::vector<Job> jobs) {
  const CallLog::Call call = begin_call(collective);
  TensorList kept = inputs;
  for (Job& job : jobs) {
    job.call.number = call.sequence;
    if (!job.agreed) shared_->queue.run([&] { job.agree(*running_->engine); });
    for (const TensorList* tensors : {&job.inputs, &job.outputs, &job.targets})
      kept.insert(kept.end(), tensors->begin(), tensors->end());
  }
  GpuCalls& gpu = *running_->gpu;
  auto work =
      gpu.submit(call, collective.async, inputs, std::move(outputs), std::move(kept), [&](const cuda::Stream& stream) {
        const at::NoGradGuard no_grad;
        for (Job& job : jobs) job.enqueue(gpu.engine(), stream);
      });
  if (collective.async) coalesce(work);
  return work;
}

// Calls `run`, which takes the call's number and returns a Tally, in its turn.
c10::intrusive_ptr<Work> ProcessGroupRing::take_turn(const Collective& collective, const TensorList& inputs,
                                                     TensorList outputs, Run run) {
  const CallLog::Call call = begin_call(collective);
  struct Task {
    c10::intrusive_ptr<CallWork> work;
    Engine& engine;
    Run run;
    Tally tally;
    std::exception_ptr error;

    void attempt() {
      const at::NoGradGuard no_grad;
      try {
        work->start();
        tally = run(work->getSequencenumber());
      } catch (const Error&) {  // of the engine
        error = std::current_exception();
      } catch (const std::exception& failed) {
        fail(failed.what());
      } catch (...) {
        fail("it failed for an unknown reason");
      }
    }
    // Before, between or after the engine's calls: the others must not wait for this rank, nor may it make the call
    // again.
    void fail(const char* why) {
      error = std::current_exception();
      const auto number = work->getSequencenumber();
      engine.fail(Error(ErrorKind::system,
                        c10::str(name_of(work->retrieveOpType()), " number ", number, " of the group: ", why),
                        engine.rank()));
    }
  };
  Task task{c10::make_intrusive<CallWork>(shared_, getRank(), call, inputs, std::move(outputs)),
            *running_->engine,
            std::move(run),
            {},
            {}};
  const auto work = task.work;
  try {
    if (collective.async) {
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

c10::intrusive_ptr<Work> ProcessGroupRing::submit(const Collective& collective, std::vector<Job> jobs) {
  TensorList inputs, outputs;
  for (const Job& job : jobs) {
    inputs.insert(inputs.end(), job.inputs.begin(), job.inputs.end());
    outputs.insert(outputs.end(), job.targets.begin(), job.targets.end());
    if (job.device != jobs[0].device)
      invalid(name_of(collective.type), ": tensors are on different devices: ", jobs[0].device, " and ", job.device,
              "; move them to one");
  }
  if (jobs.size() > 1) {
    check_outputs(outputs, name_of(collective.type));
    keep_inputs(jobs);
  }
  if (!jobs.empty() && jobs[0].device.is_cuda())
    return submit_to_gpu(collective, inputs, std::move(outputs), std::move(jobs));
  return take_turn(collective, inputs, std::move(outputs),
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

c10::intrusive_ptr<Work> ProcessGroupRing::submit(const Collective& collective, const TensorList& inputs,
                                                  const TensorList& outputs) {
  std::vector<Job> only;
  only.push_back(job(collective, inputs, outputs));
  return submit(collective, std::move(only));
}

c10::intrusive_ptr<Work> ProcessGroupRing::submit_each(const Collective& collective, const TensorList& inputs,
                                                       const TensorList& outputs) {
  check_pairs(name(collective.operation), outputs, inputs);
  std::vector<Job> jobs;
  for (std::size_t i = 0; i < inputs.size(); ++i) jobs.push_back(job(collective, {inputs[i]}, {outputs[i]}));
  return submit(collective, std::move(jobs));
}

c10::intrusive_ptr<Work> ProcessGroupRing::call(const Collective& collective, const at::Tensor& output,
                                                const at::Tensor& input) {
  if (!collective.async && call_now(collective, output, input)) return nullptr;
  return submit(collective, {input}, {output});
}

Call ProcessGroupRing::described(const Collective& collective, const at::Tensor& input, std::size_t count) const {
  Call call;
  call.operation = collective.operation;
  call.root = collective.root;
  call.dtype = dtype_of(input.scalar_type(), name(call.operation).data());
  if (collective.op != nullptr) call.reduce_op = reduce_op_of(*collective.op);
  call.packing = packing_of(call);
  call.count = call.largest = count;
  if (collective.own_op) set_operator(call, *collective.own_op, count);
  call.timeout = nanoseconds(timeout_or_default(collective.timeout));
  Engine::check(call, getSize());
  return call;
}

bool ProcessGroupRing::call_now(const Collective& collective, const at::Tensor& output, const at::Tensor& input,
                                bool tells_autograd, HeldLock* held) {
  return heard(name(collective.operation).data(), [&] {
    constexpr std::size_t kMostBlocks = 64;
    constexpr std::size_t kMostWithLock = 16 << 10;  // bytes; of more, what the lock takes is below 3% of the call
    const auto suits = [](const at::Tensor& t) { return t.is_cpu() && has_memory(t) && is_plain(t); };
    const bool in_place = !collective.flat_input && !collective.flat_output;  // one tensor is both
    if (!suits(output) || (!in_place && !suits(input))) return false;
    if (collective.op != nullptr && *collective.op == c10d::ReduceOp::PREMUL_SUM) return false;
    if (at::hasCallbacks() || shared_->hooked || shared_->timing) return false;
    if (collective.root < 0 || collective.root >= getSize()) return false;
    const auto size = static_cast<std::size_t>(getSize());
    const std::size_t ins = collective.flat_input ? size : 1, outs = collective.flat_output ? size : 1;
    const std::size_t element = collective.own_op ? collective.own_op->element_bytes : input.element_size();
    const std::size_t count = input.nbytes() / (element * ins);
    auto* const from = static_cast<std::byte*>(input.mutable_data_ptr());
    auto* const to = static_cast<std::byte*>(output.mutable_data_ptr());
    if (!in_place && (size > kMostBlocks || output.scalar_type() != input.scalar_type() ||
                      static_cast<std::size_t>(input.numel()) != count * ins ||
                      static_cast<std::size_t>(output.numel()) != count * outs ||
                      overlap(from, count * ins * element, to, count * outs * element)))
      return false;

    Call call = described(collective, input, count);
    call.by_caller = true;
    call.held = held;
    const auto release = [&call] {
      if (call.held != nullptr) std::exchange(call.held, nullptr)->release();
    };
    const bool small = count * element * std::max(ins, outs) <= kMostWithLock;
    if (!small || collective.own_op || !team_ || team_->links() != nullptr) release();
    std::array<std::byte*, kMostBlocks> input_blocks, output_blocks;
    std::array<std::size_t, kMostBlocks> counts;
    for (std::size_t b = 0; b < std::max(ins, outs); ++b) {
      input_blocks[b] = from + b * count * element;
      output_blocks[b] = to + b * count * element;
      counts[b] = count;
    }
    const Buffers buffers{{{input_blocks.data(), ins}, {counts.data(), ins}},
                          {{output_blocks.data(), outs}, {counts.data(), outs}}};

    if (tells_autograd && !output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
    const CallLog::Call listed = begin_call(collective);
    call.number = listed.sequence;
    CallLog& log = *shared_->log;
    CallQueue::Turn turn(shared_->queue);
    if (!turn.came()) release();  // before anything that throws: the turn is awaited in any case
    const std::uint64_t id = log.begin(listed, input, output, turn.came());
    Tally tally;
    try {
      if (!turn.came()) {
        turn.await();
        log.start(id);
      }
      tally = running_->engine->run(call, buffers);
    } catch (...) {
      release();
      log.end(id, collective.type, false, tally);
      shared_->completions.post([shared = shared_] { shared->work_failed(); });
      throw;
    }
    log.end(id, collective.type, true, tally);
    return true;
  });
}

}  // namespace ringreduce
