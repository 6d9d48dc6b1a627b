// How a new backup gets the state of its server.
//
// 1. The server serialises its state, without the content of blocks that are updated in place: tables, and dense blocks
//    without two copies of their states. This is the first record of the journal. A backup on the same host gets the
//    descriptors of the memory that has it and of the workers' windows, a backup that is reached by TCP gets the state
//    with the pushed data that is still needed.
// 2. The backup rebuilds itself from the state, and goes on with the journal.
// 3. The server gives the content of the other blocks piece by piece, between requests: a dense block, or a slab of a
//    table. A piece includes all updates that precede it in the journal. So the backup skips updates of blocks of which
//    nothing has arrived, and carries out those that come later. An update may need rows whose slab has not arrived.
//    The backup then makes them, and the slab replaces them. New rows are at the end of the last slab, which comes
//    last.
// 4. The backup counts when it has been given everything. Until then it could not take over, so the server shows its
//    operations without waiting for the backup, and drops a backup that stands still (Partner::stands).

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {
namespace {

// Blocks that have been given and that the backup has not taken. Bounds how long requests wait for the backup.
constexpr std::size_t kMostUnderWay = 4;
constexpr std::uint64_t kNoPayload = UINT64_MAX, kInline = UINT64_MAX - 1;

}  // namespace

// With `has_all`, pushed data is part of the state. Otherwise pushed data is given as a place in a window.
class Server::StateArchive final : public Archive {
 public:
  explicit StateArchive(bool has_all, std::byte* to = nullptr) : Archive(to), has_all(has_all) {}
  StateArchive(bool has_all, std::span<const std::byte> from) : Archive(from), has_all(has_all) {}

  void payload(std::shared_ptr<const Payload>& payload) override {
    auto lent = std::static_pointer_cast<const Lent>(payload);
    std::uint64_t place[3] = {kNoPayload, 0, 0};
    if (lent != nullptr) place[0] = has_all ? kInline : number_of(lent->window);
    if (lent != nullptr) place[1] = lent->offset, place[2] = lent->bytes;
    raw(place, sizeof place);
    const auto bytes = static_cast<std::size_t>(place[2]);
    if (reads() && place[0] != kNoPayload)
      lent = place[0] == kInline ? std::make_shared<Lent>(std::make_shared_for_overwrite<std::byte[]>(bytes), bytes)
                                 : std::make_shared<Lent>(windows.at(place[0]), place[1], bytes);
    if (place[0] == kInline) raw(const_cast<std::byte*>(lent->at()), bytes);
    payload = std::move(lent);
  }

  // What `body` visits, in memory that a backup on this host can map or, with `has_all`, in memory of this process.
  struct Written {
    FileDescriptor memory;
    std::shared_ptr<std::byte[]> data;
    std::size_t bytes;
    std::vector<int> descriptors;

    // Writes the record that this is the content of. Returns false if a backup on this host does not take the
    // descriptors.
    bool give(Partner& to, Record record) const {
      record.slot.bytes = bytes;
      record.descriptors = to.far() ? 0 : descriptors.size() + 1;
      if (!to.send(descriptors) || !to.send(std::array{memory.get()})) return false;
      to.write({record, {}, data});
      to.ring();
      return true;
    }
  };
  template <class F>
  static Written written(bool has_all, F&& body) {
    StateArchive counting(has_all);
    body(counting);
    Written made;
    made.bytes = counting.done();
    made.descriptors = std::move(counting.sent);
    if (has_all) {
      made.data = std::make_shared_for_overwrite<std::byte[]>(made.bytes);
    } else {
      made.memory = make_memory("ringreduce state", made.bytes);
      const auto mapped = std::make_shared<Mapping>(made.memory.get(), made.bytes, true);
      made.data = {mapped, mapped->at()};
    }
    StateArchive writing(has_all, made.data.get());
    body(writing);
    return made;
  }

  const bool has_all;
  std::vector<std::shared_ptr<Window>> windows;  // of the workers; then, of workers that have gone, those with pushes
  std::vector<int> sent;                         // when writing: three descriptors of each worker, one of other windows
  std::vector<FileDescriptor> received;          // when reading: these

 private:
  std::size_t number_of(const std::shared_ptr<Window>& window) {
    const auto found = std::find(windows.begin(), windows.end(), window);
    if (found != windows.end()) return static_cast<std::size_t>(found - windows.begin());
    windows.push_back(window);
    sent.push_back(window->memory_fd.get());
    return windows.size() - 1;
  }
};

// ---- The parts of a state -----------------------------------------------------------------------------------------

// Only on one host: workers connect to a backup that is reached by TCP themselves.
void Server::visit_connections(StateArchive& archive) {
  if (archive.has_all) return;
  const std::size_t count = visit_size(archive, ports_.size());
  if (!archive.reads()) {
    for (const auto& [worker, port] : ports_) {
      archive.windows.push_back(port->window);
      for (const int each : port->descriptors()) archive.sent.push_back(each);
      WorkerSpec spec = port->spec;
      archive(spec, port->alive);
    }
    return;
  }
  if (archive.received.size() < 3 * count) throw Error(ErrorKind::mismatch, "a server's state has too few descriptors");
  auto given = archive.received.begin();
  for (std::size_t i = 0; i < count; ++i) {
    WorkerSpec spec;
    bool alive = true;
    archive(spec, alive);
    for (int* const each : {&spec.window, &spec.pidfd, &spec.news}) *each = (given++)->release();
    const auto& port = ports_[spec.id] = std::make_unique<NearPort>(spec);
    port->alive = alive;
    archive.windows.push_back(port->window);
  }
  // The windows of workers that have gone, with pushes that are still part of an open round.
  for (; given != archive.received.end(); ++given)
    archive.windows.push_back(std::make_shared<Window>(std::move(*given), memory_bytes(given->get()), 0));
}

void Server::visit(StateArchive& archive) {
  visit_connections(archive);
  shard_.visit(archive);
  blocks_.visit(archive);
  archive(statistics_.requests, statistics_.updates, statistics_.bytes);
}

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::give_state(Partner& to) {
  const auto state = StateArchive::written(to.far(), [&](StateArchive& archive) { visit(archive); });
  Record record;
  record.kind = Record::Kind::state;
  record.slot.number = turn_;
  record.slot.round = to.number = ++backups_made_;
  if (!state.give(to, record))
    throw Error(ErrorKind::system, "a new backup was given " + std::to_string(state.descriptors.size() + 1) +
                                       " descriptors and did not take them: " + why_not_sent());
}

void Server::begin_to_give() {
  backup_->next = 0, backup_->end = blocks_.size(), backup_->piece = 0;
  while (backup_->next < backup_->end && blocks_[backup_->next].spec.two_states) ++backup_->next;
  if (backup_->next == backup_->end) return have_given_all();
  // An earlier backup gets no more records, so it counts no longer.
  if (!backup_->far()) header().backup.store(0, std::memory_order_seq_cst);
}

// Gives a new backup the next block. While there are requests, blocks get half of the time at most: the next block is
// given only after the backup has taken the one before, and after a pause as long as that took.
bool Server::give_blocks(bool moved) {
  if (backup_ == nullptr || backup_->next == backup_->end || backup_->ended() || backup_->silent()) return false;
  Partner& to = *backup_;
  const Nanoseconds t = ringreduce::now();
  while (!to.under_way.empty() && to.carried_out() >= to.under_way.front()) {
    to.under_way.pop_front();
    to.took = t;
    to.rests_until = t + (t - to.gave);
  }
  if ((moved || !held_.empty()) && (!to.under_way.empty() || t < to.rests_until)) return false;
  if (to.under_way.size() == kMostUnderWay || to.room() < Journal::kReserve || !give_piece(to.next, to.piece))
    return false;
  if (to.under_way.empty()) to.took = t;
  to.gave = t;
  to.under_way.push_back(to.written());
  pass(Step::gives);
  if (++to.piece < blocks_[to.next].pieces()) return true;
  to.piece = 0;
  do {
    ++to.next;
  } while (to.next < to.end && blocks_[to.next].spec.two_states);
  if (to.next == to.end) have_given_all();
  return true;
}

// Returns false if the socket to the backup is full; then it is tried again.
bool Server::give_piece(BlockId id, std::size_t piece) {
  Block& block = blocks_[id];
  Record record;
  record.kind = Record::Kind::block;
  record.slot.block = id;
  record.slot.offset = piece;
  record.slot.round = piece + 1 < block.pieces();
  return StateArchive::written(backup_->far(), [&](StateArchive& archive) { block.visit(archive, piece); })
      .give(*backup_, record);
}

// A backup on this host counts now, since the journal outlives this server. For others see backup_follows().
void Server::have_given_all() {
  backup_->given_at = backup_->written();
  backup_->hurries = false;
  if (backup_->far()) return;
  backup_->is_counted = true;
  header().backup.store(backup_->number, std::memory_order_seq_cst);  // an earlier backup counts no longer
  for (const auto& [worker, port] : ports_) tell(*port);
  if (is_heir_) take_over();
}

// Whether the backup carries out updates of this block when it reads them, and so needs the pushed data until then.
// Only matters on one host: by TCP pushed data is sent with every record.
bool Server::reads_push(BlockId id) const {
  if (blocks_[id].spec.two_states || backup_ == nullptr || backup_->far()) return !blocks_[id].spec.two_states;
  return id >= backup_->end || id < backup_->next || (id == backup_->next && backup_->piece > 0);
}

// ---- The backup ---------------------------------------------------------------------------------------------------

void Server::take_state(Entry& entry) {
  StateArchive state(followed_->far(), entry.content());
  state.received = std::move(entry.descriptors);
  visit(state);
  turn_ = static_cast<std::uint32_t>(entry.record.slot.number) + 1;
  number_ = static_cast<std::uint32_t>(entry.record.slot.round);
  for (const auto& [worker, port] : ports_) port->known = shard_.knows(worker);
}

void Server::take_block(const Entry& entry) {
  StateArchive content(true, entry.content());
  blocks_.take(entry.record.slot.block, entry.record.slot.offset, content, entry.record.slot.round != 0);
  pass(Step::takes);
}

}  // namespace ringreduce::parameter_server
