#pragma once

#include "core/no_calls.h"

namespace ringreduce {

struct Groups {
  static constexpr char kWhy[] =
      "an operator's function may not make calls of a group or destroy one; the call that runs the function waits for "
      "it";
};
// While one lives, no call begins in its thread, and no group of it ends.
using NoCalls = NoCallsOf<Groups>;

}  // namespace ringreduce
