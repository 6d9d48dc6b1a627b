// The floating-point environment that everything of ours computes in, whatever the program has set.
//
// A thread's environment decides how results are rounded, and whether denormal numbers become zero. A program may
// change it in any of its threads (torch.set_flush_denormal, fesetround), and new threads inherit it. Without this
// class, ranks would get different bits from the same numbers.
#pragma once

#include <cstdint>

namespace ringreduce {

// While it exists, this thread rounds to nearest even, keeps denormal numbers and traps nothing. Afterwards the thread
// has its own environment again.
//
// Compilers may move arithmetic past the change, but not loads and stores. So the arithmetic must be in a function that
// is not inlined here, or lie between loads and stores of its operands and results.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() : before_(read()) {
    if (changed()) write(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if (changed()) write(before_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;  // MXCSR
  static constexpr Word kDefault = 0x1f80;
  static constexpr Word kFlags = 0x3f;  // what has happened so far; decides nothing

  static Word read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word));
    return word;
  }
  static void write(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;  // FPCR
  static constexpr Word kDefault = 0, kFlags = 0;

  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#endif

  bool changed() const { return (before_ & ~kFlags) != kDefault; }

  const Word before_;
};

}  // namespace ringreduce
