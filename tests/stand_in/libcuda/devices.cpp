// The stand-in's start, its devices and their contexts.
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <sstream>
#include <vector>

#include "machine.h"

using namespace stand_in;

namespace {

constexpr struct {
  CUresult result;
  const char *name, *text;
} kResults[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kPeerAccessUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
     "peer access is not supported between these two devices"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kPeerAccessAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

// The numbers of the devices that this process sees, of so many.
std::vector<int> visible(std::size_t devices) {
  std::vector<int> all(devices), seen;
  std::iota(all.begin(), all.end(), 0);
  const char* const text = std::getenv("RINGREDUCE_STAND_IN_VISIBLE");
  if (text == nullptr) return all;
  std::istringstream numbers(text);
  for (int number; numbers >> number; numbers.ignore(1)) seen.push_back(number);
  return seen;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) std::size_t stand_in_calls(const char* function) {
  std::lock_guard lock(machine().mutex);
  const auto found = machine().calls.find(function);  // operator[] would keep the caller's text, which it may free
  return found == machine().calls.end() ? 0 : found->second;
}

API cuInit(unsigned) {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forked = machine().initialized; });
  (void)registered;
  if (forked) return kNotInitialized;
  Machine& all = machine();
  std::lock_guard lock(all.mutex);
  const std::size_t devices = setting("DEVICES", 2);
  if (devices == 0) return kNoDevice;
  if (all.devices.empty())
    for (const int number : visible(devices)) all.devices.emplace_back(static_cast<int>(all.devices.size()), number);
  all.initialized = true;
  all.locks_contexts = setting("CONTEXT_LOCK", 0) != 0;
  return kSuccess;
}

API cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}

API cuGetErrorName(CUresult result, const char** name) {
  for (const auto& known : kResults)
    if (known.result == result) return *name = known.name, kSuccess;
  return *name = nullptr, kInvalidValue;
}

API cuGetErrorString(CUresult result, const char** text) {
  for (const auto& known : kResults)
    if (known.result == result) return *text = known.text, kSuccess;
  return *text = nullptr, kInvalidValue;
}

API cuDeviceGetCount(int* count) {
  ENTER(false);
  *count = static_cast<int>(machine().devices.size());
  return kSuccess;
}

API cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER(false);
  if (find_device(ordinal) == nullptr) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

API cuDeviceGetName(char* name, int bytes, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::snprintf(name, static_cast<std::size_t>(bytes), "Stand-in GPU");
  return kSuccess;
}

API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::memset(uuid->bytes, 0x5A, sizeof(uuid->bytes));
  uuid->bytes[15] = static_cast<unsigned char>(find_device(device)->number);
  return kSuccess;
}

API cuDeviceGetPCIBusId(char* id, int bytes, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  std::snprintf(id, static_cast<std::size_t>(bytes), "0000:%02x:00.0", find_device(device)->number + 1);
  return kSuccess;
}

API cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
  ENTER(false);
  if (find_device(device) == nullptr) return kInvalidDevice;
  switch (attribute) {
    case kMultiprocessorCount:
      *value = static_cast<int>(std::max<std::size_t>(setting("BLOCKS", 64) / 2, 1));
      return kSuccess;
    case kComputeCapabilityMajor:
      *value = 9;
      return kSuccess;
    case kComputeCapabilityMinor:
      *value = 0;
      return kSuccess;
    case kVirtualMemoryManagementSupported:
    case kHandleTypePosixFileDescriptorSupported:
      *value = setting("NO_VMM", 0) == 0;
      return kSuccess;
    case kCanUse64BitStreamMemOps:
      *value = 1;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  ENTER(false);
  Device* const device = find_device(ordinal);
  if (device == nullptr) return kInvalidDevice;
  device->retained++;
  *context = device;
  return kSuccess;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
  ENTER(false);
  Device* const device = find_device(ordinal);
  if (device == nullptr) return kInvalidDevice;
  if (device->retained == 0) return kInvalidContext;
  device->retained--;
  return kSuccess;
}

API cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned* flags, int* active) {
  ENTER(false);
  Device* const device = find_device(ordinal);
  if (device == nullptr) return kInvalidDevice;
  *flags = 0;
  *active = device->retained > 0;
  return kSuccess;
}

API cuCtxPushCurrent_v2(CUcontext context) {
  ENTER(false);
  if (context == nullptr || static_cast<Device*>(context)->retained == 0) return kInvalidContext;
  contexts.push_back(static_cast<Device*>(context));
  return kSuccess;
}

API cuCtxPopCurrent_v2(CUcontext* context) {
  ENTER();
  *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

API cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  ENTER(false);
  if (find_device(device) == nullptr || find_device(peer) == nullptr) return kInvalidDevice;
  *can = device != peer && can_access(find_device(device)->number, find_device(peer)->number);
  return kSuccess;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  ENTER();
  if (flags != 0) return kInvalidValue;
  const Device& other = *static_cast<Device*>(peer);
  if (&other == contexts.back()) return kInvalidDevice;
  if (!can_access(contexts.back()->number, other.number)) return kPeerAccessUnsupported;
  return contexts.back()->peers.insert(other.ordinal).second ? kSuccess : kPeerAccessAlreadyEnabled;
}
