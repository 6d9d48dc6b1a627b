#include "engine/program.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace ringreduce {
namespace {

[[noreturn]] void malformed(const std::string& what) {
  throw Error(ErrorKind::invalid_argument, "malformed plan: " + what);
}

// Takes integers off the array, each checked against what it may be.
class Reader {
 public:
  explicit Reader(std::span<const std::int32_t> rest) : rest_(rest) {}

  int take(const char* what, int least, int most) {
    if (rest_.empty()) malformed(std::string("it ends where ") + what + " should be");
    const int value = rest_.front();
    rest_ = rest_.subspan(1);
    if (value < least || value > most)
      malformed(std::string(what) + " is " + std::to_string(value) + ", not from " + std::to_string(least) + " to " +
                std::to_string(most));
    return value;
  }
  bool at_end() const { return rest_.empty(); }

 private:
  std::span<const std::int32_t> rest_;
};

constexpr int kMost = 1 << 30;

// How many blocks a collective's data has, and where a rank finds a block among its tensors. (The same table, with the
// reasons, is in ringreduce/plan/model.py.)
int block_count(Operation o, int size) {
  switch (o) {
    case Operation::all_to_all:
      return size * size;
    case Operation::reduce_scatter:
    case Operation::all_gather:
    case Operation::gather:
    case Operation::scatter:
      return size;
    default:
      return 1;
  }
}

int input_position(Operation o, int size, int block) {
  if (o == Operation::all_to_all) return block % size;
  return o == Operation::reduce_scatter || o == Operation::scatter ? block : 0;
}

int output_position(Operation o, int size, int block) {
  if (o == Operation::all_to_all) return block / size;
  return o == Operation::all_gather || o == Operation::gather ? block : 0;
}

// Reads a lowered plan word by word. Spans are set last, when the storage no longer moves: until then steps have
// offsets.
class ProgramReader {
 public:
  ProgramReader(const LoweredPlan& plan, const Part& part) : plan_(plan), part_(part), in_(plan.words) {
    program_.operation = plan.operation;
    program_.digest = plan.digest;
    program_.completed_once = true;
  }

  Program read() {
    in_.take("size", part_.size, part_.size);
    program_.channels.resize(static_cast<std::size_t>(in_.take("channel count", 1, part_.channels)));
    for (ChannelProgram& channel : program_.channels) read_channel(channel);
    if (!in_.at_end()) malformed("it goes on after its end");
    find_rewritten();
    set_spans();
    if (reduces(program_.operation)) find_weights();
    if (program_.operation == Operation::all_reduce) find_partial();
    list_peers();
    return std::move(program_);
  }

 private:
  struct Span {
    std::size_t first, length;
  };
  struct Sent {
    std::uint32_t phase, inputs;
  };

  // The rank that is number `r` of the plan.
  int turned(int r) const { return (r + part_.root) % part_.size; }

