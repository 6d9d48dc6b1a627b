// Runs one rank's program of one call over point-to-point messages: compute, exchange, compute, exchange ...
//
// A plan's steps have phases (ringreduce/plan/symbolic.py): what a step takes was sent in earlier phases, and what is
// sent in a phase is exchanged at its end. So every rank knows from the plan which messages each exchange has, both
// ways and in which order, and nothing about them is negotiated.
//
// Slices and rounds are those of execution.h. Round k is one phase behind round k - 1: exchange number x carries phase
// x - k of every round k, and a call of R rounds and P phases takes R + P - 2 exchanges or fewer. A ring then sends up
// to P slices at once, a tree keeps all its levels busy.
//
// No deadlock. Exchange x of a rank waits for its peers' exchange x only, since both ends of a message number it alike;
// by induction on x all of them end. Ranks without messages in an exchange leave it out.
//
// A value that arrives lands in the output if the step that takes it would only write it there, and if nobody needs the
// old content until then. Everything else lands in cells: memory for a slice each, taken as they are needed and given
// back when they have been combined, or sent on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "transport/point_to_point.h"

namespace ringreduce {

// Where the elements of a call are, and what combines them: all that depends on the device.
class Device {
 public:
  virtual ~Device() = default;

  // Memory for `bytes` bytes, which are the same until resize(). give() takes it back, for the next take(). A device
  // that does things later does all of them in order, so that memory which is given back may still be in use.
  virtual std::byte* take() = 0;
  virtual void give(std::byte* cell) = 0;
  // From now on cells have at least `bytes` bytes. All must have been given back.
  virtual void resize(std::size_t bytes) = 0;

  // As kernels/accumulate.h has them. A later exchange, or operation, finds their results.
  virtual void accumulate(const Call& call, std::span<void* const> dsts, std::span<const void* const> srcs,
                          std::size_t count, const Average& average) = 0;
  virtual void scale(const Call& call, void* dst, const void* src, std::size_t count) = 0;
  virtual void copy(void* dst, const void* src, std::size_t bytes) = 0;
};

// The messages of each phase of a program, computed once per program.
struct Timetable {
  struct Arrival {
    std::uint32_t phase;   // at the end of which it arrives
    std::uint32_t step;    // that takes it
    std::uint32_t source;  // its number among that step's
    bool lands;            // in the output
  };
  struct Channel {
    std::vector<Arrival> arrivals;  // by phase; of one phase in the order of the program
    std::vector<char> moves;        // per step: whether a later step of its phase overwrites its chunk
  };

  explicit Timetable(const Program& program);

  std::vector<Channel> channels;
  std::size_t phases = 0;  // of the channel that has the most
};

// A rank's part of a call.
struct BoundProgram {
  const Program& program;
  const Timetable& timetable;  // the program's
  const Call& call;
  const Buffers& buffers;
  std::size_t slice_bytes;  // a multiple of 64
};

// Some of a program's channels: first, first + every, ... Those of several exchanges, each with a wire and a device of
// its own, may run at the same time. All ranks must divide them alike.
struct Channels {
  std::size_t first = 0, every = 1;
};

class Exchange {
 public:
  // The arguments, and all that they refer to, must outlive this object.
  Exchange(PointToPoint& wire, Device& device, const BoundProgram& part, Channels channels = {});
  ~Exchange();

  // Returns when this rank's part of the call is done. Throws what PointToPoint::exchange throws.
  void run(Nanoseconds deadline) {
    while (advance(deadline)) {
    }
  }
  // Does the next exchange, and what is to be done before it; false if there is none: this rank's part is done.
  bool advance(Nanoseconds deadline);

  // "exchange 3 of 12"
  std::string position() const { return "exchange " + std::to_string(at_ + 1) + " of " + std::to_string(last_); }
  Nanoseconds waited() const { return waited_; }  // in exchanges

 private:
  // The memory that a step works on in one round.
  struct Slice {
    std::byte *local = nullptr, *output = nullptr;
    std::size_t bytes = 0;
  };
  // Calls visit(channel, round, phase) for all rounds that are under way, the same way round on every rank.
  template <class Visit>
  void each_round(Visit&& visit) const;
  std::size_t elements_of(int block) const;
  Slice slice_of(std::size_t channel, std::size_t round, const Step& step) const;
  void run_step(std::size_t channel, std::size_t round, const Step& step, bool moves);
  void receive(std::size_t channel, std::size_t round, const Timetable::Arrival& arrival);
  std::byte*& arrived(std::size_t round, const Source& source);
  void give_back();

  PointToPoint& wire_;
  Device& device_;
  const Program& program_;
  const Timetable& timetable_;
  const Call& call_;
  const Buffers& buffers_;
  const std::size_t element_, slice_size_;  // bytes; elements
  const bool scaled_;
  std::vector<std::size_t> rounds_;  // per channel; 0 for those of other exchanges
  std::size_t at_ = 0, last_ = 0;
  Nanoseconds waited_ = 0;
  std::vector<std::byte*> arrived_;  // per round under way and receive of the program
  std::vector<std::byte*> spent_;    // cells, until the exchange under way is over
  std::vector<Outgoing> outgoing_;
  std::vector<Incoming> incoming_;
  std::vector<const void*> operands_;
  std::vector<void*> results_;
};

}  // namespace ringreduce
