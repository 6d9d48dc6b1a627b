// Tests of csrc/nccl and of the engine over it, on stand-ins for CUDA and NCCL; the ranks are threads.
//
// `nccl_test collectives FILE` makes the calls that test_nccl.py wrote to FILE and compares the results with those of
// the engine on the CPU, bit by bit. `nccl_test NAME` is one of the tests below. It ends with 0, or says what was not
// as expected and ends with 1.

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "engine/gpu/nccl_engine.h"
#include "nccl/communicator.h"
#include "stress/harness.h"
#include "stress/plans.h"

using namespace ringreduce;

namespace {

constexpr std::uint64_t kAnySize = std::numeric_limits<std::uint64_t>::max();
constexpr Nanoseconds kTimeout = 60 * kSecond;

void expect(bool ok, const std::string& found = "", std::source_location where = std::source_location::current()) {
  if (ok) return;
  std::fprintf(stderr, "nccl_test.cpp:%u: not as expected: %s\n", where.line(), found.c_str());
  std::_Exit(1);
}

void expect_error(ErrorKind kind, const std::vector<std::string>& parts, const std::function<void()>& action,
                  std::source_location where = std::source_location::current()) {
  const Error error = stress::error_of(action);
  expect(error.kind() == kind, "kind " + std::to_string(static_cast<int>(error.kind())) + " of: " + error.what(),
         where);
  for (const std::string& part : parts)
    expect(std::string(error.what()).find(part) != std::string::npos, "[" + part + "] in: " + error.what(), where);
}

template <class Signature>
Signature* symbol(const char* library, const char* name) {
  void* const opened = dlopen(std::getenv(library), RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<Signature*>(opened == nullptr ? nullptr : dlsym(opened, name));
}

int alive() { return symbol<int()>("RINGREDUCE_LIBNCCL", "stand_in_nccl_alive")(); }

// What torch does for graphs.
template <class... Arguments>
void graph_call(const char* name, Arguments... arguments) {
  const int result = symbol<int(Arguments...)>("RINGREDUCE_LIBCUDA", name)(arguments...);
  expect(result == 0, std::string(name) + ": " + cuda::driver().text(result));
}

class Graph {
 public:
  Graph(const cuda::Stream& stream, const std::function<void()>& calls) : stream_(stream) {
    const cuda::Device::Use use(*stream_.device());
    constexpr int kThreadLocal = 1;
    void* graph = nullptr;
    graph_call("cuStreamBeginCapture_v2", stream_.handle(), kThreadLocal);
    calls();
    graph_call("cuStreamEndCapture", stream_.handle(), &graph);
    graph_call("cuGraphInstantiateWithFlags", &executable_, graph, 0ull);
    graph_call("cuGraphDestroy", graph);
  }
  void launch() const {
    const cuda::Device::Use use(*stream_.device());
    graph_call("cuGraphLaunch", executable_, stream_.handle());
  }

 private:
  const cuda::Stream& stream_;
  void* executable_ = nullptr;
};

// A rank's engine over NCCL, and the thread that looks after it.
class GpuRank {
 public:
  GpuRank(std::shared_ptr<Engine> host, const cuda::DevicePtr& device, std::vector<nccl::CommunicatorPtr> communicators)
      : engine(std::move(host),
               std::make_shared<cuda::Kernels>(device,
                                               [](const std::string& stem, const std::string&, bool) {
                                                 expect(stem == "accumulate", stem);
                                                 return std::string("so:") + std::getenv("STAND_IN_KERNELS");
                                               }),
               device, std::move(communicators), 8, {.slices = 3, .least_slice_bytes = 128}),
        stream(device),
        watcher_([this](std::stop_token stopped) {
          while (!stopped.stop_requested()) {
            engine.look();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}

  NcclEngine engine;
  cuda::Stream stream;

 private:
  std::jthread watcher_;
};

// Ranks that are threads, each with a device and an engine on the CPU.
struct Ranks {
  explicit Ranks(int size) : group(std::make_shared<stress::Group>(size, 8, 1024)) {}

  int size() const { return group->size(); }
  std::shared_ptr<Engine> host(int rank) const {
    return {group, &group->ranks[static_cast<std::size_t>(rank)]->engine};
  }

  // Every rank's `body(rank, its NCCL engine)`, with so many communicators.
  void run(int communicators, const std::function<void(int, GpuRank&)>& body) const {
    const std::vector<std::string> ids = nccl::unique_ids(communicators);
    stress::in_threads(size(), [&](int rank) {
      const auto device = std::make_shared<const cuda::Device>(rank);
      GpuRank gpu(host(rank), device, nccl::make(ids, communicators, device, rank, size(), kTimeout));
      body(rank, gpu);
    });
  }

  std::shared_ptr<stress::Group> group;
};

// Tensors on a device, or on the host.
class Buffer {
 public:
  explicit Buffer(std::vector<std::size_t> counts) : counts_(std::move(counts)) {}
  Tensors tensors() { return {data_, counts_}; }
  void add(std::byte* data) { data_.push_back(data); }

 private:
  std::vector<std::size_t> counts_;
  std::vector<std::byte*> data_;
};

// ---- what test_nccl.py asks for -------------------------------------------------------------------------------------

struct Case {
  Operation operation;
  int size, root;
  DType dtype;
  ReduceOp op;
  int communicators;
  bool adopts, in_place;
  int replays;
  std::size_t slice_bytes, count, largest;
  stress::Lowered plan;
  std::vector<double> factors;                            // per rank
  std::vector<std::vector<std::size_t>> inputs, outputs;  // per rank: of each tensor, elements
};

class Reader {
 public:
  explicit Reader(const char* file) {
    std::ifstream stream(file, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
    words_.resize(bytes.size() / sizeof(std::int64_t));
    std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  bool more() const { return at_ < words_.size(); }
  template <class T>
  T next() {
    return static_cast<T>(words_.at(at_++));
  }
  template <class T>
  std::vector<T> list() {
    std::vector<T> items(next<std::size_t>());
    for (T& item : items) item = next<T>();
    return items;
  }

 private:
  std::vector<std::int64_t> words_;
  std::size_t at_ = 0;
};

Case read_case(Reader& reader) {
  Case c{};
  c.operation = reader.next<Operation>();
  c.size = reader.next<int>();
  c.root = reader.next<int>();
  c.dtype = reader.next<DType>();
  c.op = reader.next<ReduceOp>();
  c.communicators = reader.next<int>();
  c.adopts = reader.next<int>() != 0;
  c.in_place = reader.next<int>() != 0;
  c.replays = reader.next<int>();
  c.slice_bytes = reader.next<std::size_t>();
  c.count = reader.next<std::size_t>();
  c.largest = reader.next<std::size_t>();
  c.plan = reader.list<std::int32_t>();
  for (int rank = 0; rank < c.size; ++rank) c.factors.push_back(reader.next<int>() / 64.0);
  for (int rank = 0; rank < c.size; ++rank) {
    c.inputs.push_back(reader.list<std::size_t>());
    c.outputs.push_back(reader.list<std::size_t>());
  }
  return c;
}

// Fills with any bits, but for NaNs and infinities: floats are less than 2.
void fill(std::byte* data, std::size_t count, DType dtype, stress::Random& random) {
  const bool complex = dtype == DType::complex64 || dtype == DType::complex128;
  const bool floating = complex || dtype < DType::int8;
  const std::size_t part = size_of(dtype) / (complex ? 2 : 1);
  for (std::size_t i = 0; i < count * size_of(dtype); ++i) {
    auto bits = static_cast<unsigned>(random());
    if (floating && i % part == part - 1) bits &= 0xBF;
    data[i] = dtype == DType::boolean ? static_cast<std::byte>(bits & 1) : static_cast<std::byte>(bits);
  }
}

// A rank's tensors of one side of a call: on the device, and their like on the host.
struct Side {
  Side(const cuda::DevicePtr& device, const std::vector<std::size_t>& counts, DType dtype)
      : gpu(counts), cpu(counts), counts_(counts), element_(size_of(dtype)) {
    for (const std::size_t count : counts) {
      memory_.push_back(std::make_unique<cuda::DeviceMemory>(device, count * element_ + kAround));
      host_.emplace_back(count * element_ + kAround, std::byte{0});
      gpu.add(reinterpret_cast<std::byte*>(memory_.back()->pointer()) + kAround / 2);
      cpu.add(host_.back().data() + kAround / 2);
    }
  }
  void randomize(DType dtype, stress::Random& random) {
    for (std::size_t i = 0; i < counts_.size(); ++i) {
      fill(host_[i].data() + kAround / 2, counts_[i], dtype, random);
      std::memcpy(reinterpret_cast<void*>(memory_[i]->pointer()), host_[i].data(), host_[i].size());
    }
  }
  // Also what lies around them, which nobody may have touched.
  bool same() const {
    for (std::size_t i = 0; i < counts_.size(); ++i)
      if (std::memcmp(reinterpret_cast<void*>(memory_[i]->pointer()), host_[i].data(), host_[i].size()) != 0)
        return false;
    return true;
  }

  Buffer gpu, cpu;

 private:
  static constexpr std::size_t kAround = 128;
  std::vector<std::size_t> counts_;
  std::size_t element_;
  std::vector<std::unique_ptr<cuda::DeviceMemory>> memory_;
  std::vector<std::vector<std::byte>> host_;
};

void run_case(const Case& c, const std::string& name, int rank, GpuRank& gpu, Engine& cpu) {
  const auto r = static_cast<std::size_t>(rank);
  for (Engine* engine : {static_cast<Engine*>(&gpu.engine), &cpu})
    engine->choose(c.operation, kAnySize, engine->add_plan({c.operation, c.plan, 99}), c.slice_bytes);
  Call call;
  call.operation = c.operation;
  call.dtype = c.dtype;
  call.reduce_op = c.op;
  call.root = c.root;
  call.count = c.count;
  call.largest = c.largest;
  call.factor = c.factors[r];
  call.timeout = kTimeout;
  const cuda::DevicePtr& device = gpu.stream.device();
  Side input(device, c.inputs[r], c.dtype), separate(device, c.outputs[r], c.dtype);
  Side& output = c.in_place ? input : separate;
  const Buffers on_gpu{input.gpu.tensors(), output.gpu.tensors()}, on_cpu{input.cpu.tensors(), output.cpu.tensors()};
  stress::Random random(r * 1000 + 7);
  const auto compare = [&](const std::string& when) {
    gpu.stream.synchronize();
    gpu.engine.throw_if_aborted();
    cpu.run(call, on_cpu);
    expect(input.same() && output.same(), name + ", rank " + std::to_string(rank) + ", " + when);
  };
  input.randomize(c.dtype, random);
  gpu.engine.enqueue(call, on_gpu, gpu.stream);
  compare("first");
  input.randomize(c.dtype, random);
  gpu.engine.run(call, on_gpu);
  compare("second");
  if (c.replays == 0) return;
  const Graph graph(gpu.stream, [&] { gpu.engine.enqueue(call, on_gpu, gpu.stream); });
  for (int replay = 0; replay < c.replays; ++replay) {
    input.randomize(c.dtype, random);
    graph.launch();
    compare("replay");
  }
  input.randomize(c.dtype, random);
  gpu.engine.enqueue(call, on_gpu, gpu.stream);
  compare("after replays");
}

void collectives(const char* file) {
  int number = 0;
  for (Reader reader(file); reader.more(); ++number) {
    const Case c = read_case(reader);
    const std::string name = "case " + std::to_string(number);
    const Ranks ranks(c.size);
    if (!c.adopts) {
      ranks.run(c.communicators, [&](int rank, GpuRank& gpu) { run_case(c, name, rank, gpu, *ranks.host(rank)); });
    } else {
      const nccl::Library& nccl = nccl::library();
      nccl::ncclUniqueId id;
      nccl.ncclGetUniqueId(&id);
      stress::in_threads(c.size, [&](int rank) {
        const auto device = std::make_shared<const cuda::Device>(rank);
        const cuda::Device::Use use(*device);
        nccl::ncclComm_t theirs = nullptr;
        expect(nccl.ncclCommInitRank(&theirs, c.size, id, rank) == nccl::kSuccess);
        {
          GpuRank gpu(
              ranks.host(rank), device,
              nccl::adopt(reinterpret_cast<std::uint64_t>(theirs), c.communicators, device, rank, c.size, kTimeout));
          run_case(c, name, rank, gpu, *ranks.host(rank));
        }
        int size = 0;
        expect(nccl.ncclCommCount(theirs, &size) == nccl::kSuccess && size == c.size, "it was destroyed");
        expect(nccl.ncclCommDestroy(theirs) == nccl::kSuccess);
      });
    }
    expect(alive() == 0, name + ": communicators are left");
  }
  std::printf("%d calls\n", number);
}

// ---- what goes wrong ------------------------------------------------------------------------------------------------

// An all_reduce of float32 elements, its memory with it.
struct AllReduce {
  AllReduce(GpuRank& its_rank, std::size_t count, Nanoseconds timeout = kTimeout)
      : gpu(its_rank), memory(gpu.stream.device(), count * 4), tensor({count}) {
    gpu.engine.choose(Operation::all_reduce, kAnySize,
                      gpu.engine.add_plan({Operation::all_reduce, stress::two_rings(gpu.engine.size()), 5}));
    call.operation = Operation::all_reduce;
    call.dtype = DType::float32;
    call.count = call.largest = count;
    call.timeout = timeout;
    tensor.add(reinterpret_cast<std::byte*>(memory.pointer()));
  }
  void enqueue() { gpu.engine.enqueue(call, {tensor.tensors(), tensor.tensors()}, gpu.stream); }
  void run() { gpu.engine.run(call, {tensor.tensors(), tensor.tensors()}); }
  void fill() { gpu.stream.fill(memory.pointer(), 0x3F, memory.bytes()); }  // 0.747...
  void expect_sum() const {
    float one, sum = 0;
    std::memset(&one, 0x3F, sizeof(one));
    for (int rank = 0; rank < gpu.engine.size(); ++rank) sum += one;
    const auto* const found = reinterpret_cast<const float*>(memory.pointer());
    for (std::size_t i = 0; i < call.count; ++i) expect(found[i] == sum, std::to_string(found[i]));
  }
  // The group may have failed on another rank by now.
  void try_to_enqueue() {
    try {
      enqueue();
    } catch (const Error&) {
    }
  }
  // The group's error comes to this rank, and ends what is in its stream.
  void expect_failure(ErrorKind kind, const std::vector<std::string>& parts) {
    gpu.stream.synchronize();
    expect_error(kind, parts, [&] {
      for (;;) gpu.engine.throw_if_aborted();
    });
    expect_error(kind, parts, [&] { enqueue(); });
  }

  GpuRank& gpu;
  cuda::DeviceMemory memory;
  Buffer tensor;
  Call call;
};

// Rank 1 does not come.
void timeout() {
  Ranks(3).run(2, [](int rank, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 1000, rank == 0 ? 50 * kMillisecond : kTimeout);
    const std::vector<std::string> parts{"all_reduce seq 1 did not end on device 0 (", ") of rank 0 within 0.1 s. NCCL",
                                         "does not tell which rank", "NCCL_DEBUG=INFO"};
    if (rank != 1) expect_error(ErrorKind::timeout, parts, [&] { all_reduce.run(); });
    all_reduce.expect_failure(ErrorKind::timeout, parts);
  });
  expect(alive() == 0);
}

void abort_by_a_rank() {
  Ranks(3).run(2, [](int rank, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 1000);
    if (rank == 1)
      gpu.engine.abort("enough");
    else
      all_reduce.try_to_enqueue();
    all_reduce.expect_failure(ErrorKind::aborted, {"enough"});
  });
  expect(alive() == 0);
}

void abort_of_the_host() {
  const Ranks ranks(2);
  ranks.run(1, [&](int rank, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 1000);
    if (rank == 0) all_reduce.try_to_enqueue();
    if (rank == 1) ranks.host(rank)->abort("the other calls");
    all_reduce.expect_failure(ErrorKind::aborted, {"the other calls"});
  });
  expect(alive() == 0);
}

// With RINGREDUCE_STAND_IN_NCCL_HANGS: a rank is in NCCL and does not come back.
void abort_of_a_stuck_call() {
  Ranks(2).run(1, [](int rank, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 1000);
    if (rank == 1) gpu.engine.abort("enough");
    expect_error(ErrorKind::aborted, {"enough"}, [&] { all_reduce.enqueue(); });
  });
  expect(alive() == 0);
}

void network_error() {
  const std::vector<std::string> ids = nccl::unique_ids(2);
  const Ranks ranks(2);
  stress::in_threads(2, [&](int rank) {
    const auto device = std::make_shared<const cuda::Device>(rank);
    const auto communicators = nccl::make(ids, 2, device, rank, 2, kTimeout);
    GpuRank gpu(ranks.host(rank), device, communicators);
    AllReduce all_reduce(gpu, 1000);
    if (rank == 0) {
      all_reduce.enqueue();
      symbol<void(void*)>("RINGREDUCE_LIBNCCL", "stand_in_nccl_break")(communicators[1]->handle());
    }
    all_reduce.expect_failure(ErrorKind::peer_lost,
                              {"NCCL's work on rank 0: remote process exited or there was a network error",
                               "NCCL 2.27.5 (", "libnccl.so.2)", "NCCL_DEBUG=WARN"});
  });
  expect(alive() == 0);
}

// Not the same call on both.
void other_size() {
  Ranks(2).run(1, [](int rank, GpuRank& gpu) {
    AllReduce all_reduce(gpu, rank == 0 ? 1000 : 2000);
    all_reduce.try_to_enqueue();
    all_reduce.expect_failure(ErrorKind::system, {"NCCL's work on rank ", "internal error: rank ", " bytes"});
  });
  expect(alive() == 0);
}

void bad_call_leaves_the_group() {
  Ranks(2).run(1, [](int, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 100);
    Call call = all_reduce.call;
    call.operation = Operation::broadcast;
    call.root = 2;
    const Tensors tensors = all_reduce.tensor.tensors();
    expect_error(ErrorKind::invalid_argument, {"root is 2; the group has ranks 0 to 1"},
                 [&] { gpu.engine.enqueue(call, {tensors, tensors}, gpu.stream); });
    all_reduce.fill();
    gpu.stream.synchronize();  // run() has a stream of its own
    all_reduce.run();
    all_reduce.expect_sum();
  });
}

// It needs memory, and kernels, that nobody has loaded yet.
void first_call_in_a_capture() {
  Ranks(3).run(2, [](int, GpuRank& gpu) {
    AllReduce all_reduce(gpu, 3000);
    const Graph graph(gpu.stream, [&] { all_reduce.enqueue(); });
    for (int replay = 0; replay < 2; ++replay) {
      all_reduce.fill();
      graph.launch();
      gpu.stream.synchronize();
      gpu.engine.throw_if_aborted();
      all_reduce.expect_sum();
    }
  });
}

void barrier() {
  Ranks(3).run(1, [](int rank, GpuRank& gpu) {
    const AllReduce plan(gpu, 1);
    static std::atomic<int> arrived{0};
    Call call;
    call.timeout = kTimeout;
    for (int round = 1; round <= 5; ++round) {
      if (rank == round % 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++arrived;
      gpu.engine.run(call, {});
      expect(arrived >= 3 * round);
    }
  });
}

// Calls on streams in turn, none of which waits for another.
void several_streams() {
  Ranks(3).run(2, [](int, GpuRank& gpu) {
    const cuda::Stream other(gpu.stream.device());
    std::vector<std::unique_ptr<AllReduce>> calls;
    for (int i = 0; i < 6; ++i) {
      calls.push_back(std::make_unique<AllReduce>(gpu, 3000));
      AllReduce& call = *calls.back();
      const cuda::Stream& stream = i % 2 == 0 ? gpu.stream : other;
      stream.fill(call.memory.pointer(), 0x3F, 12000);  // 0.747...
      gpu.engine.enqueue(call.call, {call.tensor.tensors(), call.tensor.tensors()}, stream);
    }
    gpu.stream.synchronize();
    other.synchronize();
    gpu.engine.throw_if_aborted();
    for (const auto& call : calls) call->expect_sum();
  });
}

void wrong_communicators() {
  const auto device = std::make_shared<const cuda::Device>(0);
  const auto other = std::make_shared<const cuda::Device>(1);
  const std::vector<std::string> ids = nccl::unique_ids(1);
  const auto own = nccl::make(ids, 1, device, 0, 1, kTimeout);
  const auto handle = reinterpret_cast<std::uint64_t>(own[0]->handle());
  const std::string text = "the NCCL communicator is of rank 0 of 1 on device 0, but the group's rank is ";
  expect_error(ErrorKind::invalid_argument, {text + "0 of 2 on device 0"},
               [&] { nccl::adopt(handle, 1, device, 0, 2, kTimeout); });
  expect_error(ErrorKind::invalid_argument, {text + "1 of 2"}, [&] { nccl::adopt(handle, 1, device, 1, 2, kTimeout); });
  expect_error(ErrorKind::invalid_argument, {text + "0 of 1 on device 1"},
               [&] { nccl::adopt(handle, 1, other, 0, 1, kTimeout); });
  expect_error(ErrorKind::invalid_argument, {"is null"}, [&] { nccl::adopt(0, 1, device, 0, 1, kTimeout); });
  expect_error(ErrorKind::system, {"ncclCommCount on rank 0: invalid argument"},
               [&] { nccl::adopt(4096, 1, device, 0, 1, kTimeout); });
  expect_error(ErrorKind::invalid_argument, {"got 0 unique ids for 1 communicators and needs 1"},
               [&] { nccl::make({}, 1, device, 0, 1, kTimeout); });
  expect_error(ErrorKind::invalid_argument, {"has 128 bytes, this one has 3"},
               [&] { nccl::make({"abc"}, 1, device, 0, 1, kTimeout); });
  expect_error(ErrorKind::timeout, {"making NCCL communicators on rank 0 did not end within 0.1 s", "NCCL_DEBUG"},
               [&] { nccl::make(nccl::unique_ids(1), 1, device, 0, 2, 50 * kMillisecond); });
}

void print_unavailable() {
  try {
    nccl::library();
    std::puts(nccl::library().describe().c_str());
  } catch (const Error& error) {
    std::puts(error.what());
  }
}

const std::map<std::string, void (*)()> kTests{
    {"timeout", timeout},
    {"abort_by_a_rank", abort_by_a_rank},
    {"abort_of_the_host", abort_of_the_host},
    {"abort_of_a_stuck_call", abort_of_a_stuck_call},
    {"network_error", network_error},
    {"other_size", other_size},
    {"first_call_in_a_capture", first_call_in_a_capture},
    {"bad_call_leaves_the_group", bad_call_leaves_the_group},
    {"barrier", barrier},
    {"several_streams", several_streams},
    {"wrong_communicators", wrong_communicators},
    {"print_unavailable", print_unavailable},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    if (count > 2)
      collectives(arguments[2]);
    else
      kTests.at(arguments[1])();
  } catch (const Error& error) {
    expect(false, error.what());
  }
  std::fflush(stdout);
  std::_Exit(0);  // threads may wait in NCCL
}
