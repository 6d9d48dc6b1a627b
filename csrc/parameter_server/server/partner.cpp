// How a server and its backup write and read the log, in memory (near_log.h) or over TCP (far_log.h).
#include <algorithm>
#include <iterator>
#include <utility>

#include "parameter_server/server/partner.h"

namespace ringreduce::parameter_server {

bool NearPartner::send(std::span<const int> descriptors) {
  const char some = 0;
  for (; !descriptors.empty(); descriptors = descriptors.subspan(std::min(kMostDescriptors, descriptors.size())))
    if (!send_message(passage.get(), &some, sizeof some,
                      descriptors.first(std::min(kMostDescriptors, descriptors.size()))))
      return false;
  return true;
}

bool NearPartner::read(Entry& entry) {
  if (!log.read(entry.record, entry.bytes)) return false;
  entry.descriptors.clear();
  while (entry.descriptors.size() < entry.record.descriptors) {
    std::optional<Received> message = receive_message(passage.get());
    if (!message) throw Error(ErrorKind::mismatch, "the descriptors of a record have not come to the backup");
    std::move(message->descriptors.begin(), message->descriptors.end(), std::back_inserter(entry.descriptors));
  }
  entry.data = nullptr;
  if (entry.record.kind == Record::Kind::state || entry.record.kind == Record::Kind::block) {
    const auto bytes = static_cast<std::size_t>(entry.record.slot.bytes);
    const auto content =
        std::make_shared<Mapping>(entry.descriptors.at(entry.record.descriptors - 1).get(), bytes, false);
    entry.data = {content, content->at()};
    entry.descriptors.pop_back();
  }
  return true;
}

bool FarPartner::progress() {
  const bool moved = wire.connections().progress();
  wire.beat();
  if (is_silent) return moved;
  const auto lost = wire.take_lost();
  if (lost.empty()) return moved;
  is_silent = true;
  on_silence(lost.front().second);
  return true;
}

}  // namespace ringreduce::parameter_server
