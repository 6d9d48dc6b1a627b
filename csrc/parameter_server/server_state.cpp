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
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <span>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {
namespace {

constexpr std::size_t kBuffer = 1 << 20;
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

// Serialises a state to a memfd. With `has_all`, pushed data is part of it. Otherwise pushed data is given as a place
// in a window; windows of workers that have gone are added to the descriptors that the backup is given.
class Server::StateWriter : public Archive {
 public:
  explicit StateWriter(bool has_all)
      : Archive(false), has_all(has_all), memory_(memfd_create("ringreduce state", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    if (memory_.get() < 0) throw Error(ErrorKind::system, std::string("memfd_create: ") + std::strerror(errno));
  }

  void know(const Window* window) { windows_.emplace(window, windows_.size()); }

  void raw(void* at, std::size_t bytes) override {
    if (buffer_.size() + bytes > kBuffer) flush();
    const auto* const begin = static_cast<const std::byte*>(at);
    if (bytes > kBuffer) return put(begin, bytes);
    buffer_.insert(buffer_.end(), begin, begin + bytes);
  }
  void payload(std::shared_ptr<const Payload>& payload) override {
    const auto* const lent = static_cast<const Lent*>(payload.get());
    std::uint64_t place[3] = {kNoPayload, 0, 0};
    if (lent != nullptr && has_all) {
      place[0] = kInline, place[2] = lent->bytes;
      raw(place, sizeof place);
      return raw(const_cast<std::byte*>(lent->at()), lent->bytes);
    }
    if (lent != nullptr) {
      const auto [found, fresh] = windows_.emplace(lent->window.get(), windows_.size());
      if (fresh) more_.push_back(lent->window->memory_fd.get());
      place[0] = found->second, place[1] = lent->offset, place[2] = lent->bytes;
    }
    raw(place, sizeof place);
  }

  // The descriptors of windows whose workers have gone.
  const std::vector<int>& more() const { return more_; }
  // Seals the memory; returns its descriptor and size.
  std::pair<int, std::size_t> end() {
    flush();
    if (fcntl(memory_.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0)
      throw Error(ErrorKind::system, std::string("sealing a server's state: ") + std::strerror(errno));
    return {memory_.get(), written_};
  }

  const bool has_all;

 private:
  void flush() {
    put(buffer_.data(), buffer_.size());
    buffer_.clear();
  }
  void put(const std::byte* from, std::size_t bytes) {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t some = write(memory_.get(), from + done, bytes - done);
      if (some < 0 && errno != EINTR)
        throw Error(ErrorKind::system, std::string("writing a server's state: ") + std::strerror(errno));
      done += static_cast<std::size_t>(std::max<ssize_t>(some, 0));
    }
    written_ += bytes;
  }

  FileDescriptor memory_;
  std::size_t written_ = 0;
  std::vector<std::byte> buffer_;
  std::map<const Window*, std::uint64_t> windows_;
  std::vector<int> more_;
};

class Server::StateReader : public Archive {
 public:
  StateReader(std::span<const std::byte> memory, bool has_all, std::vector<FileDescriptor> given)
      : Archive(true), has_all(has_all), memory_(memory), given_(std::move(given)) {}

  FileDescriptor next() {
    if (next_ == given_.size()) throw Error(ErrorKind::mismatch, "a server's state has too few descriptors");
    return std::move(given_[next_++]);
  }
  void know(std::shared_ptr<Window> window) { windows_.push_back(std::move(window)); }
  bool has_more() const { return next_ < given_.size(); }

  void raw(void* at, std::size_t bytes) override {
    if (bytes > memory_.size() - taken_) throw Error(ErrorKind::mismatch, "a server's state is too short");
    if (bytes > 0) std::memcpy(at, memory_.data() + taken_, bytes);
    taken_ += bytes;
  }
  void payload(std::shared_ptr<const Payload>& payload) override {
    std::uint64_t place[3];
    raw(place, sizeof place);
    if (place[0] == kNoPayload) return;
    const auto bytes = static_cast<std::size_t>(place[2]);
    if (place[0] != kInline) {
      payload = std::make_shared<Lent>(windows_.at(place[0]), static_cast<std::size_t>(place[1]), bytes);
      return;
    }
    auto pushed = std::make_shared_for_overwrite<std::byte[]>(bytes);
    raw(pushed.get(), bytes);
    payload = std::make_shared<Lent>(std::move(pushed), bytes);
  }

  const bool has_all;

 private:
  const std::span<const std::byte> memory_;
  std::size_t taken_ = 0, next_ = 0;
  std::vector<FileDescriptor> given_;
  std::vector<std::shared_ptr<Window>> windows_;
};

void visit(Archive& archive, WorkerSpec& spec) {
  archive(spec.id, spec.group, spec.window_bytes, spec.servers, spec.lane, spec.name);
}

void visit(Archive& archive, BlockSpec& spec) {
  archive(spec.dtype, spec.count, spec.mode, spec.rule, spec.width, spec.first, spec.note, spec.two_states);
}

// ---- The parts of a state -----------------------------------------------------------------------------------------

// Only on one host: workers connect to a backup that is reached by TCP themselves.
void Server::visit_connections(Archive& archive) {
  auto* const writer = dynamic_cast<StateWriter*>(&archive);
  if (writer != nullptr ? writer->has_all : dynamic_cast<StateReader&>(archive).has_all) return;
  const std::size_t count = visit_size(archive, connections_.size());
  if (writer != nullptr) {
    for (auto& [worker, connection] : connections_) {
      writer->know(connection.window.get());
      archive(connection.spec, connection.alive);
    }
    return;
  }
  auto& reader = dynamic_cast<StateReader&>(archive);
  for (std::size_t i = 0; i < count; ++i) {
    WorkerSpec spec;
    bool alive = true;
    archive(spec, alive);
    FileDescriptor window = reader.next(), pidfd = reader.next(), news = reader.next();
    spec.window = window.release(), spec.pidfd = pidfd.release(), spec.news = news.release();
    Connection connection = connection_of(std::move(spec));
    connection.alive = alive;
    reader.know(connection.window);
    connections_.emplace(connection.spec.id, std::move(connection));
  }
  while (reader.has_more()) reader.know(std::make_shared<Window>(reader.next()));
}

void Server::visit_blocks(Archive& archive) {
  const std::size_t count = visit_size(archive, blocks_.size());
  for (BlockId id = 0; id < count; ++id) {
    if (archive.reads()) {
      BlockSpec spec;
      archive(spec);
      make_block(spec);
    } else {
      archive(blocks_[id].spec);
    }
    Block& block = blocks_[id];
    archive(block.steps, block.failure);
    block.is_missing = archive.reads() && !block.spec.two_states;
    block.lacks_rows = block.is_missing && block.table != nullptr;
  }
}

// Of a dense block the words, both buffers (readers of rounds may need both), and the states. Of a table, the rows of
// one slab.
void Server::visit_content(Archive& archive, Block& block, std::size_t slab) {
  archive(block.steps, block.failure);
  if (block.table == nullptr) return archive.raw(block.words, block_bytes(block.bytes()) + aligned(block.state_bytes));
  Table& table = *block.table;
  const bool has_rows = !archive.reads() && slab < table.slabs();
  const std::size_t count = visit_size(archive, has_rows ? table.rows_in(slab) : 0);
  const std::size_t before = table.bytes(table.rows());
  std::vector<std::int64_t> ids(count);
  std::vector<std::byte> rows(count * table.stored_bytes());
  if (has_rows) table.copy_slab(slab, reinterpret_cast<std::byte*>(ids.data()), rows.data());
  archive.raw(ids.data(), count * sizeof(std::int64_t));
  archive.raw(rows.data(), rows.size());
  if (archive.reads()) table.restore({reinterpret_cast<const std::byte*>(ids.data()), rows.data(), count}, SIZE_MAX);
  table_bytes_ += table.bytes(table.rows()) - before;
}

void Server::visit(Archive& archive) {
  visit_connections(archive);
  shard_.visit(archive);
  visit_blocks(archive);
  archive(statistics_.requests, statistics_.updates, statistics_.bytes);
}

// ---- The server ---------------------------------------------------------------------------------------------------

void Server::give_state(NearPartner& to) {
  StateWriter state(false);
  visit(state);
  std::vector<int> given;
  for (const auto& [worker, connection] : connections_)
    for (const int each : {connection.spec.window, connection.pidfd.get(), connection.spec.news}) given.push_back(each);
  given.insert(given.end(), state.more().begin(), state.more().end());
  const auto [memory, bytes] = state.end();
  const Ready ready{bytes, ++backups_made_, turn_};
  bool gone = true;
  const char some = 0;
  for (std::size_t begin = 0; begin < given.size(); begin += kMostDescriptors)
    gone &= send_message(to.passage.get(), &some, sizeof some,
                         std::span(given).subspan(begin, std::min(kMostDescriptors, given.size() - begin)));
  if (!gone || !send_message(to.passage.get(), &ready, sizeof ready, std::array{memory}))
    throw Error(ErrorKind::system, "a new backup was given " + std::to_string(given.size() + 1) +
                                       " descriptors and did not take them: " + why_not_sent());
  to.number = ready.number;
}

void Server::give_far_state() {
  StateWriter state(true);
  visit(state);
  const auto [memory, bytes] = state.end();
  const auto mapped = std::make_shared<Mapping>(memory, bytes, false);
  const Lent all(std::shared_ptr<std::byte[]>(mapped, mapped->at()), bytes);
  Record record;
  record.kind = Record::Kind::state;
  record.slot.number = turn_;
  record.slot.bytes = bytes;
  backup_->write(record, {}, &all);
}

void Server::begin_to_give() {
  backup_->next = 0, backup_->end = static_cast<BlockId>(blocks_.size()), backup_->slab = 0;
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
    to.rests_until = t + (t - to.gave);
  }
  if ((moved || !held_.empty()) && (!to.under_way.empty() || t < to.rests_until)) return false;
  if (to.under_way.size() == kMostUnderWay || to.room() < Journal::kReserve || !give_block(to.next, to.slab))
    return false;
  to.gave = t;
  to.under_way.push_back(to.written());
  pass(Step::gives);
  if (const auto& table = blocks_[to.next].table; table != nullptr && ++to.slab < table->slabs()) return true;
  to.slab = 0;
  do {
    ++to.next;
  } while (to.next < to.end && blocks_[to.next].spec.two_states);
  if (to.next == to.end) have_given_all();
  return true;
}

// Returns false if the socket to the backup is full; then it is tried again.
bool Server::give_block(BlockId id, std::size_t slab) {
  StateWriter content(backup_->far());
  visit_content(content, blocks_[id], slab);
  const auto [memory, bytes] = content.end();
  Record record;
  record.kind = Record::Kind::block;
  record.slot.block = id;
  record.slot.offset = slab;
  record.slot.round = blocks_[id].table != nullptr && slab + 1 < blocks_[id].table->slabs();
  record.slot.bytes = bytes;
  if (auto* const near = dynamic_cast<NearPartner*>(backup_.get())) {
    const char some = 0;
    if (!send_message(near->passage.get(), &some, sizeof some, std::array{memory})) return false;
    near->write(record, {}, nullptr);
  } else {
    const auto mapped = std::make_shared<Mapping>(memory, bytes, false);
    const Lent all(std::shared_ptr<std::byte[]>(mapped, mapped->at()), bytes);
    backup_->write(record, {}, &all);
  }
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
  if (blocks_[id].spec.two_states || backup_ == nullptr || backup_->far()) return !blocks_[id].spec.two_states;
  return id >= backup_->end || id < backup_->next || (id == backup_->next && backup_->slab > 0);
}

// ---- The backup ---------------------------------------------------------------------------------------------------

void Server::take_block(const Record& record, const Lent* given) {
  Block& block = blocks_[record.slot.block];
  if (block.table != nullptr && record.slot.offset == 0) empty_table(block);
  const auto take = [&](const std::byte* at) {
    StateReader content({at, static_cast<std::size_t>(record.slot.bytes)}, true, {});
    visit_content(content, block, record.slot.offset);
  };
  if (given != nullptr) {
    take(given->at());
  } else {
    const std::optional<Received> message = receive_message(near_server().passage.get());
    if (!message || message->descriptors.size() != 1)
      throw Error(ErrorKind::mismatch, "the content of a block has not come to the backup");
    take(Mapping(message->descriptors[0].get(), static_cast<std::size_t>(record.slot.bytes), false).at());
  }
  block.is_missing = false;
  block.lacks_rows = record.slot.round != 0;
  pass(Step::takes);
}

void Server::become_far_server(const Record& record, const Lent& state) {
  StateReader reader({state.at(), state.bytes}, true, {});
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
    StateReader state({memory.at(), memory.bytes()}, false, std::move(given_));
    visit(state);
    number_ = ready.number;
    turn_ = ready.turn + 1;
    stepped_ = ringreduce::now();
  }
  return true;
}

}  // namespace ringreduce::parameter_server
