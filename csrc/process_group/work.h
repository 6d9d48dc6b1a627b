// The handles that c10d's calls return.
#pragma once

#include <ATen/record_function.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "core/fork.h"
#include "core/interrupt.h"
#include "engine/completions.h"
#include "engine/mailbox.h"
#include "engine/queue.h"
#include "process_group/arguments.h"
#include "process_group/call_log.h"
#include "process_group/python_error.h"

namespace ringreduce {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// State that a group shares with its works. It lives until the group and the last pending work are gone.
struct WorkSurroundings {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Mailbox> mailbox;  // null where messages are those of another backend
  CallQueue queue{[this](const Error& error) { engine->fail(Error(error.kind(), error.what(), engine->rank())); },
                  [this] { interrupt("waiting for the calls before"); }};
  Completions completions;
  std::unique_ptr<CallLog> log;
  bool as_gloo = false;  // whether the program knows the group as one of Gloo, as profiles then do
  ForkMark fork;
  std::atomic<bool> timing{false};
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> on_completion;  // set once, before `hooked`
  std::atomic<bool> hooked{false};
  bool dump_when_broken = false;
  std::atomic<bool> dumped{false};
  std::atomic<Nanoseconds> dump_after{0};

  // Called when a work failed: writes the flight record, once, if that was because the group is broken.
  void work_failed() {
    if (!dump_when_broken || dumped) return;
    try {
      engine->throw_if_aborted();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::aborted && !dumped.exchange(true)) log->write_dump(dump_after);
    } catch (const std::bad_alloc&) {  // the next work that fails writes it
    }
  }

  // The user has interrupted a wait of this rank, which ends the group.
  void interrupt(const std::string& what) {
    engine->fail(interrupted_in(what, engine->describe(engine->rank()), engine->rank()));
  }

  void call_hook(const std::shared_ptr<c10d::WorkInfo>& info) const {
    try {
      on_completion(info);
    } catch (const std::exception& error) {
      TORCH_WARN("the group's completion hook failed: ", error.what());
    }
  }

  void throw_if_forked() const {
    if (fork.forked()) throw forked(" from " + engine->describe(engine->rank()) + ",");
  }
  static Error forked(const std::string& from_whom) {
    return Error(ErrorKind::system, "this process was forked after the group was made," + from_whom +
                                        " and cannot use it; make a group of its own, or start it with the method "
                                        "'spawn'");
  }
};

// A finished or pending collective.
class CallWork : public c10d::Work {
 public:
  using Clock = std::chrono::steady_clock;

  // The group's log is told of `call` and its tensors; so is the profiler, of the inputs or, for want of any, outputs.
  CallWork(std::shared_ptr<WorkSurroundings> surroundings, int rank, const CallLog::Call& call,
           const TensorList& inputs, TensorList outputs)
      : Work(rank, call.type, at::hasCallbacks() ? profiling_title(call.type, surroundings->as_gloo) : nullptr,
             at::hasCallbacks() ? std::optional(inputs.empty() ? outputs : inputs) : std::nullopt),
        surroundings_(std::move(surroundings)),
        sequence_(call.sequence),
        log_id_(surroundings_->log->begin(call, inputs, outputs)),
        hooked_(surroundings_->hooked.load(std::memory_order_acquire)),
        timed_(hooked_ || surroundings_->timing),
        outputs_(std::move(outputs)) {}

  // Its turn has come.
  void start() {
    surroundings_->log->start(log_id_);
    if (timed_) started_ = Clock::now();
  }

