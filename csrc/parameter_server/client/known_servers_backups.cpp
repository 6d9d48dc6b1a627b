// How a worker learns of backups, and turns to the one that takes over.
#include <cstring>
#include <utility>

#include "core/descriptors.h"
#include "parameter_server/client/known_servers.h"

namespace ringreduce::parameter_server {

// Reads all News; returns whether there were any. A worker is told of a server before it is told of that server's
// backup. So if News of another backup arrives while one is known, the known one has taken over already.
bool KnownServers::take_news() {
  bool any = false;
  for (std::optional<Received> message; news_.get() >= 0 && (message = receive_message(news_.get())); any = true) {
    News news;
    if (message->bytes.size() != sizeof news || message->descriptors.size() != 3) continue;
    std::memcpy(&news, message->bytes.data(), sizeof news);
    if (news.lane >= peers_.size() || peers_[news.lane] == nullptr || peers_[news.lane]->near == nullptr) continue;
    Peer& of = *peers_[news.lane];
    if (!of.alive || news.turn <= of.near->turn) continue;
    news.name[News::kText - 1] = news.address[News::kText - 1] = 0;
    FileDescriptor* const given = message->descriptors.data();
    ServerSpec spec{
        std::move(given[0]), std::move(given[1]), std::move(given[2]), static_cast<std::size_t>(news.capacity),
        news.name,           news.turn,           news.number,         news.address};
    if (of.backup != nullptr && of.backup->turn < news.turn) {
      take_replies(news.lane);
      turn_to_backup(news.lane);
    }
    of.backup = std::make_shared<Near>(std::move(spec), of.near->lane);
  }
  return any;
}

// Turns from a server that has ended to its backup, as often as the backup serves and has been replaced itself.
void KnownServers::look_for_next(std::uint32_t server) {
  take_news();
  Peer& of = peer(server);
  while (of.near->over() && of.backup != nullptr && of.backup->serves()) {
    take_replies(server);
    turn_to_backup(server);
    take_news();
  }
}

// Whether a server has ended without a backup that can take over. A backup that this worker has not heard of is not
// lost: it will send News itself.
bool KnownServers::is_lost(const Peer& of) const {
  if (!of.near->ended() || of.near->over()) return false;
  const std::uint32_t number = of.near->header().backup.load(std::memory_order_seq_cst);
  return number == 0 || (of.backup != nullptr && of.backup->number == number && of.backup->ended());
}

// Why a server on this host has ended, for lose(); "" if nobody knows.
std::string KnownServers::why_ended(const Peer& of) {
  if (const std::string why = of.near->failure(); !why.empty()) return "it has failed: " + why;
  const std::string why = of.backup == nullptr || !of.backup->ended() ? "" : of.backup->failure();
  return why.empty() ? "" : "it has ended, and its backup, " + of.backup->name + ", has failed: " + why;
}

// Called when the server has ended and its backup serves. The backup knows which requests the server had taken and
// answered, so this repeats all unanswered requests with their numbers.
void KnownServers::turn_to_backup(std::uint32_t server) {
  Peer& to = peer(server);
  const std::vector<Request> again = to.session.unanswered();  // here and below: first what needs memory
  std::string name = to.backup->name;
  to.near = std::exchange(to.backup, nullptr);
  to.name = std::move(name);
  Lane& lane = *to.near->lane;
  lane.asked.store(0, std::memory_order_relaxed);
  lane.answered.store(0, std::memory_order_relaxed);
  for (const Request& request : again) to.near->ask(slot_of(request));
  lane.turn.store(to.near->turn, std::memory_order_seq_cst);
  to.near->bell().ring();
}

bool KnownServers::is_near(std::uint32_t server) const {
  const Lock lock(mutex_);
  return peer(server).near != nullptr;
}

// ---- Backups that are reached by TCP ------------------------------------------------------------------------------

std::uint32_t KnownServers::address_of(std::uint32_t server, std::uint32_t replica) const {
  return static_cast<std::uint32_t>(server + replica * peers_.size());
}

bool KnownServers::may_turn(const Peer& of) const { return !of.next.empty() || seeks_; }

void KnownServers::seek() {
  const Lock lock(mutex_);
  seeks_ = true;
  open_wire();
}

// If requests have no replica to go to, they go to this one at once. Otherwise it is queued behind the replicas that
// this worker has not turned to yet: one of those may be the server that this is the backup of.
void KnownServers::attach_far_backup(std::uint32_t server, const std::string& name, std::uint32_t replica) {
  const Lock lock(mutex_);
  Peer& of = peer(server);
  of.next.emplace_back(address_of(server, replica), name);
  open_wire();
  if (of.alive && of.near == nullptr && of.address == kNobody) take_next(of);
}

void KnownServers::take_next(Peer& of) {
  of.address = kNobody;
  if (of.next.empty()) return;
  std::tie(of.address, of.name) = std::move(of.next.front());
  of.next.pop_front();
}

void KnownServers::give_up(std::uint32_t server, const std::string& why) {
  const Lock lock(mutex_);
  const Peer& of = peer(server);
  if (of.alive && of.near == nullptr && of.address == kNobody) lose(server, of.why.empty() ? why : of.why + "; " + why);
}

// Called when the server has ended or is out of reach, for the reason `why`. Queues all unanswered requests again, for
// the next replica if one is known, or until one is. That replica need not have taken over yet.
void KnownServers::turn_to_far_backup(std::uint32_t server, std::string why) {
  Peer& to = peer(server);
  to.why = std::move(why);
  take_replies();  // the last ones of this server
  std::deque<Item> again;
  for (const Request& request : to.session.unanswered()) {
    again.emplace_back(to.calls.at(request.number), request);
    again.back().tag = ++tags_;
  }
  for (const Item& item : to.queue)
    if (item.request.number == 0) {
      again.push_back(item);
      again.back().sent = 0;  // only the server has what was sent
    }
  if (to.near == nullptr)
    for (const Item& item : again)
      if (item.request.number != 0) wire_->forget(to.address, item.request.number);
  to.near = nullptr;
  take_next(to);
  to.queue = std::move(again);
  try_to_feed(server);
}

// Handles servers and backups that are out of reach.
void KnownServers::take_lost() {
  if (wire_ == nullptr) return;
  ran_out_ |= wire_->has_run_out();
  for (const auto& [address, why] : wire_->take_lost()) {
    const auto server = static_cast<std::uint32_t>(address % peers_.size());
    Peer& of = *peers_[server];
    std::erase_if(of.next, [&](const auto& each) { return each.first == address; });
    if (!of.alive || of.near != nullptr || of.address != address) continue;
    if (may_turn(of))
      turn_to_far_backup(server, why);
    else
      lose(server, why);
  }
}

void KnownServers::turn_if_ended(std::uint32_t server) {
  const Peer& of = peer(server);
  if (may_turn(of) && of.near != nullptr && of.near->ended()) turn_to_far_backup(server, why_ended(of));
}

}  // namespace ringreduce::parameter_server
