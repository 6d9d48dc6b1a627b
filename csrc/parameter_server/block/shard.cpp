#include "parameter_server/block/shard.h"

#include <algorithm>

namespace ringreduce::parameter_server {

Output Shard::step(const Message& message, Nanoseconds elapsed) {
  now_ += elapsed;
  ++steps_;
  std::visit([this](const auto& known) { on(known); }, message);
  return std::exchange(output_, {});
}

Nanoseconds Shard::due_in() const {
  Nanoseconds first = kForever;
  for (const BlockId id : open_) first = std::min(first, blocks_[id].closes);
  return first == kForever ? kForever : std::max<Nanoseconds>(0, first - now_);
}

std::size_t Shard::kept() const {
  std::size_t most = 0;
  for (const auto& [worker, member] : members_) most = std::max({most, member.replies.size(), member.early.size()});
  return most;
}

// ---- Requests: each once, in order --------------------------------------------------------------------------------

void Shard::on(const Request& request) {
  const auto found = members_.find(request.worker);
  if (found == members_.end()) return reply(request.worker, request.number, Outcome::refused);
  Member& member = found->second;
  member.replies.erase(member.replies.begin(), member.replies.upper_bound(request.seen));
  if (request.number < member.next) {
    const auto kept = member.replies.find(request.number);
    if (kept != member.replies.end()) output_.replies.push_back(kept->second);
    return;  // without a kept reply, the request is under way or the worker has the reply
  }
  if (!member.live) return reply(request.worker, request.number, Outcome::refused);
  // Bounds the replies and requests that are kept, even if the worker does not follow the protocol.
  if (request.number - std::min(request.seen, request.number) > kMostOutstanding) return;
  if (request.number - member.next >= kMostOutstanding) return;
  if (request.number > member.next) {
    member.early.emplace(request.number, request);
    return;
  }
  ++member.next;
  take(request);
  while (!member.early.empty() && member.early.begin()->first == member.next) {
    const Request following = member.early.extract(member.early.begin()).mapped();
    ++member.next;
    take(following);
  }
}

void Shard::take(const Request& request) {
  const bool about_block = request.kind <= RequestKind::pull || request.kind >= RequestKind::restore;
  if (about_block && request.block >= blocks_.size()) return reply(request.worker, request.number, Outcome::refused);
  Member& member = members_.at(request.worker);
  switch (request.kind) {
    case RequestKind::restore:
    case RequestKind::initialise: {
      Block& block = blocks_[request.block];
      const bool restores = request.kind == RequestKind::restore;
      if (block.initialised && !(restores && block.grows && block.version == 0))
        return reply(request.worker, request.number, Outcome::kept, block);
      block.initialised = true;
      block.logged = ++log_;
      output_.operations.push_back({log_,
                                    request.block,
                                    0,
                                    restores,
                                    request.priority,
                                    {{request.worker, 1, member.clock, 0, request.payload}}});
      reply(request.worker, request.number, Outcome::initialised, block);
      return answer_pulls(request.block);
    }
    case RequestKind::push: {
      Block& block = blocks_[request.block];
      if (!block.initialised) return reply(request.worker, request.number, Outcome::refused);
      return take_push(block, request);
    }
    case RequestKind::pull:
      blocks_[request.block].pulls.emplace_back(request.worker, request.number);
      return answer_pulls(request.block);
    case RequestKind::clock:
      ++member.clock;
      reply(request.worker, request.number, Outcome::done);
      for (const BlockId id : std::set(pulled_)) answer_pulls(id);
      return;
    case RequestKind::barrier:
      member.barriers.push_back(request.number);
      return answer_barrier(member.group);
    case RequestKind::leave:
      reply(request.worker, request.number, Outcome::done);
      return remove(request.worker);
    case RequestKind::change: {
      const bool fits = take_change(request.block, request);
      return reply(request.worker, request.number, fits ? Outcome::applied : Outcome::refused, blocks_[request.block]);
    }
  }
  reply(request.worker, request.number, Outcome::refused);
}

void Shard::take_push(Block& block, const Request& request) {
  const Contribution contribution{request.worker, request.weight, members_.at(request.worker).clock, request.pulled,
                                  request.payload};
  if (block.mode.consistency != Consistency::sync) {
    apply(request.block, {contribution}, request.priority);
    reply(request.worker, request.number, Outcome::applied, block);
    return answer_pulls(request.block);
  }
  if (request.round < block.version) return reply(request.worker, request.number, Outcome::late, block);
  Round& round = block.rounds[request.round];
  if (!round.emplace(request.worker, std::pair(request.number, contribution)).second)
    return reply(request.worker, request.number, Outcome::refused, block);  // a worker contributes once a round
  std::int32_t& priority = block.priorities.try_emplace(request.round, request.priority).first->second;
  priority = std::max(priority, request.priority);
  open_.insert(request.block);
  close_rounds(request.block);
}

void Shard::apply(BlockId id, std::vector<Contribution> contributions, std::int32_t priority) {
  Block& block = blocks_[id];
  block.logged = ++log_;
  output_.operations.push_back({log_, id, ++block.version, false, priority, std::move(contributions)});
}

// Returns false if another worker has asked for something else for the same round.
bool Shard::take_change(BlockId id, const Request& request) {
  Block& block = blocks_[id];
  if (block.mode.consistency != Consistency::sync) {
    change(id, request.worker, request.pulled, request.weight);
    return true;
  }
  const std::uint64_t round = std::max(request.round, block.version);
  const std::pair wanted(request.worker, request.weight);
  const auto [found, fresh] = block.changes[round].try_emplace(request.pulled, wanted);
  auto& [worker, number] = found->second;
  if (!fresh && number == request.weight) return true;
  if (!fresh && worker != request.worker) return false;
  found->second = wanted;
  if (round == block.version) change(id, request.worker, request.pulled, request.weight);
  return true;
}

void Shard::change(BlockId id, WorkerId worker, std::uint64_t place, double number) {
  Block& block = blocks_[id];
  block.logged = ++log_;
  constexpr std::int32_t kNoPriority = INT32_MIN;
  output_.operations.push_back({log_,
                                id,
                                block.version,
                                false,
                                kNoPriority,
                                {{worker, number, members_.at(worker).clock, place, nullptr}},
                                true});
}

std::vector<std::pair<std::uint64_t, double>> Shard::coming_changes(BlockId id) const {
  const Block& block = blocks_.at(id);
  std::vector<std::pair<std::uint64_t, double>> found;
  for (auto round = block.changes.upper_bound(block.version); round != block.changes.end(); ++round)
    for (const auto& [place, wanted] : round->second) found.emplace_back(place, wanted.second);
  return found;
}

// ---- Rounds -------------------------------------------------------------------------------------------------------

// Whether the present round waits for this member. It does not if the member joined during the round.
bool Shard::expects(const Block& block, const Member& member) const {
  return member.live && member.group == block.mode.group && member.joined <= block.opened;
}

// Whether the present round of the block ends now. Only the pushes of members of its group count.
bool Shard::complete(Block& block, const Round& round) {
  const bool all = std::all_of(members_.begin(), members_.end(), [&](const auto& each) {
    return !expects(block, each.second) || round.count(each.first) > 0;
  });
  if (all) return true;
  const auto pushed = std::count_if(
      round.begin(), round.end(), [&](const auto& each) { return members_.at(each.first).group == block.mode.group; });
  if (block.mode.quorum == 0 || static_cast<std::size_t>(pushed) < block.mode.quorum) {
    block.closes = kForever;  // the round may have had a quorum before a worker was lost
    return false;
  }
  if (block.closes == kForever) block.closes = now_ + std::min(block.mode.grace, kForever - now_);
  return now_ >= block.closes;
}

// Ends the present round if it is complete, then the next ones as long as they are complete.
void Shard::close_rounds(BlockId id) {
  Block& block = blocks_[id];
  for (auto first = block.rounds.begin(); first != block.rounds.end() && first->first == block.version;
       first = block.rounds.begin()) {
    if (!complete(block, first->second)) return;
    const Round round = std::move(first->second);
    const std::int32_t priority = block.priorities.extract(first->first).mapped();
    block.rounds.erase(first);
    block.closes = kForever;
    block.opened = steps_;
    std::vector<Contribution> contributions;
    for (const auto& [worker, numbered] : round) contributions.push_back(numbered.second);
    apply(id, std::move(contributions), priority);
    block.changes.erase(block.changes.begin(), block.changes.lower_bound(block.version));
    if (const auto next = block.changes.find(block.version); next != block.changes.end())
      for (const auto& [place, wanted] : next->second) change(id, wanted.first, place, wanted.second);
    for (const auto& [worker, numbered] : round) reply(worker, numbered.first, Outcome::applied, block);
    answer_pulls(id);
  }
  if (block.rounds.empty()) open_.erase(id);
}

void Shard::on(const Tick&) {
  for (const BlockId id : std::set(open_)) close_rounds(id);
}

std::vector<WorkerId> Shard::awaited(BlockId id) const {
  const Block& block = blocks_.at(id);
  std::vector<WorkerId> missing;
  const auto present = block.rounds.find(block.version);
  for (const auto& [worker, member] : members_)
    if (expects(block, member) && (present == block.rounds.end() || present->second.count(worker) == 0))
      missing.push_back(worker);
  return missing;
}

// ---- Pulls --------------------------------------------------------------------------------------------------------

// Whether a pull may be answered. It waits for the worker's pushes with smaller request numbers, and in ssp for the
// clocks of the others. It does not wait for later pushes of this worker, since those belong to a later version.
bool Shard::readable(const Block& block, WorkerId worker, std::uint64_t number) const {
  if (!block.initialised) return false;
  for (const auto& [version, round] : block.rounds) {
    const auto own = round.find(worker);
    if (own != round.end() && own->second.first < number) return false;
  }
  if (block.mode.consistency != Consistency::ssp) return true;
  const std::uint64_t clock = members_.at(worker).clock;
  return clock <= block.mode.staleness || least_clock(block.mode.group) >= clock - block.mode.staleness;
}

void Shard::answer_pulls(BlockId id) {
  Block& block = blocks_[id];
  std::erase_if(block.pulls, [&](const auto& pull) {
    const bool answered = readable(block, pull.first, pull.second);
    if (answered) reply(pull.first, pull.second, Outcome::ready, block);
    return answered;
  });
  if (block.pulls.empty())
    pulled_.erase(id);
  else
    pulled_.insert(id);
}

// ---- Membership ---------------------------------------------------------------------------------------------------

// Returns UINT64_MAX if the group has no members.
std::uint64_t Shard::least_clock(const std::string& group) const {
  std::uint64_t least = UINT64_MAX;
  for (const auto& [worker, member] : members_)
    if (member.live && member.group == group) least = std::min(least, member.clock);
  return least;
}

std::vector<WorkerId> Shard::slowest(const std::string& group) const {
  std::vector<WorkerId> found;
  const std::uint64_t least = least_clock(group);
  for (const auto& [worker, member] : members_)
    if (member.live && member.group == group && member.clock == least) found.push_back(worker);
  return found;
}

std::vector<WorkerId> Shard::absent(const std::string& group) const {
  std::vector<WorkerId> found;
  for (const auto& [worker, member] : members_)
    if (member.live && member.group == group && member.barriers.empty()) found.push_back(worker);
  return found;
}

Shard::Waiting Shard::waiting() const {
  Waiting found;
  const auto add = [&](const std::vector<WorkerId>& workers) { found.workers.insert(workers.begin(), workers.end()); };
  for (const BlockId id : open_) {
    for (const auto& [version, round] : blocks_[id].rounds) found.requests += round.size();
    add(awaited(id));
  }
  for (const BlockId id : pulled_) {
    found.requests += blocks_[id].pulls.size();
    if (blocks_[id].mode.consistency == Consistency::ssp) add(slowest(blocks_[id].mode.group));
  }
  for (const auto& [worker, member] : members_) {
    found.requests += member.barriers.size();
    if (!member.barriers.empty()) add(absent(member.group));
  }
  return found;
}

std::map<WorkerId, std::uint64_t> Shard::clocks() const {
  std::map<WorkerId, std::uint64_t> found;
  for (const auto& [worker, member] : members_)
    if (member.live) found.emplace(worker, member.clock);
  return found;
}

void Shard::on(const Join& join) {
  if (members_.count(join.worker) > 0) return;  // a backup lets it in again after it has taken over
  Member member;
  member.group = join.group;
  member.joined = steps_;
  const std::uint64_t least = least_clock(join.group);
  member.clock = least == UINT64_MAX ? 0 : least;
  members_.emplace(join.worker, std::move(member));
}

void Shard::on(const Create& create) {
  Block block;
  block.mode = create.mode;
  block.initialised = block.grows = create.grows;
  block.opened = steps_;
  blocks_.push_back(std::move(block));
}

void Shard::on(const Lose& lose) {
  const auto found = members_.find(lose.worker);
  if (found == members_.end()) return;
  found->second.replies.clear();  // nobody can ask for them any more
  if (!found->second.live) return;
  for (const BlockId id : std::set(open_)) {
    Block& block = blocks_[id];
    for (auto round = block.rounds.begin(); round != block.rounds.end();) {
      round->second.erase(lose.worker);
      if (round->second.empty()) {
        if (round->first == block.version) block.closes = kForever;
        block.priorities.erase(round->first);
        round = block.rounds.erase(round);
      } else {
        ++round;
      }
    }
  }
  for (Block& block : blocks_) std::erase_if(block.pulls, [&](const auto& pull) { return pull.first == lose.worker; });
  remove(lose.worker);
}

// Ends the membership of a worker, and answers everything that waited only for it.
void Shard::remove(WorkerId worker) {
  Member& member = members_.at(worker);
  member.live = false;
  member.early.clear();
  for (const std::uint64_t number : std::exchange(member.barriers, {})) reply(worker, number, Outcome::refused);
  const std::string group = member.group;
  answer_barrier(group);
  for (const BlockId id : std::set(open_)) close_rounds(id);
  for (const BlockId id : std::set(pulled_)) answer_pulls(id);
}

void Shard::answer_barrier(const std::string& group) {
  if (!absent(group).empty()) return;
  for (auto& [worker, member] : members_) {
    if (!member.live || member.group != group) continue;
    reply(worker, member.barriers.front(), Outcome::done);
    member.barriers.erase(member.barriers.begin());
  }
}

void Shard::reply(WorkerId worker, std::uint64_t number, Outcome outcome) { reply({worker, number, outcome, 0, log_}); }

void Shard::reply(WorkerId worker, std::uint64_t number, Outcome outcome, const Block& block) {
  reply({worker, number, outcome, block.version, block.logged});
}

void Shard::reply(const Reply& reply) {
  output_.replies.push_back(reply);
  const auto found = members_.find(reply.worker);
  if (found != members_.end() && reply.number < found->second.next) found->second.replies.emplace(reply.number, reply);
}

}  // namespace ringreduce::parameter_server
