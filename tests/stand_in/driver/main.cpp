// Tests of csrc/cuda on the stand-in driver, one function each: `driver_test NAME`. It ends with 0, or says what was
// not as expected and ends with 1. test_cuda_driver.py runs it, and chooses the machine that the stand-in plays.

#include "driver/tests.h"

int main(int count, char** arguments) {
  if (count > 2) to_peer = std::atoi(arguments[2]);
  try {
    bool found = false;
    for (const Tests* tests : {&kOneProcess, &kBetweenProcesses, &kOurKernels})
      if (const auto test = tests->find(arguments[1]); test != tests->end()) {
        found = true;
        test->second();
      }
    expect(found, std::string("there is no test ") + arguments[1]);
  } catch (const Error& error) {
    expect(false, error.what());
  }
}
