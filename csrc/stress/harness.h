// Groups whose ranks are threads of one process, each with a mapping of the segment of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/file_descriptor.h"
#include "engine/mailbox.h"
#include "engine/queue.h"
#include "engine/slot_engine.h"
#include "transport/arena.h"

namespace ringreduce::stress {

// Ends the program, as failed, unless `ok`. Threads may be waiting for one another, so nothing is cleaned up.
void check(bool ok, const std::string& what);

// Another descriptor of the same file.
FileDescriptor duplicate(int descriptor);

using Random = std::mt19937_64;
inline int random_int(Random& random, int least, int most) {
  return std::uniform_int_distribution<int>(least, most)(random);
}

// Short, so that ranks often sleep.
inline constexpr Patience kPatience{.looks = 20, .yields = 3};

struct Rank {
  Rank(std::shared_ptr<Team> its_team, std::shared_ptr<Arena> its_arena);

  std::shared_ptr<Team> team;
  SlotEngine engine;
  Mailbox mailbox;
  std::shared_ptr<Arena> arena;
  int all_reduce_plans = 0;  // numbers 0, 1, ... of the engine; a broadcast needs no choice

  int number() const { return team->rank(); }
  int size() const { return team->size(); }
};

struct Group {
  // `hosts`: the host of each rank; ranks of different hosts share nothing but sockets. Empty: one host. `linked`:
  // links are there from the start, and not made when they are needed.
  Group(int size, std::uint32_t depth, std::uint32_t slot_bytes, const std::vector<int>& hosts = {}, bool linked = true,
        std::uint32_t mailbox_slot_bytes = 256);

  int size() const { return static_cast<int>(ranks.size()); }

  // A connection between two ranks of different hosts.
  void link(int one, int other);

  std::vector<std::unique_ptr<Rank>> ranks;
};

// Runs `body(0)` to `body(count - 1)`, each in a thread of its own, and waits for them. An exception fails the program.
void in_threads(int count, const std::function<void(int)>& body);

// The same for every rank of a group.
void on_all_ranks(Group& group, const std::function<void(Rank&)>& body);

// The error that `body` throws; its absence, or any other exception, fails the program.
Error error_of(const std::function<void()>& body);

// Call number `number` of a script that `seed` determines: an all_reduce or a broadcast of any plan, root, dtype and
// size. Checks every element of the result.
void run_scripted(Rank& rank, std::uint64_t seed, std::uint64_t number);

// An all_reduce of `count` int64 elements by plan 0.
void run_all_reduce(Rank& rank, std::size_t count, Nanoseconds timeout);

// Messages to and from every other rank, posted and waited for in an order of this rank's own. A group's rounds have
// numbers of their own.
void exchange_messages(Rank& rank, int round);

// The scenarios. Each prints a line.
void stress_malformed_plans();
void stress_interpreter();
void stress_fastest();
void stress_collectives();
void stress_queue();
void stress_faults();
void stress_messages();
void stress_hosts();
// `only`: the one case of this name; empty: all.
void stress_links(const std::string& only = "");
void stress_segment(const std::string& only = "");
void stress_life_mark();
// The main function of a process that stress_life_mark() starts. It marks three words of a memfd, removes one mark, and
// then writes to the descriptor `ready`.
[[noreturn]] void hold_life_marks(int memfd, int removed, int ready);
void stress_arena(const std::string& only = "");
void stress_parameter_server();
void stress_parameter_server_nonsense();
void stress_parameter_server_backups();
void stress_mixed(int seconds);

}  // namespace ringreduce::stress
