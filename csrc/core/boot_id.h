// Which start of which machine this is.
#pragma once

#include <fstream>
#include <string>

namespace ringreduce {

// The kernel's boot id; empty if it tells none, as gVisor's does not.
inline std::string boot_id() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace ringreduce
