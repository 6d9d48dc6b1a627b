#include "parameter_server/client/known_servers.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "core/error.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookEvery = 10 * kMillisecond;  // between checks for servers that have ended

// Makes room for so many elements, so that to add them needs no memory.
template <class T>
void make_room(std::vector<T>& in, std::size_t count) {
  if (in.capacity() < count) in.reserve(std::max(count, 2 * in.capacity()));
}

}  // namespace

KnownServers::KnownServers(WorkerId worker, std::size_t servers, std::size_t data)
    : worker_(worker), window_(std::make_shared<OwnWindow>(servers, data)), bell_(&window_->bell()), peers_(servers) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 || !above_streams(ends))
    throw Error(ErrorKind::system, "socketpair: " + last_error());
  news_ = FileDescriptor(ends[0]);
  news_for_servers_ = FileDescriptor(ends[1]);
}

void KnownServers::close_wire() {
  if (!fork_.forked()) delete wire_.get();  // its thread runs in the parent only, and reads wire_ until it ends
  static_cast<void>(wire_.release());
}

void KnownServers::attach(std::uint32_t server, ServerSpec spec) {
  Lane& lane = window_->lane(server);
  auto near = std::make_shared<Near>(std::move(spec), &lane);
  lane.turn.store(near->turn, std::memory_order_release);
  const Lock lock(mutex_);
  peers_.at(server) = std::make_unique<Peer>(
      Peer{.name = near->name, .session = Session(worker_), .near = std::move(near), .address = server});
  has_near_ = true;
  take_news();
}

void KnownServers::close_news() {
  if (fork_.forked()) return news_ = FileDescriptor(), void();
  const Lock lock(mutex_);
  news_ = FileDescriptor();
}

void KnownServers::attach_far(std::uint32_t server, const std::string& name, std::uint32_t replica) {
  const Lock lock(mutex_);
  const std::uint32_t address = address_of(server, replica);
  peers_.at(server) = std::make_unique<Peer>(Peer{.name = name, .session = Session(worker_), .address = address});
  open_wire();
}

void KnownServers::open_wire() {
  if (wire_ != nullptr) return;
  wire_ = std::make_unique<WorkerWire>(*bell_, [this] {
    const Lock relock(mutex_);
    feed();
  });
}

void KnownServers::connect(std::uint32_t server, int socket, std::string path, std::uint32_t replica) {
  wire_->connections().add(static_cast<int>(address_of(server, replica)), socket, std::move(path));
}

KnownServers::Peer& KnownServers::peer(std::uint32_t server) const {
  if (server >= peers_.size() || peers_[server] == nullptr)
    throw Error(ErrorKind::invalid_argument, "there is no server " + std::to_string(server));
  return *peers_[server];
}

// ---- Replies ------------------------------------------------------------------------------------------------------

bool KnownServers::take_replies() {
  bool moved = false;
  for (std::uint32_t server = 0; server < peers_.size(); ++server) {
    if (peers_[server] == nullptr || peers_[server]->near == nullptr) continue;
    const bool over = peers_[server]->near->over();
    // If the server is over, it has written its last reply: a backup sets `over` when the server has ended.
    moved |= take_replies(server);
    if (over) look_for_next(server);
  }
  if (wire_ != nullptr)
    for (const auto& [address, slot] : wire_->take_replies()) {
      const auto server = static_cast<std::uint32_t>(address % peers_.size());
      if (peers_[server]->alive && peers_[server]->address == address) take_reply(server, slot);
      moved = true;
    }
  return moved;
}

bool KnownServers::take_replies(std::uint32_t server) {
  Near& from = *peers_[server]->near;
  const std::uint64_t before = from.taken;
  while (from.taken < from.lane->answered.load(std::memory_order_acquire))
    take_reply(server, from.lane->replies[from.taken++ % kMostOutstanding]);
  return from.taken != before;
}

