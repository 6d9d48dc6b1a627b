#include "transport/segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "core/descriptors.h"
#include "core/fork.h"
#include "core/utf8.h"

namespace ringreduce {
namespace {

struct Mapped {
  std::mutex mutex;
  std::set<const Segment*> segments;
};

}  // namespace

std::size_t Geometry::segment_bytes() const { return Segment::kHeaderBytes + Layout(*this).region_bytes * ranks; }

Segment::Segment(const FileDescriptor& memfd, const Geometry& geometry)
    : layout_(geometry), base_(nullptr, {geometry.segment_bytes()}) {
  const std::size_t bytes = base_.get_deleter().bytes;
  void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd.get(), 0);
  if (mapped == MAP_FAILED)
    throw Error(ErrorKind::system,
                "cannot map " + std::to_string(bytes) +
                    " bytes of shared memory (channel_bytes in RINGREDUCE_ENGINE lowers it): " + last_error());
  base_.reset(static_cast<std::byte*>(mapped));
  auto& all = process_wide<Mapped>();
  std::lock_guard lock(all.mutex);
  all.segments.insert(this);
}

void Segment::each_of_process(const std::function<void(const Segment&)>& look) {
  auto& all = process_wide<Mapped>();
  std::lock_guard lock(all.mutex);
  for (const Segment* segment : all.segments) look(*segment);
}

std::string Segment::name() const {
  const Header& shown = header();
  if (shown.format.load(std::memory_order_acquire) == 0) return "";
  return {shown.name, strnlen(shown.name, sizeof(shown.name))};
}

int Segment::global_rank(int rank) const {
  const RankControl& control = region(rank).control();
  return control.state.load(std::memory_order_acquire) == RankState::absent ? rank : control.global_rank.load();
}

void Segment::cannot_take_part(int memfd, int rank, const RankName& name, const std::string& reason) {
  // There may be no memory to map, but write() needs none. This rank has no call under way, so the record's writers are
  // few, and whoever else writes it has an error of the same team.
  const std::string why = name.describe(rank) + " cannot take part: " + reason;
  AbortRecord record{};  // of which the first two words stay as they are until the rest is there
  record.kind = static_cast<std::int32_t>(ErrorKind::peer_lost);
  record.culprit = record.reporter = rank;
  cut(why, sizeof(record.message) - 1).copy(record.message, sizeof(record.message));
  record.state = 2;
  constexpr std::size_t kRest = offsetof(AbortRecord, kind), kBytes = sizeof(record) - kRest;
  const auto* const bytes = reinterpret_cast<const std::byte*>(&record);
  if (pwrite(memfd, bytes + kRest, kBytes, kRest) == static_cast<ssize_t>(kBytes))
    static_cast<void>(!pwrite(memfd, bytes, sizeof(record.state), offsetof(AbortRecord, state)));
}

void Segment::show(FileDescriptor memfd, const Title& group) {
  header().geometry = layout_;
  cut(group.name, sizeof(header().name) - 1).copy(header().name, sizeof(header().name));
  cut(group.job, sizeof(header().job) - 1).copy(header().job, sizeof(header().job));
  header().format.store(kFormat, std::memory_order_release);
  shown_ = std::move(memfd);
}

Segment::~Segment() {
  auto& all = process_wide<Mapped>();
  std::lock_guard lock(all.mutex);
  all.segments.erase(this);
}

void Segment::Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

}  // namespace ringreduce
