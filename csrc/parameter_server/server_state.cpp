// How a new backup gets the state of its server.
//
// 1. The server serialises its state, without the content of blocks that are updated in place: tables, and dense blocks
//    without two copies of their states. It passes the memory to a backup on its host, together with the descriptors of
//    its workers. To a backup that is reached by TCP it sends the state, with pushed data that is still needed, as the
//    first record of the journal.
// 2. The backup rebuilds itself from the state, and goes on with the journal, which begins at the same moment.
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

// The last message of a state on one host. It comes with the descriptor of the serialised state.
struct Ready {
  std::uint64_t bytes;
  std::uint32_t number;  // of the backup
  std::uint32_t turn;    // of the server
};

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
    std::vector<std::shared_ptr<Window>> windows;
  };
  template <class F>
  static Written written(bool has_all, F&& body) {
    StateArchive counting(has_all);
    body(counting);
    Written made;
    made.bytes = counting.done();
    made.windows = std::move(counting.windows);
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

 private:
  std::size_t number_of(const std::shared_ptr<Window>& window) {
    const auto found = std::find(windows.begin(), windows.end(), window);
    if (found != windows.end()) return static_cast<std::size_t>(found - windows.begin());
    windows.push_back(window);
    return windows.size() - 1;
  }
};

void visit(Archive& archive, WorkerSpec& spec) {
  archive(spec.id, spec.group, spec.window_bytes, spec.servers, spec.lane, spec.name);
}

void visit(Archive& archive, BlockSpec& spec) {
  archive(spec.dtype, spec.count, spec.mode, spec.rule, spec.width, spec.first, spec.note, spec.two_states);
}

// ---- The parts of a state -----------------------------------------------------------------------------------------

// Only on one host: workers connect to a backup that is reached by TCP themselves. The backup has got three descriptors
// for each worker, and then those of the other windows.
void Server::visit_connections(StateArchive& archive) {
  if (archive.has_all) return;
  const std::size_t count = visit_size(archive, connections_.size());
  if (!archive.reads()) {
    for (auto& [worker, connection] : connections_) {
      archive.windows.push_back(connection.window);
      archive(connection.spec, connection.alive);
    }
    return;
  }
  if (given_.size() < 3 * count) throw Error(ErrorKind::mismatch, "a server's state has too few descriptors");
  auto given = given_.begin();
  for (std::size_t i = 0; i < count; ++i) {
    WorkerSpec spec;
    bool alive = true;
    archive(spec, alive);
    for (int* const each : {&spec.window, &spec.pidfd, &spec.news}) *each = (given++)->release();
    Connection connection = connection_of(std::move(spec));
    connection.alive = alive;
    archive.windows.push_back(connection.window);
    connections_.emplace(connection.spec.id, std::move(connection));
  }
  for (; given != given_.end(); ++given) archive.windows.push_back(std::make_shared<Window>(std::move(*given)));
  given_.clear();
}

void Server::visit_blocks(Archive& archive) {
  const std::size_t count = visit_size(archive, blocks_.size());
  for (BlockId id = 0; id < count; ++id) {
    if (archive.reads()) {
      BlockSpec spec;
      archive(spec);
      make_block(spec);
    } else {
      archive(blocks_[id]->spec);
    }
    Block& block = *blocks_[id];
    archive(block.steps, block.failure);
    block.is_missing = archive.reads() && !block.spec.two_states;
    block.lacks_rows = block.is_missing && block.is_table();
  }
}

void Server::visit(StateArchive& archive) {
  visit_connections(archive);
  shard_.visit(archive);
  visit_blocks(archive);
  archive(statistics_.requests, statistics_.updates, statistics_.bytes);
}

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::give_state(NearPartner& to) {
  auto state = StateArchive::written(false, [&](StateArchive& archive) { visit(archive); });
  std::vector<int> given;
  for (const auto& [worker, connection] : connections_)
    for (const int each : {connection.spec.window, connection.pidfd.get(), connection.spec.news}) given.push_back(each);
  for (std::size_t i = connections_.size(); i < state.windows.size(); ++i)
    given.push_back(state.windows[i]->memory_fd.get());
  const Ready ready{state.bytes, ++backups_made_, turn_};
  bool gone = true;
  const char some = 0;
  for (std::size_t begin = 0; begin < given.size(); begin += kMostDescriptors)
    gone &= send_message(to.passage.get(), &some, sizeof some,
                         std::span(given).subspan(begin, std::min(kMostDescriptors, given.size() - begin)));
  if (!gone || !send_message(to.passage.get(), &ready, sizeof ready, std::array{state.memory.get()}))
    throw Error(ErrorKind::system, "a new backup was given " + std::to_string(given.size() + 1) +
                                       " descriptors and did not take them: " + why_not_sent());
  to.number = ready.number;
}

