#include "parameter_server/server/follower.h"

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "parameter_server/server/state_archive.h"

namespace ringreduce::parameter_server {

std::optional<Record::Kind> Follower::repeat_next() {
  Entry entry;
  if (!server->read(entry)) return std::nullopt;
  repeat(entry);
  const Record::Kind kind = entry.record.kind;
  if (kind != Record::Kind::block && kind != Record::Kind::inherit) replica_.stepped = now();
  keep_decided();
  return kind;
}

void Follower::repeat(Entry& entry) {
  const Record& record = entry.record;
  switch (record.kind) {
    case Record::Kind::request: {
      std::shared_ptr<const Payload> pushed;
      if (server->far()) {
        if (record.slot.block != UINT32_MAX)
          pushed = std::make_shared<Lent>(std::move(entry.data), static_cast<std::size_t>(record.slot.bytes));
      } else {
        const Port* const port = find(replica_.ports, record.worker);
        if (port == nullptr) throw Error(ErrorKind::mismatch, "a worker is unknown to the backup");
        pushed = port->payload_of(record.slot, replica_.blocks);
      }
      return replica_.decide(replica_.request_of(record.worker, record.slot, std::move(pushed)), record.elapsed);
    }
    case Record::Kind::join:
      return repeat_join(entry);
    case Record::Kind::lose:
      return repeat_lose(record.worker, record.elapsed);
    case Record::Kind::create: {
      const auto spec = parameter_server::read<BlockSpec>(entry.bytes);
      replica_.blocks.make(spec);
      return replica_.decide(Create{spec.mode, spec.width > 0}, record.elapsed);
    }
    case Record::Kind::tick:
      return replica_.decide(Tick{}, record.elapsed);
    case Record::Kind::inherit:
      return replica_.pass(Step::inherits);
    case Record::Kind::block: {
      StateArchive content(true, entry.content());
      replica_.blocks.take(record.slot.block, record.slot.offset, content, record.slot.round != 0);
      return replica_.pass(Step::takes);
    }
    case Record::Kind::state:
      return take_state(entry);
  }
}

// Repeats that a worker has joined. On one host the server has sent its descriptors; otherwise the worker connects to
// this backup itself.
void Follower::repeat_join(Entry& entry) {
  auto spec = parameter_server::read<WorkerSpec>(entry.bytes);
  const Join join{spec.id, spec.group};
  if (server->far()) {
    if (Port* const port = find(replica_.ports, join.worker)) port->known = true;
  } else {
    FileDescriptor* const places[] = {&spec.window, &spec.pidfd, &spec.news};
    for (std::size_t i = 0; i < std::size(places); ++i) *places[i] = std::move(entry.descriptors.at(i));
    replica_.ports[join.worker] = std::make_unique<NearPort>(std::move(spec));
  }
  replica_.decide(join, entry.record.elapsed);
}

void Follower::repeat_lose(WorkerId worker, Nanoseconds elapsed) {
  replica_.decide(Lose{worker}, elapsed);
  Port* const port = find(replica_.ports, worker);
  if (port == nullptr) return;
  if (!server->far()) return static_cast<void>(replica_.ports.erase(worker));
  port->alive = false;
  port->gone = true;  // closes its connections: it may be alive, and only cut off from the server
}

// Sorts the operations that the shard has decided on. Those of blocks that will be adopted are kept until the server
// has ended, in case it ends before it publishes them. Those of blocks whose content has not arrived are dropped, since
// the content will include them.
void Follower::keep_decided() {
  for (Operation& each : replica_.decided.operations) {
    if (!replica_.blocks[each.block].spec.two_states) continue;
    kept_[each.block].push_back(std::move(each));
    replica_.pass(Step::carried_out);
  }
  std::erase_if(replica_.decided.operations, [this](const auto& each) {
    const Block& block = replica_.blocks[each.block];
    replica_.updates += block.is_missing && each.version > 0 && !each.changes;
    return block.spec.two_states || (block.is_missing && !each.changes);
  });
}

void Follower::drop_published() {
  for (auto& [block, operations] : kept_) {
    const std::uint64_t published = words_of_server(replica_.blocks[block]).published.load(std::memory_order_acquire);
    for (; !operations.empty() && operations.front().version < published; operations.pop_front()) {
      if (operations.front().changes)
        replica_.blocks[block].change(operations.front().contributions[0]);
      else
        replica_.updates += operations.front().version > 0;
    }
  }
  std::erase_if(kept_, [](const auto& each) { return each.second.empty(); });
}

const BlockWords& Follower::words_of_server(const Block& block) const {
  return *reinterpret_cast<const BlockWords*>(server->values() + replica_.blocks.offset(block));
}

void Follower::adopt_values() {
  drop_published();
  for (const auto& block : replica_.blocks)
    if (block->spec.two_states) block->adopt(words_of_server(*block));
  for (auto& [block, operations] : kept_)
    std::move(operations.begin(), operations.end(), std::back_inserter(replica_.decided.operations));
  kept_.clear();
}

void Follower::take_state(Entry& entry) {
  StateArchive state(server->far(), entry.content());
  state.received = std::move(entry.descriptors);
  replica_.visit(state);
  replica_.turn = static_cast<std::uint32_t>(entry.record.slot.number) + 1;
  replica_.number = static_cast<std::uint32_t>(entry.record.slot.round);
  for (const auto& [worker, port] : replica_.ports) port->known = replica_.shard.knows(worker);
}

}  // namespace ringreduce::parameter_server
