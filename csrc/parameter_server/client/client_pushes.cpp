// Pushes through the window, and the new values of a push_pull.
//
// A push_pull keeps the amount of data under way small, so that it stays in the caches. When kUnderWay bytes have been
// pushed, it copies the first new values to the caller before it pushes more; later pushes then reuse the same places
// in the window. This requires that the other workers push the same at the same time. If they do not, push_pull does
// not wait for them: it pushes the rest at once, past the caches, and copies the new values when the call is waited
// for.
#include <algorithm>
#include <cmath>

#include "core/float_environment.h"
#include "parameter_server/client/client-inl.h"

namespace ringreduce::parameter_server {
namespace {

constexpr std::size_t kUnderWay = std::size_t{4} << 20;  // most bytes under way while the other workers keep up
constexpr Nanoseconds kKeepUp = kMillisecond;            // without a new value for this long, they do not keep up

// Whether the new values of a tensor would overwrite another tensor that is pushed. They may overwrite the tensor
// itself, since the new value of a block comes after the block has been pushed.
bool overlap(const std::vector<Client::Pushed>& tensors) {
  struct Range {
    const std::byte *begin, *end;
    std::size_t tensor;
  };
  std::vector<Range> values, outs;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::size_t bytes = 0;
    for (const Part& part : *tensors[i].parts) bytes += part.bytes;
    if (tensors[i].values != nullptr) values.push_back({tensors[i].values, tensors[i].values + bytes, i});
    if (tensors[i].out != nullptr) outs.push_back({tensors[i].out, tensors[i].out + bytes, i});
  }
  const auto ends_before = [](const Range& a, const Range& b) { return a.end <= b.begin; };
  std::sort(outs.begin(), outs.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < outs.size(); ++i)
    if (!ends_before(outs[i - 1], outs[i])) return true;
  return std::any_of(values.begin(), values.end(), [&](const Range& value) {
    for (auto out = std::lower_bound(outs.begin(), outs.end(), value, ends_before);
         out != outs.end() && out->begin < value.end; ++out)
      if (out->tensor != value.tensor || out->begin != value.begin) return true;
    return false;
  });
}

}  // namespace

// Packs a block into the window. It is given as much room there as unpacked, because the server unpacks it to the same
// offset in its copy of the window.
void Client::pack_push(const Part& part, Packing packing, std::byte* to, const std::byte* from) {
  const DefaultFloatEnvironment environment;
  const auto* const values = reinterpret_cast<const float*>(from);
  std::vector<float>& residuals = residuals_[{part.server, part.block}];
  std::vector<float> arrived(std::min(kFragment, part.bytes) / sizeof(float));
  residuals.resize(part.bytes / sizeof(float));
  for (std::size_t begin = 0; begin < residuals.size(); begin += arrived.size()) {
    const std::size_t count = std::min(arrived.size(), residuals.size() - begin);
    float* const residual = residuals.data() + begin;
    std::byte* const packed = to + packed_bytes(packing, begin);
    for (std::size_t i = 0; i < count; ++i) residual[i] += values[begin + i];
    pack(packing, packed, reinterpret_cast<const std::byte*>(residual), count);
    unpack(packing, reinterpret_cast<std::byte*>(arrived.data()), packed, count);
    for (std::size_t i = 0; i < count; ++i) {
      const float rest = residual[i] - arrived[i];
      residual[i] = std::isfinite(rest) ? rest : 0;  // an infinity or a NaN must not spread to later pushes
    }
  }
}

void Client::send_part(Hold& hold, RequestKind kind, const std::shared_ptr<Call>& call, const Pushed& tensor,
                       const Part& part, const Options& options, bool streamed) {
  take_turns(hold);  // serves others between two copies, and keeps requests from waking up the server's thread
  if (!peer(part.server).alive) throw_lost(part.server);
  Item item(call, kind, part.block);
  item.request.priority = options.priority;
  item.request.weight = options.weight;
  if (tensor.values == nullptr) return put(hold, part.server, std::move(item), options.timeout);
  const std::byte* const from = tensor.values + part.begin;
  const bool packs = tensor.packing != Packing::none && peer(part.server).near == nullptr;
  OwnWindow::Piece piece = packs ? nullptr : window_->piece_with(from);
  const std::byte* const at = piece != nullptr ? from : (piece = take_room(hold, part.bytes, options.timeout)).get();
  if (packs)
    pack_push(part, tensor.packing, piece.get(), from);
  else if (at != from)
    copy(piece.get(), from, part.bytes, streamed);
  item.request.payload = std::make_shared<InWindow>(*window_, std::move(piece), at, part.bytes);
  if (packs) item.packing = tensor.packing;
  put(hold, part.server, std::move(item), options.timeout);
}

std::shared_ptr<Call> Client::send(RequestKind kind, const std::vector<Part>& parts, const std::byte* tensor,
                                   const Options& options) {
  const auto call = std::make_shared<Call>();
  const bool streamed = streams(parts);
  Hold hold(*this);
  for (const Part& part : parts) send_part(hold, kind, call, {&parts, tensor}, part, options, streamed);
  return call;
}

std::vector<std::shared_ptr<Call>> Client::push(const std::vector<Pushed>& tensors, const Options& options) {
  std::vector<std::shared_ptr<Call>> calls;
  std::size_t complete = 0;   // the first `complete` calls have all their new values
  std::size_t under_way = 0;  // bytes pushed whose new values have not been copied
  const auto copy_what_is_there = [&] {
    for (; complete < calls.size(); ++complete) {
      under_way -= copy_new_values(*calls[complete]);
      if (!calls[complete]->new_values.complete()) break;
    }
  };
  bool others_keep_up = true;
  const bool may_return = !overlap(tensors);
  const Nanoseconds begun = now();
  Options left = options;
  Hold hold(*this);
  for (const Pushed& tensor : tensors) {
    const auto& call = calls.emplace_back(std::make_shared<Call>());
    const bool returns = tensor.out != nullptr && may_return, large = streams(*tensor.parts);
    if (returns) call->new_values = {*tensor.parts, tensor.out, {}, large};
    for (const Part& part : *tensor.parts) {
      if (options.timeout != kForever) left.timeout = std::max<Nanoseconds>(0, options.timeout - (now() - begun));
      if (returns) {
        take_replies();
        copy_what_is_there();
      }
      while (returns && under_way >= kUnderWay && others_keep_up) {
        const std::size_t before = under_way;
        others_keep_up = wait_until(hold, std::min(kKeepUp, left.timeout), [&] {
          copy_what_is_there();
          return under_way < before;
        });
      }
      send_part(hold, RequestKind::push, call, tensor, part, left, large && !(returns && others_keep_up));
      if (returns) under_way += part.bytes;
    }
  }
  return calls;
}

// Copies, in order, the new values of blocks that have been pushed, until one is not there yet.
std::size_t Client::copy_new_values(Call& call) {
  NewValues& values = call.new_values;
  std::size_t bytes = 0;
  if (values.to == nullptr) return bytes;
  while (values.versions.size() < std::min(values.parts.size(), call.asked.size())) {
    const Part& part = values.parts[values.versions.size()];
    Peer& from = peer(part.server);
    if (!from.alive || !is_readable(from, part)) break;
    values.versions.push_back(read_block(from.near->words(part), values.to + part.begin, part.bytes, values.streamed));
    from.session.read(part.block, values.versions.back());
    bytes += part.bytes;
  }
  return bytes;
}

}  // namespace ringreduce::parameter_server
