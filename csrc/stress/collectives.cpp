// Many calls of mixed kinds over small slots, so that every slot is reused many times, and over some that are large
// enough to be filled past the caches.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr std::array kDTypesUsed{DType::float32, DType::int64, DType::bfloat16};

// A rank's contribution to element `i` of a call, so small that no dtype rounds the sum of any group.
int contribution(int rank, std::size_t i, std::uint64_t call) {
  return static_cast<int>(mix(mix(call, static_cast<std::uint64_t>(rank)), i) % 64) - 31;
}

void put(DType dtype, std::byte* to, int value) {
  const auto number = static_cast<float>(value);
  const std::int64_t wide = value;
  const auto half = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number) >> 16);
  if (dtype == DType::float32) std::memcpy(to, &number, sizeof number);
  if (dtype == DType::int64) std::memcpy(to, &wide, sizeof wide);
  if (dtype == DType::bfloat16) std::memcpy(to, &half, sizeof half);
}

// A tensor of one block, of which `value(i)` gives the elements.
template <class Value>
std::vector<std::byte> tensor(DType dtype, std::size_t count, Value&& value) {
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) put(dtype, bytes.data() + i * size_of(dtype), value(i));
  return bytes;
}

int expected(const Call& call, int size, std::size_t i, std::uint64_t number) {
  if (call.operation == Operation::broadcast) return contribution(call.root, i, number);
  int result = contribution(0, i, number);
  for (int r = 1; r < size; ++r) {
    const int next = contribution(r, i, number);
    result = call.reduce_op == ReduceOp::max ? std::max(result, next) : result + next;
  }
  return result;
}

// `shared`: the tensors are in the rank's arena.
void run_checked(Rank& rank, const Call& call, std::uint64_t number, bool in_place, bool shared) {
  auto input = tensor(call.dtype, call.count, [&](std::size_t i) { return contribution(rank.number(), i, number); });
  const auto untouched = input;
  auto output = tensor(call.dtype, in_place ? 0 : call.count, [](std::size_t) { return -99; });
  const std::size_t count = call.count;
  const auto placed = [&](std::vector<std::byte>& bytes) {
    if (!shared) return bytes.data();
    std::byte* place = rank.arena->allocate(bytes.size());
    std::copy(bytes.begin(), bytes.end(), place);
    return place;
  };
  std::byte* const from = placed(input);
  std::byte* const to = in_place ? from : placed(output);
  rank.engine.run(call, {.input = {{&from, 1}, {&count, 1}}, .output = {{&to, 1}, {&count, 1}}});
  if (shared) {  // what comes next at these places must find nobody reading
    std::copy_n(from, input.size(), input.begin());
    std::memset(from, 0xee, input.size());
    rank.arena->release(from);
    if (!in_place) {
      std::copy_n(to, output.size(), output.begin());
      std::memset(to, 0xee, output.size());
      rank.arena->release(to);
    }
  }

  const auto wanted = tensor(call.dtype, count, [&](std::size_t i) { return expected(call, rank.size(), i, number); });
  const std::string what = std::string(name(call.operation)) + " number " + std::to_string(number) + ", rank " +
                           std::to_string(rank.number()) + " of " + std::to_string(rank.size());
  check((in_place ? input : output) == wanted, what + ": wrong result");
  check(in_place || input == untouched, what + ": the input was written");
}

// The sum, and the larger, of int64 elements, as functions of a user.
template <bool kLarger>
int combined(const void* a, const void* b, void* out, std::size_t count) {
  const auto *left = static_cast<const std::int64_t*>(a), *right = static_cast<const std::int64_t*>(b);
  auto* const result = static_cast<std::int64_t*>(out);
  for (std::size_t i = 0; i < count; ++i) result[i] = kLarger ? std::max(left[i], right[i]) : left[i] + right[i];
  return 0;
}

std::size_t random_count(Random& random) {
  const int most = random_int(random, 0, 9) == 0 ? 5000 : random_int(random, 0, 2) == 0 ? 600 : 40;
  return static_cast<std::size_t>(random_int(random, 0, most));
}

}  // namespace

