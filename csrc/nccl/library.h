// NCCL: libnccl.so.2, opened at first use, so that one build serves machines with and without it.
#pragma once

#include <string>
#include <vector>

#include "core/error.h"
#include "nccl/api.h"

namespace ringreduce::nccl {

// The functions, by their names in nccl.h; those of RINGREDUCE_NCCL_NEWER_FUNCTIONS may be null.
class Library {
 public:
#define RINGREDUCE_NCCL_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  RINGREDUCE_NCCL_FUNCTIONS(RINGREDUCE_NCCL_MEMBER)
  RINGREDUCE_NCCL_NEWER_FUNCTIONS(RINGREDUCE_NCCL_MEMBER)
#undef RINGREDUCE_NCCL_MEMBER

  std::string version() const;   // "2.27.5"
  std::string describe() const;  // "2.27.5 (/usr/lib/libnccl.so.2)"
  // "unhandled cuda error ...: last words of NCCL".
  std::string text(ncclResult_t result) const;
  // Throws Error(system), or (peer_lost) if NCCL says so, for another result of `function` than success: "ncclSend on
  // rank 3: invalid argument ...".
  void require(ncclResult_t result, const char* function, int rank) const;

 private:
  friend const Library& library(const std::vector<std::string>& places);
  explicit Library(const std::vector<std::string>& places);

  std::string file_;
};

// NCCL, ready to be used; never unloaded. It is the file that RINGREDUCE_LIBNCCL names (for tests), or else the one
// that this process has loaded already, as communicators of others are of that one; then the first of `places` that can
// be loaded, then the loader's libnccl.so.2. What the first successful call found stays. Throws Error(system) that says
// why and what to do if there is none, or if it is too old.
const Library& library(const std::vector<std::string>& places);
inline const Library& library() { return library({}); }

}  // namespace ringreduce::nccl
