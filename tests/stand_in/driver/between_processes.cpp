// GPU memory that two processes share.

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

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>

#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/lent_descriptor.h"
#include "cuda/shared_memory.h"
#include "driver/parameters.h"
#include "driver/tests.h"

namespace {

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

}  // namespace

const Tests kBetweenProcesses{
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