void KnownServers::take_reply(std::uint32_t server, const ReplySlot& slot) {
  Peer& from = peer(server);
  const auto request = from.session.take({worker_, slot.number, slot.outcome, slot.version, 0});
  if (!request) return;
  if (request->kind == RequestKind::push && --from.pushes[request->block] == 0) from.pushes.erase(request->block);
  if (request->kind == RequestKind::pull && from.near == nullptr) from.session.read(request->block, slot.version);
  const auto call = from.calls.extract(slot.number);
  call.mapped().call->answers.push_back({server, request->block, slot.outcome, slot.version});
  --call.mapped().call->unanswered;
}

void KnownServers::look_for_ended() {
  take_lost();
  const Nanoseconds t = now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  take_news();
  for (std::uint32_t server = 0; server < peers_.size(); ++server) {
    if (peers_[server] == nullptr || peers_[server]->near == nullptr) continue;
    Peer& of = *peers_[server];
    if (!of.alive || !of.near->ended()) continue;
    if (may_turn(of)) {
      turn_to_far_backup(server, why_ended(of));
      continue;
    }
    look_for_next(server);
    if (is_lost(of))
      lose(server, why_ended(of));
    else if (of.backup != nullptr)
      of.backup->bell().ring();  // makes the backup check now whether its server has ended
  }
}

// Gives up a server. Replies that it has written still count; all other calls fail.
void KnownServers::lose(std::uint32_t server, std::string why) {
  take_replies();
  Peer& lost = peer(server);
  lost.alive = false;
  lost.why = std::move(why);
  for (const auto& [number, sent] : lost.calls) sent.call->lost = static_cast<int>(server);
  lost.calls.clear();
  lost.pushes.clear();
  lost.session = Session(worker_);
  for (const Item& item : lost.queue) item.call->lost = static_cast<int>(server);
  lost.queue.clear();
}

void KnownServers::throw_lost(std::uint32_t server) const {
  const std::string& why = peer(server).why;
  throw Error(ErrorKind::server_lost,
              peer(server).name + (why.empty() ? " has ended" : " is lost to this worker: " + why) +
                  ", and with it the blocks that it served: start again from what was saved" +
                  (ran_out_ ? "; memory has run out in this process, which may have cut the connection" : ""),
              static_cast<int>(server));
}

std::size_t KnownServers::outstanding() const {
  const Lock lock(mutex_);
  std::size_t sum = 0;
  for (const auto& each : peers_) sum += each == nullptr ? 0 : each->session.outstanding();
  return sum;
}

std::optional<std::pair<std::uint32_t, BlockId>> KnownServers::unanswered_push() const {
  const Lock lock(mutex_);
  for (std::uint32_t server = 0; server < peers_.size(); ++server)
    if (peers_[server] != nullptr && !peers_[server]->pushes.empty())
      return std::pair(server, peers_[server]->pushes.begin()->first);
  return std::nullopt;
}

// ---- Requests -----------------------------------------------------------------------------------------------------

void KnownServers::send_now(std::uint32_t server, Item item) {
  Peer& to = peer(server);
  // First all the memory that the request and its reply need.
  const BlockId block = item.request.block;
  const std::shared_ptr<Call> call = item.call;
  make_room(call->asked, call->asked.size() + 1);
  make_room(call->answers, call->asked.size() + 1);
  std::map<BlockId, int> pushed;
  if (item.request.kind == RequestKind::push) pushed.emplace(block, 0);
  if (to.near == nullptr) {
    item.tag = ++tags_;
    to.queue.push_back(std::move(item));
  } else {
    to.near->ask(slot_of(number(server, item)));
  }
  ++call->unanswered;
  call->asked.emplace_back(server, block);
  const bool pushes = !pushed.empty();
  to.pushes.merge(pushed);
  if (pushes) ++to.pushes[block];
  if (to.near == nullptr)
    try_to_feed(server);
  else
    to.near->bell().ring();
}

// Gives a request its number, unless it has one already.
const Request& KnownServers::number(std::uint32_t server, Item& item) {
  if (item.request.number != 0) return item.request;
  Peer& of = peer(server);
  const auto kept = of.calls.emplace(of.session.next(), item).first;
  try {
    return item.request = of.session.make(item.request);
  } catch (...) {
    of.calls.erase(kept);
    throw;
  }
}

