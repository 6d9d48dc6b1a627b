// A server and its backup that reach each other by TCP (far_log.h), and which of the two goes on when they lose
// each other.
//
// A partner falls silent because its process has ended, because its host has been silent for RINGREDUCE_DEAD_AFTER
// seconds, or because the network between the two is cut. The other one cannot tell these cases apart. So it asks the
// launcher's store: a compare-and-set changes the view of the shard from both replicas to itself alone
// (server/replication.py). The first one to do this wins, and decided() tells each of the two the result. They never
// both serve the blocks:
//
//   The server    From the moment when it has given the backup everything (leader.h), which is before
//                 the backup counts, it carries out, shows and answers nothing that the backup has not confirmed. So
//                 after the last confirmation it changes nothing that anybody sees, until it has won. If it wins, the
//                 backup has lost or will lose, and never serves.
//   The backup    It serves only after it has won. Then the server has lost or will lose: it drops what it has kept
//                 back, and has ended for its workers.
//   Lost updates  There are none. The backup has everything that was answered or shown, since it confirmed that before.
//                 Nobody has seen what the server kept back; workers repeat those requests to the backup, with the same
//                 numbers.
//   The store     A replica that cannot reach the store waits, and so do the calls of its workers.
//
// There is no lease. Workers on the server's own host copy values out of its memory themselves. While the server is cut
// off and has not noticed it, they read the values from before the cut. When it has noticed, they wait as well
// (ValuesHeader::serves).
#include <exception>
#include <utility>

#include "core/error.h"
#include "parameter_server/server/server.h"

namespace ringreduce::parameter_server {

void Server::count_backup() {
  order([&] {
    if (leader_ == nullptr || !leader_->backup->far()) return;
    leader_->counts = true;
    if (role_ == Role::heir) take_over();
  });
}

void Server::abandon_backup() {
  order([&] {
    if (leader_ != nullptr && !leader_->counts) leader_.reset();
  });
}

std::uint64_t Server::freeze() {
  return order([&] {
    if (leader_ == nullptr || leader_->backup->silent())
      throw Error(ErrorKind::invalid_argument, "this server has no backup that could go on");
    if (role_ == Role::primary) role_ = Role::frozen;
    decide(Tick{});  // a new record: the backup can confirm it only after this call
    carry_out();
    return leader_->backup->written();
  });
}

void Server::unfreeze() {
  order([&] {
    if (role_ == Role::frozen) role_ = Role::primary;
  });
}

void Server::connect_partner(int socket, std::string path) {
  FileDescriptor owned(socket);
  order([&] {
    if (leader_ == nullptr && follower_ == nullptr)
      throw Error(ErrorKind::invalid_argument, "this server has no partner");
    (leader_ != nullptr ? *leader_->backup : *follower_->server).connect(owned.release(), std::move(path));
  });
}

bool Server::partners_move() {
  if (leader_ != nullptr && leader_->backup->progress()) return true;
  return follower_ != nullptr && follower_->server->progress();
}

void Server::decided(bool goes_on) {
  order([&] {
    const bool takes_over = role_ == Role::backup || role_ == Role::heir;
    if (!takes_over && leader_ == nullptr) return;
    if (!(takes_over ? *follower_->server : *leader_->backup).silent()) return;
    if (!goes_on) return retire("");
    if (!takes_over) {
      come_back();
      leader_.reset();
      return forget_gone();
    }
    try {
      if (role_ == Role::backup) repeat_all(true);
      take_over();
    } catch (const std::exception& error) {
      retire(reason(error));
    }
  });
}

}  // namespace ringreduce::parameter_server
