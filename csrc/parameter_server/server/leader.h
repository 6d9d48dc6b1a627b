// The part of a server that keeps its backup up to date: it writes the log (near_log.h), and gives a new backup the
// state.
//
// 1. The server serialises its state, without the content of blocks that are updated in place: tables, and dense blocks
//    without two copies of their states. This is the first record of the log. A backup on the same host gets the
//    descriptors of the memory that has it and of the workers' windows, a backup that is reached by TCP gets the state
//    with the pushed data that is still needed.
// 2. The backup rebuilds itself from the state, and goes on with the log.
// 3. The server gives the content of the other blocks piece by piece, between requests: a dense block, or a slab of a
//    table. A piece includes all updates that precede it in the log. So the backup skips updates of blocks of which
//    nothing has arrived, and carries out those that come later. An update may need rows whose slab has not arrived.
//    The backup then makes them, and the slab replaces them. New rows are at the end of the last slab, which comes
//    last.
// 4. The backup counts when it has been given everything. Until then it could not take over, so the server shows its
//    operations without waiting for the backup, and drops a backup that stands still (Leader::stands).
#pragma once

#include <deque>
#include <memory>

#include "parameter_server/server/partner.h"
#include "parameter_server/server/replica.h"

namespace ringreduce::parameter_server {

class Leader {
 public:
  // The server goes on without a backup on its host that has done nothing for this long.
  static constexpr Nanoseconds kBackupStands = 5 * kSecond;

  // Writes the state as the first record. `number` is the backup's in ValuesHeader::backup. Throws Error(system) if the
  // backup does not take it.
  Leader(Replica& replica, std::unique_ptr<Partner> its, std::uint32_t number);

  // Writes a message to the log, before the shard gets it. Returns false if there is no room.
  bool write_down(const Message& message, Nanoseconds elapsed);
  // Gives a backup on this host the descriptors of a worker, before the log names it. Throws Error(system) if the
  // backup does not take them.
  void introduce(const Port& port) const;
  // Requests wait while the backup is too far behind or out of reach.
  bool takes_requests() const;
  // Whether the log has room for a new block. Throws Error(invalid_argument) if it will never have.
  bool has_room_for(BlockSpec spec) const;
  // The position in the log up to which records will outlive this server.
  std::uint64_t kept_until() const { return backup->silent() ? 0 : backup->received(); }

  // Begins to give the content of blocks. Requests wait until all has been given if it `hurries`.
  void begin_to_give(bool hurries);
  // Gives the next piece, unless the backup needs a pause for requests, of which there are some if the server is
  // `busy`. Returns whether it did.
  bool give(bool busy);
  bool gives() const { return next_ < end_; }
  // Whether the backup has received everything.
  bool follows() const { return !gives() && backup->received() >= given_at_; }
  // Whether a backup on this host has not taken for so long what it was given that the server should go on without it.
  bool stands() const;
  // Whether the backup carries out updates of this block when it reads them, and so needs the pushed data until then.
  // Only matters on one host: by TCP pushed data is sent with every record.
  bool reads_push(BlockId id) const;

  const std::unique_ptr<Partner> backup;
  const std::uint32_t number;  // the backup's
  bool counts = false;         // the backup would take over if this server ended

 private:
  bool give_piece();
  void skip_given();

  Replica& replica_;
  BlockId next_ = 0, end_ = 0;              // blocks [next_, end_) are still to be given
  std::size_t piece_ = 0;                   // of block `next_`: the next to be given
  bool hurries_ = false;                    // requests wait until all has been given
  std::deque<std::uint64_t> under_way_;     // positions in the log after the pieces that it has not taken yet
  Nanoseconds gave_ = 0, rests_until_ = 0;  // when the latest was given; while there are requests, none before this
  Nanoseconds took_ = 0;                    // when it took a piece, or was given one after it had taken all
  std::uint64_t given_at_ = 0;              // position in the log after all had been given
};

}  // namespace ringreduce::parameter_server
