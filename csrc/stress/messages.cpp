// Tagged messages among all ranks, posted in different orders on either side.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

constexpr int kRounds = 30, kThreads = 2, kTags = 6;

// Message `tag` of a round: small ones mostly, and some of many slots. Tag 0 is received from any source.
std::uint64_t tag_of(int round, int tag) { return static_cast<std::uint64_t>(round * kTags + tag); }

std::size_t bytes_of(std::uint64_t tag) {
  const std::uint64_t hash = mix(5, tag);
  return hash % 4 == 0 ? hash / 4 % 20000 : hash / 4 % 300;
}

std::vector<std::byte> content(int source, int destination, std::uint64_t tag) {
  std::vector<std::byte> bytes(bytes_of(tag));
  const std::uint64_t seed = mix(mix(tag, static_cast<std::uint64_t>(source)), static_cast<std::uint64_t>(destination));
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(seed + i * 7 + i / 256);
  return bytes;
}

struct Parcel {
  std::shared_ptr<std::vector<std::byte>> content;
  std::shared_ptr<Message> message;

  const std::vector<std::byte>& bytes() const { return *content; }
};

Parcel parcel(bool sends, int peer, std::uint64_t tag, std::vector<std::byte> bytes) {
  Parcel p{std::make_shared<std::vector<std::byte>>(std::move(bytes)), std::make_shared<Message>()};
  p.message->sends = sends;
  p.message->peer = peer;
  p.message->tag = tag;
  p.message->data = p.content->data();
  p.message->bytes = p.content->size();
  p.message->timeout = 20 * kSecond;
  p.message->on_done = [kept = p.content](const std::exception_ptr&) {};
  return p;
}

}  // namespace

void exchange_messages(Rank& rank, int round) {
  const int own = rank.number();
  Random random(mix(tag_of(round, 0), static_cast<std::uint64_t>(own)));
  std::vector<Parcel> parcels;
  for (int tag = 0; tag < kTags; ++tag)
    for (int peer = 0; peer < rank.size(); ++peer) {
      if (peer == own) continue;
      const std::uint64_t whole = tag_of(round, tag);
      parcels.push_back(parcel(true, peer, whole, content(own, peer, whole)));
      parcels.push_back(
          parcel(false, tag == 0 ? kAnySource : peer, whole, std::vector<std::byte>(bytes_of(whole), std::byte{0xEE})));
    }
  std::shuffle(parcels.begin(), parcels.end(), random);
  for (const Parcel& p : parcels) rank.mailbox.post(p.message);
  std::shuffle(parcels.begin(), parcels.end(), random);
  for (const Parcel& p : parcels) rank.mailbox.wait(p.message);

  std::vector<int> any_sources;
  for (const Parcel& p : parcels) {
    const Message& m = *p.message;
    if (m.sends) continue;
    check(m.moved == m.bytes && p.bytes() == content(m.peer, own, m.tag), "messages: wrong content");
    if (m.tag == tag_of(round, 0)) any_sources.push_back(m.peer);
  }
  std::sort(any_sources.begin(), any_sources.end());
  check(std::adjacent_find(any_sources.begin(), any_sources.end()) == any_sources.end(),
        "messages: a receive from any source met one sender twice");
}

namespace {

// Equal tags arrive in the order they were sent, whether set aside before their receives or not.
void keep_order(Rank& rank) {
  constexpr int kMessages = 40;
  constexpr std::uint64_t kTag = 1'000'000, kLastTag = kTag + 1;
  std::vector<Parcel> parcels;
  for (int i = 0; i < kMessages; ++i)
    parcels.push_back(
        parcel(rank.number() == 0, 1 - rank.number(), kTag, std::vector<std::byte>(700, static_cast<std::byte>(i))));
  parcels.push_back(parcel(rank.number() == 0, 1 - rank.number(), kLastTag, {}));
  // The receiver asks for the last message first, so that it must set many aside.
  if (rank.number() == 1) std::rotate(parcels.begin(), parcels.end() - 1, parcels.end());
  for (const Parcel& p : parcels) {
    rank.mailbox.post(p.message);
    if (p.message->tag == kLastTag) rank.mailbox.wait(p.message);
  }
  for (const Parcel& p : parcels) rank.mailbox.wait(p.message);
  if (rank.number() == 0) return;
  for (int i = 0; i < kMessages; ++i) {
    const auto& bytes = parcels[static_cast<std::size_t>(i) + 1].bytes();
    check(std::count(bytes.begin(), bytes.end(), static_cast<std::byte>(i)) == std::ssize(bytes),
          "messages: equal tags changed places");
  }
}

// Two long messages with one tag come from two ranks at a time, and are being set aside for the sake of a third message
// when two receives from any source ask for them: both get one.
void two_set_aside() {
  Group group(3, 8, 256);
  constexpr std::uint64_t kTag = 1, kThirdTag = 2;
  const std::uint32_t slot_bytes = group.ranks[0]->team->geometry().mailbox_slot_bytes;
  // Ranks 0 and 1 are played by hand, so that their messages stay incomplete for as long as the case needs.
  const auto fill_slot = [&](int source, std::uint64_t seq) {
    MessageHeader& slot = group.ranks[static_cast<std::size_t>(source)]->team->region(source).message(2, seq);
    slot.message_bytes = 2 * slot_bytes;
    slot.bytes = slot_bytes;
    slot.dtype = static_cast<std::uint32_t>(DType::uint8);
    slot.tag = kTag;
    std::memset(slot.payload(), source + 1, slot_bytes);
    slot.stamp.store(seq + 1, std::memory_order_seq_cst);
  };
  Mailbox& mailbox = group.ranks[2]->mailbox;
  const auto receive = [&](std::uint64_t tag) {
    Parcel p = parcel(false, kAnySource, tag, std::vector<std::byte>(2 * slot_bytes));
    p.message->timeout = kSecond;
    mailbox.post(p.message);
    return p;
  };
  fill_slot(0, 0), fill_slot(1, 0);
  const Parcel third = receive(kThirdTag);
  const Parcel first = receive(kTag), second = receive(kTag);
  fill_slot(1, 1);
  const MessageHeader& filled = group.ranks[1]->team->region(1).message(2, 1);
  while (filled.consumed.load(std::memory_order_acquire) != 2) std::this_thread::yield();
  fill_slot(0, 1);
  for (const Parcel* p : {&first, &second}) {
    mailbox.wait(p->message);
    check(p->bytes() == std::vector(p->bytes().size(), static_cast<std::byte>(p->message->peer + 1)),
          "messages: wrong content from any source");
  }
  mailbox.stop();
}

}  // namespace

void stress_messages() {
  for (int size : {2, 4}) {
    Group group(size, 8, 256, {}, true, size == 2 ? 8192 : 256);  // those of two are filled past the caches, too
    on_all_ranks(group, [](Rank& rank) {
      in_threads(kThreads, [&](int thread) {
        for (int round = 0; round < kRounds; ++round) exchange_messages(rank, round * kThreads + thread);
      });
    });
    std::printf("messages: %d ranks, %d messages from and to each\n", size, kRounds * kThreads * kTags * (size - 1));
  }
  Group pair(2, 8, 256);
  on_all_ranks(pair, keep_order);
  std::printf("messages: equal tags in order\n");
  two_set_aside();
  std::printf("messages: two set aside for any source\n");
}

}  // namespace ringreduce::stress
