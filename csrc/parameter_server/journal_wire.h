// The journal (journal.h) between hosts: a server sends what it writes down, and with it what workers pushed.
//
//   from the server
//     record     A Record and its bytes; seq: its position in the journal.
//     pushed     A part of what the request in a record pushed; tag: that record's position, seq: where the part
//                belongs, total: bytes of the whole.
//   from the backup
//     confirmed  Two positions: what it has, without a gap, and what it has carried out of that.
//
// What is only sent may be lost with the server's host. So, other than on one host, the server carries out nothing and
// answers nothing before the backup has the record of it: Server::keep_back().
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "parameter_server/journal.h"
#include "parameter_server/wire.h"

namespace ringreduce::parameter_server {

class JournalWire final : public Wire {
 public:
  using Wire::Wire;
  ~JournalWire() { connections_.leave(); }

  // The other of the two, which is the only peer.
  static constexpr int kPartner = 0;

  struct Entry {
    Record record;
    std::vector<std::byte> bytes;
    std::shared_ptr<std::byte[]> pushed;  // slot.bytes of it
  };

  // The server's half. Positions are in bytes of records since the beginning.
  std::uint64_t written() const { return written_; }
  std::uint64_t received() const { return received_.load(std::memory_order_acquire); }
  std::uint64_t carried_out() const { return carried_out_.load(std::memory_order_acquire); }
  // What is pushed stays as it is until the record has been carried out.
  void write(Entry entry);

  // The backup's half: the next entry, if there is one that is whole.
  bool read(Entry& entry);
  // Tells the server what is here, and that all that has been read has been carried out, if that is `done`.
  void confirm(bool done);

  // Sends something now and then. TCP only begins to count how long the partner has been silent when it has sent
  // something; if that were a push long after the network was cut, all would wait twice as long.
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
  // An entry that comes; frames of several connections overtake each other.
  struct Incoming {
    bool known = false;  // its record has come
    Entry entry;
    std::uint64_t claimed = 0, arrived = 0;  // bytes of what was pushed that frames bring, and have brought
  };

  static std::uint64_t length(const Entry& entry) { return sizeof(Record) + entry.bytes.size(); }

  std::uint64_t written_ = 0;
  std::atomic<std::uint64_t> received_ = 0, carried_out_ = 0;
  std::map<std::uint64_t, Incoming> incoming_;  // by position
  std::uint64_t whole_ = 0;                     // up to here there is no gap
  std::uint64_t taken_ = 0;
  Positions said_{}, done_{};
  Nanoseconds beaten_ = 0;
};

}  // namespace ringreduce::parameter_server
