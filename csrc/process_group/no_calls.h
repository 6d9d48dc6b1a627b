// Keeps a function that a call runs from making calls itself: it would wait for the end of the call that waits for it.
#pragma once

#include "core/error.h"

namespace ringreduce {

// While one lives, no call begins in its thread, and no group of it ends.
class NoCalls {
 public:
  NoCalls() { begin(); }
  ~NoCalls() { end(); }
  NoCalls(const NoCalls&) = delete;
  NoCalls& operator=(const NoCalls&) = delete;

  static void begin() { ++depth; }
  static void end() { --depth; }

  static void check() {
    if (depth > 0)
      throw Error(ErrorKind::invalid_argument,
                  "an operator's function may not make calls of a group or destroy one; the call that runs the "
                  "function waits for it");
  }

 private:
  static inline thread_local int depth = 0;
};

}  // namespace ringreduce
