// Messages between two ranks, and several calls as one Work.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "process_group/running.h"

namespace ringreduce {

using c10d::OpType;
using c10d::Work;

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
  if (running_->wire) {
    auto work = running_->wire->pass_on(tensors, type, peer, tag);
    coalesce(work);
    return work;
  }
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

c10::intrusive_ptr<Work> ProcessGroupRing::send(TensorList& tensors, int destination, int tag) {
  return post(tensors, OpType::SEND, destination, tag);
}

c10::intrusive_ptr<Work> ProcessGroupRing::recv(TensorList& tensors, int source, int tag) {
  return post(tensors, OpType::RECV, source, tag);
}

c10::intrusive_ptr<Work> ProcessGroupRing::recvAnysource(TensorList& tensors, int tag) {
  return post(tensors, OpType::RECVANYSOURCE, kAnySource, tag);
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

}  // namespace ringreduce
