#include "parameter_server/client.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace ringreduce::parameter_server {
namespace {

constexpr Nanoseconds kLookEvery = 10 * kMillisecond;  // for servers that have ended
constexpr int kLooks = 200, kYields = 50;              // before a thread sleeps

// Where a request's data lies in the window, to be given back with the reply.
struct InWindow : Payload {
  InWindow(std::size_t piece, std::size_t offset, std::size_t bytes) : piece(piece), offset(offset), bytes(bytes) {}
  std::size_t piece, offset, bytes;
};

}  // namespace

struct Client::Peer {
  Peer(WorkerId worker, const ServerSpec& spec)
      : values_fd(spec.values),
        bell_fd(spec.bell),
        pidfd(spec.pidfd),
        values(spec.values, spec.capacity, false),
        bell_memory(spec.bell, sizeof(Bell), true),
        name(spec.name),
        session(worker) {}

  Bell& bell() const { return *reinterpret_cast<Bell*>(bell_memory.at()); }
  bool ended() const {
    return reinterpret_cast<const ValuesHeader*>(values.at())->ended.load(std::memory_order_seq_cst) != 0 ||
           has_ended(pidfd.get());
  }

  FileDescriptor values_fd, bell_fd, pidfd;
  Mapping values, bell_memory;
  std::string name;
  Session session;
  Lane* lane = nullptr;
  std::uint64_t taken = 0;  // replies
  bool alive = true;
  std::map<std::uint64_t, std::shared_ptr<Call>> calls;  // by number
  std::map<BlockId, int> pushes;                         // not answered
};

Client::Client(WorkerId worker, std::size_t servers, std::size_t data)
    : worker_(worker),
      servers_(servers),
      window_fd_(make_memory("ringreduce window", lanes_bytes(servers) + aligned(data))),
      window_(std::make_unique<Mapping>(window_fd_.get(), lanes_bytes(servers) + aligned(data), true)),
      bell_(reinterpret_cast<Bell*>(window_->at())),
      peers_(servers) {}

Client::~Client() = default;

void Client::attach(std::uint32_t server, const ServerSpec& spec) {
  auto peer = std::make_unique<Peer>(worker_, spec);
  const Lock lock(mutex_);
  peer->lane = reinterpret_cast<Lane*>(window_->at(sizeof(Bell) + server * sizeof(Lane)));
  peers_.at(server) = std::move(peer);
}

Client::Peer& Client::peer(std::uint32_t server) const {
  if (server >= peers_.size() || peers_[server] == nullptr)
    throw Error(ErrorKind::invalid_argument, "there is no server " + std::to_string(server));
  return *peers_[server];
}

// ---- The window's memory ------------------------------------------------------------------------------------------

std::size_t Client::find_room(std::size_t bytes) {
  std::size_t begin = 0;
  for (const auto& [offset, piece] : pieces_) {
    if (offset - begin >= bytes) break;
    begin = offset + aligned(piece.bytes);
  }
  return begin <= data_bytes() && data_bytes() - begin >= bytes ? begin : SIZE_MAX;
}

void Client::drop(std::size_t offset) {
  const auto found = pieces_.find(offset);
  if (--found->second.uses == 0) pieces_.erase(found);
}

// The piece that the offset is in; SIZE_MAX: none.
std::size_t Client::piece_with(std::size_t offset) const {
  auto after = pieces_.upper_bound(offset);
  if (after == pieces_.begin()) return SIZE_MAX;
  --after;
  return offset < after->first + aligned(after->second.bytes) ? after->first : SIZE_MAX;
}

std::byte* Client::allocate(std::size_t bytes) {
  const Lock lock(mutex_);
  take_replies();
  const std::size_t wanted = std::max<std::size_t>(bytes, 1), offset = find_room(wanted);
  if (offset == SIZE_MAX)
    throw Error(ErrorKind::system, "no " + std::to_string(bytes) + " bytes in one piece are left of the window's " +
                                       std::to_string(data_bytes()) + "; free tensors, or join with a larger window=");
  pieces_[offset] = {wanted, 1};
  return data() + offset;
}

