// The kernels of csrc, launched as a group launches them.

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "driver/tests.h"
#include "engine/gpu/batches.h"
#include "engine/gpu/flat_program.h"
#include "engine/program.h"
#include "kernels/gpu/table.cuh"
#include "stress/plans.h"

namespace {

void all_kernels() {
  const DevicePtr device = open_device(0);
  const Module module = module_of(device, "kernels.so");
#define FIND(name, ...)                                                                    \
  expect(resident_blocks(*device, module.function("run_" #name), gpu::kBlockThreads) > 0); \
  expect(resident_blocks(*device, module.function("accumulate_" #name), 256) > 0);
  RINGREDUCE_GPU_KERNELS(FIND)
#undef FIND
  const Function sum = module.function("accumulate_uint64_sum");
  const std::size_t words = 10'000;
  const DeviceMemory from(device, words * 8), to(device, words * 8);
  gpu::Accumulate job{};
  job.dsts[0] = reinterpret_cast<void*>(to.pointer());
  job.srcs[0] = job.srcs[1] = reinterpret_cast<const void*>(from.pointer());
  job.count = words;
  job.factor = job.divisor = job.copies = 1;
  job.n = 2;
  job.scaled = -1;
  const Stream stream(device);
  stream.fill(from.pointer(), 1, from.bytes());
  stream.launch(sum, {3, 256}, job);
  expect(read(stream, to.pointer(), words) == same(words, 0x0202020202020202));
  expect_error([&] { stream.launch(sum, {1, 257}, job); }, {"of accumulate_uint64_sum with 1 blocks of 257 threads"});
}

constexpr std::uint32_t kSlice = 32;  // elements: a call takes several rounds

// A rank of a group of two in this process, which sums floats.
class Rank {
 public:
  Rank(const DevicePtr& device, std::uint32_t rank, const stress::Lowered& plan, gpu::RegionShape shape,
       std::uint32_t count)
      : stream_(device),
        module_(module_of(device, "kernels.so")),
        kernel_(module_.function("run_float32_sum")),
        program_(flat(plan, {.rank = static_cast<int>(rank), .depth = shape.depth, .one_lane = false})),
        image_(device, program_.image().size()),
        region_(device, shape.bytes()),
        input_(device, count * sizeof(float)),
        output_(device, count * sizeof(float)),
        arrived_(device, sizeof(std::uint32_t)),
        words_(device, shape.word_bytes()),
        report_(device, sizeof(gpu::Report)) {
    stream_.copy(image_.pointer(), reinterpret_cast<CUdeviceptr>(program_.image().data()), image_.bytes());
    std::vector<float> values(count);
    for (std::uint32_t i = 0; i < count; i++) values[i] = static_cast<float>(i * (rank + 1));
    stream_.copy(input_.pointer(), reinterpret_cast<CUdeviceptr>(values.data()), input_.bytes());
    stream_.synchronize();
    run_.program = program_.at(at(image_.pointer()));
    run_.shape = shape;
    run_.report = reinterpret_cast<gpu::Report*>(report_.pointer());
    run_.arrived = reinterpret_cast<std::uint32_t*>(arrived_.pointer());
    run_.input.data[0] = at(input_.pointer());
    run_.output.data[0] = at(output_.pointer());
    run_.input.count[0] = run_.output.count[0] = run_.largest = count;
    run_.slice = kSlice;
    run_.timeout = 30'000'000'000;
    run_.factor = run_.divisor = 1;
    run_.element = sizeof(float);
    run_.parts = 1;
    run_.rank = rank;
  }

  void meet(const std::array<const Rank*, 2>& ranks) {
    for (std::size_t r = 0; r < ranks.size(); r++) {
      run_.words[r] = at(ranks[r]->words_.pointer());
      run_.regions[r] = at(ranks[r]->region_.pointer());
    }
  }

  // As a rank that has its GPU to itself.
  void launch() {
    run_.mode = gpu::Mode::run;
    run_.lanes = run_.shape.lanes;
    stream_.launch(kernel_, {run_.lanes, 64}, run_);
  }

  // As ranks that share one: what a batch needs is there when it begins, so its blocks may give up at once.
  void take_steps() {
    run_.mode = gpu::Mode::step;
    run_.lanes = 1;
    run_.timeout = 0;
    gpu::Run here = run_;
    here.program = program_.at(program_.image().data());
    const gpu::FlatChannel& channel = here.program.channels[0];
    for (run_.round = 0; run_.round < gpu::rounds_of(here, channel); run_.round++)
      for (run_.batch = 0; run_.batch < channel.batches; run_.batch++) {
        std::vector<StreamValue> values;
        gpu::for_each_wait(here, gpu::lane_batch(here, 0, 0, run_.round, run_.batch), [&](const gpu::Wait& wait) {
          values.push_back({StreamValue::Kind::wait, words_.pointer() + wait.offset, wait.value});
        });
        stream_.take_values(values);
        stream_.launch(kernel_, {3, 64}, run_);
      }
  }

  void expect_sum() const {
    std::vector<float> values(run_.largest);
    stream_.copy(reinterpret_cast<CUdeviceptr>(values.data()), output_.pointer(), output_.bytes());
    stream_.synchronize();
    const auto& report = *reinterpret_cast<const gpu::Report*>(report_.data());
    expect(report.gave_up == 0, "gave up: " + std::to_string(report.gave_up));
    for (std::size_t i = 0; i < values.size(); i++)
      expect(values[i] == static_cast<float>(3 * i), std::to_string(i) + ": " + std::to_string(values[i]));
    stream_.fill(output_.pointer(), 0, output_.bytes());
    stream_.synchronize();
  }

 private:
  static char* at(CUdeviceptr pointer) { return reinterpret_cast<char*>(pointer); }
  static gpu::FlatProgram flat(const stress::Lowered& plan, const gpu::FlatProgram::Options& options) {
    const Program program = program_of({Operation::all_reduce, plan}, {.rank = options.rank, .size = 2});
    return {program, batches_of(program, options.depth), options};
  }

  Stream stream_;
  Module module_;
  Function kernel_;
  gpu::FlatProgram program_;
  DeviceMemory image_, region_, input_, output_, arrived_;
  HostMemory words_, report_;
  gpu::Run run_{};
};

// Two ranks on `devices` sum, more than once.
void all_reduce(std::array<int, 2> devices, std::uint32_t lanes, void (Rank::*call)()) {
  const std::vector<DevicePtr> open{open_device(devices[0]), open_device(devices[1])};
  open[0]->enable_access(*open[1]);
  open[1]->enable_access(*open[0]);
  const gpu::RegionShape shape{.ranks = 2, .lanes = lanes, .depth = 4, .slot_bytes = kSlice * sizeof(float)};
  for (const stress::Lowered& plan : {stress::one_shot(2), stress::two_shot(2), stress::ring(2)}) {
    Rank zero(open[0], 0, plan, shape, 1001), one(open[1], 1, plan, shape, 1001);
    for (Rank* rank : {&zero, &one}) rank->meet({&zero, &one});
    for (int i = 0; i < 3; i++) {
      (zero.*call)();
      if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the other one is late
      (one.*call)();
      zero.expect_sum();
      one.expect_sum();
    }
  }
}

}  // namespace

const Tests kOurKernels{
    {"all_kernels", all_kernels},
    {"all_reduce_in_kernels", [] { all_reduce({0, 1}, 2, &Rank::launch); }},
    {"all_reduce_in_steps", [] { all_reduce({0, 0}, 1, &Rank::take_steps); }},
};
