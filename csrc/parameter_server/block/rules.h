// The update rules that run in C++: assignment, reduction, and element-wise optimizers of torch.optim. Thread-safe, and
// without allocations.
#pragma once

#include <array>
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
    rowwise_adagrad,  // for tables: one sum per row, of the mean squares of its gradients
    python,           // a user's function or any other optimizer, which the server's owner calls in Python
  };
  Kind kind = Kind::assign;
  ReduceOp op = ReduceOp::sum;  // for reduce
  bool average = false;         // the sum of the pushes is divided by the sum of their weights
  // The optimizer's settings, named as in torch.optim.
  double lr = 0, momentum = 0, dampening = 0, weight_decay = 0, beta1 = 0, beta2 = 0, eps = 0, lr_decay = 0, alpha = 0;
  double initial_accumulator_value = 0;
  bool nesterov = false, maximize = false, centered = false;
  bool decoupled = false;  // weight decay is applied to the value, as in AdamW
  bool fused = true;       // torch's kernels for this CPU use fused multiply-add

  // Changes one of the numbers that may change between updates; CHANGEABLE in updates.py has their order. No effect if
  // there is no such number, or if the rule would then need other states.
  void change(std::uint64_t place, double number);
  // These numbers, in that order.
  static constexpr std::size_t kNumbers = 9;
  std::array<double, kNumbers> numbers() const {
    return {lr, momentum, dampening, weight_decay, beta1, beta2, eps, lr_decay, alpha};
  }
  // The number of state values per element; with per_row(), per row.
  int states() const;
  bool per_row() const { return kind == Kind::rowwise_adagrad; }
  // Whether the update of this dtype is computed in C++.
  bool native(DType dtype) const;
};

// Square roots of `count` elements, as torch computes them; `out` may be `in`. Thread-safe.
using Roots = void (*)(DType dtype, void* out, const void* in, std::size_t count);

// Sets `count` elements of float32 or float64.
void fill(DType dtype, void* to, std::size_t count, double value);

// One update of `count` elements. All arrays have `count` elements, but for `state` with per_row().
struct Update {
  std::uint64_t step = 1;  // number of this update of the block; the first is 1
  std::size_t count = 0;
  std::size_t width = 1;  // elements of a row, with per_row(); divides `count`
  const void* value = nullptr;
  const void* gradient = nullptr;
  void* out = nullptr;  // the new value; must not overlap `value`
  void* state[3] = {};  // the first states() are used, and updated in place
  void* scratch = nullptr;
  Roots roots = nullptr;
};

// Computes the update of an optimizer. Precondition: rule.native(dtype), and `kind` is neither assign nor reduce.
void update(const Rule& rule, DType dtype, const Update& update);

}  // namespace ringreduce::parameter_server