void Client::release(std::byte* piece) {
  if (fork_.forked()) return;
  const Lock lock(mutex_);
  drop(static_cast<std::size_t>(piece - data()));
}

// ---- Replies ------------------------------------------------------------------------------------------------------

bool Client::take_replies() {
  bool moved = false;
  for (std::uint32_t server = 0; server < peers_.size(); ++server) {
    if (peers_[server] == nullptr) continue;
    Peer& from = *peers_[server];
    while (from.taken < from.lane->answered.load(std::memory_order_acquire)) {
      take_reply(server, from.lane->replies[from.taken++ % kMostOutstanding]);
      moved = true;
    }
  }
  return moved;
}

void Client::take_reply(std::uint32_t server, const ReplySlot& slot) {
  Peer& from = peer(server);
  const auto request = from.session.take({worker_, slot.number, slot.outcome, slot.version, 0});
  if (!request) return;
  if (request->payload) drop(static_cast<const InWindow&>(*request->payload).piece);
  if (request->kind == RequestKind::push && --from.pushes[request->block] == 0) from.pushes.erase(request->block);
  const auto call = from.calls.extract(slot.number);
  call.mapped()->answers.push_back({server, request->block, slot.outcome, slot.version});
  --call.mapped()->unanswered;
}

void Client::look_for_ended() {
  const Nanoseconds t = now();
  if (t - looked_ < kLookEvery) return;
  looked_ = t;
  for (std::uint32_t server = 0; server < peers_.size(); ++server)
    if (peers_[server] != nullptr && peers_[server]->alive && peers_[server]->ended()) lose(server);
}

// What it had answered counts; the rest never will be.
void Client::lose(std::uint32_t server) {
  take_replies();
  Peer& lost = peer(server);
  lost.alive = false;
  for (const auto& [number, call] : lost.calls) call->lost = static_cast<int>(server);
  lost.calls.clear();
  lost.pushes.clear();
  for (const Request& request : lost.session.unanswered())
    if (request.payload) drop(static_cast<const InWindow&>(*request.payload).piece);
  lost.session = Session(worker_);
}

void Client::throw_lost(std::uint32_t server) const {
  throw Error(ErrorKind::peer_lost,
              peer(server).name + " has ended, and with it the blocks that it served: start again from what was saved",
              static_cast<int>(server));
}

// ---- Waiting ------------------------------------------------------------------------------------------------------

template <class F>
bool Client::wait_until(Lock& lock, Nanoseconds timeout, F&& ready) {
  const Nanoseconds begun = now();
  for (int idle = 0;; ++idle) {
    const std::uint32_t seen = bell_->rings.load(std::memory_order_seq_cst);
    take_replies();
    if (ready()) return true;
    if (aborted_) throw Error(ErrorKind::aborted, "abort() was called");
    look_for_ended();
    if (ready()) return true;
    const Nanoseconds waited = now() - begun;
    if (waited >= timeout) return false;
    if (idle < kLooks) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    lock.unlock();
    if (idle < kLooks + kYields)
      sched_yield();
    else
      bell_->sleep(seen, std::min(kLookEvery, timeout - waited));
    lock.lock();
  }
}

