// Collectives of oneCCL's CPU library as functions of C, which oneccl.py calls; peer_team.py builds it.
#include <algorithm>
#include <memory>
#include <oneapi/ccl.hpp>
#include <optional>
#include <string>

// The static library asks its program for these hooks of a profiler; none is attached.
extern "C" {
void* __itt_domain_create_ptr__3_0 = nullptr;
void* __itt_event_create_ptr__3_0 = nullptr;
void* __itt_event_end_ptr__3_0 = nullptr;
void* __itt_event_start_ptr__3_0 = nullptr;
void* __itt_metadata_add_ptr__3_0 = nullptr;
void* __itt_string_handle_create_ptr__3_0 = nullptr;
void* __itt_task_begin_ptr__3_0 = nullptr;
void* __itt_task_end_ptr__3_0 = nullptr;
void* __itt_thread_set_name_ptr__3_0 = nullptr;
}

namespace {

constexpr auto FLOAT = ccl::datatype::float32;
constexpr auto SUM = ccl::reduction::sum;
std::shared_ptr<ccl::kvs> store;
std::optional<ccl::communicator> world;

}  // namespace

extern "C" {

int address_size() { return ccl::kvs::address_max_size; }

// For rank 0: what the others join by.
void make_address(char* address) {
  store = ccl::create_main_kvs();
  const auto made = store->get_address();
  std::copy(made.begin(), made.end(), address);
}

void join(int size, int rank, const char* address) {
  if (rank != 0) {
    ccl::kvs::address_type given;
    std::copy_n(address, given.size(), given.begin());
    store = ccl::create_kvs(given);
  }
  world.emplace(ccl::create_communicator(size, rank, store));
}

void barrier() { ccl::barrier(*world).wait(); }

void all_reduce(void* in, void* out, size_t count) { ccl::allreduce(in, out, count, FLOAT, SUM, *world).wait(); }

// Any dtype and operation, by their numbers in types.hpp; with `combine` that function is the operation. The error, or
// null.
const char* all_reduce_by(void* in, void* out, size_t count, int dtype, int op, ccl::reduction_fn combine) {
  static std::string failure;
  try {
    auto attributes = ccl::create_operation_attr<ccl::allreduce_attr>();
    if (combine) attributes.set<ccl::allreduce_attr_id::reduction_fn>(combine);
    const auto type = static_cast<ccl::datatype>(dtype);
    ccl::allreduce(in, out, count, type, static_cast<ccl::reduction>(op), *world, attributes).wait();
    return nullptr;
  } catch (const std::exception& error) {
    failure = error.what();
    return failure.c_str();
  }
}

// `count` is that of a rank's part, here and below.
void reduce_scatter(void* in, void* out, size_t count) {
  ccl::reduce_scatter(in, out, count, FLOAT, SUM, *world).wait();
}

void all_gather(void* in, void* out, size_t count) { ccl::allgather(in, out, count, FLOAT, *world).wait(); }

void all_to_all(void* in, void* out, size_t count) { ccl::alltoall(in, out, count, FLOAT, *world).wait(); }

void broadcast(void* in, void* /*out*/, size_t count) { ccl::broadcast(in, count, FLOAT, 0, *world).wait(); }
}
