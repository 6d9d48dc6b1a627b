#include "parameter_server/client/client.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "parameter_server/client/client-inl.h"

namespace ringreduce::parameter_server {
Client::Client(WorkerId worker, std::size_t servers, std::size_t data, std::function<void()> interrupt)
    : interrupt_(std::move(interrupt)),
      worker_(worker),
      servers_(servers),
      window_(std::make_shared<OwnWindow>(servers, data)),
      bell_(&window_->bell()),
      peers_(servers) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0 || !above_streams(ends))
    throw Error(ErrorKind::system, std::string("socketpair: ") + std::strerror(errno));
  news_ = FileDescriptor(ends[0]);
  news_for_servers_ = FileDescriptor(ends[1]);
}

Client::~Client() {
  if (fork_.forked()) static_cast<void>(wire_.release());  // its thread runs in the parent only
}

Client& Client::of_this_process() {
  if (fork_.forked())
    throw Error(ErrorKind::invalid_argument,
                "worker " + std::to_string(worker_) +
                    " is the process that this one was forked from: call join() here for a worker of its own");
  NoQuestions::check();
  return *this;
}

std::pair<WorkerWire*, Server*> Client::shared() {
  const Lock lock(of_this_process().mutex_);
  return {wire_.get(), hosted_.get()};
}

void Client::attach(std::uint32_t server, ServerSpec spec) {
  Lane& lane = window_->lane(server);
  auto near = std::make_shared<Near>(std::move(spec), &lane);
  lane.turn.store(near->turn, std::memory_order_release);
  const Lock lock(mutex_);
  peers_.at(server) = std::make_unique<Peer>(
      Peer{.name = near->name, .session = Session(worker_), .near = std::move(near), .address = server});
  has_near_ = true;
  take_news();
}

void Client::close_news() {
  if (fork_.forked()) return news_ = FileDescriptor(), void();
  const Lock lock(mutex_);
  news_ = FileDescriptor();
}

void Client::attach_far(std::uint32_t server, const std::string& name, std::uint32_t replica) {
  const Lock lock(mutex_);
  const std::uint32_t address = address_of(server, replica);
  peers_.at(server) = std::make_unique<Peer>(Peer{.name = name, .session = Session(worker_), .address = address});
  open_wire();
}

void Client::open_wire() {
  if (wire_ != nullptr) return;
  wire_ = std::make_unique<WorkerWire>(*bell_, [this] {
    const Lock relock(mutex_);
    feed();
  });
}

void Client::host(std::shared_ptr<Server> server) {
  const Lock lock(mutex_);
  hosted_ = std::move(server);
}

void Client::connect(std::uint32_t server, int socket, std::string path, std::uint32_t replica) {
  wire_->connections().add(static_cast<int>(address_of(server, replica)), socket, std::move(path));
}

Client::Peer& Client::peer(std::uint32_t server) const {
  if (server >= peers_.size() || peers_[server] == nullptr)
    throw Error(ErrorKind::invalid_argument, "there is no server " + std::to_string(server));
  return *peers_[server];
}

// Waits for room in the window, and takes it.
OwnWindow::Piece Client::take_room(Hold& hold, std::size_t bytes, Nanoseconds timeout) {
  OwnWindow::Piece piece;
  if (wait_until(hold, timeout, [&] { return (piece = window_->take(bytes)) != nullptr; })) return piece;
  std::string busy;
  for (const auto& each : peers_)
    if (each != nullptr && !each->pushes.empty()) busy += (busy.empty() ? "" : ", ") + each->name;
  throw Error(ErrorKind::timeout,
              "the window of " + std::to_string(window_->data_bytes()) + " bytes has had no room for " +
                  std::to_string(bytes) + " in time: " + std::to_string(window_->pieces()) +
                  " tensors and pushes are in it" + (busy.empty() ? "" : ", and pushes wait for " + busy));
}

OwnWindow::Piece Client::allocate(std::size_t bytes) {
  const Lock lock(of_this_process().mutex_);
  take_replies();
  if (auto piece = window_->take(bytes)) return piece;
  throw Error(ErrorKind::system, "no " + std::to_string(bytes) + " bytes in one piece are left of the window's " +
                                     std::to_string(window_->data_bytes()) +
                                     "; free tensors, or join with a larger window=");
}

// ---- Replies ------------------------------------------------------------------------------------------------------

bool Client::take_replies() {
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
      const auto server = static_cast<std::uint32_t>(address % servers_);
      if (peers_[server]->alive && peers_[server]->address == address) take_reply(server, slot);
      moved = true;
    }
  return moved;
}

