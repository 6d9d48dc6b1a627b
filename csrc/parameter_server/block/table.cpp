#include "parameter_server/block/table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "core/error.h"
#include "kernels/accumulate.h"

namespace ringreduce::parameter_server {
namespace {

constexpr std::size_t kSlab = 2 * 1024 * 1024;  // the size of a huge page, since rows are read in random order
constexpr std::size_t kNone = SIZE_MAX;
constexpr std::size_t kId = sizeof(std::int64_t);
constexpr std::size_t kFewest = 8;             // smallest number of entries of an index
constexpr std::size_t kIndexBytes = 43;        // most per row: an index of 16-byte entries is at least 3/8 full
constexpr std::size_t kRowsSlice = 16 * 1024;  // bytes of values that are updated at once, to stay in the cache
constexpr std::size_t kAtOnce = 32;            // rows that are looked up at once, so that cache misses overlap
constexpr std::size_t kPrefetched = 4 * 64;    // most bytes of a row that are prefetched

void prefetch(const std::byte* row, std::size_t bytes) {
  for (std::size_t line = 0; line < std::min(bytes, kPrefetched); line += 64) __builtin_prefetch(row + line, 1);
}

}  // namespace

void Table::Free::operator()(std::byte* memory) const { std::free(memory); }

Table::Table(BlockSpec its, std::size_t left, std::size_t capacity)
    : Block(std::move(its)),
      row_bytes_(spec.width * size_of(spec.dtype)),
      states_(static_cast<std::size_t>(spec.rule.states())),
      state_bytes_(spec.rule.per_row() ? size_of(spec.dtype) : row_bytes_),
      stored_bytes_(row_bytes_ + states_ * state_bytes_),
      stride_(round_up(stored_bytes_, 16)),
      per_slab_(std::max<std::size_t>(1, kSlab / (stride_ + kId))) {
  const bool floats = spec.dtype == DType::float32 || spec.dtype == DType::float64;
  if (!floats || by_python())
    throw Error(ErrorKind::invalid_argument, "a table of " + std::string(name(spec.dtype)) + " has no such update");
  if (spec.width > capacity / size_of(spec.dtype))  // so that nothing else overflows
    throw Error(ErrorKind::invalid_argument, "a row of " + std::to_string(spec.width) +
                                                 " elements is larger than the " + std::to_string(capacity) +
                                                 " bytes of the server");
  if (bytes(1) > left)
    throw Error(ErrorKind::invalid_argument, "a table of rows of " + std::to_string(spec.width) + " elements needs " +
                                                 std::to_string(bytes(1)) + " bytes for its first row; " +
                                                 std::to_string(left) + " of the server's " + std::to_string(capacity) +
                                                 " are left: join with a larger memory=, or with more servers");
}

// The memory that `rows` rows take, including states and indices.
std::size_t Table::bytes(std::size_t rows) const {
  const std::size_t slab = round_up(per_slab_ * (stride_ + kId), kSlab);
  return round_up(rows, per_slab_) / per_slab_ * slab + sizeof(Table) + kSlots * kFewest * sizeof(Entry) +
         rows * kIndexBytes;
}

// ---- Looking for rows ---------------------------------------------------------------------------------------------

std::size_t Table::find(std::int64_t id, std::uint64_t hash) const {
  const std::vector<Entry>& entries = indices_[slot_of(hash)].entries;
  if (entries.empty()) return kNone;
  for (std::size_t at = hash & (entries.size() - 1);; at = (at + 1) & (entries.size() - 1)) {
    if (entries[at].row == 0) return kNone;
    if (entries[at].id == id) return entries[at].row - 1;
  }
}

// Looks up all ids, and prefetches the memory of their rows.
void Table::find(std::span<const std::int64_t> ids, std::size_t* rows) const {
  for (std::size_t begin = 0; begin < ids.size(); begin += kAtOnce) {
    const std::size_t count = std::min(kAtOnce, ids.size() - begin);
    std::uint64_t hashes[kAtOnce];
    for (std::size_t i = 0; i < count; ++i) {
      hashes[i] = hash_of(ids[begin + i]);
      const std::vector<Entry>& entries = indices_[slot_of(hashes[i])].entries;
      if (!entries.empty()) __builtin_prefetch(&entries[hashes[i] & (entries.size() - 1)]);
    }
    for (std::size_t i = 0; i < count; ++i) {
      rows[begin + i] = find(ids[begin + i], hashes[i]);
      if (rows[begin + i] != kNone) prefetch(at(rows[begin + i]), stride_);
    }
  }
}

void Table::grow(Index& index) {
  std::vector<Entry> larger(std::max(kFewest, 2 * index.entries.size()));
  for (const Entry& each : index.entries) {
    if (each.row == 0) continue;
    std::size_t at = hash_of(each.id) & (larger.size() - 1);
    while (larger[at].row != 0) at = (at + 1) & (larger.size() - 1);
    larger[at] = each;
  }
  index.entries = std::move(larger);
}

// Returns the row of an id. If there is none, makes one with its first value and states.
std::size_t Table::make(std::int64_t id) {
  const std::uint64_t hash = hash_of(id);
  if (const std::size_t known = find(id, hash); known != kNone) return known;
  if (rows_ == slabs_.size() * per_slab_) {
    const std::size_t bytes = round_up(per_slab_ * (stride_ + kId), kSlab);
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kSlab, bytes));
    if (memory == nullptr) throw std::bad_alloc();
    madvise(memory, bytes, MADV_HUGEPAGE);
    slabs_.emplace_back(memory);
  }
  Index& index = indices_[slot_of(hash)];
  if (4 * (index.used + 1) > 3 * index.entries.size()) grow(index);
  touch(rows_);  // before the slab gets another row
  const std::size_t row = rows_++;
  std::size_t place = hash & (index.entries.size() - 1);
  while (index.entries[place].row != 0) place = (place + 1) & (index.entries.size() - 1);
  index.entries[place] = {id, static_cast<std::uint32_t>(row + 1), 0};
  ++index.used;

  std::memcpy(id_at(row), &id, sizeof id);
  first_values(spec.first, spec.dtype, id, at(row), spec.width);
  std::memset(at(row) + row_bytes_, 0, stored_bytes_ - row_bytes_);
  if (const double accumulated = spec.rule.initial_accumulator_value; accumulated != 0)
    fill(spec.dtype, at(row) + row_bytes_, state_bytes_ / size_of(spec.dtype), accumulated);
  return row;
}

