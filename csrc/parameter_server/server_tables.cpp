// A server's tables: making them, updating their rows, and gathering rows for a pull.
#include <algorithm>
#include <exception>
#include <new>
#include <string>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

std::size_t Server::memory_left() const { return capacity_ - used_ - table_bytes_; }

static TableSpec table_spec(const BlockSpec& spec) { return {spec.dtype, spec.width, spec.rule, spec.first}; }

void Server::empty_table(Block& block) {
  table_bytes_ -= block.table->bytes(block.table->rows());
  block.table = std::make_unique<Table>(table_spec(block.spec));
  table_bytes_ += block.table->bytes(0);
}

void Server::create_table(Block& block) {
  const BlockSpec& spec = block.spec;
  if (spec.width > capacity_ / size_of(spec.dtype))  // so that nothing below overflows
    throw Error(ErrorKind::invalid_argument, "a row of " + std::to_string(spec.width) +
                                                 " elements is larger than the " + std::to_string(capacity_) +
                                                 " bytes of the server");
  auto table = std::make_unique<Table>(table_spec(spec));
  if (table->bytes(1) > memory_left())
    throw Error(ErrorKind::invalid_argument, "a table of rows of " + std::to_string(spec.width) + " elements needs " +
                                                 std::to_string(table->bytes(1)) + " bytes for its first row; " +
                                                 std::to_string(memory_left()) + " of the server's " +
                                                 std::to_string(capacity_) +
                                                 " are left: join with a larger memory=, or with more servers");
  table_bytes_ += table->bytes(0);
  block.table = std::move(table);
}

void Server::update_table(Block& block, const Operation& operation) {
  ++block.steps;
  ++statistics_.updates;
  const Table& table = *block.table;
  std::vector<Table::Batch> batches;
  double weights = 0;
  for (const Contribution& each : operation.contributions) {
    const auto& lent = static_cast<const Lent&>(*each.payload);
    const std::size_t count = lent.bytes / (sizeof(std::int64_t) + table.row_bytes());
    batches.push_back({lent.at(), lent.at() + count * sizeof(std::int64_t), count, each.weight});
    weights += each.weight;
  }
  const bool averages = block.spec.rule.average && block.spec.rule.kind != Rule::Kind::reduce;
  const bool done = change_rows(block, operation, [&](std::size_t room) {
    block.table->update(batches, {block.steps, averages ? weights : 1, hooks_.roots, room});
  });
  if (!done) --block.steps;  // rules use the number of updates
}

// Calls `body` with the bytes that the table may take. If that throws, nothing has been applied, and the pushes are
// answered with Outcome::failed. Returns whether it has been applied.
template <class F>
bool Server::change_rows(Block& block, const Operation& operation, F&& body) {
  const std::size_t before = block.table->bytes(block.table->rows());
  // A new backup that lacks rows cannot tell whether there is room. So the server, which can, gives it all again if
  // there is none.
  const bool lacks_rows =
      std::any_of(blocks_.begin(), blocks_.end(), [](const Block& each) { return each.lacks_rows; });
  std::string failure;
  try {
    body(lacks_rows ? SIZE_MAX : before + memory_left());
  } catch (const std::bad_alloc&) {
    if (backup_ != nullptr || followed_ != nullptr) throw;  // the partner has applied it or will
    failure = "the server's process has no memory left for the rows";
  } catch (const std::exception& error) {
    failure = error.what();
  }
  table_bytes_ += block.table->bytes(block.table->rows()) - before;
  const bool done = failure.empty();
  if (!done) failed_.insert(operation.index);
  if (!done && backup_ != nullptr && backup_->next < backup_->end) {
    backup_->hurries = true;
    begin_to_give();
  }
  block.failure = std::move(failure);
  return done;
}

// Adds the rows of a snapshot: ids and then stored rows, `bytes` bytes at `data`.
void Server::restore_table(Block& block, const Operation& operation, const std::byte* data, std::size_t bytes) {
  const std::size_t count = bytes / (sizeof(std::int64_t) + block.table->stored_bytes());
  change_rows(block, operation, [&](std::size_t room) {
    block.table->restore({data, data + count * sizeof(std::int64_t), count}, room);
  });
}

void Server::gather(const Connection& connection, const Pull& pull) {
  const std::byte* const ids = connection.window->memory.at(pull.offset);
  std::byte* const rows = connection.window->memory.at(pull.offset + pull.count * sizeof(std::int64_t));
  blocks_[pull.block].table->gather(ids, pull.count, rows);
}

}  // namespace ringreduce::parameter_server
