#include "cuda/kernels.h"

namespace ringreduce::cuda {

const Function& Kernels::get(const std::string& stem, const std::string& prefix, const std::string& row) {
  const std::string name = prefix + row;
  std::lock_guard lock(mutex_);
  if (const auto known = functions_.find(name); known != functions_.end()) return known->second;
  std::vector<std::unique_ptr<Module>>& modules = modules_[stem];
  for (const auto& module : modules)
    if (const auto found = module->find(name.c_str())) return functions_[name] = *found;
  std::unique_ptr<Module> module;
  try {
    module = std::make_unique<Module>(device_, images_(stem, row, true).data());
  } catch (const Error& refused) {
    try {
      module = std::make_unique<Module>(device_, images_(stem, row, false).data());
    } catch (const Error& error) {
      throw Error(ErrorKind::system, std::string(refused.what()) + "; compiled anew: " + error.what());
    }
  }
  modules.push_back(std::move(module));
  return functions_[name] = modules.back()->function(name.c_str());
}

}  // namespace ringreduce::cuda