bool Client::wait(Call& call, Nanoseconds timeout) {
  Lock lock(mutex_);
  const bool ended = wait_until(lock, timeout, [&] { return call.unanswered == 0 || call.lost >= 0; });
  if (ended && call.lost >= 0) throw_lost(static_cast<std::uint32_t>(call.lost));
  return ended;
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

// ---- Requests -----------------------------------------------------------------------------------------------------

// Writes a request to its lane when the session has room, and rings.
void Client::put(Lock& lock, const std::shared_ptr<Call>& call, std::uint32_t server, Request request,
                 std::size_t offset, std::size_t bytes, const Options& options) {
  Peer& to = peer(server);
  const bool ready = wait_until(lock, options.timeout, [&] { return !to.alive || to.session.has_room(); });
  if (!to.alive || !ready) {
    if (request.payload) drop(static_cast<const InWindow&>(*request.payload).piece);
    if (!to.alive) throw_lost(server);
    throw Error(ErrorKind::timeout,
                to.name + " has not answered " + std::to_string(to.session.outstanding()) +
                    " requests, the most that may be under way, in time",
                static_cast<int>(server));
  }
  const Request& made = to.session.make(std::move(request));
  to.lane->requests[(made.number - 1) % kMostOutstanding] = {
      made.kind,   made.block, made.number, made.seen,     made.round, made.pulled,
      made.weight, offset,     bytes,       made.priority, 0};
  to.lane->asked.store(made.number, std::memory_order_seq_cst);
  if (made.kind == RequestKind::push) ++to.pushes[made.block];
  to.calls.emplace(made.number, call);
  ++call->unanswered;
  call->asked.emplace_back(server, made.block);
  to.bell().ring();
}

std::shared_ptr<Call> Client::send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                                   const Options& options) {
  const auto call = std::make_shared<Call>();
  Lock lock(mutex_);
  for (const Part& part : parts) {
    if (!peer(part.server).alive) throw_lost(part.server);
    const std::byte* const from = tensor + part.begin;
    std::size_t piece = SIZE_MAX, offset = 0;
    if (from >= data() && from < data() + data_bytes()) {
      offset = static_cast<std::size_t>(from - data());
      piece = piece_with(offset);
    }
    if (piece != SIZE_MAX) {
      ++pieces_[piece].uses;
    } else {
      if (!wait_until(lock, options.timeout, [&] { return (piece = find_room(part.bytes)) != SIZE_MAX; }))
        throw Error(ErrorKind::timeout, "the window of " + std::to_string(data_bytes()) +
                                            " bytes has had no room for " + std::to_string(part.bytes) +
                                            " in time: pushes wait for " + std::to_string(pieces_.size()) + " others");
      offset = piece;
      pieces_[piece] = {part.bytes, 1};
      std::memcpy(data() + offset, from, part.bytes);
    }
    Request request;
    request.kind = kind;
    request.block = part.block;
    request.priority = options.priority;
    request.weight = options.weight;
    request.payload = std::make_shared<InWindow>(piece, offset, part.bytes);
    put(lock, call, part.server, std::move(request), offset, part.bytes, options);
  }
  return call;
}

std::shared_ptr<Call> Client::ask(RequestKind kind, const std::vector<Part>& parts, const Options& options) {
  const auto call = std::make_shared<Call>();
  Lock lock(mutex_);
  for (const Part& part : parts) {
    Request request;
    request.kind = kind;
    request.block = part.block;
    put(lock, call, part.server, std::move(request), 0, 0, options);
  }
  return call;
}

std::shared_ptr<Call> Client::ask(RequestKind kind, const std::vector<std::uint32_t>& servers, const Options& options) {
  const auto call = std::make_shared<Call>();
  Lock lock(mutex_);
  for (const std::uint32_t server : servers) {
    if (kind == RequestKind::leave && !peer(server).alive) continue;
    Request request;
    request.kind = kind;
    put(lock, call, server, std::move(request), 0, 0, options);
  }
  return call;
}

std::vector<std::uint64_t> Client::read(const std::vector<Part>& parts, std::byte* tensor, Nanoseconds timeout) {
  std::vector<std::uint64_t> versions;
  Lock lock(mutex_);
  take_replies();
  for (const Part& part : parts) {
    Peer& from = peer(part.server);
    const auto readable = [&] {
      return !from.alive ||
             (from.pushes.count(part.block) == 0 && reinterpret_cast<const BlockWords*>(from.values.at(part.offset))
                                                            ->published.load(std::memory_order_acquire) > 0);
    };
    if (!readable() && !wait_until(lock, timeout, readable))
      throw Error(ErrorKind::timeout, "this worker's pushes have not been applied in time",
                  static_cast<int>(part.server));
    look_for_ended();
    if (!from.alive) throw_lost(part.server);
    const auto& words = *reinterpret_cast<const BlockWords*>(from.values.at(part.offset));
    lock.unlock();
    versions.push_back(read_block(words, tensor + part.begin, part.bytes));
    lock.lock();
    from.session.read(part.block, versions.back());
  }
  return versions;
}

}  // namespace ringreduce::parameter_server
