// The client's calls for rows of tables. In the window, a push has the ids for a server and then a row for each; a pull
// has the ids and then room for their rows.
#include <cstring>
#include <string>

#include "core/float_environment.h"
#include "parameter_server/block/table.h"
#include "parameter_server/client/client-inl.h"

namespace ringreduce::parameter_server {
namespace {

constexpr std::size_t kId = sizeof(std::int64_t);

// Adds up the rows of equal ids: `values` has a row for each id of the batch, `to` gets one for each of the server's
// ids.
void fill_rows(const TablePlace& table, const RowSet& rows, std::uint32_t server, const std::byte* values,
               std::byte* to) {
  const DefaultFloatEnvironment environment;
  const std::size_t bytes = table.row_bytes();
  std::size_t known = 0;  // the first `known` rows of `to` are set: ids are numbered as they first appear
  for (const RowSet::Item& item : rows.items(server)) {
    const std::byte* const from = values + item.from * bytes;
    if (item.to < known) {
      add_row(table.dtype, to + item.to * bytes, from, table.width);
    } else {
      std::memcpy(to + item.to * bytes, from, bytes);
      known = item.to + 1;
    }
  }
}

}  // namespace

void Client::fit_rows(const TablePlace& table, const RowSet& rows) const {
  if (table.blocks.size() != rows.servers())
    throw Error(ErrorKind::invalid_argument, "the rows are those of another table");
  for (std::uint32_t server = 0; server < rows.servers(); ++server) {
    const std::size_t count = rows.ids(server).size();
    if (count > window_->data_bytes() / (kId + table.row_bytes()))
      throw Error(ErrorKind::invalid_argument,
                  std::to_string(count) + " rows of " + std::to_string(table.row_bytes()) + " bytes for " +
                      peer(server).name + " are more than the window of " + std::to_string(window_->data_bytes()) +
                      " bytes holds: take fewer ids at once, or join with a larger window=");
  }
}

std::shared_ptr<Call> Client::push_rows(const TablePlace& table, const RowSet& rows, const std::byte* values,
                                        bool distinct, const Options& options) {
  const auto call = std::make_shared<Call>();
  Hold hold(*this);
  fit_rows(table, rows);
  for (std::uint32_t server = 0; server < rows.servers(); ++server) {
    take_turns(hold);
    if (!peer(server).alive) throw_lost(server);
    Item item(call, RequestKind::push, table.blocks[server]);
    item.request.priority = options.priority;
    item.request.weight = options.weight;
    const std::span<const std::int64_t> ids = rows.ids(server);
    if (!ids.empty()) {
      const std::size_t bytes = ids.size() * (kId + table.row_bytes());
      const OwnWindow::Piece piece = take_room(hold, bytes, options.timeout);
      item.request.payload = std::make_shared<InWindow>(*window_, piece, piece.get(), bytes);
      std::memcpy(piece.get(), ids.data(), ids.size_bytes());
      std::byte* const to = piece.get() + ids.size_bytes();
      if (distinct)
        std::memcpy(to, values + rows.begin(server) * table.row_bytes(), ids.size() * table.row_bytes());
      else
        fill_rows(table, rows, server, values, to);
    }
    put(hold, server, std::move(item), options.timeout);
  }
  return call;
}

std::shared_ptr<Call> Client::pull_rows(const TablePlace& table, const RowSet& rows, Nanoseconds timeout) {
  const auto call = std::make_shared<Call>();
  call->pieces.resize(rows.servers());
  Hold hold(*this);
  fit_rows(table, rows);
  try {
    for (std::uint32_t server = 0; server < rows.servers(); ++server) {
      const std::span<const std::int64_t> ids = rows.ids(server);
      if (ids.empty()) continue;
      take_turns(hold);
      if (!peer(server).alive) throw_lost(server);
      const OwnWindow::Piece piece = take_room(hold, ids.size() * (kId + table.row_bytes()), timeout);
      call->pieces[server] = piece;
      std::memcpy(piece.get(), ids.data(), ids.size_bytes());
      Item item(call, RequestKind::pull, table.blocks[server]);
      item.request.payload = std::make_shared<InWindow>(*window_, piece, piece.get(), ids.size_bytes());
      item.into = piece.get() + ids.size_bytes();
      item.bytes = ids.size() * table.row_bytes();
      put(hold, server, std::move(item), timeout);
    }
  } catch (...) {
    forget(*call);
    throw;
  }
  return call;
}

void Client::take_rows(const TablePlace& table, const RowSet& rows, Call& call, std::byte* out, bool distinct) {
  const Lock lock(mutex_);
  if (call.unanswered > 0) throw Error(ErrorKind::invalid_argument, "the rows have not come yet: wait for the call");
  const std::size_t bytes = table.row_bytes();
  for (std::uint32_t server = 0; server < call.pieces.size(); ++server) {
    const OwnWindow::Piece piece = std::exchange(call.pieces[server], nullptr);
    if (piece == nullptr) continue;
    const std::span<const std::int64_t> ids = rows.ids(server);
    const std::byte* const from = piece.get() + ids.size_bytes();
    if (distinct)
      std::memcpy(out + rows.begin(server) * bytes, from, ids.size() * bytes);
    else
      for (const RowSet::Item& item : rows.items(server))
        std::memcpy(out + item.from * bytes, from + item.to * bytes, bytes);
  }
}

}  // namespace ringreduce::parameter_server
