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

#include "core/error.h"
#include "parameter_server/server.h"
#include "parameter_server/state_archive.h"

namespace ringreduce::parameter_server {
namespace {

// Blocks that have been given and that the backup has not taken. Bounds how long requests wait for the backup.
constexpr std::size_t kMostUnderWay = 4;

}  // namespace

void Server::give_state(Partner& to) {
  const auto state = StateArchive::written(to.far(), [&](StateArchive& archive) { replica_.visit(archive); });
  Record record;
  record.kind = Record::Kind::state;
  record.slot.number = replica_.turn;
  record.slot.round = to.number = ++backups_made_;
  if (!state.give(to, record))
    throw Error(ErrorKind::system, "a new backup was given " + std::to_string(state.descriptors.size() + 1) +
                                       " descriptors and did not take them: " + why_not_sent());
}

void Server::begin_to_give() {
  backup_->next = 0, backup_->end = replica_.blocks.size(), backup_->piece = 0;
  while (backup_->next < backup_->end && replica_.blocks[backup_->next].spec.two_states) ++backup_->next;
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
  replica_.pass(Step::gives);
  if (++to.piece < replica_.blocks[to.next].pieces()) return true;
  to.piece = 0;
  do {
    ++to.next;
  } while (to.next < to.end && replica_.blocks[to.next].spec.two_states);
  if (to.next == to.end) have_given_all();
  return true;
}

// Returns false if the socket to the backup is full; then it is tried again.
bool Server::give_piece(BlockId id, std::size_t piece) {
  Block& block = replica_.blocks[id];
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
  for (const auto& [worker, port] : replica_.ports) tell(*port);
  if (is_heir_) take_over();
}

// Whether the backup carries out updates of this block when it reads them, and so needs the pushed data until then.
// Only matters on one host: by TCP pushed data is sent with every record.
bool Server::reads_push(BlockId id) const {
  if (replica_.blocks[id].spec.two_states || backup_ == nullptr || backup_->far())
    return !replica_.blocks[id].spec.two_states;
  return id >= backup_->end || id < backup_->next || (id == backup_->next && backup_->piece > 0);
}

}  // namespace ringreduce::parameter_server