  // Ends the work: waiters first, then what hangs on its end, in a thread of `completions`. Does nothing the second
  // time.
  void end(const std::exception_ptr& error, const Tally& tally = {}) {
    if (timed_) ended_ = Clock::now();
    std::shared_ptr<WorkSurroundings> group;
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      std::lock_guard<std::mutex> lock(future_mutex_);
      if (!surroundings_) return;
      ended_with_ = error;
      group = std::move(surroundings_);
      future = future_;
    }
    group->log->end(log_id_, opType_, error == nullptr, tally);
    finish(error);
    if (error) group->completions.post([group] { group->work_failed(); });
    if (future) {
      const auto self = c10::intrusive_ptr<CallWork>::unsafe_reclaim_from_nonowning(this);
      group->completions.post([self, future, error] { self->settle(*future, error); });
    }
    if (hooked_) group->completions.post([group, info = info()] { group->call_hook(info); });
  }

  // Its place in the group's queue. Must be called before anybody waits.
  void set_turn(std::size_t turn) { turn_ = turn; }

  // Without a `timeout` it does the work in this thread, if no other has begun it. Throws timeout when `timeout` is
  // over; the call goes on then, until the timeout of its own.
  bool wait(std::chrono::milliseconds timeout) override {
    if (in_child()) return wait_in_child();
    const Nanoseconds deadline = timeout == kNoTimeout ? kForever : now() + nanoseconds(timeout);
    if (timeout == kNoTimeout && turn_)
      if (const auto group = pending()) group->queue.help(*turn_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!completed_) {
      const Nanoseconds patience = std::min(deadline - now(), kLookForCtrlC);
      if (cv_.wait_for(lock, std::chrono::nanoseconds(patience), [&] { return completed_; })) break;
      if (now() >= deadline)
        throw Error(ErrorKind::timeout,
                    c10::str("Operation timed out! ", name_of(opType_), " number ", sequence_, " of the group: rank ",
                             rank_, " of it waited the ", timeout.count(), " ms that wait() was given"));
      lock.unlock();
      if (ctrl_c_came())  // the work ends with the group's error
        if (const auto group = pending()) group->interrupt(c10::str(name_of(opType_), " number ", sequence_));
      lock.lock();
    }
    lock.unlock();
    return Work::wait(kNoTimeout);
  }

  TensorList result() override { return outputs_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  float getDuration() const override {
    TORCH_CHECK(timed_ && ended_ != Clock::time_point(),
                "getDuration: the work has not ended, or was made before enableCollectivesTiming()");
    return std::chrono::duration<float, std::milli>(ended_ - started_).count();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(future_mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (!surroundings_) settle(*future_, ended_with_);  // otherwise end() does
    }
    return future_;
  }

  // A future of a c10d::WorkResult, which an error completes too.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return getFuture()->then(
        [](c10::ivalue::Future& future) {
          auto result = c10d::WorkResult::SUCCESS;
          if (future.hasError()) {
            const auto error = error_in(future.exception_ptr());
            result = !error                                ? c10d::WorkResult::UNKNOWN
                     : error->kind() == ErrorKind::timeout ? c10d::WorkResult::TIMEOUT
                                                           : c10d::WorkResult::COMM_ERROR;
          }
          return at::IValue(static_cast<int64_t>(result));
        },
        c10::IntType::get());
  }

 protected:
  // In a forked child: locks may be held for ever, but nothing changes any more either.
  bool in_child() const { return fork_.forked(); }
  bool wait_in_child() {
    // The fork may have come while the work ended, which takes the surroundings first.
    if (!completed_) throw WorkSurroundings::forked("");
    if (exception_) std::rethrow_exception(exception_);
    return true;
  }

  // The surroundings, while the work is pending.
  std::shared_ptr<WorkSurroundings> pending() {
    std::lock_guard<std::mutex> lock(future_mutex_);
    return surroundings_;
  }

 private:
  void settle(c10::ivalue::Future& future, const std::exception_ptr& error) {
    try {
      if (error)
        future.setErrorIfNeeded(for_future(error));
      else
        future.markCompleted(at::IValue(outputs_));
    } catch (const c10::Error&) {
      TORCH_WARN(name_of(opType_), ": somebody else has completed its future already");
    }
  }

  std::shared_ptr<c10d::WorkInfo> info() const {
    return std::make_shared<c10d::WorkInfo>(opType_, sequence_, started_, ended_, ended_ - started_);
  }

  std::shared_ptr<WorkSurroundings> surroundings_;  // until the end
  const ForkMark fork_;
  const std::uint64_t sequence_, log_id_;
  const bool hooked_, timed_;
  std::optional<std::size_t> turn_;  // of asynchronous calls
  Clock::time_point started_, ended_;
  const TensorList outputs_;
  std::mutex future_mutex_;
  std::exception_ptr ended_with_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message; whoever waits for it drives the mailbox.
