// The kernels of a GPU, loaded when they are first needed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/device.h"

namespace ringreduce::cuda {

// Returns an image that Module can load, with the kernels of one file (csrc/**/<stem>.cu): those of all rows of the
// kernels' table, or only those of `row`. `prebuilt` is false if the driver is too old for the image that the package
// was built with. Throws Error(system).
using Images = std::function<std::string(const std::string& stem, const std::string& row, bool prebuilt)>;

class Kernels {
 public:
  Kernels(DevicePtr device, Images images) : device_(std::move(device)), images_(std::move(images)) {}
  // Those of this process for the GPU, as long as anybody has them: a fatbin has megabytes. `images` counts for whoever
  // comes first.
  static std::shared_ptr<Kernels> of(const DevicePtr& device, const Images& images);

  // The kernel `prefix` + `row` of `stem`.cu. The reference stays valid. Thread-safe.
  const Function& get(const std::string& stem, const std::string& prefix, const std::string& row);

 private:
  const Function* find(const std::string& stem, const std::string& name);
  const Function& load(const std::string& stem, const std::string& name, const std::string& image);

  const DevicePtr device_;
  const Images images_;
  std::mutex mutex_;  // not held while an image is made: that may need Python's lock, whose holder may want this one
  std::map<std::string, std::vector<std::unique_ptr<Module>>> modules_;  // per stem
  std::map<std::string, Function> functions_;                            // by name
};

}  // namespace ringreduce::cuda
