#include "parameter_server/server/far_log.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kBeat = kSecond / 4;  // between two beats

}  // namespace

void FarLog::write(Entry entry) {
  const std::uint64_t position = written_, bytes = entry.data == nullptr ? 0 : entry.record.slot.bytes;
  Frame frame = frame_of(Kind::record, bytes_of(entry.record), entry.bytes);
  frame.header.seq = position;
  connections_.send(kPartner, std::move(frame));
  written_ += length(entry);
  for (std::uint64_t begin = 0; begin < bytes; begin += kFragment) {
    const std::uint64_t some = std::min<std::uint64_t>(kFragment, bytes - begin);
    const FrameHeader header{
        .kind = Kind::pushed, .bytes = static_cast<std::uint32_t>(some), .seq = begin, .tag = position, .total = bytes};
    connections_.send(kPartner, {header, entry.data.get() + begin, entry.data});
  }
}

bool FarLog::read(Entry& entry) {
  const std::lock_guard lock(mutex_);
  if (taken_ == whole_) return false;
  entry = std::move(incoming_.extract(taken_).mapped().entry);
  taken_ += length(entry);
  return true;
}

void FarLog::confirm(bool done) {
  Positions here;
  {
    const std::lock_guard lock(mutex_);
    if (done) done_.carried_out = taken_;
    here = {whole_, done_.carried_out};
  }
  if (here == std::exchange(said_, here)) return;
  connections_.send(kPartner, frame_of(Kind::confirmed, bytes_of(here)), Connections::When::latest);
}

void FarLog::beat() {
  const Nanoseconds t = now();
  if (t - beaten_ < kBeat) return;
  beaten_ = t;
  connections_.send(kPartner, frame_of(Kind::confirmed, bytes_of(said_)), Connections::When::latest);
}

std::byte* FarLog::place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) {
  if (is_farewell(peer, header)) return nullptr;
  if (header.kind == Kind::pushed) {
    const std::lock_guard lock(mutex_);
    demand(header.tag >= whole_ && header.bytes > 0 && header.bytes <= kFragment && header.seq <= header.total &&
               header.bytes <= header.total - header.seq,
           peer, "a part of what was pushed that is none");
    Incoming& to = incoming_[header.tag];
    if (to.entry.data == nullptr) {
      demand(!to.known || header.total == to.entry.record.slot.bytes, peer, "other data than its record says");
      to.entry.data = unwritten_bytes(header.total);
      to.total = header.total;
    }
    to.claimed += header.bytes;
    demand(header.total == to.total && to.claimed <= to.total, peer, "more than was pushed");
    return to.entry.data.get() + header.seq;
  }
  if (header.kind == Kind::record)
    demand(header.bytes >= sizeof(Record) && header.bytes <= sizeof(Record) + NearLog::kReserve, peer,
           "a record of another size");
  else
    demand(header.kind == Kind::confirmed && header.bytes == sizeof(Positions), peer, "a frame of an unknown kind");
  aside.resize(header.bytes);
  return aside.data();
}

void FarLog::deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) {
  if (header.kind == FrameHeader::kLeave) return;
  if (header.kind == Kind::confirmed) {
    Positions positions;
    std::memcpy(&positions, aside.data(), sizeof positions);
    received_.store(std::max(received_.load(std::memory_order_relaxed), positions.received), std::memory_order_release);
    carried_out_.store(std::max(carried_out_.load(std::memory_order_relaxed), positions.carried_out),
                       std::memory_order_release);
    return;
  }
  const std::lock_guard lock(mutex_);
  if (header.kind == Kind::record) {
    demand(header.seq >= whole_, peer, "a record twice");
    Incoming& to = incoming_[header.seq];
    std::memcpy(&to.entry.record, aside.data(), sizeof(Record));
    demand(to.entry.data == nullptr || to.entry.record.slot.bytes == to.total, peer, "a record of other data");
    to.entry.bytes.assign(aside.begin() + sizeof(Record), aside.end());
    to.known = true;
  } else {
    incoming_.at(header.tag).arrived += header.bytes;
  }
  for (auto next = incoming_.find(whole_); next != incoming_.end() && next->second.known;
       next = incoming_.find(whole_)) {
    if (next->second.arrived < next->second.entry.record.slot.bytes) break;
    whole_ += length(next->second.entry);
  }
}

}  // namespace ringreduce::parameter_server