void Table::take_ids(const std::byte* ids, std::size_t count) {
  const std::size_t before = ids_.size();
  ids_.resize(before + count);
  if (count > 0) std::memcpy(ids_.data() + before, ids, count * kId);
}

std::uint64_t Table::read(const std::byte* ids, std::size_t count, std::byte* out) {
  ids_.clear();
  take_ids(ids, count);
  std::size_t rows[kAtOnce];
  for (std::size_t begin = 0; begin < count; begin += kAtOnce) {
    const std::span<const std::int64_t> some = std::span(ids_).subspan(begin, std::min(kAtOnce, count - begin));
    find(some, rows);
    for (std::size_t i = 0; i < some.size(); ++i) {
      std::byte* const to = out + (begin + i) * row_bytes_;
      if (rows[i] != kNone)
        std::memcpy(to, at(rows[i]), row_bytes_);
      else
        first_values(spec.first, spec.dtype, some[i], to, spec.width);
    }
  }
  return 0;
}

// ---- Updates ------------------------------------------------------------------------------------------------------

// Throws Error(system) if the table would take more than `room` bytes with the rows of ids_.
void Table::check_room(std::size_t room) {
  if (rows_ + ids_.size() < UINT32_MAX && bytes(rows_ + ids_.size()) <= room) return;
  std::size_t fresh = 0;
  found_.resize(ids_.size());
  find(ids_, found_.data());
  for (const std::size_t row : found_) fresh += row == kNone;
  if (rows_ + fresh < UINT32_MAX && bytes(rows_ + fresh) <= room) return;
  if (fresh == 0) return;  // `room` is exceeded, but not by this update: other tables or blocks have grown
  throw Error(ErrorKind::system, "there is no room for " + std::to_string(fresh) + " new rows beside its " +
                                     std::to_string(rows_) + ": they would take " +
                                     std::to_string(bytes(rows_ + fresh)) + " bytes in all, and " +
                                     std::to_string(room) +
                                     " are left of this server's memory for the table; nothing of the push was "
                                     "applied here: use more servers, or a larger memory=");
}

