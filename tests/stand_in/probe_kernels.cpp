// The kernels of bench/gpu/probe.cu as the stand-in driver runs them.
#include "../../bench/gpu/probe.cu"

#include "kernel.h"

using ringreduce::gpu::Probe;

STAND_IN_KERNEL(probe_hand_over, Probe, 512) {
  ringreduce::gpu::hand_over(parameters, block, true, [] {});
}

STAND_IN_KERNEL(probe_nothing, Probe, 512) { (void)parameters; }
