// What a server has decided, and does not carry out or answer before its backup has confirmed a position in the log.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "parameter_server/messages.h"
#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

class Unconfirmed {
 public:
  // Takes what has been decided at position `at`, and returns what may be carried out when the log up to position
  // `kept_until` is kept.
  Output next(Output decided, std::uint64_t at, std::uint64_t kept_until) {
    answers_up_to_ = at;
    if (outputs_.empty() && at <= kept_until) return decided;
    if (!decided.empty()) outputs_.emplace_back(at, std::move(decided));
    Output kept;
    for (; !outputs_.empty() && outputs_.front().first <= kept_until; outputs_.pop_front()) {
      answers_up_to_ = outputs_.front().first;
      kept.add(std::move(outputs_.front().second));
    }
    return kept;
  }
  // Keeps a reply to what next() returned last until the backup has carried that out, too.
  void hold(WorkerId worker, const ReplySlot& reply) { replies_.push_back({answers_up_to_, {worker, reply}}); }
  void clear() {
    outputs_.clear();
    replies_.clear();
  }
  bool holds_replies() const { return !replies_.empty(); }
  std::optional<std::pair<WorkerId, ReplySlot>> next_reply(std::uint64_t carried_out) {
    if (replies_.empty() || replies_.front().first > carried_out) return std::nullopt;
    const auto reply = replies_.front().second;
    replies_.pop_front();
    return reply;
  }
  // The replies need not wait any more.
  void release_replies() {
    for (auto& each : replies_) each.first = 0;
  }

 private:
  std::deque<std::pair<std::uint64_t, Output>> outputs_;  // by position
  std::uint64_t answers_up_to_ = 0;                       // position of what is being carried out
  std::deque<std::pair<std::uint64_t, std::pair<WorkerId, ReplySlot>>> replies_;  // by position
};

}  // namespace ringreduce::parameter_server
