#include "engine/observe.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
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

// `later`: a second copy of the same. A call that was being written during the first is another one there.
RankSeen seen(int rank, const RankControl& control, const RankControl& later) {
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
    const auto call = control.calls.find(its.entered - back);
    std::string text = call && later.calls.find(call->seq) ? describe(*call, control.calls.op_of(call->seq)) : "";
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

std::vector<RankSeen> observe(int memfd) {
  const Copy<Segment::Header> header(memfd, 0);
  const std::uint64_t format = header->format;
  if (format == 0) return {};
  if (format != Segment::kFormat)
    throw Error(ErrorKind::invalid_argument, "this is not the memory of a group, or one of another version");
  const Layout layout(header->geometry);
  std::vector<RankSeen> ranks;
  for (int rank = 0; rank < static_cast<int>(layout.ranks); ++rank) {
    const std::size_t offset = Segment::offset_of(rank, layout);
    const Copy<RankControl> control(memfd, offset), later(memfd, offset);
    if (control->state.load() != RankState::absent) ranks.push_back(seen(rank, *control, *later));
  }
  return ranks;
}

}  // namespace ringreduce
