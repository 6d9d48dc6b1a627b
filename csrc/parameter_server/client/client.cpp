#include "parameter_server/client/client.h"

#include <utility>

#include "parameter_server/client/client-inl.h"

namespace ringreduce::parameter_server {
Client::Client(WorkerId worker, std::size_t servers, std::size_t data, std::function<void()> interrupt)
    : KnownServers(worker, servers, data), interrupt_(std::move(interrupt)) {}

Client& Client::of_this_process() {
  if (fork_.forked())
    throw Error(ErrorKind::invalid_argument,
                "worker " + std::to_string(worker_) +
                    " is the process that this one was forked from: call join() here for a worker of its own");
  NoQuestions::check();
  return *this;
}

Client::Shared Client::shared() {
  const Lock lock(of_this_process().mutex_);
  return {wire_.get(), hosted_.get(), has_near_};
}

void Client::host(std::shared_ptr<Server> server) {
  const Lock lock(mutex_);
  hosted_ = std::move(server);
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

// ---- Waiting ------------------------------------------------------------------------------------------------------

void Client::take_turns(Hold& hold) {
  const Unlocked unlocked(hold.lock);  // a turn may take long
  hold.turns.take();
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

std::tuple<std::uint32_t, std::string, std::string> Client::served_by(std::uint32_t server, std::uint32_t known,
                                                                      Nanoseconds timeout) {
  Hold hold(*this);
  const Peer& of = peer(server);
  const auto is_known = [&] { return of.alive && of.near != nullptr && of.near->turn == known; };
  wait_until(hold, timeout, [&] {
    if (!is_known()) return true;
    return !of.near->ended() && of.near->header().backup.load(std::memory_order_seq_cst) == 0;  // nobody will follow
  });
  if (is_known() && of.backup != nullptr) return {known, of.backup->name, ""};
  return {of.alive && of.near != nullptr ? of.near->turn : known, of.name, of.near == nullptr ? "" : of.near->address};
}

std::vector<std::int64_t> Client::asks(std::uint32_t server) {
  Hold hold(*this);
  if (wire_ != nullptr) wire_->connections().progress();
  take_replies();
  look_for_ended();
  const Peer& of = peer(server);
  if (!of.alive) return {};
  const auto replica = [&](std::uint32_t address) { return static_cast<std::int64_t>(address / peers_.size()); };
  std::vector<std::int64_t> found{of.address == kNobody ? -1 : replica(of.address)};
  for (const auto& [address, name] : of.next) found.push_back(replica(address));
  return found;
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
  send_now(server, std::move(item));
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

std::shared_ptr<Call> Client::ask(RequestKind kind, const std::vector<std::uint32_t>& servers, Nanoseconds timeout) {
  const auto call = std::make_shared<Call>();
  Hold hold(*this);
  for (const std::uint32_t server : servers) {
    if (kind == RequestKind::leave && !peer(server).alive) continue;
    put(hold, server, Item(call, kind), timeout);
  }
  return call;
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
    turn_if_ended(part.server);
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
