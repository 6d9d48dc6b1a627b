// Workers and a shard of the parameter server under random schedules: messages that are late, overtake each other, come
// twice or are lost with their connection; workers that are killed, that leave and that join; servers that die, whose
// backups have taken the same messages and go on.
//
//   simulator SEED OPERATIONS
//
// The value is its own history: worker w's i-th push to a block adds 1 to element (w, i). So what a pull shows is
// exactly which pushes it contains. Prints "ok" and what happened, or the first invariant that broke, and exits with 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "parameter_server/block/archive.h"
#include "parameter_server/block/shard.h"
#include "parameter_server/client/session.h"

namespace {

using namespace ringreduce;
using namespace ringreduce::parameter_server;

constexpr Nanoseconds kAges = 1'000'000'000'000'000;

struct Mark : Payload {  // the i-th push of its worker to its block
  explicit Mark(std::size_t i) : i(i) {}
  std::size_t i;
};

// A shard as bytes. Of a payload it has the number in `payloads`, as a server's has where it lies.
struct Copier : Archive {
  using Archive::Archive;
  void payload(std::shared_ptr<const Payload>& payload) override {
    std::uint64_t number = payloads.size();
    raw(&number, sizeof number);
    if (reads())
      payload = payloads[number];
    else
      payloads.push_back(payload);
  }

  std::vector<std::shared_ptr<const Payload>> payloads;
};

struct Copy {
  explicit Copy(Shard& of) {
    Copier counting;
    of.visit(counting);
    bytes.resize(counting.done());
    Copier writing(bytes.data());
    of.visit(writing);
    payloads = writing.payloads;
  }
  bool operator==(const Copy&) const = default;

  std::vector<std::byte> bytes;
  std::vector<std::shared_ptr<const Payload>> payloads;
};

struct Push {
  std::uint64_t clock;   // of the worker
  Nanoseconds came = 0;  // when the shard first got it
  bool applied = false, late = false;
  std::size_t changes = 0;  // of the block's rule by the worker before it
};

struct Worker {
  WorkerId id;
  Session session;
  int connection = 0;  // messages of earlier ones are lost
  bool alive = true;   // sends and receives
  bool member = true;  // as the shard must see it
  bool guest;          // of another group than that of all blocks
  std::uint64_t joined;
  std::uint64_t clock = 0;
  std::uint64_t made = 0;                 // the number of its latest request
  std::uint64_t told = 0;                 // up to where the shard knows that it has replies
  std::uint64_t leave = 0;                // the number of its request to leave; 0: none
  std::vector<std::vector<Push>> pushes;  // by block
  struct Asked {
    std::uint64_t clock;
    std::size_t own;      // pushes to the block before it
    std::uint64_t round;  // of the latest of them, if there is any
  };
  std::map<std::uint64_t, Asked> pulls;                   // by number
  std::set<std::uint64_t> barriers;                       // not answered
  std::map<BlockId, std::vector<std::uint64_t>> changes;  // of the block's rule: the round from which each holds
  std::map<BlockId, std::size_t> changed;                 // how many of them hold
};

struct Envelope {
  Nanoseconds at;
  std::uint64_t order;
  bool to_shard;
  WorkerId worker;
  int connection;  // -1: about the worker, not from it
  Message message;
  Reply reply;
  bool operator<(const Envelope& other) const { return std::tie(at, order) > std::tie(other.at, other.order); }
};

class Simulation {
 public:
  explicit Simulation(std::uint64_t seed) : seed_(seed), random_(seed), fate_(seed) {
    for (int i = 0, n = 2 + pick(4); i < n; ++i) join();
    for (int i = 0, n = 2 + pick(5); i < n; ++i) create();
  }

  void run(std::size_t operations) {
    while (operations_ < operations && acts_ < 10 * operations) {  // in the end all may have left
      if (pick(3) == 0 || network_.empty())
        act();
      else
        deliver();
    }
    drain();
  }

