// The driver, as one process uses it.

#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/kernels.h"
#include "cuda/shared_memory.h"
#include "driver/parameters.h"
#include "driver/tests.h"

namespace {

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

}  // namespace

const Tests kOneProcess{
    {"devices", devices},
    {"memory", memory},
    {"out_of_memory", out_of_memory},
    {"launches", launches},
    {"streams", streams},
    {"context_lock", context_lock},
    {"priorities", priorities},
    {"capture", capture},
    {"relaxed_capture", relaxed_capture},
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
};
