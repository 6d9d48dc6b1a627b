// Arrays that are nearly plans: program_of takes them or refuses them, but reads nothing beyond them.
#include <cstdio>
#include <limits>

#include "stress/harness.h"
#include "stress/plans.h"

namespace ringreduce::stress {
namespace {

// Whether `words` is accepted, for every rank.
bool binds(Operation operation, const Lowered& words, int size) {
  try {
    for (int rank = 0; rank < size; ++rank)
      program_of({operation, words, 1}, {.rank = rank, .size = size, .root = rank % 2, .channels = 2});
  } catch (const Error& error) {
    check(error.kind() == ErrorKind::invalid_argument, std::string("malformed plan: ") + error.what());
    return false;
  }
  return true;
}

}  // namespace

void stress_malformed_plans() {
  constexpr int kLeast = std::numeric_limits<int>::min(), kMost = std::numeric_limits<int>::max();
  int refused = 0, accepted = 0;
  const auto count = [&](bool ok) { ++(ok ? accepted : refused); };
  for (int size = 2; size <= 4; ++size) {
    for (const auto& plan : {one_shot, two_shot, ring, two_rings, broadcast}) {
      const Lowered whole = plan(size);
      // The last reads the blocks of a plan in another way.
      for (const Operation operation : {Operation::all_reduce, Operation::broadcast, Operation::all_to_all}) {
        check(binds(operation, whole, size), "a sound plan was refused");
        for (std::size_t length = 0; length < whole.size(); ++length) {
          // A copy, so that reading past its end is noticed.
          const Lowered cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
          check(!binds(operation, cut, size), "a truncated plan was accepted");
        }
        for (std::size_t at = 0; at < whole.size(); ++at) {
          Lowered changed = whole;
          const int value = whole[at];
          for (int other : {value - 1, value + 1, -1, 0, size, 1 << 20, 1 << 30, kLeast, kMost}) {
            changed[at] = other;
            count(binds(operation, changed, size));
          }
        }
      }
    }
  }
  // size, channels, share, chunks; then per rank steps and sends, and the one step of rank 0
  check(!binds(Operation::all_reduce, {2, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, -1, 0, 0, 0, 0}, 2),
        "a plan that writes nothing's value was accepted");
  check(binds(Operation::all_reduce, {2, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0}, 2),
        "a plan that copies was refused");
  check(!binds(Operation::all_reduce, {2, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0}, 2),
        "a plan that has two ranks' inputs in one rank's was accepted");
  check(!binds(Operation::all_to_all, {2048, 1, 0, 1, 1, 1 << 20}, 2048), "a plan of 2^42 chunks was accepted");
  std::printf("malformed plans: %d refused, %d accepted\n", refused, accepted);
}

}  // namespace ringreduce::stress
