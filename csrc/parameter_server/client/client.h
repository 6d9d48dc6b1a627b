// The worker's side of the parameter server: its calls, and how they wait for the servers.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parameter_server/client/known_servers.h"
#include "parameter_server/row_ids.h"

namespace ringreduce::parameter_server {

class Server;

// A table: its block on each server, and the type and size of its rows.
struct TablePlace {
  std::vector<BlockId> blocks;
  DType dtype = DType::float32;
  std::size_t width = 0;  // elements of a row

  std::size_t row_bytes() const { return width * size_of(dtype); }
};

// Thread-safe. Every wait is bounded. It throws Error(timeout) after its timeout unless the function says that it
// returns something instead, Error(server_lost) with `culprit` set when a server that it needs has ended, and
// Error(aborted) after abort(), and what of_this_process() throws.
class Client : public KnownServers {
 public:
  // Makes a window with `data` bytes for pushes to `servers` servers. Throws Error(system). A waiting thread calls
  // `interrupt` several times a second; an exception thrown by it ends the wait.
  Client(WorkerId worker, std::size_t servers, std::size_t data, std::function<void()> interrupt = nullptr);
  ~Client() { close_wire(); }

  // Returns turn, name and address of whoever serves these blocks now. Waits until that is no longer the server with
  // turn `known`. Returns `known` if that server is alive and has no backup, if it is lost, and after the timeout; if
  // it has a backup by then, the name returned is the backup's.
  std::tuple<std::uint32_t, std::string, std::string> served_by(std::uint32_t server, std::uint32_t known,
                                                                Nanoseconds timeout);
  // Returns the number of the replica that requests go to now (-1: none yet), then the numbers of the attached backups,
  // in the order in which they may take over. Returns nothing if the server is lost.
  std::vector<std::int64_t> asks(std::uint32_t server);
  // Sets the server of this process. Threads that wait here take its turns.
  void host(std::shared_ptr<Server> server);

  // Allocates memory in the window; a push from there needs no copy. It lives until nobody holds it and no push reads
  // it any more. Throws Error(system) if the window has no room.
  OwnWindow::Piece allocate(std::size_t bytes);

  struct Options {
    std::int32_t priority = 0;
    double weight = 1;
    Nanoseconds timeout = kForever;
  };
  // A tensor to push, with all its parts.
  struct Pushed {
    const std::vector<Part>* parts;
    const std::byte* values;          // nullptr: the push has no data (Request::payload)
    Packing packing = Packing::none;  // used for parts on other hosts
    // Where the new values go; nullptr: they are not wanted. They are copied there during push() and wait(). All parts
    // must be on this host. If the new values of one tensor would overwrite `values` of another, none are copied.
    std::byte* out = nullptr;
  };
  // Pushes tensors; returns a call for each. Waits for room in the window and in the sessions. The caller may change
  // `values` after it returns, unless they lie in the window. To a packed push, the client adds what was rounded off
  // earlier pushes to the same block (error feedback).
  std::vector<std::shared_ptr<Call>> push(const std::vector<Pushed>& tensors, const Options& options);
  // Sends a request of any kind that carries the values of one tensor, which are not packed.
  std::shared_ptr<Call> send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                             const Options& options);
  // Sends a pull for each part. Values of parts on other hosts are packed as `packing` says, and stored in `tensor`,
  // which must stay valid until the call is over or cancelled. For parts on this host the reply only says that they may
  // be read: see read().
  std::shared_ptr<Call> pull(const std::vector<Part>& parts, std::byte* tensor, Nanoseconds timeout = kForever,
                             Packing packing = Packing::none);
  // Changes a number of the rule of each part (Rule::change).
  std::shared_ptr<Call> change(const std::vector<Part>& parts, std::uint64_t place, double number, Nanoseconds timeout);
  // Pushes rows of a table. `values` has a row for each id of the batch, and rows of the same id are added in order;
  // with `distinct` it has a row for each of rows.ids(). Every server gets a request, even without rows, so that all
  // count the same updates. Throws Error(invalid_argument), and sends nothing, if the window is too small for a
  // server's rows.
  std::shared_ptr<Call> push_rows(const TablePlace& table, const RowSet& rows, const std::byte* values, bool distinct,
                                  const Options& options);
  // Asks for rows, which the servers put in the window.
  std::shared_ptr<Call> pull_rows(const TablePlace& table, const RowSet& rows, Nanoseconds timeout = kForever);
  // Copies these rows to `out`, which is laid out as `values` of push_rows(), and frees their room in the window. The
  // call must be over.
  void take_rows(const TablePlace& table, const RowSet& rows, Call& call, std::byte* out, bool distinct);
  // Gives up a call: when this returns, nothing more is stored in the caller's tensors.
  void cancel(Call& call);
  // Sends clock, barrier or leave to the servers.
  std::shared_ptr<Call> ask(RequestKind kind, const std::vector<std::uint32_t>& servers,
                            Nanoseconds timeout = kForever);

