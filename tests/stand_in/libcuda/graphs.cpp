// Captures and graphs. But for two, these are calls of torch's, not ours.
#include <utility>

#include "machine.h"

using namespace stand_in;

API cuStreamIsCapturing(CUstream handle, int* status) {
  ENTER();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  *status = stream->capture == nullptr ? kStreamCaptureStatusNone : stream->capture->invalid ? 2 : 1;
  return kSuccess;
}

API cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER(false);
  if (*mode < kCaptureModeGlobal || *mode > kStreamCaptureModeRelaxed) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

API cuStreamBeginCapture_v2(CUstream handle, int mode) {
  ENTER();
  Stream* const stream = find_stream(handle);
  if (stream == nullptr || stream == contexts.back()->null_stream.get()) return kCaptureUnsupported;
  if (stream->capture != nullptr) return kInvalidValue;
  stream->capture = std::make_shared<Capture>(stream, mode, std::this_thread::get_id());
  stream->capture->ends[stream] = {};
  machine().captures.insert(stream->capture);
  return kSuccess;
}

API cuStreamEndCapture(CUstream handle, void** graph_handle) {
  ENTER();
  *graph_handle = nullptr;
  Stream* const stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream->capture == nullptr) return kInvalidValue;
  const std::shared_ptr<Capture> capture = stream->capture;
  if (capture->origin != stream) return capture->invalid = true, kCaptureUnmatched;
  machine().captures.erase(capture);
  const std::vector<std::size_t> last = capture->ends[stream];
  bool joined = true;
  for (const auto& [member, ends] : capture->ends) {
    member->capture = nullptr;
    for (const std::size_t end : ends) joined = joined && capture->graph.comes_after(last, end);
  }
  if (capture->invalid) return kCaptureInvalidated;
  if (!joined) return kCaptureUnjoined;
  const auto graph = std::make_shared<const Graph>(std::move(capture->graph));
  machine().graphs[graph.get()] = graph;
  *graph_handle = const_cast<Graph*>(graph.get());
  return kSuccess;
}

API cuGraphInstantiateWithFlags(void** executable, void* graph_handle, unsigned long long) {
  ENTER();
  const auto found = machine().graphs.find(static_cast<const Graph*>(graph_handle));
  if (found == machine().graphs.end()) return kInvalidHandle;
  const auto copy = std::make_shared<const Graph>(*found->second);
  machine().graphs[copy.get()] = copy;
  *executable = const_cast<Graph*>(copy.get());
  return kSuccess;
}

API cuGraphLaunch(void* executable, CUstream stream) {
  ENTER();
  const auto found = machine().graphs.find(static_cast<const Graph*>(executable));
  if (found == machine().graphs.end()) return kInvalidHandle;
  return submit(stream, [graph = found->second] { graph->run(); });
}

API cuGraphDestroy(void* graph) {
  ENTER();
  return machine().graphs.erase(static_cast<const Graph*>(graph)) == 1 ? kSuccess : kInvalidHandle;
}

API cuGraphExecDestroy(void* executable) { return cuGraphDestroy(executable); }
