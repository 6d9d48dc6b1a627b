// The bodies of the GPU's accumulate kernels on a CPU, thread after thread, for test_gpu_kernels.py.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/gpu/accumulate.h"
#include "kernels/gpu/table.cuh"

namespace ringreduce::gpu {

// A Pack whose loads and stores are counted.
struct alignas(16) CountedPack {
  Word word[4];
};
static std::uint64_t packs_accessed = 0;

template <class Format>
struct ByWhole<Format, CountedPack> : ByWhole<Format, Pack> {
  using Base = ByWhole<Format, Pack>;
  static typename Base::Raw load(const char* p) { return ++packs_accessed, Base::load(p); }
  static void store(char* p, const typename Base::Raw& raw) { ++packs_accessed, Base::store(p, raw); }
};

}  // namespace ringreduce::gpu

namespace {

using namespace ringreduce;
using namespace ringreduce::gpu;

struct Row {
  std::string_view name;
  void (*accumulate)(const Accumulate& job, std::uint64_t thread, std::uint64_t threads);
};

constexpr Row kRows[] = {
#define ROW(name, Format, Op) {#name, accumulate<Format, Op, CountedPack>},
    RINGREDUCE_GPU_KERNELS(ROW)
#undef ROW
};

constexpr Row kMove = {"move_bytes", move_bytes};  // no kernel of its own: the interpreter's

void write(const std::string& text, char* out) { std::memcpy(out, text.c_str(), text.size() + 1); }

}  // namespace

extern "C" {

// Runs all virtual threads of the named kernel, or of move_bytes, in an order drawn by `seed`; false where there is no
// such kernel.
bool run(const char* name, const Accumulate* job, std::uint64_t threads, unsigned seed) {
  const auto* row = std::find_if(std::begin(kRows), std::end(kRows), [&](const Row& r) { return r.name == name; });
  if (name == kMove.name) row = &kMove;
  if (row == std::end(kRows)) return false;
  std::vector<std::uint64_t> order(threads);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (std::uint64_t thread : order) row->accumulate(*job, thread, threads);
  return true;
}

// How many packs have been loaded and stored since the last call, but for those of move_bytes.
std::uint64_t packs() { return std::exchange(packs_accessed, 0); }

// The codes that a GPU with instructions for float8_e5m2 makes of numbers. The instruction is modelled by the PTX ISA's
// rule for cvt.rn.satfinite: a magnitude beyond the largest number becomes that number.
void narrow_to_float8_e5m2(const float* values, std::uint8_t* codes, std::uint64_t count) {
  constexpr float kLargest = 57344;
  for (std::uint64_t i = 0; i < count; ++i) {
    const float bounded = values[i] > kLargest ? kLargest : values[i] < -kLargest ? -kLargest : values[i];
    codes[i] = static_cast<std::uint8_t>(Float8E5M2Code::narrow(bounded) + infinite_float8_e5m2(values[i], 0));
  }
}

// The name of kernel `index`, nullptr past the last.
const char* kernel(std::size_t index) { return index < std::size(kRows) ? kRows[index].name.data() : nullptr; }

// kernel_for() of what is called so: writes the kernel's name to `out` and returns the parts.
std::uint32_t kernel_for_names(const char* dtype, const char* op, char* out) {
  const auto at = [](const auto& all, auto named) {
    return std::find_if(std::begin(all), std::end(all), named) - std::begin(all);
  };
  const auto d = at(detail::kDTypes, [&](const auto& info) { return info.name == dtype; });
  const auto o = at(detail::kReduceOps, [&](std::string_view name) { return name == op; });
  const Kernel found = kernel_for(static_cast<DType>(d), static_cast<ReduceOp>(o));
  write(found.name, out);
  return found.parts;
}

void copy_kernel_name(char* out) { write(copy_kernel().name, out); }

std::size_t job_bytes() { return sizeof(Accumulate); }
}
