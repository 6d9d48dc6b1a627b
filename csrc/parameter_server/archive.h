// Serialisation of a server's state for its backup.
//
// A visit() function lists the members of a structure once; the same function writes and reads them. Server and backup
// run the same program on the same architecture, so values are stored with their bytes as they are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

class Archive;
void visit(Archive& archive, Mode& mode);

class Archive {
 public:
  explicit Archive(bool reads) : reads_(reads) {}
  virtual ~Archive() = default;

  // Whether this archive fills the values it visits; otherwise it writes them.
  bool reads() const { return reads_; }
  // Copies `bytes` bytes into `at` when reading, out of it when writing.
  virtual void raw(void* at, std::size_t bytes) = 0;
  virtual void payload(std::shared_ptr<const Payload>& payload) = 0;

  // Visits all values, in the order given.
  template <class... T>
  void operator()(T&... values) {
    (visit(*this, values), ...);
  }

 private:
  const bool reads_;
};

// Visits the size of a container: writes `size`, or returns the size that was written.
inline std::size_t visit_size(Archive& archive, std::size_t size) {
  std::uint64_t count = size;
  archive.raw(&count, sizeof count);
  return static_cast<std::size_t>(count);
}

template <class T>
  requires std::is_trivially_copyable_v<T>
void visit(Archive& archive, T& value) {
  archive.raw(&value, sizeof value);
}

template <class Char>
void visit(Archive& archive, std::basic_string<Char>& text) {
  text.resize(visit_size(archive, text.size()));
  archive.raw(text.data(), text.size());
}

template <class A, class B>
  requires(!std::is_trivially_copyable_v<std::pair<A, B>>)
void visit(Archive& archive, std::pair<A, B>& both) {
  archive(both.first, both.second);
}

inline void visit(Archive& archive, std::vector<std::byte>& bytes) {
  bytes.resize(visit_size(archive, bytes.size()));
  archive.raw(bytes.data(), bytes.size());
}

template <class Sequence>
void visit_each(Archive& archive, Sequence& values) {
  values.resize(visit_size(archive, values.size()));
  for (auto& each : values) archive(each);
}
template <class T>
void visit(Archive& archive, std::vector<T>& values) {
  visit_each(archive, values);
}
template <class T>
void visit(Archive& archive, std::deque<T>& values) {
  visit_each(archive, values);
}

template <class T>
void visit(Archive& archive, std::set<T>& values) {
  std::vector<T> all(values.begin(), values.end());
  archive(all);
  if (archive.reads()) values = {all.begin(), all.end()};
}

template <class Key, class T>
void visit(Archive& archive, std::map<Key, T>& values) {
  const std::size_t count = visit_size(archive, values.size());
  if (!archive.reads()) {
    for (auto& [key, value] : values) {
      Key copy = key;
      archive(copy, value);
    }
    return;
  }
  values.clear();
  for (std::size_t i = 0; i < count; ++i) {
    Key key{};
    T value{};
    archive(key, value);
    values.emplace_hint(values.end(), std::move(key), std::move(value));
  }
}

}  // namespace ringreduce::parameter_server
