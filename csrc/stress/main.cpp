// The engine under load and under faults, without torch and without processes: for sanitizers. See `make stress`.
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "stress/harness.h"

int main() {
  using namespace ringreduce::stress;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  alarm(300);  // a deadlock that no timeout ends is a failure too
  try {
    stress_malformed_plans();
    stress_collectives();
    stress_queue();
    stress_faults();
    stress_messages();
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  std::printf("all passed\n");
}
