// A server and its backup that reach each other over connections (journal_wire.h), and who of them goes on.
//
// When the one does not hear the other, because its process has ended, its host has been silent for as long as
// RINGREDUCE_DEAD_AFTER says, or the network between them is cut, it cannot know which of these it is. So it asks the
// directory, which is the launcher's store: a compare-and-set of the shard's view, from both to itself alone
// (succession.py). The first one wins, and decided() tells each of them. Two never serve the same blocks:
//
//   The server    carries out, shows and answers nothing that its backup has not confirmed, from when it has given the
//                 backup all (server_state.cpp), which is before the backup counts. So from the last
//                 confirmation on it changes nothing that anybody sees, until it has won. Then the backup has lost, or
//                 will lose, and never serves.
//   The backup    serves once it has won. Then the server has lost, or will lose: what it kept back it drops, and it
//                 has ended for its workers.
//   Nothing that was answered or shown is missing at the backup, since it confirmed that before. What the server kept
//                 back nobody has seen, and workers ask the backup for it again, with the same numbers.
//   Who cannot reach the store waits, and so do the calls of its workers.
//
// There is no lease. Workers on the server's own host copy values from its memory themselves: while it is cut off and
// has not noticed it, they read what was there before the cut. Then they wait as well (ValuesHeader::serves).
#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

void Server::lead_far(std::function<void()> on_silence, std::string name) {
  auto partner = std::make_unique<FarPartner>(*bell_, std::move(on_silence), std::move(name));
  order([&] {
    if (!serves_ || backup_ != nullptr)
      throw Error(ErrorKind::invalid_argument, "this server has a backup already, or is one");
    check_native();
    carry_out();  // what an earlier backup had to have first
    for (Held& each : held_) each.after = 0;
    backup_ = std::move(partner);
    give_far_state();
    begin_to_give();
  });
}

bool Server::backup_follows() {
  bool follows = false;
  order([&] {
    follows = backup_ != nullptr && !backup_->silent() && backup_->next == backup_->end &&
              backup_->received() >= backup_->given_at;
  });
  return follows;
}

void Server::count_backup() {
  order([&] {
    auto* const partner = dynamic_cast<FarPartner*>(backup_.get());
    if (partner == nullptr) return;
    partner->is_counted = true;
    if (is_heir_) take_over();
  });
}

void Server::abandon_backup() {
  order([&] {
    if (backup_ != nullptr && !backup_->counts()) go_on_alone();
  });
}

void Server::go_on_alone() {
  backup_.reset();
  if (is_heir_) return;
  header().serves.store(1, std::memory_order_seq_cst);
  for (auto& [worker, connection] : connections_) connection.window->bell().ring();
}

std::uint64_t Server::freeze() {
  std::uint64_t written = 0;
  order([&] {
    if (backup_ == nullptr || backup_->silent())
      throw Error(ErrorKind::invalid_argument, "this server has no backup that could go on");
    frozen_ = true;
    decide(Tick{});  // of which the backup cannot have heard before
    carry_out();
    written = backup_->written();
  });
  return written;
}

void Server::unfreeze() {
  order([&] { frozen_ = false; });
}

std::uint64_t Server::confirmed() {
  std::uint64_t received = 0;
  order([&] { received = backup_ == nullptr || backup_->silent() ? 0 : backup_->received(); });
  return received;
}

void Server::follow_far(std::function<void()> on_silence) {
  follow(std::make_unique<FarPartner>(*bell_, std::move(on_silence), std::string()));
}

// Whether what was written down up to there will outlive this server, or need not.
bool Server::is_kept(std::uint64_t position) const {
  return backup_ == nullptr || (backup_->received() >= position && !backup_->silent());
}

// Leaves in `decided_` what may be carried out now.
void Server::keep_back() {
  answers_up_to_ = backup_ == nullptr ? 0 : backup_->written();
  if (backup_ == nullptr ? kept_back_.empty() : !backup_->far() || backup_->next < backup_->end) return;
  if (!decided_.operations.empty() || !decided_.replies.empty())
    kept_back_.emplace_back(answers_up_to_, std::exchange(decided_, {}));
  for (; !kept_back_.empty() && is_kept(kept_back_.front().first); kept_back_.pop_front()) {
    auto& [position, output] = kept_back_.front();
    answers_up_to_ = position;
    std::move(output.operations.begin(), output.operations.end(), std::back_inserter(decided_.operations));
    std::move(output.replies.begin(), output.replies.end(), std::back_inserter(decided_.replies));
  }
}

void Server::FarPartner::write(const Record& record, const std::vector<std::byte>& bytes, const Lent* pushed) {
  JournalWire::Entry entry{record, bytes, nullptr};
  if (pushed != nullptr && pushed->bytes > 0)
    entry.pushed = pushed->window == nullptr
                       ? pushed->memory
                       : std::shared_ptr<std::byte[]>(pushed->window, pushed->window->memory.at(pushed->offset));
  wire.write(std::move(entry));
}

bool Server::FarPartner::read(Record& record, std::vector<std::byte>& bytes, std::shared_ptr<const Lent>& pushed) {
  JournalWire::Entry entry;
  if (!wire.read(entry)) return false;
  record = entry.record;
  bytes = std::move(entry.bytes);
  pushed = nullptr;
  const bool has_some = record.kind == Record::Kind::request && record.slot.block != UINT32_MAX;
  if (has_some || record.kind == Record::Kind::state || record.kind == Record::Kind::block)
    pushed = std::make_shared<Lent>(entry.pushed, static_cast<std::size_t>(record.slot.bytes));
  return true;
}

bool Server::FarPartner::progress() {
  const bool moved = wire.connections().progress();
  wire.beat();
  if (is_silent || wire.take_lost().empty()) return moved;
  is_silent = true;
  on_silence();
  return true;
}

void Server::connect_partner(int socket, std::string path) {
  order([&] {
    auto* const partner = dynamic_cast<FarPartner*>(backup_ != nullptr ? backup_.get() : followed_.get());
    if (partner == nullptr) throw Error(ErrorKind::invalid_argument, "this server has no partner on another host");
    partner->wire.connections().add(JournalWire::kPartner, socket, path);
  });
}

bool Server::partners_move() {
  if (backup_ != nullptr && backup_->progress()) {
    header().serves.store(serves_ && !is_heir_ && !backup_->silent(), std::memory_order_seq_cst);
    return true;
  }
  return followed_ != nullptr && followed_->progress();
}

void Server::decided(bool goes_on) {
  order([&] {
    const bool is_backup = backup_ == nullptr || is_heir_;
    const Partner* const partner = is_backup ? followed_.get() : backup_.get();
    if (partner == nullptr || !partner->silent()) return;
    if (!goes_on) return is_backup ? give_up("") : be_replaced();
    if (!is_backup) {
      come_back();
      return go_on_alone();
    }
    try {
      if (!is_heir_) repeat_all(true);
      take_over();
    } catch (const std::exception& error) {
      give_up(error.what());
    }
  });
}

// By its backup, which has decided otherwise on what this one has kept back.
void Server::be_replaced() {
  serves_ = false;
  kept_back_.clear();
  held_.clear();
  decided_ = {};
  backup_.reset();
  header().serves.store(0, std::memory_order_seq_cst);
  header().ended.store(1, std::memory_order_seq_cst);
  header().leaves.store(0, std::memory_order_seq_cst);  // last: without it, one that has not ended has come back
  send_away();
}

}  // namespace ringreduce::parameter_server
