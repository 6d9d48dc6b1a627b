// How a server updates its values: assignment, reduction, and the element-wise optimizers of torch.optim. Thread-safe;
// allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/types.h"

namespace ringreduce::parameter_server {

struct Rule {
  enum class Kind : std::uint32_t {
    assign,  // the value becomes what was pushed
    reduce,  // value op what was pushed
    sgd,
    adam,  // and AdamW
    adagrad,
    rmsprop,
    rowwise_adagrad,  // of tables: one sum for a row, of the means of its gradients' squares
    python,           // a function of the user's, or any other optimizer: called by the server's owner
  };
  Kind kind = Kind::assign;
  ReduceOp op = ReduceOp::sum;  // reduce
  bool average = false;         // what the workers pushed is divided by the sum of its weights
  // As torch.optim calls them.
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0, lr_decay = 0, alpha = 0;
  double initial_accumulator_value = 0;
  bool nesterov = false, maximize = false, centered = false;
  bool decoupled = false;  // weight decay as AdamW has it
  bool fused = true;       // whether torch, on this CPU, contracts a product and a sum into one rounding

  // How many numbers a value's element has as state, or a row where per_row().
  int states() const;
  bool per_row() const { return kind == Kind::rowwise_adagrad; }
  // Whether the update is computed here, for this dtype. Otherwise `python` does it.
  bool native(DType dtype) const;
};

// Square roots of `count` elements, as torch computes them; `out` may be `in`. Thread-safe.
using Roots = void (*)(DType dtype, void* out, const void* in, std::size_t count);

// Elements to update: the value before and after, what was pushed, and `states()` arrays of state.
struct Update {
  std::uint64_t step = 1;  // of this block: 1 is the first update
  std::size_t count = 0;
  std::size_t width = 1;  // of a row, where per_row(): `count` is a multiple of it
  const void* value = nullptr;
  const void* gradient = nullptr;
  void* out = nullptr;  // not `value`
  void* state[3] = {};
  void* scratch = nullptr;  // room for the elements
  Roots roots = nullptr;
};

// For optimizers. Precondition: native(dtype).
void update(const Rule& rule, DType dtype, const Update& update);

}  // namespace ringreduce::parameter_server
