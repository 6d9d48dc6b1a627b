// Tests of csrc/cuda on the stand-in driver, one function each: `driver_test NAME`. It ends with 0, or says what was
// not as expected and ends with 1. test_cuda_driver.py runs it, and chooses the machine that the stand-in plays.

#include "driver_test.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/lent_descriptor.h"
#include "cuda/shared_memory.h"
#include "engine/gpu/batches.h"
#include "engine/gpu/flat_program.h"
#include "engine/program.h"
#include "kernels/gpu/table.cuh"
#include "stress/plans.h"

using namespace ringreduce;
using namespace ringreduce::cuda;

namespace {

void expect(bool ok, const std::string& found = "", std::source_location where = std::source_location::current()) {
  if (ok) return;
  std::fprintf(stderr, "driver_test.cpp:%u: not as expected %s\n", where.line(), found.c_str());
  std::exit(1);
}

// `action` throws Error(system) with a text that has all `parts`.
void expect_error(const std::function<void()>& action, const std::vector<std::string>& parts,
                  std::source_location where = std::source_location::current()) {
  try {
    action();
  } catch (const Error& error) {
    for (const std::string& part : parts)
      expect(std::string(error.what()).find(part) != std::string::npos, "[" + part + "] in: " + error.what(), where);
    expect(error.kind() == ErrorKind::system, "kind", where);
    return;
  }
  expect(false, "no error", where);
}

// Memory that is shared in the way that DRIVER_TEST_FIRST says, if it does.
std::unique_ptr<OwnMemory> own_memory(const DevicePtr& device, std::size_t bytes) {
  const char* const first = std::getenv("DRIVER_TEST_FIRST");
  if (first == nullptr) return std::make_unique<OwnMemory>(device, bytes);
  const bool ipc = std::strcmp(first, "ipc") == 0;
  return std::make_unique<OwnMemory>(device, bytes, ipc ? Handle::Kind::ipc : Handle::Kind::file_descriptor);
}

DevicePtr open_device(int ordinal) { return std::make_shared<const Device>(ordinal); }

std::vector<std::uint64_t> read(const Stream& stream, CUdeviceptr from, std::size_t words) {
  std::vector<std::uint64_t> values(words);
  stream.copy(reinterpret_cast<CUdeviceptr>(values.data()), from, words * 8);
  stream.synchronize();
  return values;
}

std::vector<std::uint64_t> same(std::size_t words, std::uint64_t value) { return std::vector(words, value); }

Module module_of(const DevicePtr& device, const std::string& file) {
  return Module(device, ("so:" + std::string(std::getenv("STAND_IN_FOLDER")) + "/" + file).c_str());
}

Module kernels(const DevicePtr& device) { return module_of(device, "driver_test_kernels.so"); }

// What others than we call.
struct Others {
  void* const library = dlopen(std::getenv("RINGREDUCE_LIBCUDA"), RTLD_NOW);
  template <class... A>
  CUresult call(const char* name, A... arguments) const {
    return reinterpret_cast<CUresult (*)(A...)>(dlsym(library, name))(arguments...);
  }
  // How often the function was called.
  std::size_t calls(const char* name) const {
    return reinterpret_cast<std::size_t (*)(const char*)>(dlsym(library, "stand_in_calls"))(name);
  }
};

// ---- one process ----------------------------------------------------------------------------------------------------

void devices() {
  expect(Device::count() == 2);
  const Device zero(0), one(1);
  expect(zero.describe() == "device 0 (Stand-in GPU, 0000:01:00.0)", zero.describe());
  expect(one.pci_bus_id() == "0000:02:00.0", one.pci_bus_id());
  expect(zero.uuid() != one.uuid());
  expect(zero.capability() == 90 && zero.multiprocessors() == 32 && zero.has_stream_values());
  expect(zero.attribute(-1) == 0);
  expect(zero.can_access(one) && zero.can_access(zero));
  zero.enable_access(one);
  zero.enable_access(one);
  expect_error([] { Device(2); }, {"no CUDA device 2", "the driver sees 2", "CUDA_VISIBLE_DEVICES"});
  expect_error([] { Device(-1); }, {"no CUDA device -1"});
}

void memory() {
  const DevicePtr device = open_device(1);
  const DeviceMemory device_memory(device, 8 << 20);
  const Stream stream(device);
  const std::size_t words = device_memory.bytes() / 8;
  expect(read(stream, device_memory.pointer(), words) == same(words, 0));
  const HostMemory host(device, 64);
  expect(std::string(64, '\0') == std::string(reinterpret_cast<char*>(host.data()), 64));
  stream.fill(host.pointer(), 7, 64);
  stream.synchronize();
  expect(std::string(64, '\7') == std::string(reinterpret_cast<char*>(host.data()), 64));
  int ordinal = -1;
  driver().cuPointerGetAttribute(&ordinal, kPointerAttributeDeviceOrdinal, device_memory.pointer() + 100);
  expect(ordinal == 1);
}

void out_of_memory() {  // with 32 MB
  const DevicePtr device = open_device(0);
  const std::string text = " of 64 MB on device 0: CUDA_ERROR_OUT_OF_MEMORY (out of memory)";
  expect_error([&] { DeviceMemory(device, 64 << 20); }, {"cuMemAlloc" + text});
  expect_error([&] { OwnMemory(device, 64 << 20, Handle::Kind::ipc); }, {"cuMemAlloc" + text});
  expect_error([&] { OwnMemory(device, 64 << 20, Handle::Kind::file_descriptor); }, {"cuMemCreate" + text});
  for (int i = 0; i < 3; i++)
    for (const auto kind : {Handle::Kind::ipc, Handle::Kind::file_descriptor}) OwnMemory(device, 32 << 20, kind);
  for (int i = 0; i < 3; i++) DeviceMemory(device, 32 << 20);  // each is given back
}

void launches() {
  const DevicePtr device = open_device(0);
  const Module module = kernels(device);
  const Function add = module.function("add");
  const std::size_t words = 1000;
  const DeviceMemory memory(device, words * 8);
  const Stream stream(device);
  stream.launch(add, {7, 32}, Add{memory.pointer(), words, 3});
  stream.launch(add, {1, 1}, Add{memory.pointer(), words, 4});
  stream.synchronize();
  const Stream legacy = Stream::borrowed(device, nullptr);
  expect(read(legacy, memory.pointer(), words) == same(words, 7));

  // As many blocks as are said to be resident can wait for one another.
  const Function meet = module.function("meet");
  const unsigned blocks = resident_blocks(*device, meet, 128);
  expect(blocks == 64);
  const DeviceMemory counter(device, 8);
  legacy.launch(meet, {blocks, 128}, Meet{counter.pointer()});
  expect(read(legacy, counter.pointer(), 1)[0] == 64);

  expect_error([&] { legacy.launch(add, {1, 2048}, Add{}); },
               {"cuLaunchKernel of add with 1 blocks of 2048 threads on device 0: CUDA_ERROR_INVALID_VALUE"});
  expect_error([&] { module.function("subtract"); },
               {"cuModuleGetFunction of subtract on device 0: CUDA_ERROR_NOT_FOUND"});
  expect_error(
      [&] {
        Module(device,
               "\x7f"
               "ELF");
      },
      {"cuModuleLoadData on device 0 (Stand-in GPU, 0000:01:00.0) of compute capability 9.0: CUDA_ERROR_INVALID_"});
}

void priorities() {
  const DevicePtr device = open_device(0);
  const Device::Use use(*device);
  const auto expect_priority = [](const Stream& stream, int expected) {
    int priority = 1;
    expect(Others().call("cuStreamGetPriority", stream.handle(), &priority) == kSuccess);
    expect(priority == expected, std::to_string(priority));
  };
  expect_priority(Stream(device), 0);
  expect_priority(Stream(device, -2), -2);
  expect_priority(Stream(device, Stream::highest_priority), -5);
}

void streams() {
  const DevicePtr zero = open_device(0), one = open_device(1);
  const Stream waiting(zero), other(one);
  const DeviceMemory flag(zero, 8), memory(one, 64);
  const Event event(zero), never(zero);
  expect(waiting.done() && never.done());
  waiting.wait_value(flag.pointer(), 5);
  waiting.record(event);
  other.wait(event);
  other.fill(memory.pointer(), 1, 64);
  // The waiting streams do not hold up a third one.
  const Stream third(zero);
  third.write_value(flag.pointer(), 4);
  third.synchronize();
  expect(!waiting.done() && !other.done() && !event.done());
  expect(read(third, memory.pointer(), 8) == same(8, 0));
  third.write_value(flag.pointer(), 6);  // past it, which is not enough
  third.synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  expect(!event.done());
  third.write_value(flag.pointer(), 5);
  other.synchronize();
  expect(event.done());
  expect(read(third, memory.pointer(), 8) == same(8, 0x0101010101010101));
  expect_error([&] { waiting.wait_value(flag.pointer() + 4, 1); }, {"cuStreamBatchMemOp on device 0"});

  // More than one call of the driver takes, in their order.
  std::vector<StreamValue> values;
  for (std::uint64_t i = 6; i < 706; i++) {
    values.push_back({StreamValue::Kind::write, flag.pointer(), i});
    values.push_back({StreamValue::Kind::wait, flag.pointer(), i});
  }
  third.take_values(values);
  expect(read(third, flag.pointer(), 1) == same(1, 705));
  third.take_values({});

  const Event start(zero, true), end(zero, true);
  third.record(start);
  third.record(end);
  end.synchronize();
  expect(end.milliseconds_since(start) >= 0);
  expect_error([&] { event.milliseconds_since(start); }, {"cuEventElapsedTime on device 0: CUDA_ERROR_INVALID_HANDLE"});
}

// While a launch of `function` in `launching` waits for something, no call of its context comes back; a store ends
// that.
void expect_held(const Stream& launching, const Function& function, unsigned launches, unsigned at_once) {
  const DevicePtr& device = launching.device();
  const DeviceMemory memory(device, 64);
  const HostMemory flag(device, 8);
  const Stream waiting(device), other(device);
  const Stream& first = launches > 1 ? launching : waiting;
  first.wait_value(flag.pointer(), 1);
  std::atomic<unsigned> launched = 0;
  std::atomic<bool> asked = false;
  std::thread launcher([&] {
    for (unsigned i = 0; i < launches; i++) {
      launching.launch(function, {1, 1}, Add{memory.pointer(), 8, 1});
      launched++;
    }
  });
  while (launched < at_once) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::thread asker([&] {
    (void)other.done();
    asked = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  expect(launched == at_once && !asked, std::to_string(launched));
  std::atomic_ref(*reinterpret_cast<std::uint64_t*>(flag.data())).store(1);
  launcher.join();
  asker.join();
  expect(read(launching, memory.pointer(), 8) == same(8, launches));
}

void context_lock() {  // with CONTEXT_LOCK
  const DevicePtr device = open_device(0);
  const Module module = kernels(device);
  const Function add = module.function("add");
  const Stream stream(device);
  expect_held(stream, add, 1, 0);        // which loads it
  expect_held(stream, add, 2000, 1023);  // of a queue of 1024 operations, one of which waits
}

constexpr int kCaptureGlobal = 0, kCaptureThreadLocal = 1;

// What torch calls for a CUDA graph.
struct Graphs : Others {
  CUresult begin(const Stream& stream, int mode = kCaptureGlobal) const {
    return call("cuStreamBeginCapture_v2", stream.handle(), mode);
  }
  CUresult end(const Stream& stream, void** graph) const { return call("cuStreamEndCapture", stream.handle(), graph); }
};

void capture() {
  const DevicePtr device = open_device(0);
  const Device::Use use(*device);
  const Module module = kernels(device);
  const Function add = module.function("add");
  const DeviceMemory memory(device, 64), flag(device, 8);
  const Stream main(device), side(device);
  const Event fork(device), join(device);
  const Graphs graphs;
  void* graph = nullptr;

  expect(!main.capturing());
  expect(graphs.begin(main) == kSuccess);
  expect(main.capturing() && !side.capturing());
  {
    Add parameters{memory.pointer(), 8, 1};
    main.launch(add, {2, 2}, parameters);
    parameters.value = 1000;  // too late
  }
  main.record(fork);
  side.wait(fork);
  expect(side.capturing());
  // One waits for the other, which is launched later: both must run at once.
  main.wait_value(flag.pointer(), 1);
  side.launch(add, {1, 1}, Add{memory.pointer(), 8, 10});
  side.write_value(flag.pointer(), 1);
  side.record(join);
  main.wait(join);
  main.launch(add, {1, 1}, Add{memory.pointer(), 8, 100});
  expect(graphs.end(main, &graph) == kSuccess);
  expect(!main.capturing() && !side.capturing());
  expect(read(main, memory.pointer(), 8) == same(8, 0));

  void* executable = nullptr;
  expect(graphs.call("cuGraphInstantiateWithFlags", &executable, graph, 0ULL) == kSuccess);
  expect(graphs.call("cuGraphDestroy", graph) == kSuccess);
  for (int i = 0; i < 3; i++) {
    main.fill(flag.pointer(), 0, 8);
    expect(graphs.call("cuGraphLaunch", executable, main.handle()) == kSuccess);
  }
  expect(read(main, memory.pointer(), 8) == same(8, 333));
  expect(graphs.call("cuGraphExecDestroy", executable) == kSuccess);

  // What a capture forbids, ends it.
  const std::string forbidden =
      "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED (operation not permitted when stream is capturing)";
  const std::map<std::string, std::function<void()>> calls{
      {"cuStreamSynchronize on device 0: ", [&] { main.synchronize(); }},
      {"cuStreamQuery on device 0: ", [&] { (void)main.done(); }},
      {"cuEventQuery on device 0: ", [&] { (void)fork.done(); }},
      {"cuEventSynchronize on device 0: ", [&] { fork.synchronize(); }},
      {"cuMemAlloc of 64 bytes on device 0: ", [&] { DeviceMemory(device, 64); }},
      {"cuMemHostAlloc of 64 bytes on device 0: ", [&] { HostMemory(device, 64); }},
      {"cuModuleLoadData on device 0 (Stand-in GPU, 0000:01:00.0) of compute capability 9.0: ",
       [&] { kernels(device); }}};
  for (const auto& [name, call] : calls) {
    expect(graphs.begin(main) == kSuccess);
    expect_error(call, {name + forbidden});
    expect_error([&] { main.fill(memory.pointer(), 0, 8); }, {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"});
    expect(graphs.end(main, &graph) != kSuccess && graph == nullptr);
  }
  // A stream that was forked must be joined.
  expect(graphs.begin(main) == kSuccess);
  main.record(fork);
  side.wait(fork);
  side.fill(memory.pointer(), 0, 8);
  expect(graphs.end(main, &graph) == 904);
  expect(!side.capturing());
  // Work from outside must not be waited for.
  side.record(join);
  expect(graphs.begin(main) == kSuccess);
  expect_error([&] { main.wait(join); }, {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION"});
  expect(graphs.end(main, &graph) == 901);
}

void relaxed_capture() {
  const DevicePtr device = open_device(0);
  const Device::Use use(*device);
  const Stream stream(device);
  const Graphs graphs;
  void* graph = nullptr;
  const auto allocate = [&] {
    DeviceMemory(device, 64);
    HostMemory(device, 64);
    kernels(device);
  };
  const auto in_thread = [](const std::function<void()>& action) { std::thread(action).join(); };
  const auto relaxed = [&](const std::function<void()>& action) {
    const RelaxedCapture guard;
    action();
  };
  const auto refused = [&] {
    expect_error(allocate, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"});
    expect(graphs.end(stream, &graph) != kSuccess);
  };
  for (const int mode : {kCaptureGlobal, kCaptureThreadLocal}) {
    expect(graphs.begin(stream, mode) == kSuccess);
    relaxed(allocate);
    relaxed([&] { relaxed(allocate), allocate(); });
    in_thread([&] { relaxed(allocate); });
    expect(graphs.end(stream, &graph) == kSuccess);  // nothing has made it invalid
    expect(graphs.call("cuGraphDestroy", graph) == kSuccess);
    expect(graphs.begin(stream, mode) == kSuccess);
    relaxed([] {});
    refused();
  }
  // Captures that are not global are nothing to other threads; relaxed ones are nothing to any.
  expect(graphs.begin(stream, kCaptureThreadLocal) == kSuccess);
  in_thread(allocate);
  expect(graphs.end(stream, &graph) == kSuccess);
  expect(graphs.begin(stream, kStreamCaptureModeRelaxed) == kSuccess);
  allocate();
  in_thread(allocate);
  expect(graphs.end(stream, &graph) == kSuccess);
  expect(graphs.begin(stream) == kSuccess);
  in_thread([&] { expect_error(allocate, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}); });
  expect(graphs.end(stream, &graph) != kSuccess);
  // What is part of a capture is refused all the same.
  expect(graphs.begin(stream) == kSuccess);
  relaxed([&] { expect_error([&] { stream.synchronize(); }, {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}); });
  expect(graphs.end(stream, &graph) != kSuccess);
}

void one_process() {  // with and without IPC
  const DevicePtr zero = open_device(0), one = open_device(1);
  auto memory = own_memory(zero, 1000);
  expect(memory->bytes() >= 1000);
  const Handle handle = memory->handle();
  auto here = std::make_unique<PeerMapping>(zero, handle, "rank 1");
  const PeerMapping there(one, handle, "rank 1");
  expect(here->pointer() == memory->pointer() && there.pointer() == memory->pointer());
  expect(there.bytes() == memory->bytes());
  const Stream stream(one);
  expect(read(stream, there.pointer(), there.bytes() / 8) == same(there.bytes() / 8, 0));
  // A mapping keeps the memory.
  memory = nullptr;
  here = nullptr;
  stream.fill(there.pointer(), 1, there.bytes());
  expect(read(stream, there.pointer(), 1)[0] == 0x0101010101010101);
}

void freed() {
  const DevicePtr device = open_device(0);
  auto memory = own_memory(device, 1000);
  const Handle handle = memory->handle();
  memory = nullptr;
  expect_error([&] { PeerMapping(device, handle, "rank 1"); },
               {"device 0 (Stand-in GPU, 0000:01:00.0) cannot use GPU memory of rank 1, process " +
                std::to_string(getpid()) + ": it has been freed"});
}

void no_peer_access() {
  const DevicePtr zero = open_device(0), one = open_device(1);
  const auto memory = own_memory(zero, 1000);
  PeerMapping(zero, memory->handle(), "rank 1");
  expect_error([&] { PeerMapping(one, memory->handle(), "rank 1"); },
               {"device 1 (Stand-in GPU, 0000:02:00.0) cannot use GPU memory of rank 1",
                "it is on device 0 (Stand-in GPU, 0000:01:00.0), which this one cannot access", "topo -p2p"});
  expect_error([&] { one->enable_access(*zero); },
               {"cuCtxEnablePeerAccess of device 1", "to device 0", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"});
}

void damaged_handles() {
  const DevicePtr device = open_device(0);
  const auto memory = own_memory(device, 1000);
  const auto expect_refused = [&](const std::function<void(Handle&)>& damage, const std::string& text) {
    Handle handle = memory->handle();
    damage(handle);
    expect_error([&] { PeerMapping(device, handle, "rank 1"); }, {"cannot use GPU memory of rank 1", text});
  };
  expect_refused([](Handle& h) { h.format++; }, "run the same version of ringreduce in all ranks");
  expect_refused([](Handle& h) { h.kind = static_cast<Handle::Kind>(0); }, "damaged: kind is 0");
  expect_refused([](Handle& h) { h.kind = static_cast<Handle::Kind>(4); }, "damaged: kind is 4");
  expect_refused([](Handle& h) { h.pid = 0; }, "damaged: pid is 0");
  expect_refused([](Handle& h) { h.bytes = 0; }, "damaged: bytes is 0");
  expect_refused([](Handle& h) { h.bytes = (1ULL << 44) + 1; }, "damaged: bytes is 17592186044417");
  expect_refused([](Handle& h) { h.pointer = 0; }, "damaged: pointer is 0");
  expect_refused([](Handle& h) { h.pointer += 8; }, "it has been freed");
  expect_refused([](Handle& h) { h.bytes -= 8; }, "it has been freed");
  expect_refused([](Handle& h) { h.host++; }, "it is on another host");
  expect_refused([](Handle& h) { h.device[15] = 77; }, "it has been freed");  // a device that is not visible, here
  expect_refused([](Handle& h) { h.device[15] = 1; }, "it has been freed");   // device 1 never had it
  // As if from another process:
  const auto foreign = [](Handle::Kind kind, const std::function<void(Handle&)>& damage) {
    return [=](Handle& h) {
      h.kind = kind;
      h.process++;
      damage(h);
    };
  };
  const auto fd = Handle::Kind::file_descriptor;
  expect_refused(foreign(Handle::Kind::ipc, [](Handle& h) { h.ipc[0]++; }), "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_V");
  expect_refused(foreign(fd, [](Handle&) {}), "connect: Connection refused; keep the owner alive");
}

// Of the words, which need no context where they are refused.
void damaged_words() {
  const DevicePtr device = open_device(0);
  const OwnMemory memory(device, 10'000);
  const auto expect_refused = [&](const std::function<void(Handle&)>& damage, std::size_t bytes, const char* text) {
    Handle handle = memory.handle();
    damage(handle);
    expect_error([&] { SharedWords(device, handle, bytes, "rank 1"); },
                 {"cannot use memory of the host that is of rank 1, process", text});
  };
  expect_refused([](Handle& h) { h.pointer++; }, 8, "connect: Connection refused; keep the owner alive");
  expect_refused([](Handle& h) { h.process++; }, 8, "connect: Connection refused; keep the owner alive");
  expect_refused([](Handle& h) { h.host++; }, 8, "it is on another host");
  expect_refused([](Handle&) {}, 10'001, "it has not 10001 bytes");
}

void words_not_registered() {  // with NO_HOST_REGISTER
  const DevicePtr device = open_device(0);
  const OwnMemory memory(device, 10'000);
  expect_error([&] { SharedWords(device, memory.handle(), 10'000, "rank 0"); },
               {"cuMemHostRegister of 12 KB: CUDA_ERROR_NOT_SUPPORTED", "ranks that share a GPU need it"});
}

void forked() {
  const DevicePtr device = open_device(0);
  auto memory = own_memory(device, 1000);
  auto stream = std::make_unique<Stream>(device);
  const pid_t child = fork();
  if (child == 0) {
    const std::string text =
        "CUDA cannot be used in a process that was forked after CUDA was used; start processes with";
    expect(unavailable().find(text) == 0, unavailable());
    expect_error([&] { stream->synchronize(); }, {text});
    expect_error([&] { Device(0); }, {text});
    memory = nullptr;
    stream = nullptr;
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "status " + std::to_string(status));
  stream->fill(memory->pointer(), 1, memory->bytes());
  expect(read(*stream, memory->pointer(), 1)[0] == 0x0101010101010101);
}

void pooled_events() {
  const DevicePtr zero = open_device(0), one = open_device(1);
  const auto handle_of = [](const DevicePtr& device, bool timed) { return PooledEvent(device, timed)->handle(); };
  const CUevent timed = handle_of(zero, true), untimed = handle_of(zero, false), other = handle_of(one, false);
  expect((std::set{timed, untimed, other}.size() == 3));
  for (int i = 0; i < 3; i++) {
    expect(handle_of(open_device(0), false) == untimed && handle_of(zero, true) == timed);
    expect(handle_of(one, false) == other);
  }
  auto taken = std::make_unique<PooledEvent>(zero);
  expect((*taken)->handle() == untimed && handle_of(zero, false) != untimed);
  const pid_t child = fork();
  if (child == 0) {
    taken = nullptr;
    expect_error([&] { PooledEvent(zero, true); }, {"forked after CUDA was used"});
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0);
  const Stream stream(zero);
  stream.record(**taken);
  (*taken)->synchronize();
  // A burst of calls leaves no more than so many.
  std::vector<std::unique_ptr<PooledEvent>> burst;
  for (int i = 0; i < 2000; i++) burst.push_back(std::make_unique<PooledEvent>(one));
  burst.clear();
  expect(Others().calls("cuEventDestroy_v2") == 2000 - 1024);
}

void shared_kernels() {
  const DevicePtr zero = open_device(0), one = open_device(1);
  int asked = 0;
  const Images images = [&](const std::string&, const std::string&, bool) {
    asked++;
    return "so:" + std::string(std::getenv("STAND_IN_FOLDER")) + "/kernels.so";
  };
  auto first = Kernels::of(zero, images);
  const auto second = Kernels::of(open_device(0), images), other = Kernels::of(one, images);
  expect(first == second && first != other);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; i++)
    threads.emplace_back([&] { expect(!first->get("interpreter", "run_", "float32_sum").name.empty()); });
  for (std::thread& thread : threads) thread.join();
  expect(Others().calls("cuModuleLoadData") == 1 && asked >= 1);
  const Function& found = second->get("interpreter", "run_", "float32_sum");
  first = nullptr;
  expect(second->get("interpreter", "run_", "float32_sum").handle == found.handle);
  expect_error([&] { second->get("interpreter", "run_", "none"); },
               {"cuModuleGetFunction of run_none", "compiled anew"});
}

// Another process in which somebody else than we had used CUDA.
void forked_by_others() {
  const Others others;
  expect(others.call("cuInit", 0u) == kSuccess);
  const pid_t child = fork();
  if (child == 0) {
    expect(unavailable().find("CUDA cannot be used in a process that was forked") == 0, unavailable());
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0, "status " + std::to_string(status));
  expect(unavailable().empty(), unavailable());
}

void print_unavailable() {
  std::puts(unavailable().c_str());
  std::puts(unavailable().c_str());  // what failed once fails always
}

// ---- two processes --------------------------------------------------------------------------------------------------

int to_peer = -1;

template <class T>
void send(const T& value) {
  expect(write(to_peer, &value, sizeof(value)) == sizeof(value), "peer gone");
}

template <class T>
T receive() {
  T value;
  expect(recv(to_peer, &value, sizeof(value), MSG_WAITALL) == sizeof(value), "peer gone");
  return value;
}

void meet() {
  send('.');
  receive<char>();
}

// Starts `name` of this program, connected over to_peer.
class Peer {
 public:
  explicit Peer(const char* name, const std::function<void()>& prepare = [] {}) {
    int ends[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      prepare();
      const std::string end = std::to_string(dup(ends[1]));
      execl("/proc/self/exe", "driver_test", name, end.c_str(), nullptr);
      std::_Exit(127);
    }
    close(ends[1]);
    to_peer = ends[0];
  }
  void kill_it() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void expect_success() {
    int status = -1;
    waitpid(pid_, &status, 0);
    expect(status == 0, "the peer's status is " + std::to_string(status));
  }

 private:
  pid_t pid_;
};

constexpr std::size_t kWords = 100'000;

// Each owns memory on its device, adds to the other's with a kernel, and waits with its stream for what the other did.
void share(int ordinal, std::uint64_t own_value, std::uint64_t peer_value) {
  const DevicePtr device = open_device(ordinal);
  const Module module = kernels(device);
  const Stream stream(device);
  const auto owned = own_memory(device, (kWords + 1) * 8);
  const OwnMemory& own = *owned;
  send(own.handle());
  const Handle handle = receive<Handle>();
  expect(handle.kind == own.handle().kind && handle.pid != getpid());
  {
    const PeerMapping peer(device, handle, "the peer");
    const PeerMapping again(device, handle, "the peer");
    expect(peer.bytes() == own.bytes());
    const SharedWords own_words(device, own.handle(), 16, "this rank"), peer_words(device, handle, 16, "the peer");
    stream.wait_value(own_words.pointer() + 8, peer_value);
    std::atomic_ref(*reinterpret_cast<std::uint64_t*>(peer_words.data() + 8)).store(own_value);  // without the driver
    stream.launch(module.function("add"), {4, 64}, Add{peer.pointer(), kWords, own_value});
    stream.write_value(again.pointer() + kWords * 8, 1);  // tells the peer
    stream.wait_value(own.pointer() + kWords * 8, 1);
    expect(read(stream, own.pointer(), kWords) == same(kWords, peer_value));
  }
  meet();  // no mapping is left: the owners may free
}

void two_processes(int peer_device) {
  Peer peer(peer_device == 0 ? "peer_on_0" : "peer_on_1");
  share(0, 5, 7);
  peer.expect_success();
}

void sends_handle(int ordinal) {
  const auto own = own_memory(open_device(ordinal), 1000);
  send(own->handle());
  receive<char>();
}

void owner_killed() {
  Peer peer("sends_handle");
  const DevicePtr device = open_device(0);
  const Handle handle = receive<Handle>();
  {
    const PeerMapping works(device, handle, "rank 1");
  }
  const PeerMapping kept(device, handle, "rank 1");
  const SharedWords words(device, handle, 1000, "rank 1");
  peer.kill_it();
  words.data()[999] = std::byte{1};
  expect_error([&] { SharedWords(device, handle, 1000, "rank 1"); }, {"keep the owner alive"});
  expect_error([&] { PeerMapping(open_device(1), handle, "rank 1"); },
               {"cannot use GPU memory of rank 1, process " + std::to_string(handle.pid), "keep the owner alive"});
}

// Each process sees one GPU, which is not the other's, and takes it for device 0.
void gpu_hidden() {
  Peer peer("hidden_peer", [] { setenv("RINGREDUCE_STAND_IN_VISIBLE", "1", 1); });
  share(0, 5, 7);
  peer.expect_success();
}

void hidden_without_peer_access() {
  Peer peer("sends_handle_of_0", [] { setenv("RINGREDUCE_STAND_IN_VISIBLE", "1", 1); });
  const Handle handle = receive<Handle>();
  expect_error(
      [&] { PeerMapping(open_device(0), handle, "rank 1"); },
      {"cuIpcOpenMemHandle: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "have peer access (nvidia-smi topo -p2p rw)"});
  send('.');
  peer.expect_success();
}

// Takes this process every right to look into others, as in a container without SYS_PTRACE.
void drop_capabilities() {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct none[2]{};
  expect(syscall(SYS_capset, &header, none) == 0);
}

void needs_no_ptrace() {  // with file descriptors
  Peer peer("closed_to_tracing");
  const Handle handle = receive<Handle>();
  drop_capabilities();
  const int process = static_cast<int>(syscall(SYS_pidfd_open, handle.pid, 0));
  expect(process >= 0 && syscall(SYS_pidfd_getfd, process, 0, 0) < 0 && errno == EPERM, "the process can be traced");
  const PeerMapping works(open_device(0), handle, "rank 1");
  send('.');
  peer.expect_success();
}

// A process that has as many as it may asks for another one.
void no_descriptors_left() {
  const std::string name = "driver_test " + std::to_string(getpid());
  const LentDescriptor lent(name, FileDescriptor(dup(0)));
  const pid_t child = fork();
  if (child == 0) {
    const auto refused_with = [&](int more, const char* text) {
      const rlimit now{static_cast<rlim_t>(FileDescriptor(dup(0)).get() + more), 1024};
      expect(setrlimit(RLIMIT_NOFILE, &now) == 0);
      expect_error([&] { borrow_descriptor(name); }, {text, "Too many open files; raise the limit of open files"});
      const rlimit before{1024, 1024};
      expect(setrlimit(RLIMIT_NOFILE, &before) == 0);
    };
    refused_with(0, "socket: ");
    refused_with(1, "recvmsg: ");
    std::_Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  expect(status == 0);
}

// What can go wrong between two who have a name.
void lent_descriptors() {
  const std::string name = "driver_test " + std::to_string(getpid());
  expect_error([&] { borrow_descriptor(name); },
               {"connect: Connection refused; keep the owner alive", "--network=host"});
  const auto inode = [](const FileDescriptor& file) {
    struct stat facts{};
    expect(fstat(file.get(), &facts) == 0);
    return facts.st_ino;
  };
  const FileDescriptor file(memfd_create("lent", MFD_CLOEXEC));
  {
    const LentDescriptor lent(name, FileDescriptor(dup(file.get())));
    for (int i = 0; i < 3; i++) {
      const FileDescriptor copy = borrow_descriptor(name);
      expect(copy.get() != file.get() && inode(copy) == inode(file));
      expect(fcntl(copy.get(), F_GETFD) == FD_CLOEXEC);
    }
    expect_error([&] { LentDescriptor(name, FileDescriptor(dup(0))); }, {"bind: Address already in use"});
    const pid_t child = fork();
    if (child == 0) std::_Exit((lent.~LentDescriptor(), 0));
    int status = -1;
    waitpid(child, &status, 0);
    expect(status == 0);
    const FileDescriptor still = borrow_descriptor(name);
    expect(inode(still) == inode(file));
    if (geteuid() == 0) {
      const pid_t other = fork();
      if (other == 0) {
        expect(seteuid(65534) == 0);
        expect_error([&] { borrow_descriptor(name); }, {"run all ranks as one user"});
        std::_Exit(0);
      }
      waitpid(other, &status, 0);
      expect(status == 0);
    }
  }
  expect_error([&] { borrow_descriptor(name); }, {"connect: Connection refused"});
  // One who listens and does not answer.
  const FileDescriptor silent(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  expect(bind(silent.get(), reinterpret_cast<const sockaddr*>(&address), bytes) == 0 && listen(silent.get(), 1) == 0);
  expect_error([&] { borrow_descriptor(name, kMillisecond); }, {"recvmsg: ", "the owner does not answer"});
}

void peer_stays_closed() {  // without peer access
  Peer peer("sends_handle");
  const Handle handle = receive<Handle>();
  const DevicePtr device = open_device(0);
  expect_error([&] { PeerMapping(device, handle, "rank 1"); }, {"it is on device 1", "which this one cannot access"});
  unsigned flags = 0;
  int active = -1;
  expect(Others().call("cuDevicePrimaryCtxGetState", 1, &flags, &active) == kSuccess);
  expect(active == 0, "there is a context on the peer's device");
  send('.');
  peer.expect_success();
}

void forged_size() {
  Peer peer("sends_handle");
  Handle handle = receive<Handle>();
  const DevicePtr device = open_device(1);
  const std::size_t bytes = handle.bytes;
  handle.bytes += 2 << 20;
  const bool ipc = handle.kind == Handle::Kind::ipc;
  for (int i = 0; i < 2; i++)
    expect_error(
        [&] { PeerMapping(device, handle, "rank 1"); },
        {"cannot use GPU memory of rank 1", ipc ? "its handle is damaged: bytes is 4194304, of memory that has "
                                                  "2097152"
                                                : "cuMemMap: CUDA_ERROR_INVALID_VALUE"});
  handle.bytes = bytes;
  const PeerMapping works(device, handle, "rank 1");
  send('.');
  peer.expect_success();
}

void context_gone() {  // without IPC: what was imported is given back
  Peer peer("sends_handle");
  const Handle handle = receive<Handle>();
  const DevicePtr device = open_device(1);
  const auto descriptors = [] {
    const std::filesystem::directory_iterator open("/proc/self/fd");
    return std::distance(begin(open), end(open));
  };
  const auto before = descriptors();
  driver().cuDevicePrimaryCtxRelease(1);
  expect_error([&] { PeerMapping(device, handle, "rank 1"); },
               {"cannot use GPU memory of rank 1", "cuCtxPushCurrent on device 1: CUDA_ERROR_INVALID_CONTEXT"});
  expect(descriptors() == before);
  CUcontext context;
  driver().cuDevicePrimaryCtxRetain(&context, 1);
  send('.');
  peer.expect_success();
}

void nothing_shared() {  // without IPC and VMM
  Peer peer("sends_handle");
  const Handle handle = receive<Handle>();
  expect_error([&] { PeerMapping(open_device(1), handle, "rank 1"); },
               {"cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED", "must be threads of one process"});
  send('.');
  peer.expect_success();
}

// ---- kernels of csrc ------------------------------------------------------------------------------------------------

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

const std::map<std::string, std::function<void()>> kTests{
    {"devices", devices},
    {"memory", memory},
    {"out_of_memory", out_of_memory},
    {"launches", launches},
    {"streams", streams},
    {"context_lock", context_lock},
    {"priorities", priorities},
    {"capture", capture},
    {"relaxed_capture", relaxed_capture},
    {"all_kernels", all_kernels},
    {"all_reduce_in_kernels", [] { all_reduce({0, 1}, 2, &Rank::launch); }},
    {"all_reduce_in_steps", [] { all_reduce({0, 0}, 1, &Rank::take_steps); }},
    {"one_process", one_process},
    {"freed", freed},
    {"no_peer_access", no_peer_access},
    {"damaged_handles", damaged_handles},
    {"damaged_words", damaged_words},
    {"words_not_registered", words_not_registered},
    {"forked", forked},
    {"pooled_events", pooled_events},
    {"shared_kernels", shared_kernels},
    {"forked_by_others", forked_by_others},
    {"print_unavailable", print_unavailable},
    {"two_processes_one_gpu", [] { two_processes(0); }},
    {"two_processes_two_gpus", [] { two_processes(1); }},
    {"owner_killed", owner_killed},
    {"gpu_hidden", gpu_hidden},
    {"hidden_without_peer_access", hidden_without_peer_access},
    {"needs_no_ptrace", needs_no_ptrace},
    {"lent_descriptors", lent_descriptors},
    {"no_descriptors_left", no_descriptors_left},
    {"nothing_shared", nothing_shared},
    {"peer_stays_closed", peer_stays_closed},
    {"forged_size", forged_size},
    {"context_gone", context_gone},
    // Peers of those above:
    {"peer_on_0", [] { share(0, 7, 5); }},
    {"peer_on_1", [] { share(1, 7, 5); }},
    {"sends_handle", [] { sends_handle(1); }},
    {"sends_handle_of_0", [] { sends_handle(0); }},
    {"hidden_peer", [] { share(0, 7, 5); }},
    {"closed_to_tracing",
     [] {
       expect(prctl(PR_SET_DUMPABLE, 0) == 0);
       sends_handle(1);
     }},
};

}  // namespace

int main(int count, char** arguments) {
  if (count > 2) to_peer = std::atoi(arguments[2]);
  try {
    kTests.at(arguments[1])();
  } catch (const Error& error) {
    expect(false, error.what());
  }
}
