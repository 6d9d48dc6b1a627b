#include "process_group/c10d_point_to_point.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <future>
#include <memory>
#include <sstream>
#include <utility>

#include "core/threads.h"
#include "engine/mailbox.h"
#include "process_group/arguments.h"

namespace ringreduce {
namespace {

// The process that has the store may be stopped, or gone, itself.
constexpr std::chrono::seconds kStorePatience{5};
const std::string kBroken = "broken";

at::Tensor bytes_of(const std::byte* data, std::size_t bytes) {
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(bytes)}, at::kByte);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

C10dPointToPoint::C10dPointToPoint(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                                   std::vector<RankName> names)
    : rank_(backend->getRank()), store_(std::move(store)), names_(std::move(names)), backend_(std::move(backend)) {}

std::string C10dPointToPoint::number(int rank) const { return names_[static_cast<std::size_t>(rank)].number(rank); }
std::string C10dPointToPoint::describe(int rank) const { return names_[static_cast<std::size_t>(rank)].describe(rank); }

void C10dPointToPoint::throw_if_aborted() const {
  std::lock_guard lock(mutex_);
  if (broken_) throw broken_->error;
}

int C10dPointToPoint::reporter() const {
  std::lock_guard lock(mutex_);
  return broken_ ? broken_->reporter : -1;
}

c10::intrusive_ptr<c10d::Work> C10dPointToPoint::pass_on(std::vector<at::Tensor>& tensors, c10d::OpType type, int peer,
                                                         int tag) const {
  const bool sends = type == c10d::OpType::SEND;
  if (tag == kTag) invalid("the tag ", tag, " is that of collectives; take another");
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    std::lock_guard lock(mutex_);
    if (broken_) throw broken_->error;
    backend = backend_;
  }
  if (type == c10d::OpType::RECVANYSOURCE) return backend->recvAnysource(tensors, tag);
  return sends ? backend->send(tensors, peer, tag) : backend->recv(tensors, peer, tag);
}

void C10dPointToPoint::post(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming) {
  const auto begin = [&](int peer, const std::byte* data, std::size_t bytes, bool sends) {
    std::vector<at::Tensor> tensors{bytes_of(data, bytes)};
    try {
      pending_.push_back(
          {sends ? backend_->send(tensors, peer, kTag) : backend_->recv(tensors, peer, kTag), peer, sends});
    } catch (const std::exception& error) {
      throw failure(sends, peer, error.what(), false);
    }
  };
  std::lock_guard lock(mutex_);  // abort() may not miss one
  if (broken_) throw broken_->error;
  exchanging_ = true;
  for (const Incoming& message : incoming) begin(message.peer, message.data, message.bytes, false);
  for (const Outgoing& message : outgoing) begin(message.peer, message.data, message.bytes, true);
}

void C10dPointToPoint::exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming,
                                Nanoseconds timeout) {
  const Nanoseconds deadline = now() + timeout;
  // The works go in any case: without them the backend has no memory of ours to touch.
  const auto end = [&] {
    std::lock_guard lock(mutex_);
    pending_.clear();
    exchanging_ = false;
    if (broken_) backend_.reset();
  };
  try {
    post(outgoing, incoming);
    for (const Pending& pending : pending_) {
      bool done = false;
      try {
        const Nanoseconds left = std::max(deadline - now(), kMillisecond);
        done = pending.work->wait(std::chrono::ceil<std::chrono::milliseconds>(std::chrono::nanoseconds(left)));
      } catch (const std::exception& error) {
        throw_if_aborted();
        throw failure(pending.sends, pending.peer, error.what(), now() >= deadline);
      }
      if (!done) {
        throw_if_aborted();
        throw failure(pending.sends, pending.peer, "the transport gave it up", now() >= deadline);
      }
    }
  } catch (...) {
    end();
    throw;
  }
  end();
}

Error C10dPointToPoint::failure(bool sends, int peer, const std::string& reason, bool late) const {
  const std::string message =
      (sends ? "a message to " : "a message from ") + (peer == kAnySource ? "any rank" : describe(peer));
  if (late) return {ErrorKind::timeout, message + " was not done within the timeout", peer};
  return {ErrorKind::peer_lost, message + " failed: " + first_line(reason), peer};
}

// Puts `error` in the store, unless there is one; returns what is there. As text: kind, culprit, reporter, message.
C10dPointToPoint::Broken C10dPointToPoint::agree_on(const Error& error) const {
  std::ostringstream own;
  own << static_cast<int>(error.kind()) << ' ' << error.culprit() << ' ' << rank_ << ' ' << error.what();
  const auto asked = std::make_shared<std::promise<std::string>>();
  std::future<std::string> answer = asked->get_future();
  try {
    const auto ask = [asked, store = store_, text = own.str()] {
      try {
        asked->set_value(store->compareSet(kBroken, "", text));
      } catch (...) {
        asked->set_exception(std::current_exception());
      }
    };
    try {
      start_thread(ask).detach();
    } catch (const Error&) {  // there is no thread to be had
      ask();
    }
    if (answer.wait_for(kStorePatience) != std::future_status::ready) return {error, rank_};
    std::istringstream first(answer.get());
    int kind = 0, culprit = -1, reporter = -1;
    std::string message;
    first >> kind >> culprit >> reporter;
    first.get();
    std::getline(first, message, '\0');
    if (kind < static_cast<int>(ErrorKind::invalid_argument) || kind > static_cast<int>(ErrorKind::system))
      return {error, rank_};
    if (reporter != rank_) message += " [reported by " + number(reporter) + "]";
    return {Error(static_cast<ErrorKind>(kind), message, culprit), reporter};
  } catch (const std::exception&) {  // the store is gone, or there is no memory
    return {error, rank_};
  }
}

void C10dPointToPoint::abort(const Error& error) {
  {
    std::lock_guard lock(mutex_);
    if (broken_) return;
  }
  Broken agreed = agree_on(error);  // before connections close, so that peers that see it find the reason
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = std::move(agreed);
  let_go();
}

void C10dPointToPoint::leave() {
  std::lock_guard lock(mutex_);
  if (!broken_) broken_ = Broken{Error(ErrorKind::aborted, "this rank has left the group"), rank_};
  let_go();
}

// With the lock held.
void C10dPointToPoint::let_go() {
  for (const Pending& pending : pending_) {
    try {
      pending.work->abort();
    } catch (const std::exception&) {  // a backend that cannot; it ends by the timeout
    }
  }
  if (!exchanging_) backend_.reset();
}

}  // namespace ringreduce
