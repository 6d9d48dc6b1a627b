// Serialisation of a server's state for its backup, and of what the log says besides its records.
//
// A visit() function lists the members of a structure once; the same function writes and reads them. Server and backup
// run the same program on the same architecture, so values are stored with their bytes as they are in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"
#include "parameter_server/messages.h"

namespace ringreduce::parameter_server {

class Archive;
void visit(Archive& archive, Mode& mode);

class Archive {
 public:
  // Writes to `to`, which has room for everything; nullptr: only counts the bytes.
  explicit Archive(std::byte* to = nullptr) : reads_(false), at_(to) {}
  // Reads from the bytes. The functions throw Error(mismatch) if there are too few.
  explicit Archive(std::span<const std::byte> from)
      : reads_(true), at_(const_cast<std::byte*>(from.data())), bytes_(from.size()) {}
  virtual ~Archive() = default;

  // Whether this archive fills the values it visits; otherwise it writes them.
  bool reads() const { return reads_; }
  std::size_t done() const { return done_; }  // bytes read, written or counted

  // The place of the next `bytes` bytes, which are there or are to be written there; nullptr: they are only counted.
  std::byte* next(std::size_t bytes) {
    if (reads_ && bytes > bytes_ - done_)
      throw Error(ErrorKind::mismatch, "what a server told its backup is too short");
    std::byte* const place = at_ == nullptr ? nullptr : at_ + done_;
    done_ += bytes;
    return place;
  }
  // Copies `bytes` bytes into `at` when reading, out of it when writing.
  void raw(void* at, std::size_t bytes) {
    std::byte* const place = next(bytes);
    if (place != nullptr && bytes > 0) std::memcpy(reads_ ? at : place, reads_ ? place : at, bytes);
  }
  virtual void payload(std::shared_ptr<const Payload>&) {}

  // Visits all values, in the order given.
  template <class... T>
  void operator()(T&... values) {
    (visit(*this, values), ...);
  }

 private:
  const bool reads_;
  std::byte* const at_;
  const std::size_t bytes_ = 0;
  std::size_t done_ = 0;
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

template <class T>
void visit(Archive& archive, std::vector<T>& values) {
  values.resize(visit_size(archive, values.size()));
  for (auto& each : values) archive(each);
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

template <class T>
std::vector<std::byte> written(T& value) {
  Archive counting;
  counting(value);
  std::vector<std::byte> bytes(counting.done());
  Archive{bytes.data()}(value);
  return bytes;
}
template <class T>
T read(std::span<const std::byte> bytes) {
  T value;
  Archive{bytes}(value);
  return value;
}

}  // namespace ringreduce::parameter_server
