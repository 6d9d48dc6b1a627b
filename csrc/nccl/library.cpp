#include "nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "core/fork.h"

namespace ringreduce::nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";
constexpr const char* kFix = "install it: `pip install nvidia-nccl-cu13` (-cu12 for CUDA 12), as torch for CUDA does";

struct Opened {
  std::mutex mutex;
  std::unique_ptr<const Library> library;
};

std::string version_text(int version) {  // of NCCL 2.9 and later
  return std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

Library::Library(const std::vector<std::string>& places) {
  void* handle = nullptr;
  std::string reasons;
  const auto open = [&](const std::string& file, int flags = 0) {
    if (handle != nullptr) return;
    handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (handle != nullptr)
      file_ = file;
    else if (const char* const reason = dlerror(); reason != nullptr && flags == 0)
      reasons += (reasons.empty() ? "" : "; ") + std::string(reason);
  };
  if (const char* const named = std::getenv("RINGREDUCE_LIBNCCL"); named != nullptr && *named != '\0') {
    open(named);
  } else {
    open(kName, RTLD_NOLOAD);
    for (const std::string& place : places) open(place);
    open(kName);
  }
  if (handle == nullptr) throw Error(ErrorKind::system, "no NCCL: " + reasons + "; " + kFix);

  std::string missing;
#define RINGREDUCE_NCCL_FIND(name, result, parameters) \
  name = reinterpret_cast<result(*) parameters>(dlsym(handle, #name));
  RINGREDUCE_NCCL_NEWER_FUNCTIONS(RINGREDUCE_NCCL_FIND)
#define RINGREDUCE_NCCL_REQUIRE(name, result, parameters) \
  RINGREDUCE_NCCL_FIND(name, result, parameters)          \
  if (name == nullptr) missing += missing.empty() ? #name : ", " #name;
  RINGREDUCE_NCCL_FUNCTIONS(RINGREDUCE_NCCL_REQUIRE)
#undef RINGREDUCE_NCCL_REQUIRE
#undef RINGREDUCE_NCCL_FIND
  if (Dl_info found; ncclGetVersion != nullptr && dladdr(reinterpret_cast<void*>(ncclGetVersion), &found) != 0)
    file_ = found.dli_fname;
  if (!missing.empty())
    throw Error(ErrorKind::system, "NCCL (" + file_ + ") is too old: it has no " + missing +
                                       "; ringreduce needs NCCL 2.7 or later: " + kFix);
}

std::string Library::version() const {
  int version = 0;
  return ncclGetVersion(&version) == kSuccess ? version_text(version) : "?";
}

std::string Library::describe() const { return version() + " (" + file_ + ")"; }

std::string Library::text(ncclResult_t result) const {
  std::string text = ncclGetErrorString(result);
  const char* const last = ncclGetLastError == nullptr ? nullptr : ncclGetLastError(nullptr);
  if (last != nullptr && *last != '\0') text += std::string(": ") + last;
  return text;
}

void Library::require(ncclResult_t result, const char* function, int rank) const {
  if (result == kSuccess) return;
  const bool lost = result == kRemoteError;
  throw Error(lost ? ErrorKind::peer_lost : ErrorKind::system,
              std::string(function) + " on rank " + std::to_string(rank) + ": " + text(result) + "; NCCL " +
                  describe() + " says more with NCCL_DEBUG=WARN in the environment",
              lost ? -1 : rank);
}

const Library& library(const std::vector<std::string>& places) {
  Opened& opened = process_wide<Opened>();
  std::lock_guard lock(opened.mutex);
  if (opened.library == nullptr) opened.library.reset(new Library(places));
  return *opened.library;
}

}  // namespace ringreduce::nccl
