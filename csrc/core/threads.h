// Starting threads.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"

namespace ringreduce {

// Throws Error(system) where std::thread would throw its own.
template <class F>
std::thread start_thread(F&& body) {
  try {
    return std::thread(std::forward<F>(body));
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::system, std::string("cannot start a thread: ") + error.what());
  }
}

}  // namespace ringreduce