  void read_channel(ChannelProgram& channel) {
    const std::size_t first_source = program_.sources.size();
    sent_in_.assign(static_cast<std::size_t>(part_.size), {});
    alike_.assign(static_cast<std::size_t>(part_.size), false);
    const int begin = in_.take("share begin", 0, kMost), end = in_.take("share end", begin, kMost);
    const int total = in_.take("share total", end, kMost);
    if (total == 0) malformed("share total is 0");
    channel.share = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end),
                     static_cast<std::uint32_t>(total)};
    const int blocks = block_count(plan_.operation, part_.size);
    channel.chunks = static_cast<std::uint32_t>(in_.take("chunks", 1, std::min(1 << 20, kMost / blocks)));
    channel.sends.resize(static_cast<std::size_t>(part_.size));
    completed_.assign(static_cast<std::size_t>(blocks) * channel.chunks, 0);
    for (int r = 0; r < part_.size; ++r) read_rank(channel, turned(r));
    const auto own = static_cast<std::size_t>(part_.rank);
    if (alike_[own]) malformed("it leaves out this rank");
    // Those who do as this rank does complete as many chunks, all of them different if there are as many.
    const auto alike = 1 + static_cast<std::size_t>(std::count(alike_.begin(), alike_.end(), true));
    const auto completions = static_cast<std::size_t>(std::accumulate(completed_.begin(), completed_.end(), 0)) * alike;
    program_.completed_once &= completions == completed_.size();
    for (std::size_t r = 0; r < alike_.size(); ++r)
      if (alike_[r]) channel.sends[r] = channel.sends[own];
    for (std::size_t i = first_source; i < program_.sources.size(); ++i) {
      Source& source = program_.sources[i];
      const auto& sent =
          sent_in_[alike_[static_cast<std::size_t>(source.peer)] ? own : static_cast<std::size_t>(source.peer)];
      if (source.send_index >= sent.size()) malformed("send index is none of the peer's");
      source.phase = sent[source.send_index].phase;
      source.inputs = sent[source.send_index].inputs;
    }
  }

  void read_rank(ChannelProgram& channel, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const int steps = in_.take("step count", -1, kMost);
    alike_[r] = steps < 0;
    if (alike_[r]) return;
    channel.sends[r] = static_cast<std::uint32_t>(in_.take("sends per round", 0, steps));
    int phase = 0;
    for (int s = 0; s < steps; ++s) {
      Step step = read_step(channel, phase);
      const Span recv = read_sources(step), send = read_destinations();
      put_in_rank_order(step, recv, rank);
      const bool combines = recv.length + (step.read != Read::none) > 1;
      step.completes = combines && step.inputs == static_cast<std::uint32_t>(part_.size);
      completed_[static_cast<std::size_t>(step.block) * channel.chunks + step.chunk] += step.completes;
      if (send.length > 0) {
        step.send_index = static_cast<std::uint32_t>(sent_in_[r].size());
        sent_in_[r].push_back({step.phase, step.inputs});
      }
      if (rank == part_.rank) {
        channel.steps.push_back(step);
        channel.phases = step.phase + 1;
        recv_of_.push_back(recv);
        send_of_.push_back(send);
      } else {
        program_.sources.resize(recv.first);
        program_.destinations.resize(send.first);
      }
    }
    if (sent_in_[r].size() != channel.sends[r]) malformed("sends per round does not count the sends");
  }

  // All of a step but what it receives and sends. `phase` is that of the rank's step before, and then of this one.
  Step read_step(const ChannelProgram& channel, int& phase) {
    const Operation operation = plan_.operation;
    Step step;
    const int id = in_.take("chunk", 0, static_cast<int>(completed_.size()) - 1);
    step.chunk = static_cast<std::uint32_t>(id) % channel.chunks;
    const int block = id / static_cast<int>(channel.chunks);
    step.block = operation == Operation::gather || operation == Operation::scatter ? turned(block) : block;
    step.read = static_cast<Read>(in_.take("read", 0, 2));
    if (step.read == Read::input) step.read_position = input_position(operation, part_.size, step.block);
    if (step.read == Read::output) step.read_position = output_position(operation, part_.size, step.block);
    if (in_.take("write", 0, 1) == 1) step.write_position = output_position(operation, part_.size, step.block);
    step.inputs = static_cast<std::uint32_t>(in_.take("inputs", 1, part_.size));
    step.returned = in_.take("returned", 0, 1) == 1;
    phase = in_.take("phase", phase, 1 << 20);
    step.phase = static_cast<std::uint32_t>(phase);
    step.local_position = in_.take("local position", -1, part_.size - 1);
    return step;
  }

  Span read_sources(const Step& step) {
    const int recvs = in_.take("recv count", 0, part_.size - 1);
    if ((step.read == Read::none) != (step.local_position == -1) || step.local_position > recvs)
      malformed("local position does not fit the operands");
    if (step.read == Read::none && recvs == 0) malformed("a step has neither a local chunk nor anything to receive");
    const std::size_t first = program_.sources.size();
    for (int i = 0; i < recvs; ++i) {
      const int peer = turned(in_.take("peer", 0, part_.size - 1));
      program_.sources.push_back({peer, static_cast<std::uint32_t>(in_.take("send index", 0, kMost))});
    }
    return {first, static_cast<std::size_t>(recvs)};
  }

  // A plan's numbers begin at the root. Operands are combined in the order of ranks, whatever the root is.
  void put_in_rank_order(Step& step, const Span& recv, int rank) {
    const auto first = program_.sources.begin() + static_cast<std::ptrdiff_t>(recv.first);
    std::sort(first, program_.sources.end(), [](const Source& a, const Source& b) { return a.peer < b.peer; });
    if (step.read == Read::none) return;
    const auto lower = [&](const Source& source) { return source.peer < rank; };
    step.local_position = static_cast<int>(std::count_if(first, program_.sources.end(), lower));
  }

  Span read_destinations() {
    const int sends = in_.take("send count", 0, part_.size - 1);
    const std::size_t first = program_.destinations.size();
    for (int i = 0; i < sends; ++i) program_.destinations.push_back(turned(in_.take("peer", 0, part_.size - 1)));
    return {first, static_cast<std::size_t>(sends)};
  }

  void find_rewritten() {
    for (ChannelProgram& channel : program_.channels)
      for (auto step = channel.steps.begin(); step != channel.steps.end(); ++step) {
        const int position = step->write_position >= 0 ? step->write_position : step->read_position;
        step->rewritten = std::any_of(step + 1, channel.steps.end(), [&](const Step& later) {
          return later.write_position == position && later.chunk == step->chunk;
        });
      }
  }

  void set_spans() {
    std::size_t i = 0;
    for (ChannelProgram& channel : program_.channels)
      for (Step& step : channel.steps) {
        step.recv = std::span<const Source>(program_.sources).subspan(recv_of_[i].first, recv_of_[i].length);
        step.send = std::span<const int>(program_.destinations).subspan(send_of_[i].first, send_of_[i].length);
        for (const Source& source : step.recv)
          if (source.phase >= step.phase) malformed("a step is in no later phase than what it receives");
        ++i;
      }
  }

  void find_weights() {
    std::vector<std::size_t> first;  // of each step
    for (const ChannelProgram& channel : program_.channels) {
      std::map<std::pair<int, std::uint32_t>, std::uint32_t> output;  // of how many ranks the chunk there has the input
      for (const Step& step : channel.steps) {
        const std::pair chunk{step.block, step.chunk};
        std::vector<std::uint32_t> inputs;  // of each operand
        for (const Source& source : step.recv) inputs.push_back(source.inputs);
        if (step.read != Read::none)
          inputs.insert(inputs.begin() + step.local_position, step.read == Read::input ? 1 : output[chunk]);
        if (std::accumulate(inputs.begin(), inputs.end(), 0u) != step.inputs)
          malformed("a step's inputs are not those of its operands");
        first.push_back(program_.weights.size());
        for (const std::uint32_t each : inputs)
          program_.weights.push_back(static_cast<float>(each) / static_cast<float>(std::bit_ceil(step.inputs)));
        if (step.write_position >= 0) output[chunk] = step.inputs;
      }
    }
    auto at = first.begin();
    for (ChannelProgram& channel : program_.channels)
      for (Step& step : channel.steps)
        step.weights = std::span<const float>(program_.weights).subspan(*at++, step.operands());
  }

  // What a rank only passes on counts as whole: it has been rounded already if it came from another host.
  void find_partial() {
    for (ChannelProgram& channel : program_.channels) {
      std::vector<bool> output(channel.chunks, false);  // whether the chunk in the output is a part
      for (Step& step : channel.steps) {
        const bool of_parts =
            step.operands() > 1 || step.read == Read::input || (step.read == Read::output && output[step.chunk]);
        step.partial = of_parts && !step.completes;
        if (step.write_position >= 0) output[step.chunk] = step.partial;
      }
    }
  }

  void list_peers() {
    std::vector<int>& peers = program_.peers;
    for (const Source& source : program_.sources) peers.push_back(source.peer);
    peers.insert(peers.end(), program_.destinations.begin(), program_.destinations.end());
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  }

  const LoweredPlan& plan_;
  const Part part_;
  Reader in_;
  Program program_;
  std::vector<Span> recv_of_, send_of_;     // of each step of this rank
  std::vector<std::vector<Sent>> sent_in_;  // per rank, of the channel at hand: its sends
  std::vector<bool> alike_;                 // per rank: whether it is left out, as it does what this one does
  std::vector<int> completed_;              // per chunk of it: by how many steps of the ranks that are not
};

}  // namespace

Program program_of(const LoweredPlan& plan, const Part& part) { return ProgramReader(plan, part).read(); }

Average average_of(const Call& call, const Step& step, int size) {
  if (!reduces(call.operation) || call.reduce_op != ReduceOp::avg || step.operands() < 2) return {};
  if (!narrow_float(call.dtype)) return {.divisor = step.completes ? static_cast<double>(size) : 1.0};
  return {step.weights, step.mean_divisor()};
}

}  // namespace ringreduce