void run_scripted(Rank& rank, std::uint64_t seed, std::uint64_t number) {
  Random random(mix(seed, number));
  Call call{.operation = random_int(random, 0, 3) == 0 ? Operation::broadcast : Operation::all_reduce,
            .dtype = kDTypesUsed[static_cast<std::size_t>(random_int(random, 0, 2))],
            .reduce_op = random_int(random, 0, 1) == 0 ? ReduceOp::sum : ReduceOp::max,
            .timeout = 20 * kSecond};
  static const Operator sum{combined<false>, sizeof(std::int64_t), 1, "the sum", ""};
  static const Operator larger{combined<true>, sizeof(std::int64_t), 2, "the larger", ""};
  if (call.operation == Operation::all_reduce && call.dtype == DType::int64 && random_int(random, 0, 1) == 0) {
    call.op = call.reduce_op == ReduceOp::sum ? &sum : &larger;
    call.shape = call.op->digest;
  }
  const int plan = random_int(random, 0, rank.all_reduce_plans - 1);
  rank.engine.choose(Operation::all_reduce, std::numeric_limits<std::uint64_t>::max(), plan);
  if (call.operation == Operation::broadcast) call.root = random_int(random, 0, rank.size() - 1);
  call.count = call.largest = random_count(random);
  const bool in_place = random_int(random, 0, 1) == 0;
  run_checked(rank, call, number, in_place, random_int(random, 0, 1) == 0);
}

void run_all_reduce(Rank& rank, std::size_t count, Nanoseconds timeout) {
  Call call{.operation = Operation::all_reduce, .dtype = DType::int64, .timeout = timeout};
  call.count = call.largest = count;
  run_checked(rank, call, 0, false, false);
}

void stress_collectives() {
  constexpr std::uint64_t kCalls = 1000;
  for (int size = 2; size <= 5; ++size) {
    const bool even = size % 2 == 0;
    Group group(size, even ? 8 : 16, size == 2 ? 16384 : even ? 256 : 1024);
    on_all_ranks(group, [&](Rank& rank) {
      Random pause(static_cast<std::uint64_t>(rank.number()));
      for (std::uint64_t number = 0; number < kCalls; ++number) {
        run_scripted(rank, static_cast<std::uint64_t>(size), number);
        // Now and then a rank is late, so that the others come to sleep.
        if (random_int(pause, 0, 99) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      }
    });
    std::printf("collectives: %d ranks, %d calls\n", size, static_cast<int>(kCalls));
  }
}

// Threads of a rank race for turns; whoever has turn k makes call k of the script, so the ranks agree.
namespace {

// The thread of a queue sleeps while other threads run their calls themselves.
void queue_lets_its_thread_sleep() {
  constexpr int kCalls = 500;
  CallQueue queue;
  const auto sleeps = [&] {  // how often the thread has slept so far
    long times = 0;
    queue.post(
        [&] {
          rusage used;
          getrusage(RUSAGE_THREAD, &used);
          times = used.ru_nvcsw;
        },
        [] {});
    queue.drain();
    return times;
  };
  const long before = sleeps();
  for (int i = 0; i < kCalls; ++i) queue.run([] { std::this_thread::sleep_for(std::chrono::microseconds(100)); });
  check(sleeps() - before < kCalls / 5, "queue: its thread is woken by calls that are not for it");
  std::printf("queue: its thread sleeps through %d calls of others\n", kCalls);
}

}  // namespace

void stress_queue() {
  queue_lets_its_thread_sleep();
  constexpr int kThreads = 3, kCallsPerThread = 60;
  Group group(3, 8, 256);
  on_all_ranks(group, [&](Rank& rank) {
    CallQueue queue;
    std::uint64_t next = 0;                         // guarded by the queue's turns alone
    std::array<std::vector<int>, kThreads> orders;  // likewise
    in_threads(kThreads, [&](int t) {
      Random random(static_cast<std::uint64_t>(rank.number() * kThreads + t));
      for (int i = 0; i < kCallsPerThread; ++i) {
        const auto call = [&, t, i] {
          orders[static_cast<std::size_t>(t)].push_back(i);
          run_scripted(rank, 77, next++);
        };
        if (random_int(random, 0, 2) == 0) {
          queue.run(call);
        } else {
          const std::size_t turn = queue.post(call, [] {});
          if (random_int(random, 0, 1) == 0) queue.help(turn);
        }
      }
    });
    queue.stop();
    check(!queue.busy() && next == kThreads * kCallsPerThread, "queue: calls were lost");
    for (const auto& order : orders)
      check(std::is_sorted(order.begin(), order.end()), "queue: calls of a thread changed places");
  });
  std::printf("queue: 3 ranks, %d threads each, %d calls\n", kThreads, kThreads * kCallsPerThread);
}

}  // namespace ringreduce::stress