bool Client::take_replies(std::uint32_t server) {
  Near& from = *peers_[server]->near;
  const std::uint64_t before = from.taken;
  while (from.taken < from.lane->answered.load(std::memory_order_acquire))
    take_reply(server, from.lane->replies[from.taken++ % kMostOutstanding]);
  return from.taken != before;
}

void Client::take_reply(std::uint32_t server, const ReplySlot& slot) {
  Peer& from = peer(server);
  const auto request = from.session.take({worker_, slot.number, slot.outcome, slot.version, 0});
  if (!request) return;
  if (request->kind == RequestKind::push && --from.pushes[request->block] == 0) from.pushes.erase(request->block);
  if (request->kind == RequestKind::pull && from.near == nullptr) from.session.read(request->block, slot.version);
  const auto call = from.calls.extract(slot.number);
  call.mapped().call->answers.push_back({server, request->block, slot.outcome, slot.version});
  --call.mapped().call->unanswered;
}

void Client::look_for_ended() {
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
      turn_to_far_backup(server);
      continue;
    }
    look_for_next(server);
    if (is_lost(of))
      lose(server, "");
    else if (of.backup != nullptr)
      of.backup->bell().ring();  // makes the backup check now whether its server has ended
  }
}

// Gives up a server. Replies that it has written still count; all other calls fail.
void Client::lose(std::uint32_t server, const std::string& why) {
  take_replies();
  Peer& lost = peer(server);
  lost.alive = false;
  lost.why = why;
  for (const auto& [number, sent] : lost.calls) sent.call->lost = static_cast<int>(server);
  lost.calls.clear();
  lost.pushes.clear();
  lost.session = Session(worker_);
  for (const Item& item : lost.queue) item.call->lost = static_cast<int>(server);
  lost.queue.clear();
}

void Client::throw_lost(std::uint32_t server) const {
  throw Error(ErrorKind::server_lost,
              peer(server).name + " has ended" + (peer(server).why.empty() ? "" : ": " + peer(server).why) +
                  ", and with it the blocks that it served: start again from what was saved" +
                  (ran_out_ ? "; memory has run out in this process, which may have cut the connection" : ""),
              static_cast<int>(server));
}

// ---- Waiting ------------------------------------------------------------------------------------------------------

void Client::sleep(std::uint32_t seen, Nanoseconds most) {
  if (wire_ == nullptr) return bell_->sleep(seen, most);
  Connections& connections = wire_->connections();
  if (!has_near_) return connections.doze();  // no server on this host could ring the bell
  const HandedOver handed_over(wire_.get());
  bell_->sleep(seen, most);
}

// A signal handler may take long, and another thread may keep the GIL. So others have meanwhile all that this thread
// has, and the handler may ask this process's server.
void Client::call_python(Hold& hold) {
  hold.turns.leave();
  const HandedOver handed_over(hold.wire);
  interrupt_();
}

bool Client::take_turns(Hold& hold) {
  if (hosted_ == nullptr) return false;
  const Unlocked unlocked(hold.lock);  // a turn may take long
  return hold.turns.take();
}

bool Client::wait(Call& call, Nanoseconds timeout) {
  Hold hold(*this);
  const bool ended = wait_until(hold, timeout, [&] {
    copy_new_values(call);
    return call.unanswered == 0 || call.lost >= 0;
  });
  if (ended && call.lost >= 0) throw_lost(static_cast<std::uint32_t>(call.lost));
  return ended;
}

bool Client::drain(Nanoseconds timeout) {
  Hold hold(*this);
  return wait_until(hold, timeout, [&] {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const auto& each) { return each == nullptr || each->pushes.empty(); });
  });
}

void Client::abort() {
  aborted_ = true;
  bell_->ring();
}

std::size_t Client::outstanding() const {
  const Lock lock(mutex_);
  std::size_t sum = 0;
  for (const auto& each : peers_) sum += each == nullptr ? 0 : each->session.outstanding();
  return sum;
}

std::optional<std::pair<std::uint32_t, BlockId>> Client::unanswered_push() const {
  const Lock lock(mutex_);
  for (std::uint32_t server = 0; server < peers_.size(); ++server)
    if (peers_[server] != nullptr && !peers_[server]->pushes.empty())
      return std::pair(server, peers_[server]->pushes.begin()->first);
  return std::nullopt;
}

// ---- Requests -----------------------------------------------------------------------------------------------------

