#include "engine/history.h"

#include <algorithm>

#include "core/atomics.h"
#include "engine/call.h"

namespace ringreduce {
namespace {

std::uint64_t calls_of(const RankControl& rank) { return rank.entered.load(std::memory_order_acquire); }

// The latest call that both ranks have made; 0: none.
std::uint64_t latest_of_both(const RankControl& one, const RankControl& other) {
  return std::min(calls_of(one), calls_of(other));
}

bool differ_at(const RankControl& one, const RankControl& other, std::uint64_t seq) {
  const auto ours = one.calls.find(seq), theirs = other.calls.find(seq);
  return ours && theirs && ours->fingerprint != theirs->fingerprint;
}

constexpr char kRule[] = ". All ranks of a group must make the same calls in the same order";

}  // namespace

void record(RankControl& own, const CallHeader& call, const Operator* op) {
  own.calls.add(call, op == nullptr ? std::string_view() : std::string_view(op->name));
  own.entered.store(call.seq, std::memory_order_release);
}

bool differ(const RankControl& one, const RankControl& other) {
  return differ_at(one, other, latest_of_both(one, other));
}

Error different_calls(const Team& team, int peer, const std::string& what) {
  const RankControl &own = team.control(team.rank()), &other = team.control(peer);
  const std::uint64_t last = latest_of_both(own, other);
  std::uint64_t seq = last - std::min<std::uint64_t>(last, CallHistory::kKept) + 1;
  while (seq < last && !differ_at(own, other, seq)) ++seq;
  const std::string ours = describe_call(own, seq), theirs = describe_call(other, seq);
  const std::string who = team.fate().number(team.rank()), whose = team.fate().describe(peer);
  std::string text = what + ": ranks of the group made different calls";
  const bool first =
      seq == 1 || (own.calls.find(seq - 1) && other.calls.find(seq - 1));  // else there may be earlier ones
  if (!differ_at(own, other, seq) || (ours == theirs && !first)) {
    text += ": " + who + " called " + ours + ", and the first call that was another on " + whose + " is not recorded";
  } else {
    if (seq < calls_of(own)) text += " before, at seq " + std::to_string(number_of_call(own, seq));
    text += ": " + who + " called " + ours + ", " + whose + " called " +
            (ours == theirs ? "the same with other sizes or dtypes" : theirs);
  }
  return {ErrorKind::mismatch, text + kRule, peer};
}

std::optional<Error> difference_at_the_end(const Team& team) {
  fence(std::memory_order_seq_cst);  // of two ranks that leave at once, one sees that the other has left
  const RankControl& own = team.control(team.rank());
  for (int r = 0; r < team.size(); ++r) {
    if (r == team.rank()) continue;
    const RankControl& peer = team.control(r);
    const bool left = peer.has_left();  // before its calls, which are all there then
    if (differ(own, peer)) return different_calls(team, r, "leaving the group");
    const std::uint64_t ours = calls_of(own), theirs = calls_of(peer);
    // A rank on another host does not tell its last calls to a peer that has left before.
    const bool more = ours > theirs && !team.elsewhere(r), fewer = ours < theirs;
    if (!left || (!more && !fewer)) continue;
    const std::string own_name = team.fate().number(team.rank()), its_name = team.fate().describe(r);
    return Error(ErrorKind::mismatch,
                 "leaving the group: " + (more ? own_name : its_name) + " called " +
                     describe_call(more ? own : peer, std::max(ours, theirs)) + ", which " +
                     (more ? its_name : own_name) + " never called" + kRule,
                 r);
  }
  return std::nullopt;
}

std::uint64_t number_of_call(const RankControl& rank, std::uint64_t seq) {
  const auto call = rank.calls.find(seq);
  return call ? call->number : seq;
}

std::string describe_call(const RankControl& rank, std::uint64_t seq) {
  const auto call = rank.calls.find(seq);
  const std::string text = call ? describe(*call, rank.calls.op_of(seq)) : "";
  if (!text.empty()) return text;
  return "a call that is no longer recorded (it is at call " + std::to_string(calls_of(rank)) + ")";
}

}  // namespace ringreduce
