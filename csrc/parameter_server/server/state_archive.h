// The archive of a server's state, and of pieces of its blocks, for a backup.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/bytes.h"
#include "parameter_server/server/partner.h"
#include "parameter_server/server/port.h"

namespace ringreduce::parameter_server {

// With `has_all`, pushed data is part of the state. Otherwise pushed data is given as a place in a window.
class StateArchive final : public Archive {
 public:
  explicit StateArchive(bool has_all, std::byte* to = nullptr) : Archive(to), has_all(has_all) {}
  StateArchive(bool has_all, std::span<const std::byte> from) : Archive(from), has_all(has_all) {}

  static constexpr std::uint64_t kNoPayload = UINT64_MAX, kInline = UINT64_MAX - 1;

  void payload(std::shared_ptr<const Payload>& payload) override {
    auto lent = std::static_pointer_cast<const Lent>(payload);
    std::uint64_t place[3] = {kNoPayload, 0, 0};
    if (lent != nullptr) place[0] = has_all ? kInline : number_of(lent->window);
    if (lent != nullptr) place[1] = lent->offset, place[2] = lent->bytes;
    raw(place, sizeof place);
    const auto bytes = static_cast<std::size_t>(place[2]);
    if (reads() && place[0] != kNoPayload)
      lent = place[0] == kInline ? std::make_shared<Lent>(unwritten_bytes(bytes), bytes)
                                 : std::make_shared<Lent>(windows.at(place[0]), place[1], bytes);
    if (place[0] == kInline) raw(const_cast<std::byte*>(lent->at()), bytes);
    payload = std::move(lent);
  }

  // What `body` visits, in memory that a backup on this host can map or, with `has_all`, in memory of this process.
  struct Written {
    FileDescriptor memory;
    std::shared_ptr<std::byte[]> data;
    std::size_t bytes;
    std::vector<int> descriptors;

    // Writes the record that this is the content of. Returns false if a backup on this host does not take the
    // descriptors.
    bool give(Partner& to, Record record) const {
      record.slot.bytes = bytes;
      record.descriptors = to.far() ? 0 : descriptors.size() + 1;
      if (!to.send(descriptors) || !to.send(std::array{memory.get()})) return false;
      to.write({record, {}, data});
      to.ring();
      return true;
    }
  };
  template <class F>
  static Written written(bool has_all, F&& body) {
    StateArchive counting(has_all);
    body(counting);
    Written made;
    made.bytes = counting.done();
    made.descriptors = std::move(counting.sent);
    if (has_all) {
      made.data = unwritten_bytes(made.bytes);
    } else {
      made.memory = make_memory("ringreduce state", made.bytes);
      const auto mapped = std::make_shared<Mapping>(made.memory.get(), made.bytes, true);
      made.data = {mapped, mapped->at()};
    }
    StateArchive writing(has_all, made.data.get());
    body(writing);
    return made;
  }

  const bool has_all;
  std::vector<std::shared_ptr<Window>> windows;  // of the workers; then, of workers that have gone, those with pushes
  std::vector<int> sent;                         // when writing: three descriptors of each worker, one of other windows
  std::vector<FileDescriptor> received;          // when reading: these

 private:
  std::size_t number_of(const std::shared_ptr<Window>& window) {
    const auto found = std::find(windows.begin(), windows.end(), window);
    if (found != windows.end()) return static_cast<std::size_t>(found - windows.begin());
    windows.push_back(window);
    sent.push_back(window->memory_fd.get());
    return windows.size() - 1;
  }
};

}  // namespace ringreduce::parameter_server