// Merges several pushes: adds the rows of equal ids. Leaves the distinct ids in ids_, and returns their rows.
const std::byte* Table::merge(std::span<const Batch> batches, double divisor) {
  ids_.clear();
  if (batches.size() == 1 && batches[0].weight == 1 && divisor == 1) {
    take_ids(batches[0].ids, batches[0].count);
    return batches[0].rows;
  }
  double scale = 1;
  for (const Batch& batch : batches) {
    take_ids(batch.ids, batch.count);
    if (batch.weight != 1) scale = 1 / divisor;  // shares of the sum: a weight times a value may be too large
  }
  if (scale != 1) divisor = 1;
  Distinct distinct(ids_.size());
  std::size_t begin = 0, used = 0;
  scratch_.resize(std::max(scratch_.size(), row_bytes_));
  for (const Batch& batch : batches) {
    for (std::size_t i = 0; i < batch.count; ++i) {
      const std::size_t number = distinct.number(ids_[begin + i]);
      const std::byte* from = batch.rows + i * row_bytes_;
      if (const double weight = batch.weight * scale; weight != 1) {
        kernels::scale(spec.dtype, scratch_.data(), from, spec.width, weight);
        from = scratch_.data();
      }
      if (number < used) {
        add_row(spec.dtype, merged_.data() + number * row_bytes_, from, spec.width);
        continue;
      }
      if (merged_.size() < (number + 1) * row_bytes_) merged_.resize(std::max(2 * merged_.size(), 1024 * row_bytes_));
      std::memcpy(merged_.data() + number * row_bytes_, from, row_bytes_);
      used = number + 1;
    }
    begin += batch.count;
  }
  ids_ = distinct.ids();
  if (divisor != 1 && used > 0) {
    void* const to = merged_.data();
    const void* const from = to;
    kernels::accumulate(spec.dtype, ReduceOp::sum, {&to, 1}, {&from, 1}, used * spec.width, divisor);
  }
  return merged_.data();
}

// Sets found_ to the rows of ids_. Everything that takes memory is done here, before the rows are changed. If there is
// no memory, nothing has been applied: a row without an update has the value that it would have if it were not there.
void Table::find_or_make() {
  found_.resize(ids_.size());
  find(ids_, found_.data());
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (found_[i] == kNone) found_[i] = make(ids_[i]);
    touch(found_[i]);
  }
}

void Table::apply(const Operation& operation, const Means& means) {
  const std::size_t room = means.room == SIZE_MAX ? SIZE_MAX : own_bytes() + means.room;
  if (operation.restores) {
    const Data& data = data_of(operation.contributions[0]);
    const std::byte* const ids = restored(*this, data);
    const std::size_t count = (data.bytes - sizeof(std::uint64_t)) / (kId + stored_bytes_);
    return store(ids, ids + count * kId, count, room);
  }
  std::vector<Batch> batches;
  double weights = 0;
  for (const Contribution& each : operation.contributions) {
    const Data& data = data_of(each);
    const std::size_t count = data.bytes / (kId + row_bytes_);
    batches.push_back({data.at(), data.at() + count * kId, count, each.weight});
    weights += each.weight;
  }
  const bool averages = spec.rule.average && spec.rule.kind != Rule::Kind::reduce;
  update(batches, averages ? weights : 1, means, room);
}

// Gradients of the same row are added, in the order of the batches and of the rows in each, and the sum is divided by
// `divisor`.
void Table::update(std::span<const Batch> batches, double divisor, const Means& means, std::size_t room) {
  const std::byte* const gradients = merge(batches, divisor);
  check_room(room);
  const std::size_t slice = std::min(ids_.size(), std::max<std::size_t>(1, kRowsSlice / row_bytes_));
  scratch_.resize(std::max(scratch_.size(), slice_bytes(slice)));
  find_or_make();
  ++steps;
  for (std::size_t begin = 0; begin < found_.size(); begin += slice)
    update_slice(std::span(found_).subspan(begin, std::min(slice, found_.size() - begin)),
                 gradients + begin * row_bytes_, means.roots);
}

