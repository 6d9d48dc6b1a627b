// Functions of the CUDA driver that bench/gpu/driver.py calls and csrc does not. It calls them through ctypes, which
// checks nothing, so they are written down here: the stand-in must define them so, and signatures.cpp compares them
// with cuda.h.
#pragma once

#include <cstdint>

// FUNCTION(name, what the driver appends to it, parameters), as in cuda/api.h.
#define PROBE_CUDA_FUNCTIONS(FUNCTION)                                                                            \
  FUNCTION(cuStreamWaitValue64, _v2, (CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags)) \
  FUNCTION(cuStreamWriteValue64, _v2, (CUstream stream, CUdeviceptr address, std::uint64_t value, unsigned flags))
