// The memory that a rank shares with its peers: payloads, in a region of its GPU's memory, and words, which say when a
// payload may be read or written again. Every rank of the group maps the regions and words of all.
//
// Where the words are depends on who waits for them. The kernels of a rank that has its GPU to itself look at them
// again and again: its words are in the GPU's memory, at the beginning of the region, and what ends a wait in vain is
// the host's word Report::abort, which those kernels look at, too. The streams of a rank that shares its GPU look at
// nothing else: its words are in memory of the host, so that a plain store of the host's ends what a stream waits for.
// That must not take a call of CUDA: while a stream waits, another thread may hold the context's lock until it goes on.
//
// A *lane* is a channel's share of one thread block: it has an outbox of its own, and lanes know nothing of each other.
// Per lane a rank has
//   - the outbox: `depth` slots, written by the owner, read by every receiver where they are;
//   - per writer and slot a Notice, stored by that writer: the slot is full, and of what;
//   - per reader and slot a word, 1 from when the owner hands the slot out until that reader is done with it.
// So everybody waits on words of its own, and only payloads are read over a link.
//
// Slots are full or empty, nothing counts up: a call begins with slot 0 whatever was before. Hence a launch has no
// state that a replay of its graph would have to change. A word is handed to and fro: the writer stores the payload,
// sets `taken` of each reader, and stores its `full` with release order; the reader sees that with acquire order, reads
// the payload, clears `full`, and clears `taken` with release order, which the writer acquires before it writes the
// slot again. All other stores to the two lie between these in that order, so none is lost.
//
// A payload lies in its slot as far from a multiple of kPack as its tensor does in the writer's memory, and the notice
// says how far. So where all ranks' tensors lie alike, all operands of a step do.
//
// All bytes are zero in the beginning.
#pragma once

#include "core/device.h"

namespace ringreduce::gpu {

// Bytes that kernels read and write at once where they can.
inline constexpr std::uint32_t kPack = 16;

// Among the reader's words, stored by the writer.
struct Notice {
  std::uint64_t full;  // at the address of the notice. 1: the slot holds what is described here; 0: it has been read
  std::uint64_t fingerprint;
  std::uint64_t bytes;
  std::uint64_t offset;  // of the payload in the slot, below kPack
};

// The sizes that all ranks of a group agree on, and where things are.
struct RegionShape {
  std::uint32_t ranks = 1;
  std::uint32_t lanes = 1;
  std::uint32_t depth = 1;         // slots per outbox: a power of two
  std::uint32_t slot_bytes = 128;  // a multiple of 128

  // Byte offsets among a rank's words. `slot` is a number below depth.
  RINGREDUCE_BOTH std::uint64_t notice(std::uint32_t lane, std::uint32_t writer, std::uint32_t slot) const {
    return index(lane, writer, slot) * sizeof(Notice);
  }
  RINGREDUCE_BOTH std::uint64_t taken(std::uint32_t lane, std::uint32_t reader, std::uint32_t slot) const {
    return words() * sizeof(Notice) + index(lane, reader, slot) * sizeof(std::uint64_t);
  }
  RINGREDUCE_BOTH std::uint64_t word_bytes() const { return words() * (sizeof(Notice) + sizeof(std::uint64_t)); }

  // Byte offsets in a region, behind room for the words.
  //
  // Where the owner's kernels tell one another that one of them has given up: then it is not 0, and stays so.
  RINGREDUCE_BOTH std::uint64_t broken() const { return word_bytes(); }
  // From here `Notice::offset` counts.
  RINGREDUCE_BOTH std::uint64_t payload(std::uint32_t lane, std::uint32_t slot) const {
    return outboxes() + (std::uint64_t{lane} * depth + slot) * stride();
  }
  RINGREDUCE_BOTH std::uint64_t bytes() const { return outboxes() + std::uint64_t{lanes} * depth * stride(); }

 private:
  static constexpr std::uint32_t kLine = 128;  // bytes, where every slot begins

  RINGREDUCE_BOTH std::uint64_t index(std::uint32_t lane, std::uint32_t rank, std::uint32_t slot) const {
    return (std::uint64_t{lane} * ranks + rank) * depth + slot;
  }
  RINGREDUCE_BOTH std::uint64_t words() const { return std::uint64_t{lanes} * ranks * depth; }
  // The distance between slots, which leaves room for the offset.
  RINGREDUCE_BOTH std::uint64_t stride() const { return std::uint64_t{slot_bytes} + kLine; }
  RINGREDUCE_BOTH std::uint64_t outboxes() const {
    return (broken() + sizeof(std::uint64_t) + kLine - 1) / kLine * kLine;
  }
};

}  // namespace ringreduce::gpu
