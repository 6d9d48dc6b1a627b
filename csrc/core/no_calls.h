// Keeps a function that somebody runs from calling that one in turn: it would wait for its own end.
#pragma once

#include "core/error.h"

namespace ringreduce {

// While one lives, its thread may not call what Callee stands for. Callee::kWhy says so in the error.
template <class Callee>
class NoCallsOf {
 public:
  NoCallsOf() { begin(); }
  ~NoCallsOf() { end(); }
  NoCallsOf(const NoCallsOf&) = delete;
  NoCallsOf& operator=(const NoCallsOf&) = delete;

  static void begin() { ++depth; }
  static void end() { --depth; }

  static void check() {
    if (depth > 0) throw Error(ErrorKind::invalid_argument, Callee::kWhy);
  }

 private:
  static inline thread_local int depth = 0;
};

}  // namespace ringreduce
