#include "parameter_server/server/replica.h"

#include <algorithm>
#include <map>
#include <set>

#include "core/error.h"
#include "parameter_server/server/state_archive.h"

namespace ringreduce::parameter_server {

void Replica::decide(const Message& message, Nanoseconds elapsed) { decided.add(shard.step(message, elapsed)); }

bool Replica::carry_out(Output output, bool in_order, bool has_partner, const Enter& enter, const Answer& answer) {
  bool all_done = true;
  std::map<BlockId, std::int32_t> priorities;
  for (const Operation& each : output.operations) {
    const auto [found, fresh] = priorities.try_emplace(each.block, each.priority);
    if (!fresh) found->second = std::max(found->second, each.priority);
  }
  if (!in_order)
    std::stable_sort(output.operations.begin(), output.operations.end(),
                     [&](const auto& a, const auto& b) { return priorities[a.block] > priorities[b.block]; });
  std::set<std::uint64_t> due;
  for (const Operation& each : output.operations) due.insert(each.index);
  std::multimap<std::uint64_t, const Reply*> waiting;  // by index of the operation
  for (const Reply& reply : output.replies) {
    if (reply.outcome != Outcome::done && due.count(reply.after) == 0)
      answer(reply, nullptr, false);
    else
      waiting.emplace(reply.outcome == Outcome::done ? UINT64_MAX : reply.after, &reply);
  }
  const auto finish = [&](const Operation& operation) {
    const bool done = carry_out(operation, has_partner);
    all_done &= done;
    pass(Step::carried_out);
    const auto [begin, end] = waiting.equal_range(operation.index);
    for (auto each = begin; each != end; ++each) answer(*each->second, &operation, !done);
    waiting.erase(begin, end);
  };
  bool others = false;
  for (const Operation& operation : output.operations) {
    if (blocks.by_python(operation))
      others = true;
    else
      finish(operation);
  }
  if (others)
    enter([&] {
      for (const Operation& operation : output.operations)
        if (blocks.by_python(operation)) finish(operation);
    });
  for (const auto& [index, reply] : waiting) answer(*reply, nullptr, false);
  return all_done;
}

// Returns false if the operation has failed.
bool Replica::carry_out(const Operation& operation, bool has_partner) {
  Block& block = blocks[operation.block];
  if (operation.changes) return block.change(operation.contributions[0]), true;
  updates += operation.version > 0;
  const bool done = blocks.apply(operation, has_partner);
  if (operation.version > 0) pass(Step::updated);
  block.publish();
  return done;
}

Request Replica::request_of(WorkerId worker, const RequestSlot& slot, std::shared_ptr<const Payload> payload) {
  Request request;
  request.kind = slot.kind;
  request.worker = worker;
  request.number = slot.number;
  request.seen = slot.seen;
  request.block = slot.block;
  request.priority = slot.priority;
  request.round = slot.round;
  request.pulled = slot.pulled;
  request.weight = slot.weight;
  if (slot.kind == RequestKind::initialise || slot.kind == RequestKind::push || slot.kind == RequestKind::restore) {
    const bool is_dense = blocks.have(slot.block) && !blocks[slot.block].is_table();
    const bool has_none = slot.kind == RequestKind::push && slot.bytes == 0 && is_dense;
    if (!has_none) request.payload = std::move(payload);
    if (request.payload == nullptr && !has_none)
      request.block = UINT32_MAX;  // no such block: the shard refuses the request
    else
      bytes += slot.bytes;
  }
  ++requests;
  return request;
}

std::vector<WorkerId> Replica::awaited(BlockId block) const {
  if (!blocks.have(block)) return {};
  const Mode& mode = shard.mode(block);
  if (mode.consistency == Consistency::sync) return shard.awaited(block);
  return mode.consistency == Consistency::ssp ? shard.slowest(mode.group) : std::vector<WorkerId>();
}

std::map<WorkerId, std::pair<std::string, std::string>> Replica::workers() const {
  std::map<WorkerId, std::pair<std::string, std::string>> found;
  const std::map<WorkerId, std::uint64_t> members = shard.clocks();
  for (const auto& [worker, port] : ports)
    if (members.count(worker) > 0) found[worker] = {port->spec.group, port->spec.name};
  return found;
}

std::vector<WorkerId> Replica::without_port() const {
  std::vector<WorkerId> found;
  for (const auto& [worker, clock] : shard.clocks())
    if (find(ports, worker) == nullptr) found.push_back(worker);
  return found;
}

std::vector<std::tuple<std::string, BlockId, std::size_t>> Replica::notes() const {
  std::vector<std::tuple<std::string, BlockId, std::size_t>> found;
  for (BlockId id = 0; id < blocks.size(); ++id)
    found.emplace_back(blocks[id].spec.note, id, blocks.offset(blocks[id]));
  return found;
}

// ---- The state ----------------------------------------------------------------------------------------------------

// Only on one host: workers connect to a backup that is reached by TCP themselves.
static void visit_ports(StateArchive& archive, Ports& ports) {
  if (archive.has_all) return;
  const std::size_t count = visit_size(archive, ports.size());
  if (!archive.reads()) {
    for (const auto& [worker, port] : ports) {
      archive.windows.push_back(port->window);
      for (const int each : port->descriptors()) archive.sent.push_back(each);
      archive(port->spec, port->alive);
    }
    return;
  }
  if (archive.received.size() < 3 * count) throw Error(ErrorKind::mismatch, "a server's state has too few descriptors");
  auto given = archive.received.begin();
  for (std::size_t i = 0; i < count; ++i) {
    WorkerSpec spec;
    bool alive = true;
    archive(spec, alive);
    for (FileDescriptor* const each : {&spec.window, &spec.pidfd, &spec.news}) *each = std::move(*given++);
    const auto& port = ports[spec.id] = std::make_unique<NearPort>(std::move(spec));
    port->alive = alive;
    archive.windows.push_back(port->window);
  }
  // The windows of workers that have gone, with pushes that are still part of an open round.
  for (; given != archive.received.end(); ++given)
    archive.windows.push_back(std::make_shared<Window>(std::move(*given), memory_bytes(given->get()), 0));
}

void Replica::visit(StateArchive& archive) {
  visit_ports(archive, ports);
  shard.visit(archive);
  blocks.visit(archive);
  archive(requests, updates, bytes);
}

}  // namespace ringreduce::parameter_server
