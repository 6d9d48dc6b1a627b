#include "engine/program.h"

#include <algorithm>
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

}  // namespace

Program bind(Operation operation, std::span<const std::int32_t> lowered, std::uint64_t digest, int size, int rank,
             int root, int channels) {
  const auto turned = [&](int r) { return (r + root) % size; };
  const int own = (rank - root + size) % size;  // this rank's number in the plan
  const bool per_rank_blocks = operation == Operation::gather || operation == Operation::scatter;

  Reader in(lowered);
  in.take("size", size, size);
  Program program;
  program.operation = operation;
  program.digest = digest;
  program.completed_once = true;
  program.channels.resize(static_cast<std::size_t>(in.take("channel count", 1, channels)));

  // Spans are set last, when the storage no longer moves: until then steps keep (offset, length).
  std::vector<std::pair<std::size_t, std::size_t>> recv_of, send_of;

  for (ChannelProgram& channel : program.channels) {
    const std::size_t first_of_channel = program.sources.size();
    std::vector<std::vector<std::uint32_t>> sent_in(static_cast<std::size_t>(size));  // per rank: its sends' phases
    const int begin = in.take("share begin", 0, kMost), end = in.take("share end", begin, kMost);
    const int total = in.take("share total", end, kMost);
    if (total == 0) malformed("share total is 0");
    channel.share = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end),
                     static_cast<std::uint32_t>(total)};
    const int blocks = block_count(operation, size);
    channel.chunks = static_cast<std::uint32_t>(in.take("chunks", 1, std::min(1 << 20, kMost / blocks)));
    const int chunk_ids = blocks * static_cast<int>(channel.chunks);
    channel.sends.resize(static_cast<std::size_t>(size));
    std::vector<int> completed(static_cast<std::size_t>(chunk_ids));  // by how many steps of all ranks

    for (int r = 0; r < size; ++r) {
      const int steps = in.take("step count", 0, kMost);
      channel.sends[static_cast<std::size_t>(turned(r))] =
          static_cast<std::uint32_t>(in.take("sends per round", 0, steps));
      std::vector<std::uint32_t>& sent = sent_in[static_cast<std::size_t>(turned(r))];
      int phase = 0;
      for (int s = 0; s < steps; ++s) {
        Step step;
        const int id = in.take("chunk", 0, chunk_ids - 1);
        step.chunk = static_cast<std::uint32_t>(id) % channel.chunks;
        int block = id / static_cast<int>(channel.chunks);
        if (per_rank_blocks) block = turned(block);
        step.block = block;
        step.read = static_cast<Read>(in.take("read", 0, 2));
        if (step.read == Read::input) step.read_position = input_position(operation, size, block);
        if (step.read == Read::output) step.read_position = output_position(operation, size, block);
        if (in.take("write", 0, 1) == 1) step.write_position = output_position(operation, size, block);
        step.completes = in.take("completes", 0, 1) == 1;
        completed[static_cast<std::size_t>(id)] += step.completes;
        step.returned = in.take("returned", 0, 1) == 1;
        phase = in.take("phase", phase, 1 << 20);
        step.phase = static_cast<std::uint32_t>(phase);
        step.local_position = in.take("local position", -1, size - 1);

        const int recvs = in.take("recv count", 0, size - 1);
        if ((step.read == Read::none) != (step.local_position == -1) || step.local_position > recvs)
          malformed("local position does not fit the operands");
        if (step.read == Read::none && recvs == 0)
          malformed("a step has neither a local chunk nor anything to receive");
        const std::size_t first_source = program.sources.size();
        for (int i = 0; i < recvs; ++i) {
          const int peer = turned(in.take("peer", 0, size - 1));
          program.sources.push_back({peer, static_cast<std::uint32_t>(in.take("send index", 0, kMost))});
        }
        const int sends = in.take("send count", 0, size - 1);
        const std::size_t first_destination = program.destinations.size();
        for (int i = 0; i < sends; ++i) program.destinations.push_back(turned(in.take("peer", 0, size - 1)));
        if (sends > 0) {
          step.send_index = static_cast<std::uint32_t>(sent.size());
          sent.push_back(step.phase);
        }

        if (r == own) {
          channel.steps.push_back(step);
          channel.phases = step.phase + 1;
          recv_of.emplace_back(first_source, static_cast<std::size_t>(recvs));
          send_of.emplace_back(first_destination, static_cast<std::size_t>(sends));
        } else {
          program.sources.resize(first_source);
          program.destinations.resize(first_destination);
        }
      }
      if (sent.size() != channel.sends[static_cast<std::size_t>(turned(r))])
        malformed("sends per round does not count the sends");
    }
    program.completed_once &= std::all_of(completed.begin(), completed.end(), [](int times) { return times == 1; });
    for (std::size_t i = first_of_channel; i < program.sources.size(); ++i) {
      Source& source = program.sources[i];
      const auto& sent = sent_in[static_cast<std::size_t>(source.peer)];
      if (source.send_index >= sent.size()) malformed("send index is none of the peer's");
      source.phase = sent[source.send_index];
    }
  }
  if (!in.at_end()) malformed("it goes on after its end");

  for (ChannelProgram& channel : program.channels)
    for (auto step = channel.steps.begin(); step != channel.steps.end(); ++step) {
      const int position = step->write_position >= 0 ? step->write_position : step->read_position;
      step->rewritten = std::any_of(step + 1, channel.steps.end(), [&](const Step& later) {
        return later.write_position == position && later.chunk == step->chunk;
      });
    }

  std::size_t i = 0;
  for (ChannelProgram& channel : program.channels)
    for (Step& step : channel.steps) {
      step.recv = std::span<const Source>(program.sources).subspan(recv_of[i].first, recv_of[i].second);
      step.send = std::span<const int>(program.destinations).subspan(send_of[i].first, send_of[i].second);
      for (const Source& source : step.recv)
        if (source.phase >= step.phase) malformed("a step is in no later phase than what it receives");
      ++i;
    }
  for (const Source& source : program.sources) program.peers.push_back(source.peer);
  program.peers.insert(program.peers.end(), program.destinations.begin(), program.destinations.end());
  std::sort(program.peers.begin(), program.peers.end());
  program.peers.erase(std::unique(program.peers.begin(), program.peers.end()), program.peers.end());
  return program;
}

}  // namespace ringreduce
