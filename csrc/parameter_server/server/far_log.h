// The log (near_log.h) over TCP. The server sends each record together with the data that its request pushed.
//
//   from the server
//     record     A Record and its bytes; seq: its position in the log.
//     pushed     A fragment of the data; tag: the position of its record, seq: where the fragment begins in the data,
//                total: bytes of all the data.
//   from the backup
//     confirmed  Two positions: up to which the backup has received every record, and up to which it has carried them
//                out.
//
// Data that has only been sent is lost if the server's host fails. Unlike on one host, the server therefore carries out
// and answers nothing before the backup has confirmed the record of it: Unconfirmed.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "parameter_server/server/near_log.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

class FarLog final : public Wire {
 public:
  using Wire::Wire;
  ~FarLog() { connections_.leave(); }

  // The peer number of the other side. There is one peer only.
  static constexpr int kPartner = 0;

  // ---- Called by the server. Positions count the bytes of records, without pushed data. ----
  std::uint64_t written() const { return written_; }
  std::uint64_t received() const { return received_.load(std::memory_order_acquire); }
  std::uint64_t carried_out() const { return carried_out_.load(std::memory_order_acquire); }
  // `entry.data` must not change until the record has been carried out. If there is no memory for an entry without
  // data, nothing has been written.
  void write(Entry entry);

  // ---- Called by the backup ----
  // Takes the next entry. Returns false unless all of it has arrived.
  bool read(Entry& entry);
  // Tells the server how much has been received; with `done`, also that all entries read so far have been carried out.
  void confirm(bool done);

  // ---- Called by both ----
  // Sends a small frame several times a second. TCP measures the partner's silence from the moment something is sent.
  // If the first frame after a network failure were a push much later, a failure would be noticed after twice the time.
  void beat();

  std::byte* place_for(int peer, const FrameHeader& header, std::vector<std::byte>& aside) override;
  void deliver(int peer, const FrameHeader& header, const std::vector<std::byte>& aside) override;

 private:
  struct Kind {
    static constexpr std::uint32_t record = 1, pushed = 2, confirmed = 3;
  };
  struct Positions {
    std::uint64_t received, carried_out;
    bool operator==(const Positions&) const = default;
  };
  // An entry of which some frames have arrived. Frames on different connections can overtake each other.
  struct Incoming {
    bool known = false;  // the record has arrived
    Entry entry;
    std::uint64_t total = 0;                 // bytes of pushed data, as each of its frames says
    std::uint64_t claimed = 0, arrived = 0;  // those in frames that have begun, and in frames that are complete
  };

  static std::uint64_t length(const Entry& entry) { return sizeof(Record) + entry.bytes.size(); }

  std::uint64_t written_ = 0;
  std::atomic<std::uint64_t> received_ = 0, carried_out_ = 0;
  std::map<std::uint64_t, Incoming> incoming_;  // by position
  std::uint64_t whole_ = 0;                     // every entry before this position has arrived
  std::uint64_t taken_ = 0;                     // the backup has read up to here
  Positions said_{}, done_{};                   // sent to the server last; carried out here
  Nanoseconds beaten_ = 0;                      // time of the last beat
};

}  // namespace ringreduce::parameter_server