void Server::give_far_state() {
  const auto state = StateArchive::written(true, [&](StateArchive& archive) { visit(archive); });
  Record record;
  record.kind = Record::Kind::state;
  record.slot.number = turn_;
  record.slot.bytes = state.bytes;
  const Lent all(state.data, state.bytes);
  backup_->write(record, {}, &all);
}

void Server::begin_to_give() {
  backup_->next = 0, backup_->end = static_cast<BlockId>(blocks_.size()), backup_->piece = 0;
  while (backup_->next < backup_->end && blocks_[backup_->next]->spec.two_states) ++backup_->next;
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
  if (++to.piece < blocks_[to.next]->pieces()) return true;
  to.piece = 0;
  do {
    ++to.next;
  } while (to.next < to.end && blocks_[to.next]->spec.two_states);
  if (to.next == to.end) have_given_all();
  return true;
}

// Returns false if the socket to the backup is full; then it is tried again.
bool Server::give_piece(BlockId id, std::size_t piece) {
  Block& block = *blocks_[id];
  auto content = StateArchive::written(backup_->far(), [&](StateArchive& archive) { block.visit(archive, piece); });
  Record record;
  record.kind = Record::Kind::block;
  record.slot.block = id;
  record.slot.offset = piece;
  record.slot.round = piece + 1 < block.pieces();
  record.slot.bytes = content.bytes;
  const auto* const near = dynamic_cast<const NearPartner*>(backup_.get());
  const char some = 0;
  if (near != nullptr && !send_message(near->passage.get(), &some, sizeof some, std::array{content.memory.get()}))
    return false;
  const Lent all(content.data, content.bytes);
  backup_->write(record, {}, &all);
  backup_->ring();
  return true;
}

// A backup on this host counts now, since the journal outlives this server. For others see backup_follows().
void Server::have_given_all() {
  backup_->given_at = backup_->written();
  backup_->hurries = false;
  const auto* const near = dynamic_cast<const NearPartner*>(backup_.get());
  if (near == nullptr) return;
  backup_->is_counted = true;
  header().backup.store(near->number, std::memory_order_seq_cst);  // an earlier backup counts no longer
  for (auto& [worker, connection] : connections_) tell(connection);
  if (is_heir_) take_over();
}

// Whether the backup carries out updates of this block when it reads them, and so needs the pushed data until then.
// Only matters on one host: by TCP pushed data is sent with every record.
bool Server::reads_push(BlockId id) const {
  if (blocks_[id]->spec.two_states || backup_ == nullptr || backup_->far()) return !blocks_[id]->spec.two_states;
  return id >= backup_->end || id < backup_->next || (id == backup_->next && backup_->piece > 0);
}

// ---- The backup ---------------------------------------------------------------------------------------------------

void Server::take_block(const Record& record, const Lent* given) {
  Block& block = *blocks_[record.slot.block];
  const std::size_t before = block.own_bytes();
  const auto take = [&](const std::byte* at) {
    StateArchive content(true, std::span(at, static_cast<std::size_t>(record.slot.bytes)));
    block.visit(content, record.slot.offset);
  };
  if (given != nullptr) {
    take(given->at());
  } else {
    const std::optional<Received> message = receive_message(near_server().passage.get());
    if (!message || message->descriptors.size() != 1)
      throw Error(ErrorKind::mismatch, "the content of a block has not come to the backup");
    take(Mapping(message->descriptors[0].get(), static_cast<std::size_t>(record.slot.bytes), false).at());
  }
  own_bytes_ += block.own_bytes() - before;
  block.is_missing = false;
  block.lacks_rows = record.slot.round != 0;
  pass(Step::takes);
}

void Server::become_far_server(const Record& record, const Lent& state) {
  StateArchive reader(true, std::span(state.at(), state.bytes));
  visit(reader);
  turn_ = static_cast<std::uint32_t>(record.slot.number) + 1;
  for (auto& [worker, connection] : connections_) connection.known = shard_.knows(worker);
}

// Takes the server's state if it has arrived. Returns whether this backup has it.
bool Server::become_server() {
  while (number_ == 0) {
    std::optional<Received> message = receive_message(near_server().passage.get());
    if (!message) return false;
    if (message->bytes.size() != sizeof(Ready)) {
      for (FileDescriptor& each : message->descriptors) given_.push_back(std::move(each));
      continue;
    }
    Ready ready;
    std::memcpy(&ready, message->bytes.data(), sizeof ready);
    const Mapping memory(message->descriptors.at(0).get(), static_cast<std::size_t>(ready.bytes), false);
    StateArchive state(false, std::span<const std::byte>(memory.at(), memory.bytes()));
    visit(state);
    number_ = ready.number;
    turn_ = ready.turn + 1;
    stepped_ = ringreduce::now();
  }
  return true;
}

}  // namespace ringreduce::parameter_server
