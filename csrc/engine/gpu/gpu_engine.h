// An engine whose tensors are on this rank's GPU: it does not run calls but puts them in streams.
//
// It belongs to a group that has an engine on the host as well. That one knows the peers by name, and carries errors:
// what goes wrong on any rank's GPU becomes the error of the whole group, on the host and on all GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "engine/engine.h"

namespace ringreduce {

class GpuEngine : public Engine {
 public:
  // How long after a call's timeout it may still end with an error of its own, which knows more.
  static constexpr Nanoseconds kGrace = kSecond;

  // Puts the call in `stream`, of device(), and returns without waiting for the GPU. The tensors must stay until the
  // stream has done it. Throws Error.
  //
  // Calls run in the order in which they are made, whatever their streams. In a capture that order is the program's to
  // keep: the calls of a graph come one after the other, and nothing else of the group runs while a graph does.
  virtual void enqueue(const Call& call, const Buffers& buffers, const cuda::Stream& stream) = 0;

  // Finds out what has gone wrong on the GPU and tells the host's engine; if the group is broken, ends what the GPU
  // waits for. To be called every few milliseconds as long as calls, or graphs with calls, may run: by a Lookout.
  // Does not throw.
  virtual void look() noexcept = 0;

  // Whether no replay of a graph with calls is known to run.
  virtual bool idle() const { return true; }
  // Whether the peers need this rank's memory no more, after its own calls have ended.
  virtual bool quiet() { return true; }

  // After the last call: gives back what all ranks must give back together. May wait for them, for some time.
  virtual void leave() noexcept {}

  // A further sentence for the error of a call that does not end, or nothing.
  virtual std::string hint() const { return ""; }

  // Whether look() finds out itself that a call waits for a rank that is gone.
  virtual bool finds_lost_peers() const { return false; }

  // Puts the call in a stream and waits for it.
  Tally run(const Call& call, const Buffers& buffers) final;

  void fail(const Error& error) override { host_->fail(error); }
  void throw_if_aborted() const override { host_->throw_if_aborted(); }
  int reporter() const override { return host_->reporter(); }
  std::string number(int rank) const override { return host_->number(rank); }
  std::string describe(int rank) const override { return host_->describe(rank); }
  std::vector<int> gone() const override { return host_->gone(); }

  const cuda::DevicePtr& device() const { return device_; }

  // From now on errors are those of `host`, which is an engine of the same rank. Only between calls.
  void set_host(std::shared_ptr<Engine> host) { host_ = std::move(host); }

 protected:
  Engine& host() const { return *host_; }

  GpuEngine(std::shared_ptr<Engine> host, cuda::DevicePtr device, int channels, const Options& options,
            std::size_t most_slice_bytes)
      : Engine(host->rank(), host->size(), channels, options, most_slice_bytes),
        host_(std::move(host)),
        device_(std::move(device)) {}

 private:
  std::shared_ptr<Engine> host_;
  const cuda::DevicePtr device_;
};

}  // namespace ringreduce
