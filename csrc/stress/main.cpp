// The engine under load and under faults, without torch and without processes: for sanitizers. See `make stress`.
// With an argument, only the mixed load, for that many seconds. See `make soak`.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "stress/harness.h"

int main(int argc, char** argv) {
  using namespace ringreduce::stress;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int seconds = argc > 1 ? std::atoi(argv[1]) : 0;
  alarm(static_cast<unsigned>(300 + seconds));  // a deadlock that no timeout ends is a failure too
  try {
    if (seconds > 0) {
      stress_mixed(seconds);
      return 0;
    }
    if (argc > 1 && std::string(argv[1]) == "hosts") return stress_hosts(), 0;
    stress_malformed_plans();
    stress_interpreter();
    stress_collectives();
    stress_queue();
    stress_faults();
    stress_messages();
    stress_hosts();
    stress_mixed(3);
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  std::printf("all passed\n");
}