// The bytes that an update of `count` rows needs for copies of their values and states.
std::size_t Table::slice_bytes(std::size_t count) const {
  return 3 * count * row_bytes_ + states_ * count * state_bytes_;
}

void Table::update_slice(std::span<const std::size_t> found, const std::byte* gradients, Roots roots) {
  const std::size_t count = found.size(), bytes = count * row_bytes_;
  if (spec.rule.kind == Rule::Kind::reduce) {  // added in place, without copies
    for (std::size_t i = 0; i < count; ++i) add_row(spec.dtype, at(found[i]), gradients + i * row_bytes_, spec.width);
    return;
  }
  std::byte *const values = scratch_.data(), *const out = values + bytes, *const states = out + 2 * bytes;
  for (std::size_t i = 0; i < count; ++i) {
    const std::byte* const row = at(found[i]);
    std::memcpy(values + i * row_bytes_, row, row_bytes_);
    for (std::size_t state = 0; state < states_; ++state)
      std::memcpy(states + (state * count + i) * state_bytes_, row + row_bytes_ + state * state_bytes_, state_bytes_);
  }
  if (spec.rule.kind != Rule::Kind::assign) {
    Update update;
    update.step = steps;
    update.count = count * spec.width;
    update.width = spec.width;
    update.value = values;
    update.gradient = gradients;
    update.out = out;
    update.scratch = out + bytes;
    update.roots = roots;
    for (std::size_t state = 0; state < states_; ++state) update.state[state] = states + state * count * state_bytes_;
    parameter_server::update(spec.rule, spec.dtype, update);
  } else {
    std::memcpy(out, gradients, bytes);
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* const row = at(found[i]);
    std::memcpy(row, out + i * row_bytes_, row_bytes_);
    for (std::size_t state = 0; state < states_; ++state)
      std::memcpy(row + row_bytes_ + state * state_bytes_, states + (state * count + i) * state_bytes_, state_bytes_);
  }
}

// ---- Stored rows: the value of each, followed by its states -------------------------------------------------------

bool Table::fits(const RequestSlot& slot) const {
  if (slot.offset % kId != 0) return false;
  if (slot.kind == RequestKind::push) return slot.bytes % (kId + row_bytes_) == 0;
  constexpr std::size_t kSteps = sizeof(std::uint64_t);
  return slot.kind == RequestKind::restore && slot.bytes >= kSteps &&
         (slot.bytes - kSteps) % (kId + stored_bytes_) == 0;
}

// Adds rows, or replaces those with the same ids.
void Table::store(const std::byte* ids, const std::byte* stored, std::size_t count, std::size_t room) {
  ids_.clear();
  take_ids(ids, count);
  check_room(room);
  find_or_make();
  for (std::size_t i = 0; i < count; ++i) std::memcpy(at(found_[i]), stored + i * stored_bytes_, stored_bytes_);
}

void Table::copy_slab(std::size_t slab, std::byte* ids, std::byte* stored) const {
  const std::size_t begin = slab * per_slab_, count = rows_in(slab);
  std::memcpy(ids, id_at(begin), count * kId);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(stored + i * stored_bytes_, at(begin + i), stored_bytes_);
}

void Table::visit(Archive& archive, std::size_t slab) {
  archive(steps, failure);
  const std::size_t count = visit_size(archive, archive.reads() || slab == pieces() ? 0 : rows_in(slab));
  std::byte* const ids = archive.next(count * kId);
  std::byte* const stored = archive.next(count * stored_bytes_);
  if (archive.reads() && slab == 0) {
    rows_ = 0;
    slabs_.clear();
    indices_ = {};
  }
  if (count == 0 || ids == nullptr) return;
  if (archive.reads())
    store(ids, stored, count, SIZE_MAX);
  else
    copy_slab(slab, ids, stored);
}

Snapshot::Piece Table::copy(BlockId id, std::size_t slab) const {
  const std::size_t rows = rows_in(slab), ids = rows * kId;
  Snapshot::Piece piece{id, slab * per_slab_, rows, ids + rows * stored_bytes_, nullptr};
  piece.bytes = std::make_unique_for_overwrite<std::byte[]>(piece.size);
  copy_slab(slab, piece.bytes.get(), piece.bytes.get() + ids);
  return piece;
}

}  // namespace ringreduce::parameter_server
