#include "engine/observe.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "core/types.h"
#include "engine/call.h"
#include "transport/segment.h"

namespace ringreduce {
namespace {

// A copy of a part of the memory, which the ranks go on writing. Each word of it is one that was there.
template <class Part>
class Copy {
 public:
  Copy(int memfd, std::size_t offset) {
    const ssize_t got = pread(memfd, bytes_, sizeof(Part), static_cast<off_t>(offset));
    if (got < 0) throw Error(ErrorKind::invalid_argument, std::string("cannot be read: ") + std::strerror(errno));
    if (static_cast<std::size_t>(got) < sizeof(Part))
      throw Error(ErrorKind::invalid_argument, "this is not the memory of a group, or one of another version");
  }
  const Part& operator*() const { return *reinterpret_cast<const Part*>(bytes_); }
  const Part* operator->() const { return &**this; }

 private:
  alignas(Part) std::byte bytes_[sizeof(Part)];
};

// What a rank writes over while it is copied may be half of one record and half of the next. The number of a record
// only grows, so a copy is whole if the record had its number in a copy `before` and in one `after` it.
RankSeen seen(int rank, const RankControl& before, const RankControl& control, const RankControl& after) {
  RankSeen its;
  its.rank = rank;
  its.global_rank = control.global_rank;
  its.pid = control.pid;
  its.left = control.has_left() || control.life.ends();
  its.entered = control.entered;
  its.completed = std::min<std::uint64_t>(control.completed, its.entered);
  its.since_sign = now() - control.heartbeat;
  if (its.entered > its.completed) its.waits_for = control.waiting_for;
  for (std::uint64_t back = 0; back < std::min<std::uint64_t>(CallHistory::kKept, its.entered); ++back) {
    const std::uint64_t seq = its.entered - back;
    const bool whole = before.calls.find(seq) && after.calls.find(seq);
    const auto call = whole ? control.calls.find(seq) : std::nullopt;
    std::string text = call ? describe(*call, control.calls.op_of(call->seq)) : "";
    if (text.empty()) continue;
    if (its.call.empty()) {
      its.call = std::move(text);
      its.number = call->number;
    }
    its.recent.emplace_back(call->seq, call->count * size_of(static_cast<DType>(call->dtype)));
  }
  return its;
}

}  // namespace

GroupSeen observe(int memfd) {
  const Copy<Segment::Header> header(memfd, 0);
  const std::uint64_t format = header->format;
  if (format == 0) return {};
  if (format != Segment::kFormat)
    throw Error(ErrorKind::invalid_argument, "this is not the memory of a group, or one of another version");
  const Layout layout(header->geometry);
  const auto text = [](const auto& field) { return std::string(field, strnlen(field, sizeof(field))); };
  GroupSeen group{text(header->name), text(header->job), static_cast<int>(layout.ranks), {}};
  for (int rank = 0; rank < group.size; ++rank) {
    const std::size_t offset = Segment::offset_of(rank, layout);
    const Copy<RankControl> before(memfd, offset), control(memfd, offset), after(memfd, offset);
    if (before->state.load() != RankState::absent) group.ranks.push_back(seen(rank, *before, *control, *after));
  }
  return group;
}

}  // namespace ringreduce
