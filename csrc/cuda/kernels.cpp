#include "cuda/kernels.h"

#include "core/fork.h"

namespace ringreduce::cuda {
namespace {

struct OfDevices {
  std::mutex mutex;
  std::map<int, std::weak_ptr<Kernels>> by_ordinal;
};

}  // namespace

std::shared_ptr<Kernels> Kernels::of(const DevicePtr& device, const Images& images) {
  OfDevices& all = process_wide<OfDevices>();
  std::lock_guard lock(all.mutex);
  std::weak_ptr<Kernels>& known = all.by_ordinal[device->ordinal()];
  auto kernels = known.lock();
  if (kernels == nullptr) known = kernels = std::make_shared<Kernels>(device, images);
  return kernels;
}

const Function& Kernels::get(const std::string& stem, const std::string& prefix, const std::string& row) {
  const std::string name = prefix + row;
  {
    std::lock_guard lock(mutex_);
    if (const Function* const known = find(stem, name)) return *known;
  }
  try {
    return load(stem, name, images_(stem, row, true));
  } catch (const Error& refused) {
    try {
      return load(stem, name, images_(stem, row, false));
    } catch (const Error& error) {
      throw Error(ErrorKind::system, std::string(refused.what()) + "; compiled anew: " + error.what());
    }
  }
}

const Function* Kernels::find(const std::string& stem, const std::string& name) {
  if (const auto known = functions_.find(name); known != functions_.end()) return &known->second;
  for (const auto& module : modules_[stem])
    if (const auto found = module->find(name.c_str())) return &(functions_[name] = *found);
  return nullptr;
}

const Function& Kernels::load(const std::string& stem, const std::string& name, const std::string& image) {
  std::lock_guard lock(mutex_);
  if (const Function* const known = find(stem, name)) return *known;  // another thread was first
  auto module = std::make_unique<Module>(device_, image.data());
  modules_[stem].push_back(std::move(module));
  return functions_[name] = modules_[stem].back()->function(name.c_str());
}

}  // namespace ringreduce::cuda
