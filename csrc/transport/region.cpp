#include "transport/region.h"

#include <sys/mman.h>

#include <bit>
#include <cstring>

namespace ringreduce {
namespace {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "shared memory needs lock-free atomics");
static_assert(sizeof(SlotHeader) == 64 && sizeof(MessageHeader) == 64);

constexpr std::uint64_t pair_of(std::uint32_t low, std::uint32_t high) {
  return low | static_cast<std::uint64_t>(high) << 32;
}

}  // namespace

Layout::Layout(const Geometry& g) : Geometry(g) {
  const auto check = [](bool ok, const char* field, std::uint64_t value, const std::string& demand) {
    if (!ok)
      throw Error(ErrorKind::invalid_argument,
                  std::string(field) + " is " + std::to_string(value) + "; it must be " + demand);
  };
  const auto count = [&](const char* field, std::uint32_t value, std::uint32_t most) {
    check(value >= 1 && value <= most, field, value, "from 1 to " + std::to_string(most));
  };
  const auto power = [&](const char* field, std::uint32_t value) {
    check(std::has_single_bit(value) && value <= 1u << 14, field, value, "a power of two up to 16384");
  };
  const auto payload = [&](const char* field, std::uint32_t value) {
    check(value > 0 && value <= 1u << 28 && value % 64 == 0, field, value, "a multiple of 64 up to 268435456");
  };
  count("ranks", ranks, 4096);
  count("channels", channels, 64);
  power("depth", depth);
  payload("slot_bytes", slot_bytes);
  power("mailbox_depth", mailbox_depth);
  payload("mailbox_slot_bytes", mailbox_slot_bytes);

  outbox_slot = sizeof(SlotHeader) + slot_bytes;
  mailbox_slot = sizeof(MessageHeader) + mailbox_slot_bytes;
  acknowledgements = round_up(sizeof(RankControl), kPage);
  outboxes = round_up(acknowledgements + sizeof(std::uint64_t) * channels * ranks * depth, kPage);
  mailboxes = outboxes + outbox_slot * channels * depth;
  region_bytes = round_up(mailboxes + mailbox_slot * ranks * mailbox_depth, kPage);
}

void CallHistory::add(const CallHeader& call, std::string_view op) {
  auto& words = entries_[call.seq % kKept].words;
  if (words[0].load(std::memory_order_relaxed) >= call.seq) return;
  const std::array values{call.seq,
                          call.fingerprint,
                          call.number,
                          call.count,
                          call.plan,
                          pair_of(call.operation, call.dtype),
                          pair_of(call.reduce_op, static_cast<std::uint32_t>(call.root)),
                          pair_of(call.part, call.packing)};
  words[0].store(0, std::memory_order_relaxed);
  // Release: a reader that sees any of the new words sees the 0 when it looks at the first again.
  for (std::size_t i = 1; i < values.size(); ++i) words[i].store(values[i], std::memory_order_release);
  if (!op.empty()) {
    auto& name = ops_[call.seq % kKept];
    std::array<std::uint64_t, std::tuple_size_v<std::remove_cvref_t<decltype(name)>>> text{};
    std::memcpy(text.data(), op.data(), op.size());
    for (std::size_t i = 0; i < text.size(); ++i) name[i].store(text[i], std::memory_order_release);
  }
  words[0].store(call.seq, std::memory_order_release);
}

std::optional<CallHeader> CallHistory::find(std::uint64_t seq) const {
  const auto& words = entries_[seq % kKept].words;
  std::array<std::uint64_t, std::tuple_size_v<std::remove_cvref_t<decltype(words)>>> values;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = words[i].load(std::memory_order_acquire);
  if (values[0] != seq || words[0].load(std::memory_order_relaxed) != seq) return std::nullopt;
  return CallHeader{.seq = seq,
                    .fingerprint = values[1],
                    .number = values[2],
                    .count = values[3],
                    .plan = values[4],
                    .operation = static_cast<std::uint32_t>(values[5]),
                    .dtype = static_cast<std::uint32_t>(values[5] >> 32),
                    .reduce_op = static_cast<std::uint32_t>(values[6]),
                    .root = static_cast<std::int32_t>(values[6] >> 32),
                    .part = static_cast<std::uint32_t>(values[7]),
                    .packing = static_cast<std::uint32_t>(values[7] >> 32)};
}

std::string CallHistory::op_of(std::uint64_t seq) const {
  const auto& name = ops_[seq % kKept];
  std::array<std::uint64_t, std::tuple_size_v<std::remove_cvref_t<decltype(name)>>> text;
  const auto& stamp = entries_[seq % kKept].words[0];
  if (stamp.load(std::memory_order_acquire) != seq) return "";
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = name[i].load(std::memory_order_acquire);
  if (stamp.load(std::memory_order_relaxed) != seq) return "";
  const auto* const begin = reinterpret_cast<const char*>(text.data());
  return {begin, strnlen(begin, kNameBytes)};
}

void Region::populate(int channel, std::uint64_t seq, std::size_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  const auto begin = reinterpret_cast<std::uintptr_t>(slot(channel, seq).payload());
  const std::uintptr_t page = begin / kPage * kPage;
  madvise(reinterpret_cast<void*>(page), begin + bytes - page,
          MADV_POPULATE_WRITE);  // NOLINT(performance-no-int-to-ptr)
#endif
}

void RankControl::wake() {
  for (Doorbell* doorbell : {&for_calls, &for_messages})
    if (doorbell->sleepers.load(std::memory_order_seq_cst) != 0) doorbell->ring();
}

}  // namespace ringreduce