// Waits until the session has room, and sends a request. If this throws, the request is not under way.
void Client::put(Hold& hold, std::uint32_t server, Item item, Nanoseconds timeout) {
  Peer& to = peer(server);
  const bool ready = wait_until(hold, timeout, [&] { return !to.alive || to.session.has_room(to.queue.size()); });
  if (!to.alive) throw_lost(server);
  if (!ready)
    throw Error(ErrorKind::timeout,
                to.name + " has not answered " + std::to_string(to.session.outstanding() + to.queue.size()) +
                    " requests, the most that may be under way, in time",
                static_cast<int>(server));
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
const Request& Client::number(std::uint32_t server, Item& item) {
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

RequestSlot Client::slot_of(const Request& made) {
  const auto* const data = static_cast<const InWindow*>(made.payload.get());
  return data == nullptr ? parameter_server::slot_of(made, 0, 0)
                         : parameter_server::slot_of(made, data->offset, data->bytes);
}

void Client::feed() {
  if (wire_ == nullptr) return;
  for (std::uint32_t server = 0; server < peers_.size(); ++server)
    if (peers_[server] != nullptr && !peers_[server]->queue.empty()) feed(server);
}

// Selects the most urgent request that may be sent next. A request overtakes neither an earlier one about the same
// block nor a clock, a barrier, a leave or a restore.
template <class Queue>
typename Queue::iterator Client::next_of(Queue& queue) {
  auto best = queue.begin();
  std::set<BlockId> earlier;
  for (auto each = queue.begin(); each != queue.end() && each->request.kind <= RequestKind::pull; ++each)
    if (earlier.insert(each->request.block).second && each->urgency() > best->urgency()) best = each;
  return best;
}

// Hands queued requests to the connections, as long as these can take more. May be called again if it throws.
void Client::feed(std::uint32_t server) {
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
void Client::try_to_feed(std::uint32_t server) {
  try {
    feed(server);
  } catch (const std::bad_alloc&) {
  }
}

std::shared_ptr<Call> Client::change(const std::vector<Part>& parts, std::uint64_t place, double number,
                                     Nanoseconds timeout) {
  const auto call = std::make_shared<Call>();
  Hold hold(*this);
  for (const Part& part : parts) {
    if (!peer(part.server).alive) throw_lost(part.server);
    Item item(call, RequestKind::change, part.block);
    item.request.pulled = place;
    item.request.weight = number;
    put(hold, part.server, std::move(item), timeout);
  }
  return call;
}

std::shared_ptr<Call> Client::pull(const std::vector<Part>& parts, std::byte* tensor, Nanoseconds timeout,
                                   Packing packing) {
  const auto call = std::make_shared<Call>();
  Hold hold(*this);
  try {
    for (const Part& part : parts) {
      Item item(call, RequestKind::pull, part.block);
      item.into = tensor + part.begin;
      item.bytes = part.bytes;
      item.packing = packing;
      put(hold, part.server, std::move(item), timeout);
    }
  } catch (...) {
    forget(*call);
    throw;
  }
  return call;
}

void Client::cancel(Call& call) {
  if (fork_.forked()) return;
  const Lock lock(mutex_);
  forget(call);
}

void Client::forget(Call& call) {
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

std::shared_ptr<Call> Client::ask(RequestKind kind, const std::vector<std::uint32_t>& servers, Nanoseconds timeout) {
  const auto call = std::make_shared<Call>();
  Hold hold(*this);
  for (const std::uint32_t server : servers) {
    if (kind == RequestKind::leave && !peer(server).alive) continue;
    put(hold, server, Item(call, kind), timeout);
  }
  return call;
}

bool Client::is_readable(const Peer& from, const Part& part) const {
  return from.near != nullptr && from.pushes.count(part.block) == 0 && from.near->serves() &&
         from.near->words(part).published.load(std::memory_order_acquire) > 0;
}

std::optional<std::vector<std::uint64_t>> Client::read(const std::vector<Part>& parts, std::byte* tensor,
                                                       Nanoseconds timeout) {
  std::vector<std::uint64_t> versions;
  versions.reserve(parts.size());
  const bool streamed = streams(parts);
  Hold hold(*this);
  take_replies();
  for (const Part& part : parts) {
    Peer& from = peer(part.server);
    if (may_turn(from) && from.near != nullptr && from.near->ended()) turn_to_far_backup(part.server);
    // The backup may have acknowledged pushes that are not in the values of the server that has ended.
    if (from.near != nullptr && from.near->over()) take_replies();
    const auto decided = [&] { return !from.alive || from.near == nullptr || is_readable(from, part); };
    if (!wait_until(hold, timeout, decided)) return std::nullopt;
    look_for_ended();
    if (!from.alive) throw_lost(part.server);
    if (from.near == nullptr) return std::vector<std::uint64_t>();
    const std::shared_ptr<const Near> near = from.near;  // keeps the values mapped while they are copied
    {
      const Unlocked unlocked(hold.lock);
      versions.push_back(read_block(near->words(part), tensor + part.begin, part.bytes, streamed));
    }
    from.session.read(part.block, versions.back());
  }
  return versions;
}

}  // namespace ringreduce::parameter_server
