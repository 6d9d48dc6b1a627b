#include "parameter_server/server/leader.h"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

#include "core/error.h"
#include "parameter_server/server/state_archive.h"

namespace ringreduce::parameter_server {
namespace {

// Pieces that have been given and that the backup has not taken. Bounds how long requests wait for the backup.
constexpr std::size_t kMostUnderWay = 2;

}  // namespace

Leader::Leader(Replica& replica, std::unique_ptr<Partner> its, std::uint32_t number)
    : backup(std::move(its)), number(number), replica_(replica) {
  const auto state = StateArchive::written(backup->far(), [&](StateArchive& archive) { replica_.visit(archive); });
  Record record;
  record.kind = Record::Kind::state;
  record.slot.number = replica_.turn;
  record.slot.round = number;
  if (!state.give(*backup, record))
    throw Error(ErrorKind::system, "a new backup was given " + std::to_string(state.descriptors.size() + 1) +
                                       " descriptors and did not take them: " + why_not_sent());
}

bool Leader::write_down(const Message& message, Nanoseconds elapsed) {
  Entry entry;
  Record& record = entry.record;
  record.elapsed = elapsed;
  const auto* const request = std::get_if<Request>(&message);
  if (request != nullptr) {
    record.kind = Record::Kind::request;
    record.worker = request->worker;
    const auto* const lent = static_cast<const Lent*>(request->payload.get());
    const std::size_t offset = lent == nullptr || lent->window == nullptr ? 0 : lent->offset - lent->window->data_begin;
    record.slot = slot_of(*request, offset, lent == nullptr ? 0 : lent->bytes);
    if (lent != nullptr) entry.data = lent->memory;
  } else if (const auto* join = std::get_if<Join>(&message)) {
    record.kind = Record::Kind::join;
    record.worker = join->worker;
    record.descriptors = backup->far() ? 0 : 3;
    entry.bytes = written(replica_.ports.at(join->worker)->spec);
  } else if (const auto* lose = std::get_if<Lose>(&message)) {
    record.kind = Record::Kind::lose;
    record.worker = lose->worker;
  } else if (std::holds_alternative<Create>(message)) {
    record.kind = Record::Kind::create;
    entry.bytes = written(replica_.blocks[replica_.blocks.size() - 1].spec);
  }
  record.bytes = entry.bytes.size();
  if (!backup->far() && backup->room() < sizeof record + entry.bytes.size()) return false;
  backup->write(std::move(entry));
  const bool waits = request != nullptr && replica_.blocks.have(request->block) && reads_push(request->block);
  if (waits || backup->room() < NearLog::kBytes / 4 * 3) backup->ring();
  replica_.pass(Step::logged);
  return true;
}

void Leader::introduce(const Port& port) const {
  if (!backup->ended() && !backup->send(port.descriptors()) && !backup->ended())
    throw Error(ErrorKind::system,
                std::string("the server's backup was not told of a worker that joins: ") + why_not_sent());
}

bool Leader::takes_requests() const { return backup->room() >= NearLog::kReserve && !backup->silent() && !hurries_; }

// Blocks may use half of the reserve. The rest is for ticks and for workers that join and leave: these are few while
// requests wait.
bool Leader::has_room_for(BlockSpec spec) const {
  const std::size_t bytes = sizeof(Record) + written(spec).size();
  if (bytes > NearLog::kReserve / 2)
    throw Error(ErrorKind::invalid_argument, "what is said of a block has " + std::to_string(bytes) +
                                                 " bytes; its server's backup takes at most " +
                                                 std::to_string(NearLog::kReserve / 2));
  return backup->room() >= NearLog::kReserve / 2 + bytes && !backup->silent();
}

// ---- Giving -------------------------------------------------------------------------------------------------------

void Leader::begin_to_give(bool hurries) {
  hurries_ = hurries;
  next_ = 0, end_ = replica_.blocks.size(), piece_ = 0;
  skip_given();
}

// Passes over blocks that a backup adopts. When all has been given, a backup on this host counts, since the log
// outlives this server. For others, the store must know of it first.
void Leader::skip_given() {
  while (gives() && replica_.blocks[next_].spec.two_states) ++next_;
  if (gives()) return;
  given_at_ = backup->written();
  hurries_ = false;
  counts |= !backup->far();
}

// While there are requests, pieces get half of the time at most: the next one is given only after the backup has taken
// the one before, and after a pause as long as that took.
bool Leader::give(bool busy) {
  const Nanoseconds t = now();
  while (!under_way_.empty() && backup->carried_out() >= under_way_.front()) {
    under_way_.pop_front();
    took_ = t;
    rests_until_ = t + (t - gave_);
  }
  if (busy && (!under_way_.empty() || t < rests_until_)) return false;
  if (under_way_.size() == kMostUnderWay || backup->room() < NearLog::kReserve || !give_piece()) return false;
  if (under_way_.empty()) took_ = t;
  gave_ = t;
  under_way_.push_back(backup->written());
  replica_.pass(Step::gives);
  if (++piece_ < replica_.blocks[next_].pieces()) return true;
  piece_ = 0;
  ++next_;
  skip_given();
  return true;
}

// Returns false if the socket to the backup is full; then it is tried again.
bool Leader::give_piece() {
  Block& block = replica_.blocks[next_];
  Record record;
  record.kind = Record::Kind::block;
  record.slot.block = next_;
  record.slot.offset = piece_;
  record.slot.round = piece_ + 1 < block.pieces();
  return StateArchive::written(backup->far(), [&](StateArchive& archive) { block.visit(archive, piece_); })
      .give(*backup, record);
}

bool Leader::stands() const {
  return !backup->far() && !counts && !under_way_.empty() && now() - took_ > kBackupStands;
}

bool Leader::reads_push(BlockId id) const {
  if (replica_.blocks[id].spec.two_states || backup->far()) return !replica_.blocks[id].spec.two_states;
  return id >= end_ || id < next_ || (id == next_ && piece_ > 0);
}

}  // namespace ringreduce::parameter_server
