// Frames, which go over a connection between two ranks of different hosts. Each has a header and a payload.
//
// A frame carries what a rank would otherwise store in memory that its peer can read: a slot of an outbox or of a
// mailbox, the word that gives a slot back, the control block, the group's error. It names its place (channel, sequence
// number), so frames may arrive in any order and over any of several connections. Numbers are little endian, as on all
// machines that this library is built for.
//
// A header comes from another process, so `objection` checks all of it before any of it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "transport/connection.h"
#include "transport/region.h"

namespace ringreduce {

struct FrameKind {
  enum : std::uint32_t {
    slot = 1,      // of the sender's outbox: `channel`, `seq`, `tag` (the fingerprint), `total` and `packing` (of the
                   // value); the value follows
    slot_read,     // the sender has read slot `seq` of the receiver's outbox `channel`
    message,       // a slot of the sender's mailbox: `seq`, `tag`, `dtype`, `total`; its part of the message follows
    message_read,  // the sender is done with slot `seq` of the receiver's mailbox
    control,       // the sender's control block (ControlImage) follows
    error,         // the group's error (ErrorImage) follows
    leave = FrameHeader::kLeave,
  };
};

// A control block, as it travels.
struct ControlImage {
  std::uint64_t entered = 0, completed = 0, barriers_entered = 0, barriers_given_up = 0;
  std::int32_t waiting_for = -1, gpu_waiting_for = -1;
  std::uint32_t waits = 0, gpu_waits = 0;     // 1: has said so lately
  CallHeader calls[CallHistory::kKept] = {};  // those with seq 0 stand for none
};

// The group's error, as it travels; the text follows, without a final zero.
struct ErrorImage {
  std::int32_t kind = 0, culprit = -1, reporter = -1;
  std::uint32_t reserved = 0;
};

inline constexpr std::size_t kErrorText = 2047;  // at most

// Says in words why a header is invalid for a group of this geometry; empty if it is valid.
std::string objection(const FrameHeader& header, const Geometry& geometry);

// Copies a control block into an image; and stores an image that came from a peer in the mirror of its control block.
ControlImage image_of(const RankControl& control);
void store(const ControlImage& image, RankControl& mirror);

}  // namespace ringreduce
