#include "stress/harness.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <thread>

#include "stress/plans.h"
#include "transport/links.h"

namespace ringreduce::stress {

void check(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::_Exit(1);
}

FileDescriptor duplicate(int descriptor) {
  FileDescriptor another(dup(descriptor));
  check(another.get() >= 0, "duplicating a descriptor");
  return another;
}

Rank::Rank(std::shared_ptr<Team> its_team, std::shared_ptr<Arena> its_arena)
    : team(std::move(its_team)),
      // Ranks need not lend in the same calls: every third one never does.
      engine(team, {.patience = kPatience,
                    .slices = 3,
                    .least_slice_bytes = 128,
                    .least_fetch_bytes = team->rank() % 3 == 2 ? std::size_t{1} << 30 : 256,
                    .spread_bytes = std::size_t{64} << 10}),
      mailbox(team, kPatience),
      arena(std::move(its_arena)) {
  std::uint64_t digest = 1;
  for (const auto& plan : {one_shot, two_shot, ring, two_rings}) {
    engine.add_plan({Operation::all_reduce, plan(size()), digest++});
    ++all_reduce_plans;
  }
  engine.choose(Operation::all_reduce, std::numeric_limits<std::uint64_t>::max(), 0);
  engine.choose(Operation::broadcast, std::numeric_limits<std::uint64_t>::max(),
                engine.add_plan({Operation::broadcast, broadcast(size()), digest}));
}

void Group::link(int one, int other) {
  int ends[2];
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "no sockets");
  const auto links = [&](int rank) { return ranks[static_cast<std::size_t>(rank)]->team->links(); };
  links(one)->add(other, ends[0], "one end");
  links(other)->add(one, ends[1], "other end");
}

Group::Group(int size, std::uint32_t depth, std::uint32_t slot_bytes, const std::vector<int>& hosts, bool linked,
             std::uint32_t mailbox_slot_bytes) {
  const Geometry geometry{.ranks = static_cast<std::uint32_t>(size),
                          .channels = 2,
                          .depth = depth,
                          .slot_bytes = slot_bytes,
                          .mailbox_depth = 4,
                          .mailbox_slot_bytes = mailbox_slot_bytes};
  const auto host_of = [&](int rank) { return hosts.empty() ? 0 : hosts[static_cast<std::size_t>(rank)]; };
  std::vector<int> memfds;  // by host
  for (int r = 0; r < size; ++r) {
    while (static_cast<int>(memfds.size()) <= host_of(r)) memfds.push_back(memfd_create("stress", MFD_CLOEXEC));
    const int memfd = memfds.back();
    check(memfd >= 0 && ftruncate(memfd, static_cast<off_t>(geometry.segment_bytes())) == 0, "no memory for a segment");
  }
  // In groups of an even size, ranks read one another's tensors where they are, if the kernel lets them.
  std::vector<std::shared_ptr<OpenMemory>> opened;
  std::vector<int> threads;
  for (int r = 0; r < size && size % 2 == 0 && hosts.empty(); ++r) {
    opened.push_back(std::make_shared<OpenMemory>());
    if (can_access(opened.back()->key())) threads.push_back(opened.back()->key().thread);
  }
  std::vector<std::shared_ptr<Arena>> arenas;
  for (int r = 0; r < size; ++r) arenas.push_back(std::make_shared<Arena>(Arena::Options{1 << 20, 1 << 19}));
  for (int r = 0; r < size; ++r) {
    Roster roster{.memfd = dup(memfds[static_cast<std::size_t>(host_of(r))]),
                  .geometry = geometry,
                  .rank = r,
                  .names = std::vector<RankName>(static_cast<std::size_t>(size), {"thread", getpid()}),
                  .pidfds = {},
                  .threads = threads,
                  .arena = arenas[static_cast<std::size_t>(r)],
                  .connect = [this, r](int peer, Nanoseconds) { link(r, peer); }};
    if (!threads.empty()) roster.memory = opened[static_cast<std::size_t>(r)];
    for (int peer = 0; peer < size; ++peer) {
      roster.elsewhere.push_back(host_of(peer) != host_of(r));
      roster.arenas.push_back(host_of(peer) == host_of(r) ? dup(arenas[static_cast<std::size_t>(peer)]->descriptor())
                                                          : -1);
    }
    ranks.push_back(std::make_unique<Rank>(Team::of(std::move(roster)), arenas[static_cast<std::size_t>(r)]));
  }
  for (const int memfd : memfds) close(memfd);
  for (int r = 0; r < size && linked; ++r)
    for (int peer = 0; peer < r; ++peer)
      if (host_of(peer) != host_of(r)) link(peer, r);
}

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i)
    threads.emplace_back([&body, i] {
      try {
        body(i);
      } catch (const std::exception& error) {
        check(false, error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
}

void on_all_ranks(Group& group, const std::function<void(Rank&)>& body) {
  in_threads(group.size(), [&](int rank) { body(*group.ranks[static_cast<std::size_t>(rank)]); });
}

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  check(false, "an error was expected, and none was thrown");
  std::abort();
}

}  // namespace ringreduce::stress