  std::size_t operations_ = 0, pulls_ = 0, applied_ = 0, late_ = 0, resent_ = 0, killed_ = 0, failed_over_ = 0,
              started_late_ = 0;

 private:
  [[noreturn]] void broken(const char* invariant, const std::string& text) const {
    std::printf("broken: %s: %s (seed %llu)\n", invariant, text.c_str(), static_cast<unsigned long long>(seed_));
    std::exit(1);
  }
  void demand(bool holds, const char* invariant, const std::string& text) const {
    if (!holds) broken(invariant, text);
  }
  int pick(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  // ---- what workers do ----------------------------------------------------------------------------------------------

  void join() {
    const auto id = static_cast<WorkerId>(workers_.size());
    const bool guest = seed_ % 4 == 3 && id % 2 == 1;
    workers_.push_back({id, Session(id), 0, true, true, guest, 0, 0, 0, 0, 0, {}, {}, {}, {}, {}});
    workers_.back().pushes.resize(modes_.size());
    workers_.back().joined = ++moment_;
    give(Join{id, guest ? "guests" : "workers"});
    workers_.back().clock = shard_.clock(id);  // where it begins; it counts for itself from here
    for (BlockId block = 0; block < modes_.size(); ++block) ask(workers_.back(), RequestKind::initialise, block);
  }

  void create() {
    Mode mode;
    mode.consistency = static_cast<Consistency>(pick(3));
    if (mode.consistency == Consistency::sync && pick(2) == 0) mode.quorum = 1 + static_cast<unsigned>(pick(3));
    if (mode.quorum > 0) mode.grace = pick(2) * 5000;
    if (mode.consistency == Consistency::ssp) mode.staleness = static_cast<std::uint64_t>(pick(3));
    modes_.push_back(mode);
    opened_.push_back(++moment_);
    versions_.push_back(0);
    give(Create{mode, pick(4) == 0});
    for (Worker& worker : workers_) {
      worker.pushes.emplace_back();
      ask(worker, RequestKind::initialise, static_cast<BlockId>(modes_.size() - 1));
    }
  }

  void act() {
    Worker& worker = workers_[static_cast<std::size_t>(pick(static_cast<int>(workers_.size())))];
    ++acts_;
    if (!worker.alive || !worker.member) return;
    ++operations_;
    const int what = pick(1000);
    const auto block = static_cast<BlockId>(pick(static_cast<int>(modes_.size())));
    if (what < 15) return lose_connection(worker);
    if (what < 17) return kill(worker);
    if (what < 19 && workers_.size() < 12) return join();
    if (worker.session.outstanding() > 20 || !worker.session.has_room()) return;
    if (what < 20)
      ask(worker, RequestKind::leave, 0);
    else if (what < 40)
      ask(worker, RequestKind::barrier, 0);
    else if (what < 120)
      ask(worker, RequestKind::clock, 0);
    else if (what < 140)
      ask(worker, RequestKind::change, block);
    else
      ask(worker, what < 500 ? RequestKind::pull : RequestKind::push, block);
  }

  void ask(Worker& worker, RequestKind kind, BlockId block) {
    Request request;
    request.kind = kind;
    request.block = block;
    if (kind == RequestKind::push) {
      request.payload = std::make_shared<Mark>(worker.pushes[block].size());
      request.weight = 1 + static_cast<double>(worker.pushes[block].size() % 3);
      request.priority = static_cast<std::int32_t>(worker.pushes[block].size() % 5);
      worker.pushes[block].push_back({worker.clock});
      worker.pushes[block].back().changes = worker.changes[block].size();
    }
    if (kind == RequestKind::change) {  // each worker has a number of its own, which counts its changes
      request.pulled = worker.id;
      request.weight = static_cast<double>(worker.changes[block].size() + 1);
    }
    const Request made = worker.session.make(std::move(request));
    worker.made = made.number;
    if (kind == RequestKind::change) worker.changes[block].push_back(made.round);
    if (kind == RequestKind::push) {
      rounds_[{worker.id, block}] = made.round;
      demand(made.round >= known_[{worker.id, block}], "present round", "a push is for a round known to be over");
    }
    if (kind == RequestKind::pull)
      worker.pulls[made.number] = {worker.clock, worker.pushes[block].size(), rounds_[{worker.id, block}]};
    if (kind == RequestKind::barrier) worker.barriers.insert(made.number);
    if (kind == RequestKind::clock) ++worker.clock;
    if (kind == RequestKind::leave) worker.alive = false, worker.leave = made.number;
    send(worker, made);
  }

  void send(const Worker& worker, const Request& request) {
    for (int copies = pick(20) == 0 ? 2 : 1; copies > 0; --copies)
      network_.push({now_ + 1 + pick(2000), ++order_, true, worker.id, worker.connection, request, {}});
  }

  void lose_connection(Worker& worker) {
    ++worker.connection;
    for (const Request& request : worker.session.unanswered()) send(worker, request), ++resent_;
  }

  void kill(Worker& worker) {
    if (killed_ + 2 >= workers_.size()) return;
    ++killed_;
    worker.alive = false;
    network_.push({now_ + pick(5000), ++order_, true, worker.id, -1, Lose{worker.id}, {}});
  }

  // ---- the network --------------------------------------------------------------------------------------------------

  void deliver() {
    const Nanoseconds due = deadline();
    if (due <= network_.top().at) {
      now_ = std::max(now_, due);
      give(Tick{});
      return demand(deadline() > now_, "grace", "a round stays open after its grace");
    }
    const Envelope envelope = network_.top();
    network_.pop();
    now_ = std::max(now_, envelope.at);
    Worker& worker = workers_[envelope.worker];
    if (envelope.connection >= 0 && envelope.connection != worker.connection) return;
    if (envelope.to_shard) {
      const auto* request = std::get_if<Request>(&envelope.message);
      if (request != nullptr) worker.told = std::max(worker.told, request->seen);
      if (request != nullptr && request->kind == RequestKind::push) {
        Push& push = worker.pushes[request->block][static_cast<const Mark&>(*request->payload).i];
        if (push.came == 0) push.came = now_;
      }
      if (std::holds_alternative<Lose>(envelope.message)) worker.member = false, lost_ = now_;
      give(envelope.message);
    } else if (worker.alive || worker.leave > 0) {
      receive(worker, envelope.reply);
    }
  }

  void receive(Worker& worker, const Reply& reply) {
    const auto request = worker.session.take(reply);
    if (!request || request->kind > RequestKind::pull) return;
    std::uint64_t& known = known_[{worker.id, request->block}];
    known = std::max(known, reply.version);
    if (request->kind != RequestKind::push) return;
    Push& push = worker.pushes[request->block][static_cast<const Mark&>(*request->payload).i];
    if (reply.outcome == Outcome::applied)
      demand(push.applied, "acknowledged", "a push was acknowledged and is not in the value");
    else
      demand(!push.applied && reply.outcome == Outcome::late, "acknowledged",
             "a push was refused, and is in the value");
  }

  // ---- what the shard decides ---------------------------------------------------------------------------------------

  // The clock of the present server's host, which booted at a time of its own.
  Nanoseconds clock() const { return now_ - booted_; }
  Nanoseconds deadline() const {
    const Nanoseconds due = shard_.due_in();
    return due == kForever ? kForever : now_ + std::max<Nanoseconds>(0, due - (clock() - stepped_at_));
  }

  void give(const Message& message) {
    const Nanoseconds before = deadline();
    const std::uint64_t log = log_;
    take(message);
    if (log_ == log && !std::holds_alternative<Lose>(message))
      demand(deadline() <= before, "grace", "the end of a round is put off");
  }

  // The server writes the message down before its shard gets it, and may die at either moment.
  void take(const Message& message) {
    const Nanoseconds elapsed = clock() - std::exchange(stepped_at_, clock());
    given_.emplace_back(message, elapsed);
    const bool dies = seed_ % 8 == 0 && fate_() % 100 == 0;
    if (dies && fate_() % 2 == 0) return fail_over();
    judge(shard_.step(message, elapsed), true);
    ++stepped_;
    if (seed_ % 2 == 0 && fate_() % 200 == 0) start_late();
    if (fate_() % 3 == 0) repeat(given_.size());
    if (dies) fail_over();
  }

  // A new backup, which begins with what the server is now and has seen nothing of how it came to that.
  void start_late() {
    ++started_late_;
    const Copy copy(shard_);
    Copier reader(std::span<const std::byte>(copy.bytes));
    reader.payloads = copy.payloads;
    backup_ = Shard();
    backup_.visit(reader);
    demand(Copy(backup_) == copy && reader.done() == copy.bytes.size(), "same state",
           "a backup that starts late is something else than its server");
    repeated_ = stepped_;
    same_ = done_.size();
  }

  // The backup gets what the server has written down, up to there, and decides the same.
  void repeat(std::size_t end) {
    for (; repeated_ < end; ++repeated_) {
      const auto& [message, elapsed] = given_[repeated_];
      const Output output = backup_.step(message, elapsed);
      if (repeated_ >= stepped_) {  // the server has died before it did that
        judge(output, false);
        continue;
      }
      for (const std::string& each : told(output))
        demand(same_++ < done_.size() && each == done_[same_ - 1], "same log",
               "a backup decides something else than its server");
    }
  }

  // All that was decided, in words.
  static std::vector<std::string> told(const Output& output) {
    std::vector<std::string> texts;
    const auto list = [&](auto... values) {
      std::string text;
      ((text += std::to_string(values) + " "), ...);
      return text;
    };
    for (const Operation& each : output.operations) {
      texts.push_back(list(each.index, each.block, each.version, each.restores, each.priority, each.changes));
      for (const Contribution& one : each.contributions) {
        const auto* const mark = static_cast<const Mark*>(one.payload.get());
        texts.back() += list(one.worker, one.weight, one.clock, one.pulled, mark == nullptr ? 0 : mark->i);
      }
    }
    for (const Reply& each : output.replies)
      texts.push_back(list(each.worker, each.number, static_cast<int>(each.outcome), each.version, each.after));
    return texts;
  }

  // Replies under way are lost or not, as connections are. The next backup begins with all that this one has.
  void fail_over() {
    ++failed_over_;
    repeat(given_.size());
    booted_ = -static_cast<Nanoseconds>(fate_() % kAges);
    stepped_at_ = clock();
    stepped_ = repeated_;
    same_ = done_.size();
    shard_ = backup_;
    for (Worker& worker : workers_)
      if (worker.alive || worker.leave > 0) lose_connection(worker);
  }

  void judge(const Output& output, bool answers) {
    for (const Reply& reply : output.replies) {
      Worker& worker = workers_[reply.worker];
      if (reply.number == worker.leave && reply.outcome == Outcome::done) worker.member = false;
    }
    for (const std::string& each : told(output)) done_.push_back(each);
    for (const Operation& operation : output.operations) carry_out(operation);
    std::set<WorkerId> met;
    for (const Reply& reply : output.replies) {
      demand(reply.after <= log_, "log", "a reply came before its operation");
      check(reply, met);
      const Worker& worker = workers_[reply.worker];
      if (answers) network_.push({now_ + 1 + pick(2000), ++order_, false, worker.id, worker.connection, {}, reply});
    }
    if (!met.empty())
      for (const Worker& worker : workers_)
        demand(!worker.member || worker.guest != workers_[*met.begin()].guest || met.count(worker.id) > 0, "barrier",
               "a barrier ended without a member");
    std::uint64_t most = 0;
    for (const Worker& worker : workers_) most = std::max(most, worker.made - worker.told);
    demand((answers ? shard_ : backup_).kept() <= most, "memory", "replies are kept that every worker has");
  }

  void carry_out(const Operation& operation) {
    demand(operation.index == ++log_, "log", "an operation is missing");
    if (operation.changes) return change(operation);
    if (operation.version == 0) return;
    const Mode& mode = modes_[operation.block];
    demand(operation.version == ++versions_[operation.block], "version", "a version is missing");
    std::set<WorkerId> in;
    std::multiset<Nanoseconds> came;  // of members
    for (const Contribution& contribution : operation.contributions) {
      demand(in.empty() || *in.rbegin() < contribution.worker, "worker order", "contributions are in another order");
      in.insert(contribution.worker);
      auto& pushes = workers_[contribution.worker].pushes[operation.block];
      const std::size_t i = static_cast<const Mark&>(*contribution.payload).i;
      demand(!pushes[i].applied, "twice", "a push was applied twice");
      demand(workers_[contribution.worker].changed[operation.block] >= pushes[i].changes, "change",
             "a push was applied without an earlier change of its worker");
      for (std::size_t k = i + 1; k < pushes.size(); ++k)
        demand(!pushes[k].applied, "order", "a push was applied after a later one");
      pushes[i].applied = true;
      if (!workers_[contribution.worker].guest) came.insert(pushes[i].came);
      ++applied_;
    }
    if (mode.consistency == Consistency::sync) check_round(operation, mode, in, came);
    opened_[operation.block] = ++moment_;
  }

  void change(const Operation& operation) {
    const Contribution& one = operation.contributions[0];
    Worker& worker = workers_[one.worker];
    const auto number = static_cast<std::size_t>(one.weight);
    demand(one.pulled == worker.id && number > worker.changed[operation.block], "change", "a change came back");
    worker.changed[operation.block] = number;
    demand(operation.version == versions_[operation.block], "version", "a change makes a version");
    if (modes_[operation.block].consistency == Consistency::sync)
      demand(versions_[operation.block] >= worker.changes[operation.block][number - 1], "change",
             "a change took effect before its round");
  }

  void check_round(const Operation& operation, const Mode& mode, const std::set<WorkerId>& in,
                   const std::multiset<Nanoseconds>& came) {
    bool all = true;
    for (const Worker& worker : workers_)
      all = all &&
            (!worker.member || worker.guest || worker.joined > opened_[operation.block] || in.count(worker.id) > 0);
    if (all) return;
    demand(mode.quorum > 0 && came.size() >= mode.quorum, "round", "a round ended without a member");
    if (lost_ >= *came.begin()) return;  // the quorum may have been that of a worker who was lost since
    demand(now_ >= *std::next(came.begin(), mode.quorum - 1) + mode.grace, "grace", "a round ended before its grace");
  }

  void check(const Reply& reply, std::set<WorkerId>& met) {
    Worker& worker = workers_[reply.worker];
    if (worker.barriers.erase(reply.number) > 0 && reply.outcome == Outcome::done) met.insert(worker.id);
    const Request* request = outstanding(worker, reply.number);
    if (request != nullptr && request->kind == RequestKind::push && reply.outcome == Outcome::late) {
      auto& push = worker.pushes[request->block][static_cast<const Mark&>(*request->payload).i];
      if (!push.late) ++late_;
      push.late = true;
    }
    const auto pull = worker.pulls.find(reply.number);
    if (pull == worker.pulls.end() || reply.outcome != Outcome::ready) return;
    ++pulls_;
    check_pull(worker, request->block, reply.version, pull->second);
    worker.pulls.erase(pull);  // a reply that comes again says what was true
  }

  void check_pull(const Worker& worker, BlockId block, std::uint64_t version, const Worker::Asked& asked) {
    const Mode& mode = modes_[block];
    bool missed = false;
    for (std::size_t i = 0; i < asked.own; ++i) {
      const Push& push = worker.pushes[block][i];
      demand(push.applied || push.late, "own pushes", "a pull misses a push that its worker made before");
      missed = missed || push.late;
    }
    if (mode.consistency == Consistency::sync && mode.quorum == 0 && asked.own > 0 && !missed && worker.member &&
        !worker.guest)
      demand(version == asked.round + 1, "exact version",
             "a pull after push " + std::to_string(asked.round) + " got version " + std::to_string(version));
    if (mode.consistency != Consistency::ssp) return;
    for (const Worker& other : workers_)
      for (const Push& push : other.pushes[block])
        demand(!other.member || other.guest || push.applied || push.clock + mode.staleness + 1 > asked.clock, "ssp",
               "a pull at clock " + std::to_string(asked.clock) + " misses a push at clock " +
                   std::to_string(push.clock) + " (s = " + std::to_string(mode.staleness) + ")");
  }

  const Request* outstanding(const Worker& worker, std::uint64_t number) {
    for (requests_ = worker.session.unanswered(); const Request& request : requests_)
      if (request.number == number) return &request;
    return nullptr;
  }
  // Everybody leaves, nothing is lost any more: then every request of a living worker has been answered.
  void drain() {
    for (Worker& worker : workers_)
      if (worker.alive && worker.member) ask(worker, RequestKind::leave, 0);
    for (Worker& worker : workers_)
      if (worker.leave > 0) lose_connection(worker);
    while (!network_.empty() || deadline() != kForever) {
      if (network_.empty()) {
        now_ = std::max(now_, deadline());
        give(Tick{});
      } else {
        deliver();
      }
    }
    for (const Worker& worker : workers_)
      if (worker.leave > 0)
        demand(worker.session.outstanding() == 0, "answered",
               std::to_string(worker.session.outstanding()) + " requests of worker " + std::to_string(worker.id) +
                   " have no reply");
  }

  const std::uint64_t seed_;
  std::mt19937_64 random_, fate_;  // the latter of servers, which die in every eighth simulation
  Shard shard_, backup_;
  std::vector<std::pair<Message, Nanoseconds>> given_;
  std::size_t stepped_ = 0, repeated_ = 0,
              same_ = 0;           // messages that the server and its backup took; what both decided
  std::vector<std::string> done_;  // what was decided
  std::vector<Worker> workers_;
  std::vector<Mode> modes_;
  std::vector<std::uint64_t> opened_, versions_;                          // by block
  std::map<std::pair<WorkerId, BlockId>, std::uint64_t> rounds_, known_;  // of the latest push; that its worker knows
  std::vector<Request> requests_;
  std::priority_queue<Envelope> network_;
  std::uint64_t order_ = 0, moment_ = 0, log_ = 0, acts_ = 0;
  Nanoseconds now_ = 1, lost_ = 0;
  Nanoseconds booted_ = -kAges / 2, stepped_at_ = clock();  // when the server last took a message, by its host's clock
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return std::fprintf(stderr, "simulator SEED OPERATIONS\n"), 2;
  std::uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
  const std::size_t operations = std::strtoull(arguments[2], nullptr, 10);
  std::size_t done = 0, pulls = 0, applied = 0, late = 0, resent = 0, killed = 0, failed_over = 0, started_late = 0;
  for (; done < operations; ++seed) {
    Simulation simulation(seed);
    simulation.run(1000);
    done += simulation.operations_;
    pulls += simulation.pulls_;
    applied += simulation.applied_;
    late += simulation.late_;
    resent += simulation.resent_;
    killed += simulation.killed_;
    failed_over += simulation.failed_over_;
    started_late += simulation.started_late_;
  }
  std::printf(
      "ok: %zu operations, %zu pulls checked, %zu pushes applied, %zu late, %zu requests sent again, "
      "%zu workers and %zu servers killed, %zu backups that started late\n",
      done, pulls, applied, late, resent, killed, failed_over, started_late);
}
