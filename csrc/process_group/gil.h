// Python's lock where it is not known whether this thread has it.
#pragma once

#include <Python.h>

#include "core/waiting.h"

namespace ringreduce {

// If this thread has the GIL, it keeps it until release(), and has it again when this object goes.
class HeldGil final : public HeldLock {
 public:
  HeldGil() = default;
  ~HeldGil() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;

  void release() override {
    if (saved_ == nullptr && Py_IsInitialized() != 0 && PyGILState_Check() != 0) saved_ = PyEval_SaveThread();
  }

 private:
  PyThreadState* saved_ = nullptr;
};

// Releases the GIL, if this thread has it, until this object goes.
class WithoutGil {
 public:
  WithoutGil() { gil_.release(); }

 private:
  HeldGil gil_;
};

}  // namespace ringreduce
