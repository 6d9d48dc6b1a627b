#include "parameter_server/row_ids.h"

#include <bit>
#include <string>

#include "core/error.h"

namespace ringreduce::parameter_server {
namespace {

template <class T>
void fill(const FirstValues& first, std::int64_t id, T* out, std::size_t count) {
  const double low = first.low, span = static_cast<double>(first.high - first.low);
  const std::uint64_t key = mixed(first.seed ^ hash_of(id));
  for (std::size_t i = 0; i < count; ++i) {
    const auto random = static_cast<double>(mixed(key + i) >> 40);
    out[i] = static_cast<T>(low + span * (random / (1 << 24)));  // the product has 48 bits, so it is exact
  }
}

template <class T>
void add(void* to, const void* from, std::size_t count) {
  auto* __restrict sum = static_cast<T*>(to);
  const auto* __restrict more = static_cast<const T*>(from);
  for (std::size_t i = 0; i < count; ++i) sum[i] += more[i];
}

}  // namespace

std::vector<std::uint32_t> owners_of_slots(std::size_t servers) {
  std::vector<std::uint32_t> owners(kSlots);
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    std::uint64_t greatest = 0;
    for (std::size_t server = 0; server < servers; ++server) {
      const std::uint64_t weight = mixed(mixed(server) ^ slot);
      if (server > 0 && weight <= greatest) continue;
      greatest = weight;
      owners[slot] = static_cast<std::uint32_t>(server);
    }
  }
  return owners;
}

void first_values(const FirstValues& first, DType dtype, std::int64_t id, void* out, std::size_t count) {
  if (dtype == DType::float32)
    fill(first, id, static_cast<float*>(out), count);
  else
    fill(first, id, static_cast<double*>(out), count);
}

void add_row(DType dtype, void* to, const void* from, std::size_t width) {
  if (dtype == DType::float32)
    add<float>(to, from, width);
  else
    add<double>(to, from, width);
}

Distinct::Distinct(std::size_t most) : mask_(std::bit_ceil(2 * most + 2) - 1), numbers_(mask_ + 1) {
  ids_.reserve(most);
}

RowSet::RowSet(std::span<const std::int64_t> ids, std::span<const std::uint32_t> owners, std::size_t servers)
    : begins_(servers + 1), starts_(servers + 1), items_(ids.size()) {
  if (ids.size() >= UINT32_MAX)
    throw Error(ErrorKind::invalid_argument,
                "a batch has " + std::to_string(ids.size()) + " ids; the most is 2^32 - 2: give parts of it");
  Distinct distinct(ids.size());
  std::vector<std::uint32_t> numbers(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) numbers[i] = distinct.number(ids[i]);

  const std::size_t count = distinct.ids().size();
  std::vector<std::uint32_t> servers_of(count), positions(count);
  for (std::size_t k = 0; k < count; ++k) {
    servers_of[k] = owners[slot_of(hash_of(distinct.ids()[k]))];
    ++begins_[servers_of[k] + 1];
  }
  for (std::size_t server = 0; server < servers; ++server) begins_[server + 1] += begins_[server];
  ids_.resize(count);
  std::vector<std::size_t> next(begins_.begin(), begins_.end() - 1);
  for (std::size_t k = 0; k < count; ++k) {
    positions[k] = static_cast<std::uint32_t>(next[servers_of[k]]++);
    ids_[positions[k]] = distinct.ids()[k];
  }

  positions_.resize(ids.size());
  for (const std::uint32_t number : numbers) ++starts_[servers_of[number] + 1];
  for (std::size_t server = 0; server < servers; ++server) starts_[server + 1] += starts_[server];
  next.assign(starts_.begin(), starts_.end() - 1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint32_t server = servers_of[numbers[i]], position = positions[numbers[i]];
    positions_[i] = position;
    items_[next[server]++] = {static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(position - begins_[server])};
  }
}

}  // namespace ringreduce::parameter_server
