// A server's tables: making them, updating their rows, and gathering rows for a pull.
#include <exception>
#include <new>
#include <string>

#include "core/error.h"
#include "parameter_server/server-inl.h"
#include "parameter_server/server.h"

namespace ringreduce::parameter_server {

std::size_t Server::memory_left() const { return capacity_ - used_ - table_bytes_; }

void Server::create_table(Block& block) {
  const BlockSpec& spec = block.spec;
  if (spec.width > capacity_ / size_of(spec.dtype))  // so that nothing below overflows
    throw Error(ErrorKind::invalid_argument, "a row of " + std::to_string(spec.width) +
                                                 " elements is larger than the " + std::to_string(capacity_) +
                                                 " bytes of the server");
  auto table = std::make_unique<Table>(TableSpec{spec.dtype, spec.width, spec.rule, spec.first});
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
  Table& table = *block.table;
  std::vector<Table::Batch> batches;
  double weights = 0;
  for (const Contribution& each : operation.contributions) {
    const auto& lent = static_cast<const Lent&>(*each.payload);
    const std::size_t count = lent.bytes / (sizeof(std::int64_t) + table.row_bytes());
    batches.push_back({lent.at(), lent.at() + count * sizeof(std::int64_t), count, each.weight});
    weights += each.weight;
  }
  const std::size_t before = table.bytes(table.rows());
  const bool averages = block.spec.rule.average && block.spec.rule.kind != Rule::Kind::reduce;
  try {
    table.update(batches, {block.steps, averages ? weights : 1, hooks_.roots, before + memory_left()});
    block.failure.clear();
  } catch (const std::bad_alloc&) {
    --block.steps;
    refuse_for_memory(block, operation);
  } catch (const std::exception& error) {
    --block.steps;  // nothing was applied, and rules use the number of updates
    block.failure = error.what();
    failed_.insert(operation.index);
  }
  table_bytes_ += table.bytes(table.rows()) - before;
}

// Called when there was no memory for an operation, and nothing of it was applied. A partner has applied it or will, so
// then this server or backup cannot go on: throws std::bad_alloc.
void Server::refuse_for_memory(Block& block, const Operation& operation) {
  if (backup_ != nullptr || followed_ != nullptr) throw;  // the exception being handled
  block.failure = "the server's process has no memory left for the rows";
  failed_.insert(operation.index);
}

void Server::gather(const Connection& connection, const Pull& pull) {
  const std::byte* const ids = connection.window->memory.at(pull.offset);
  std::byte* const rows = connection.window->memory.at(pull.offset + pull.count * sizeof(std::int64_t));
  blocks_[pull.block].table->gather(ids, pull.count, rows);
}

}  // namespace ringreduce::parameter_server
