#include "parameter_server/server/near_log.h"

#include <algorithm>
#include <cstring>

namespace ringreduce::parameter_server {

FileDescriptor NearLog::make() { return make_memory("ringreduce log", sizeof(Words) + kBytes); }

NearLog::NearLog(int memory) : memory_(memory, sizeof(Words) + kBytes, true) {}

void NearLog::write(const Record& record, const std::vector<std::byte>& bytes) {
  const std::uint64_t at = written();
  put(at, &record, sizeof record);
  put(at + sizeof record, bytes.data(), bytes.size());
  words().written.store(at + sizeof record + bytes.size(), std::memory_order_release);
}

bool NearLog::read(Record& record, std::vector<std::byte>& bytes) {
  if (words().written.load(std::memory_order_acquire) == taken_) return false;
  get(taken_, &record, sizeof record);
  bytes.resize(static_cast<std::size_t>(record.bytes));
  get(taken_ + sizeof record, bytes.data(), bytes.size());
  taken_ += sizeof record + bytes.size();
  return true;
}

// The memory is a ring: what does not fit before its end continues at its beginning.
void NearLog::put(std::uint64_t at, const void* from, std::size_t bytes) {
  const std::size_t begin = static_cast<std::size_t>(at % kBytes), first = std::min(bytes, kBytes - begin);
  std::byte* const ring = memory_.at(sizeof(Words));
  if (bytes == 0) return;
  std::memcpy(ring + begin, from, first);
  std::memcpy(ring, static_cast<const std::byte*>(from) + first, bytes - first);
}

void NearLog::get(std::uint64_t at, void* to, std::size_t bytes) const {
  const std::size_t begin = static_cast<std::size_t>(at % kBytes), first = std::min(bytes, kBytes - begin);
  const std::byte* const ring = memory_.at(sizeof(Words));
  if (bytes == 0) return;
  std::memcpy(to, ring + begin, first);
  std::memcpy(static_cast<std::byte*>(to) + first, ring, bytes - first);
}

}  // namespace ringreduce::parameter_server