  // Waits until all pushes have been answered; returns false after the timeout.
  bool drain(Nanoseconds timeout);
  // Waits until the call is over, and copies new values as they come; returns false after the timeout.
  bool wait(Call& call, Nanoseconds timeout);
  // Copies the latest value of parts on this host to `tensor`, after this worker's own pushes to them were applied;
  // returns their versions. Returns std::nullopt after the timeout. Returns an empty vector if one of the servers has
  // been replaced by a backup that is reached by TCP: then the parts must be pulled.
  std::optional<std::vector<std::uint64_t>> read(const std::vector<Part>& parts, std::byte* tensor,
                                                 Nanoseconds timeout);

  // Copies all parts as they were after the same update, the latest that all of them have; part i goes to places[i].
  // Returns the version. All servers must be on this host. Throws Error(timeout) also if updates kept overtaking it.
  std::uint64_t read_round(const std::vector<Part>& parts, const std::vector<std::byte*>& places, Nanoseconds timeout);
  // The latest version that all parts have; 0 if one of them has no value.
  std::uint64_t round_of(const std::vector<Part>& parts);

  // Throws Error(invalid_argument) in a forked child, and in a function that a server calls (turns.h).
  Client& of_this_process();
  // Makes every wait, now and later, throw Error(aborted).
  void abort();

 private:
  struct Hold;
  struct Unlocked;
  using Lock = std::unique_lock<std::mutex>;

  // Calls `ready` until it returns true; returns false after the timeout.
  template <class F>
  bool wait_until(Hold& hold, Nanoseconds timeout, F&& ready);
  void take_turns(Hold& hold);
  void put(Hold& hold, std::uint32_t server, Item item, Nanoseconds timeout);
  void send_part(Hold& hold, RequestKind kind, const std::shared_ptr<Call>& call, const Pushed& tensor,
                 const Part& part, const Options& options, bool streamed);
  std::size_t copy_new_values(Call& call);  // returns the number of bytes copied
  OwnWindow::Piece take_room(Hold& hold, std::size_t bytes, Nanoseconds timeout);
  void pack_push(const Part& part, Packing packing, std::byte* to, const std::byte* from);
  void fit_rows(const TablePlace& table, const RowSet& rows) const;

  struct Shared {
    WorkerWire* wire;  // or nullptr, as the next one
    Server* hosted;
    bool has_near;
  };
  Shared shared();  // throws as of_this_process()

  const std::function<void()> interrupt_;
  // By server and block: what has been rounded off packed pushes and is still to be pushed.
  std::map<std::pair<std::uint32_t, BlockId>, std::vector<float>> residuals_;
  std::atomic<bool> aborted_ = false;
  std::shared_ptr<Server> hosted_;
};

}  // namespace ringreduce::parameter_server