RequestSlot KnownServers::slot_of(const Request& made) {
  const auto* const data = static_cast<const InWindow*>(made.payload.get());
  return data == nullptr ? parameter_server::slot_of(made, 0, 0)
                         : parameter_server::slot_of(made, data->offset, data->bytes);
}

void KnownServers::feed() {
  if (wire_ == nullptr) return;
  for (std::uint32_t server = 0; server < peers_.size(); ++server)
    if (peers_[server] != nullptr && !peers_[server]->queue.empty()) feed(server);
}

// Selects the most urgent request that may be sent next. A request overtakes neither an earlier one about the same
// block nor a clock, a barrier, a leave or a restore.
template <class Queue>
typename Queue::iterator KnownServers::next_of(Queue& queue) {
  auto best = queue.begin();
  std::set<BlockId> earlier;
  for (auto each = queue.begin(); each != queue.end() && each->request.kind <= RequestKind::pull; ++each)
    if (earlier.insert(each->request.block).second && each->urgency() > best->urgency()) best = each;
  return best;
}

// Hands queued requests to the connections, as long as these can take more. May be called again if it throws.
void KnownServers::feed(std::uint32_t server) {
  Peer& to = peer(server);
  Connections& connections = wire_->connections();
  const int id = static_cast<int>(to.address);
  while (!to.queue.empty() && connections.takes_next(id)) {
    const auto next = next_of(to.queue);
    const InWindow* const data = next->data();
    if (data != nullptr && next->sent < data->bytes) {
      const std::size_t at = data->offset + next->sent, bytes = std::min(kFragment, data->bytes - next->sent);
      const FrameHeader header =
          packed({.kind = WireKind::data, .bytes = static_cast<std::uint32_t>(bytes), .seq = at, .tag = next->tag},
                 next->packing);
      connections.send(id, {header, window_->data() + data->offset + wire_bytes(next->packing, at - data->offset)});
      next->sent += bytes;
      continue;
    }
    RequestSlot slot = slot_of(number(server, *next));
    slot.packing = next->packing;
    if (next->into != nullptr) {
      next->call->pulls.emplace_back(server, slot.number);
      wire_->expect(to.address, slot.number, next->into, next->bytes);
    }
    Frame frame = frame_of(WireKind::request, bytes_of(slot));
    frame.header.tag = next->tag;
    connections.send(id, std::move(frame));
    to.queue.erase(next);
  }
}

// Where there is no memory, what is queued stays there, and the next wait or the thread of the connections sends it.
void KnownServers::try_to_feed(std::uint32_t server) {
  try {
    feed(server);
  } catch (const std::bad_alloc&) {
  }
}

void KnownServers::forget(Call& call) {
  for (const auto& each : peers_) {
    if (each == nullptr) continue;
    std::erase_if(each->queue, [&](Item& item) {
      if (item.call.get() != &call) return false;
      item.into = nullptr;
      if (item.request.number != 0) return false;  // requests with later numbers would wait for it
      return item.sent == 0;                       // otherwise the server has part of the data and waits for the rest
    });
    for (auto& [number, sent] : each->calls)
      if (sent.call.get() == &call) sent.into = nullptr;
  }
  for (const auto& [server, number] : call.pulls) wire_->forget(peer(server).address, number);
  call.pieces.clear();
}

bool KnownServers::is_readable(const Peer& from, const Part& part) const {
  return from.near != nullptr && from.pushes.count(part.block) == 0 && from.near->serves() &&
         from.near->words(part).published.load(std::memory_order_acquire) > 0;
}

const BlockWords& KnownServers::words_of(const Part& part) const {
  const Peer& from = peer(part.server);
  if (from.near == nullptr)
    throw Error(ErrorKind::invalid_argument,
                from.name + " is on another host, and rounds can only be read on this one");
  return from.near->words(part);
}

}  // namespace ringreduce::parameter_server
