// The engine under load and under faults, without torch and without processes: for sanitizers, see `make stress`, and
// for another processor, see `make aarch64`. Arguments are the names of scenarios; without any, all run. `links:death`
// is one case of a scenario that has several. A number is the mixed load, for that many seconds, see `make soak`.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "stress/harness.h"

namespace ringreduce::stress {
namespace {

struct Scenario {
  const char* name;
  void (*run)();
  void (*run_case)(const std::string& name) = nullptr;  // of those that have several; "": all
};

constexpr Scenario kScenarios[] = {
    {"malformed_plans", stress_malformed_plans},
    {"interpreter", stress_interpreter},
    {"fastest", stress_fastest},
    {"collectives", stress_collectives},
    {"queue", stress_queue},
    {"faults", stress_faults},
    {"messages", stress_messages},
    {"hosts", stress_hosts},
    {"links", nullptr, stress_links},
    {"segment", nullptr, stress_segment},
    {"life", stress_life_mark},
    {"arena", nullptr, stress_arena},
    {"parameter_server", stress_parameter_server},
    {"nonsense", stress_parameter_server_nonsense},
    {"backups", stress_parameter_server_backups},
    {"mixed", [] { stress_mixed(3); }},
};

void run(const Scenario& scenario, const std::string& only) {
  alarm(300);  // a deadlock that no timeout ends is a failure too
  if (scenario.run_case) return scenario.run_case(only);
  check(only.empty(), scenario.name + std::string(" has no cases"));
  scenario.run();
}

void run(const std::string& word) {
  const auto colon = word.find(':');
  const std::string name = word.substr(0, colon);
  for (const Scenario& scenario : kScenarios)
    if (name == scenario.name) return run(scenario, colon == std::string::npos ? "" : word.substr(colon + 1));
  check(false, "no scenario is called " + name);
}

}  // namespace
}  // namespace ringreduce::stress

int main(int argc, char** argv) {
  using namespace ringreduce::stress;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int seconds = argc > 1 ? std::atoi(argv[1]) : 0;
  try {
    if (seconds > 0) {
      alarm(static_cast<unsigned>(300 + seconds));
      stress_mixed(seconds);
      return 0;
    }
    if (argc == 5 && std::string(argv[1]) == "hold_life_marks")  // as the scenario "life" starts this program
      hold_life_marks(std::atoi(argv[2]), std::atoi(argv[3]), std::atoi(argv[4]));
    for (int i = 1; i < argc; ++i) run(argv[i]);
    if (argc == 1)
      for (const Scenario& scenario : kScenarios) run(scenario, "");
  } catch (const std::exception& error) {
    check(false, error.what());
  }
  std::printf("all passed\n");
}