class MessageWork : public CallWork {
 public:
  MessageWork(std::shared_ptr<WorkSurroundings> surroundings, int rank, const CallLog::Call& call,
              const TensorList& tensors, std::shared_ptr<Message> message)
      : CallWork(std::move(surroundings), rank, call, message->sends ? tensors : TensorList{},
                 message->sends ? TensorList{} : tensors),
        message_(std::move(message)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Nanoseconds patience = timeout == kNoTimeout ? kForever : nanoseconds(timeout);
    if (in_child()) return wait_in_child();
    if (const auto group = pending()) group->mailbox->wait(message_, patience);
    return Work::wait(kNoTimeout);
  }
  int sourceRank() const override { return message_->peer; }

 private:
  const std::shared_ptr<Message> message_;
};

// A message that another backend passes on, from or to `buffer`. What it receives there goes to the user's `tensor`,
// unless that is the buffer.
class PassedMessage : public c10d::Work {
 public:
  // `failed` gives the error for the reason why `work` has failed; true: it was not done in time.
  using Failed = std::function<Error(const std::string& reason, bool late)>;
  PassedMessage(int rank, c10d::OpType type, WorkPtr work, std::chrono::milliseconds timeout, at::Tensor tensor,
                at::Tensor buffer, Failed failed)
      : Work(rank, type),
        work_(std::move(work)),
        deadline_(now() + nanoseconds(timeout)),
        tensor_(std::move(tensor)),
        buffer_(std::move(buffer)),
        failed_(std::move(failed)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Nanoseconds left = std::max(deadline_ - now(), kMillisecond);
    const Nanoseconds patience = timeout == kNoTimeout ? left : std::min(left, nanoseconds(timeout));
    bool done = false;
    try {
      done = work_->wait(std::chrono::milliseconds(patience / kMillisecond));
    } catch (const std::exception& error) {
      const std::string reason = error.what();
      throw failed_(reason, reason.find("Timed out") != std::string::npos);
    }
    if (done && opType_ != c10d::OpType::SEND && !buffer_.is_same(tensor_))
      std::call_once(copied_, [this] { copy_elements(tensor_, buffer_); });
    finish();
    return done;
  }
  int sourceRank() const override { return work_->sourceRank(); }
  void abort() override { work_->abort(); }

 private:
  const WorkPtr work_;
  const Nanoseconds deadline_;  // by the group's timeout, which the other backend does not know
  const at::Tensor tensor_, buffer_;
  const Failed failed_;
  std::once_flag copied_;
};

// Several works as one.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkPtr> works) : Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& w) { return w->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const auto& w) { return w->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (auto error = work->exception()) return error;
    return nullptr;
  }
  // `timeout` is for each of them.
  bool wait(std::chrono::milliseconds timeout) override {
    for (const auto& work : works_) work->wait(timeout);
    return true;
  }
  TensorList result() override {
    TensorList results;
    for (const auto& work : works_)
      for (at::Tensor& t : work->result()) results.push_back(std::move(t));
    return results;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const auto type = c10::ListType::create(c10::TensorType::get());
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
    for (const auto& work : works_) futures.push_back(work->getFuture());
    const auto self = c10::intrusive_ptr<CoalescedWork>::unsafe_reclaim_from_nonowning(this);
    return c10::collectAll(futures)->then(
        [self](c10::ivalue::Future& all) {
          if (all.hasError()) std::rethrow_exception(all.exception_ptr());
          return at::IValue(self->result());
        },
        type);
  }

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace ringreduce
