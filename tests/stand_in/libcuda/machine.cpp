#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace stand_in {

std::size_t setting(const char* name, std::size_t otherwise) {
  const char* const text = std::getenv((std::string("RINGREDUCE_STAND_IN_") + name).c_str());
  return text == nullptr || *text == '\0' ? otherwise : std::strtoull(text, nullptr, 10);
}

std::atomic<bool> forked{false};
thread_local std::vector<Device*> contexts;
thread_local int capture_mode = kCaptureModeGlobal;

// Never destroyed: streams' threads may still run when the process ends.
Machine& machine() {
  static Machine& one = *new Machine;
  return one;
}

Piece::~Piece() {
  close(fd);
  if (counts) machine().devices[static_cast<std::size_t>(device)].used -= bytes;
}

CUresult forbidden_by_captures() {
  if (capture_mode == kStreamCaptureModeRelaxed) return kSuccess;
  bool any = false;
  for (const auto& capture : machine().captures) {
    if (capture->mode == kStreamCaptureModeRelaxed) continue;
    const bool global = capture->mode == kCaptureModeGlobal && capture_mode == kCaptureModeGlobal;
    if (global || capture->thread == std::this_thread::get_id()) capture->invalid = any = true;
  }
  return any ? kCaptureUnsupported : kSuccess;
}

Device* find_device(CUdevice ordinal) {
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= machine().devices.size()) return nullptr;
  return &machine().devices[static_cast<std::size_t>(ordinal)];
}

Stream* find_stream(CUstream handle) {
  constexpr std::uintptr_t kLegacy = 1;
  if (handle == nullptr || reinterpret_cast<std::uintptr_t>(handle) == kLegacy) {
    Device& device = *contexts.back();
    if (device.null_stream == nullptr) device.null_stream.reset(new Stream{device.ordinal});
    return device.null_stream.get();
  }
  const auto found = machine().streams.find(static_cast<Stream*>(handle));
  return found == machine().streams.end() ? nullptr : found->second.get();
}

Event* find_event(CUevent handle) {
  const auto found = machine().events.find(static_cast<Event*>(handle));
  return found == machine().events.end() ? nullptr : *found;
}

Range* find_range(CUdeviceptr pointer, std::size_t bytes, CUdeviceptr* start) {
  auto next = machine().ranges.upper_bound(pointer);
  if (next == machine().ranges.begin()) return nullptr;
  auto& [first, range] = *--next;
  if (pointer - first > range.bytes || bytes > range.bytes - (pointer - first) || pointer == first + range.bytes)
    return nullptr;
  if (range.place == Place::reserved && range.piece == nullptr) return nullptr;
  if (start != nullptr) *start = first;
  return &range;
}

Range* find_reserved(CUdeviceptr pointer, std::size_t bytes, bool mapped) {
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end()) return nullptr;
  Range& range = found->second;
  return range.place == Place::reserved && range.bytes == bytes && (range.piece != nullptr) == mapped ? &range
                                                                                                      : nullptr;
}

bool can_access(int device, int other) { return device == other || setting("NO_PEER", 0) == 0; }

static bool is_idle(const Device& device) {
  if (device.null_stream != nullptr && !device.null_stream->worker.idle()) return false;
  return std::all_of(machine().streams.begin(), machine().streams.end(), [&](const auto& entry) {
    return entry.second->device != device.ordinal || entry.second->worker.idle();
  });
}

bool context_is_idle() { return is_idle(*contexts.back()); }

bool peers_are_idle() {
  return std::all_of(machine().devices.begin(), machine().devices.end(), [](const Device& device) {
    return (&device != contexts.back() && !device.peers.contains(contexts.back()->ordinal)) || is_idle(device);
  });
}

CUresult submit(CUstream handle, Operation operation) {
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream->device != contexts.back()->ordinal) return kInvalidHandle;
  if (stream->capture == nullptr) {
    stream->worker.push(std::move(operation));
    return kSuccess;
  }
  Capture& capture = *stream->capture;
  if (capture.invalid) return kCaptureInvalidated;
  std::vector<std::size_t>& ends = capture.ends[stream];
  capture.graph.nodes.push_back({std::move(operation), ends});
  ends = {capture.graph.nodes.size() - 1};
  return kSuccess;
}

std::shared_ptr<Piece> make_piece(Device& device, std::size_t bytes) {
  if (bytes > setting("MEMORY", std::size_t{8} << 30) - device.used) return nullptr;
  const int fd = memfd_create("stand-in device memory", MFD_CLOEXEC);
  if (fd < 0) return nullptr;
  device.used += bytes;
  auto piece = std::make_shared<Piece>(fd, bytes, device.ordinal, true);
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return nullptr;
  std::vector<unsigned char> rubbish(std::min<std::size_t>(bytes, 4096), 0xA5);
  if (pwrite(fd, rubbish.data(), rubbish.size(), 0) < 0 ||
      pwrite(fd, rubbish.data(), rubbish.size(), static_cast<off_t>(bytes - rubbish.size())) < 0)
    return nullptr;
  return piece;
}

void* map_piece(const Piece& piece) {
  void* const mapped = mmap(nullptr, piece.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, piece.fd, 0);
  return mapped == MAP_FAILED ? nullptr : mapped;
}

CUresult unmap(CUdeviceptr pointer, Place place) {
  const auto found = machine().ranges.find(pointer);
  if (found == machine().ranges.end() || found->second.place != place) return kInvalidValue;
  munmap(at(pointer), found->second.bytes);
  machine().ranges.erase(found);
  return kSuccess;
}

}  // namespace stand_in
