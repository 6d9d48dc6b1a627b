// The engine under load and under faults, without torch and without processes: for sanitizers. See `make stress`.
// With a number, only the mixed load, for that many seconds. See `make soak`. With `hosts`, `peers`, `backups`,
// `life`, `links`, `segment` or `arena`, only that scenario; of the latter three, only the case that a further argument
// names.
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
    const std::string scenario = argc > 1 ? argv[1] : "", only = argc > 2 ? argv[2] : "";
    if (scenario == "hosts") return stress_hosts(), 0;
    if (scenario == "links") return stress_links(only), 0;
    if (scenario == "segment") return stress_segment(only), 0;
    if (scenario == "life") return stress_life_mark(), 0;
    if (scenario == "hold_life_marks") hold_life_marks(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
    if (scenario == "peers") return stress_peers(), 0;
    if (scenario == "arena") return stress_arena(only), 0;
    if (scenario == "parameter_server") return stress_parameter_server(), 0;
    if (scenario == "backups") return stress_parameter_server_backups(), 0;
    stress_malformed_plans();
    stress_interpreter();
    stress_collectives();
    stress_queue();
    stress_faults();
    stress_messages();
    stress_hosts();
    stress_links();
    stress_segment();
    stress_life_mark();
    stress_peers();
    stress_arena();
    stress_parameter_server();
    stress_parameter_server_backups();
    stress_mixed(3);
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  std::printf("all passed\n");
}
