// Messages of another c10d backend, such as Gloo, as a PointToPoint; and a c10d store to tell why a group broke.
#pragma once

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "transport/fate.h"
#include "transport/point_to_point.h"

namespace ringreduce {

class C10dPointToPoint final : public PointToPoint {
 public:
  // The tag of our messages; the program's may have any other.
  static constexpr int kTag = 0x7fffffff;

  // `backend` has all ranks of the group, for CPU tensors; when the group breaks this object lets go of it, and nobody
  // else should hold it, so that its connections close. `store` is the group's alone.
  C10dPointToPoint(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                   std::vector<RankName> names);

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(names_.size()); }
  std::string number(int rank) const override;
  std::string describe(int rank) const override;
  void exchange(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming, Nanoseconds timeout) override;
  void abort(const Error& error) override;
  void throw_if_aborted() const override;
  int reporter() const override;

  // Takes no further part: connections close, as when the process ends, and calls throw.
  void leave();
  // A message of the program's own, in contiguous CPU memory: the backend's Work, with its errors. `type` is SEND, RECV
  // or RECVANYSOURCE. Throws the group's error if it is broken.
  c10::intrusive_ptr<c10d::Work> pass_on(std::vector<at::Tensor>& tensors, c10d::OpType type, int peer, int tag) const;
  // The error of a message that cannot be done, for the backend's `reason`. `peer` may be kAnySource.
  Error failure(bool sends, int peer, const std::string& reason, bool late) const;

 private:
  struct Pending {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
    bool sends;
  };
  struct Broken {
    Error error;
    int reporter;
  };

  void let_go();
  void post(std::span<const Outgoing> outgoing, std::span<const Incoming> incoming);
  Broken agree_on(const Error& error) const;

  const int rank_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::vector<RankName> names_;
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Pending> pending_;  // changed by the thread that is in exchange() only
  bool exchanging_ = false;
  std::optional<Broken> broken_;
};

}  // namespace ringreduce
