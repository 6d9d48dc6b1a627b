#!/usr/bin/env bash
# After an allreduce of oneCCL the ranks hold different results, for a function of one's own and for sums of NaN.
#
# oneccl-devel 2022.1.2, impi-rt and impi-devel 2021.18.1, CPU library, 2 and 4 ranks on one host, x86-64 Linux, 2026-11-29.
# The function composes maps x -> a x + b of 32-bit integers. That is associative and does not commute. As oneCCL has no way to
# say so, one may expect any order of the ranks, but the same one on all. Instead each of 4 ranks has another result for few
# elements, where all exchange with all, and only long arrays, which are reduced in one place, are equal. So it is with the
# bits of a sum of NaN that hold the rank. Functions need the transport "ofi"; the default, "mpi", refuses them.
#
# Seen, how many different results the ranks hold:
#   function, 2 ranks: 2 of 1003 elements, 1 of 300000; 4 ranks: 4 of 1003 elements, 1 of 300000
#   NaN, 2 ranks: 2 of 1003 elements, 1 of 300000; 4 ranks: 4 of 1003 elements, 1 of 300000
#
# Why it matters: ringreduce has the same bits on all ranks. A program that moves between the two has replicas that drift
# apart on oneCCL only, and only for short arrays.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install -q oneccl-devel==2022.1.2 impi-rt==2021.18.1 impi-devel==2021.18.1
cat > program.cpp <<'PROGRAM'
#include <mpi.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <oneapi/ccl.hpp>
#include <set>
#include <string>
#include <vector>

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

struct Map {
  uint32_t a, b;
};

void compose(const void* in, size_t count, void* inout, size_t*, ccl::datatype, const ccl::fn_context*) {
  auto* left = static_cast<const Map*>(in);
  auto* right = static_cast<Map*>(inout);
  for (size_t i = 0; i < count; ++i) right[i] = {left[i].a * right[i].a, left[i].a * right[i].b + left[i].b};
}

void run(int rank, int size, bool function, size_t count) {
  ccl::kvs::address_type address;
  ccl::shared_ptr_class<ccl::kvs> store;
  if (rank == 0) address = (store = ccl::create_main_kvs())->get_address();
  MPI_Bcast(address.data(), address.size(), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank != 0) store = ccl::create_kvs(address);
  auto world = ccl::create_communicator(size, rank, store);

  std::string result(count * (function ? sizeof(Map) : sizeof(float)), '\0');
  if (function) {
    auto attributes = ccl::create_operation_attr<ccl::allreduce_attr>();
    attributes.set<ccl::allreduce_attr_id::reduction_fn>(ccl::reduction_fn(compose));
    const std::vector<Map> maps(count, {2u + rank, 1});
    ccl::allreduce(
        maps.data(), result.data(), count, ccl::datatype::int64, ccl::reduction::custom, world, attributes).wait();
  } else {
    const std::vector<uint32_t> nan(count, 0x7fc00001 + rank);
    ccl::allreduce(nan.data(), result.data(), count, ccl::datatype::float32, ccl::reduction::sum, world).wait();
  }
  const int bytes = result.size();
  std::string all(size * bytes, '\0');
  MPI_Gather(result.data(), bytes, MPI_BYTE, all.data(), bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
  std::set<std::string> different;
  for (int each = 0; each < size; ++each) different.insert(all.substr(each * bytes, bytes));
  if (rank == 0) std::ofstream("found") << different.size() << " of " << count;  // warnings go to the output
}

int main(int, char** arguments) {
  int rank, size;
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  run(rank, size, std::string(arguments[1]) == "function", std::atoi(arguments[2]));
  MPI_Finalize();
}
PROGRAM
c++ -std=c++17 -O1 program.cpp venv/lib/ccl/cpu/lib/libccl.a -Ivenv/include -Lvenv/lib -Wl,-rpath,"$folder/venv/lib" \
    -lmpi -lsvml -limf -lintlc -lirng -lhwloc -lpthread -ldl -lrt -o program
export CCL_ROOT=$folder/venv CCL_ATL_TRANSPORT=ofi I_MPI_FABRICS=shm
ranks() {
    venv/bin/mpiexec.hydra -n "$1" ./program "$2" "$3" >/dev/null 2>&1
    cat found
}
for kind in function NaN; do
    echo "$kind, 2 ranks: $(ranks 2 $kind 1003) elements, $(ranks 2 $kind 300000);" \
        "4 ranks: $(ranks 4 $kind 1003) elements, $(ranks 4 $kind 300000)"
done | tee seen
grep -qxF "function, 2 ranks: 2 of 1003 elements, 1 of 300000; 4 ranks: 4 of 1003 elements, 1 of 300000" seen
grep -qxF "NaN, 2 ranks: 2 of 1003 elements, 1 of 300000; 4 ranks: 4 of 1003 elements, 1 of 300000" seen
