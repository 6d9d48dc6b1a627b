// Serialisation of a shard (archive.h), for a backup that is made while the server serves.
#include "parameter_server/block/archive.h"
#include "parameter_server/block/shard.h"

namespace ringreduce::parameter_server {

// The templates of archive.h find these functions by argument-dependent lookup.

void visit(Archive& archive, Mode& mode) {
  archive(mode.consistency, mode.quorum, mode.grace, mode.staleness, mode.group);
}

static void visit(Archive& archive, Reply& reply) {
  archive(reply.worker, reply.number, reply.outcome, reply.version, reply.after);
}

static void visit(Archive& archive, Request& request) {
  archive(request.kind, request.worker, request.number, request.seen, request.block, request.priority);
  archive(request.round, request.pulled, request.weight);
  archive.payload(request.payload);
}

static void visit(Archive& archive, Contribution& contribution) {
  archive(contribution.worker, contribution.weight, contribution.clock, contribution.pulled);
  archive.payload(contribution.payload);
}

void visit(Archive& archive, Shard::Member& member) {
  archive(member.group, member.live, member.joined, member.clock, member.next);
  archive(member.replies, member.early, member.barriers);
}

void visit(Archive& archive, Shard::Block& block) {
  archive(block.mode, block.initialised, block.grows, block.version, block.logged, block.opened);
  archive(block.rounds, block.priorities, block.closes, block.pulls, block.changes);
}

void Shard::visit(Archive& archive) { archive(members_, blocks_, pulled_, open_, log_, steps_, now_); }

}  // namespace ringreduce::parameter_server
