// A block of a server: a part of a dense tensor (dense.h) or of a table (table.h). The server decides what happens
// to it and when; how values and states are kept is the block's own affair.
//
// A block is copied in pieces, for a backup or a snapshot. A dense block is one piece, a table has one for each slab.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parameter_server/block/archive.h"
#include "parameter_server/block/rules.h"
#include "parameter_server/block/snapshot.h"
#include "parameter_server/row_ids.h"
#include "parameter_server/shared.h"

namespace ringreduce::parameter_server {

// A block to make.
struct BlockSpec {
  DType dtype = DType::float32;
  std::size_t count = 0;
  Mode mode;
  Rule rule;
  // Not 0: the block is this server's part of a table, whose rows have so many elements. `count` is ignored.
  std::size_t width = 0;
  FirstValues first;
  std::string note;  // text of the server's owner about the block; backups have it, too
  // Set by the server. The block has room for two copies of the states, and an update writes the one that is not
  // published, so that a backup can adopt the block after the server has ended.
  bool two_states = false;

  std::size_t bytes() const { return count * size_of(dtype); }
};

void visit(Archive& archive, BlockSpec& spec);

// The data of a push.
struct Data : Payload {
  explicit Data(std::size_t bytes) : bytes(bytes) {}
  virtual const std::byte* at() const = 0;

  const std::size_t bytes;
};
inline const Data& data_of(const Contribution& contribution) { return static_cast<const Data&>(*contribution.payload); }

// An update that Python computes, from `value` to `out`, which already holds a copy of the value.
struct PythonUpdate {
  BlockId block;
  std::uint64_t version;  // the version that it makes
  const void* value;
  void* out;
  const void* gradient;  // the workers' pushes, combined
  const std::vector<Contribution>& contributions;
  const Rule& rule;
};

class Block {
 public:
  // What an operation may use.
  struct Means {
    std::vector<std::byte>& scratch;
    Roots roots;
    const std::function<void(const PythonUpdate&)>& update;
    std::size_t room;  // bytes that the block may take in addition to own_bytes()
  };

  explicit Block(BlockSpec its) : spec(std::move(its)) {}
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  bool is_table() const { return spec.width > 0; }
  bool by_python() const { return !spec.rule.native(spec.dtype); }
  // Whether the payload of an initialise, push or restore has the size that the block needs, and lies as it should.
  virtual bool fits(const RequestSlot& slot) const = 0;
  // Carries out an operation that changes values. If it throws, the value is as it was. publish() must follow even
  // then, because a dense block makes a version for each operation.
  virtual void apply(const Operation& operation, const Means& means) = 0;
  virtual void publish() {}
  // Changes a number of the rule.
  void change(const Contribution& wanted) { spec.rule.change(wanted.pulled, wanted.weight); }
  // The size of a value that is pulled: of `rows` rows of a table.
  virtual std::size_t value_bytes(std::size_t rows) const = 0;
  // Copies the value, or the rows of `rows` ids at `ids`, to `out`. Returns the version of a dense block.
  virtual std::uint64_t read(const std::byte* ids, std::size_t rows, std::byte* out) = 0;
  virtual bool has_value() const { return true; }
  virtual std::size_t rows() const { return 0; }
  // Memory of the process that it takes, beside the server's values.
  virtual std::size_t own_bytes() const { return 0; }
  // Its place in the server's values; nullptr: it has none.
  virtual const std::byte* place() const { return nullptr; }
  // Copies what a server that has ended had published. An update that it had begun has only written the buffers of the
  // next version. Precondition: spec.two_states.
  virtual void adopt(const BlockWords&) {}

  // ---- Pieces ----
  virtual std::size_t pieces() const { return 1; }
  // Writes or reads a piece. A block of which piece 0 is read gets all of its pieces anew.
  virtual void visit(Archive& archive, std::size_t piece) = 0;
  // A copy for a snapshot.
  virtual Snapshot::Piece copy(BlockId id, std::size_t piece) const = 0;
  virtual Watch& watch() = 0;

  BlockSpec spec;
  std::uint64_t steps = 0;  // updates
  std::string failure;
  bool is_missing = false;  // at a new backup: no piece has arrived yet
  bool lacks_rows = false;  // at a new backup: some slabs have not arrived yet
};

// What a request to restore brings: the number of updates, and then the value and the states of a dense block, or ids
// and stored rows of a table.
inline const std::byte* restored(Block& block, const Data& data) {
  std::uint64_t steps = 0;
  std::memcpy(&steps, data.at(), sizeof steps);
  block.steps = std::max(block.steps, steps);
  return data.at() + sizeof steps;
}

}  // namespace ringreduce::parameter_server
