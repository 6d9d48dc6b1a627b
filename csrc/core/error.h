// The errors a caller can meet. Everything below the process group throws `Error`; the process group turns the kind
// into the exception class of `ringreduce.errors`.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace ringreduce {

enum class ErrorKind : int {
  invalid_argument = 1,  // this rank's call is wrong; nothing moved, the group is intact
  peer_lost,             // a process of the group ended or left; the group is unusable
  timeout,               // a deadline passed; the group is unusable
  mismatch,              // ranks made different calls; the group is unusable, unless it was a single message
  aborted,               // abort() was called; the group is unusable
  system,                // the operating system refused something
  server_lost,           // a parameter server ended, and no backup has its blocks; those of others can be read
  operator_failed,       // the user's operator failed on some rank; the call has ended, the group is intact
};

class Error : public std::runtime_error {
 public:
  // `culprit` is the rank (in the group) the error is about, or -1.
  Error(ErrorKind kind, const std::string& message, int culprit = -1)
      : std::runtime_error(message), kind_(kind), culprit_(culprit) {}

  ErrorKind kind() const { return kind_; }
  int culprit() const { return culprit_; }

 private:
  ErrorKind kind_;
  int culprit_;
};

// What a rank tells the others of an exception that is no Error. Needs no memory; valid as long as the exception.
inline const char* reason(const std::exception& thrown) {
  if (dynamic_cast<const std::bad_alloc*>(&thrown) == nullptr) return thrown.what();
  return "memory ran out: free some, or start fewer processes on its host (RLIMIT_AS and a cgroup's memory count too)";
}

}  // namespace ringreduce
