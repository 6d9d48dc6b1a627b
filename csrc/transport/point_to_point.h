// The wire between ranks that share no memory: messages from one rank to another, all of a moment together.
//
// This is what another library has to offer so that plans can run over it (engine/exchange.h): Gloo by way of
// c10d::Backend (process_group/c10d_point_to_point.h); ncclSend and ncclRecv within one group are of the same shape.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/clock.h"
#include "core/error.h"

namespace ringreduce {

struct Outgoing {
  int peer;
  const std::byte* data;
  std::size_t bytes;  // at least 1
};

struct Incoming {
  int peer;
  std::byte* data;
  std::size_t bytes;  // what the peer sends
};

class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  PointToPoint() = default;
  PointToPoint(const PointToPoint&) = delete;
  PointToPoint& operator=(const PointToPoint&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "rank 3 (rank 1 of the group)": see RankName. And the same with host and pid.
  virtual std::string number(int rank) const = 0;
  virtual std::string describe(int rank) const = 0;

  // Sends and receives all of these messages at once. Only messages between the same two ranks have an order: that of
  // the exchanges, and within an exchange that of the lists. When it returns, the incoming data has arrived and the
  // outgoing memory may be changed; on a GPU, this holds for work that is put in the stream later. One call at a time.
  // The memory remains the caller's, and is not touched after an error. Throws peer_lost or timeout with the peer as
  // the culprit, or the error that the group was aborted with. After any error the wire is unusable, and the caller
  // must call abort().
  virtual void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming,
                        Nanoseconds timeout) = 0;

  // Makes `error` the group's, unless it has one already, as far as the others can still be told; ends an exchange
  // under way and lets go of the peers, so that theirs end too. Thread-safe.
  virtual void abort(const Error& error) = 0;
  // Throws the group's error, if this rank knows of one. Thread-safe.
  virtual void throw_if_aborted() const = 0;
  // The rank that the group's error is from; -1 if this rank knows of none.
  virtual int reporter() const = 0;
};

}  // namespace ringreduce
