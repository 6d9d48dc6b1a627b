// The update rules of torch.optim. rules.cpp includes this file once for each instruction set and defines
//   RINGREDUCE_TARGET  the namespace to fill
//
// Results are bit-identical to torch's on a CPU with foreach=False and fused=False: the same operations in the same
// order with the same rounding. torch's kernels for AVX2 and AVX-512 use fused multiply-add, those for other CPUs do
// not; the template parameter `fused` selects between them. Square roots are computed by torch, because those of MKL,
// with which torch may be built, are not always correctly rounded.

namespace ringreduce::parameter_server::RINGREDUCE_TARGET {
namespace {

template <bool fused, class T>
inline T add_product(T a, T x, T y) {  // a + x * y
  if constexpr (!fused)
    return a + x * y;
  else if constexpr (sizeof(T) == sizeof(float))
    return __builtin_fmaf(x, y, a);
  else
    return __builtin_fma(x, y, a);
}

// torch.lerp with a scalar weight.
template <bool fused, class T>
inline T lerp(T a, T b, T weight, bool small) {
  return small ? add_product<fused>(a, weight, b - a) : add_product<fused>(b, -(b - a), T{1} - weight);
}

// A Python number becomes a double, which torch rounds once to the tensor's type.
template <class T>
inline T rounded(double x) {
  return static_cast<T>(x);
}

template <bool fused, class T>
inline T decayed(T gradient, T value, bool maximize, bool decays, T decay) {
  const T g = maximize ? -gradient : gradient;
  return decays ? add_product<fused>(g, decay, value) : g;
}

template <bool fused, class T>
void sgd(const Rule& rule, const Update& update) {
  const T rate = rounded<T>(-rule.lr), decay = rounded<T>(rule.weight_decay), momentum = rounded<T>(rule.momentum);
  const T fresh = rounded<T>(1 - rule.dampening);
  const bool decays = rule.weight_decay != 0, first = update.step == 1, maximize = rule.maximize;
  const T* __restrict value = of<T>(update.value);
  const T* __restrict gradient = of<T>(update.gradient);
  T* __restrict out = of<T>(update.out);
  if (rule.momentum == 0) {
    for (std::size_t i = 0; i < update.count; ++i)
      out[i] = add_product<fused>(value[i], rate, decayed<fused>(gradient[i], value[i], maximize, decays, decay));
    return;
  }
  T* __restrict buffer = of<T>(update.state[0]);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    const T b = first ? g : add_product<fused>(momentum * buffer[i], fresh, g);
    buffer[i] = b;
    out[i] = add_product<fused>(value[i], rate, rule.nesterov ? add_product<fused>(g, momentum, b) : b);
  }
}

template <bool fused, class T>
void adam(const Rule& rule, const Update& update) {
  const auto step = static_cast<double>(update.step);
  const double correction1 = 1 - std::pow(rule.beta1, step), correction2 = 1 - std::pow(rule.beta2, step);
  const T rate = rounded<T>(-(rule.lr / correction1)), divisor = rounded<T>(std::pow(correction2, 0.5));
  const T shrink = rounded<T>(1 - rule.lr * rule.weight_decay), decay = rounded<T>(rule.weight_decay);
  const T weight = rounded<T>(1 - rule.beta1), keep = rounded<T>(rule.beta2), fresh = rounded<T>(1 - rule.beta2);
  const T eps = rounded<T>(rule.eps);
  const bool decays = rule.weight_decay != 0 && !rule.decoupled, shrinks = rule.weight_decay != 0 && rule.decoupled;
  const bool small = (weight < 0 ? -weight : weight) < T{0.5}, maximize = rule.maximize;
  const T* __restrict value = of<T>(update.value);
  const T* __restrict gradient = of<T>(update.gradient);
  T* __restrict out = of<T>(update.out);
  T* __restrict mean = of<T>(update.state[0]);
  T* __restrict square = of<T>(update.state[1]);
  T* __restrict root = of<T>(update.scratch);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    mean[i] = lerp<fused>(mean[i], g, weight, small);
    square[i] = add_product<fused>(square[i] * keep, fresh * g, g);
  }
  update.roots(kDType<T>, root, square, update.count);
  for (std::size_t i = 0; i < update.count; ++i)
    out[i] = (shrinks ? value[i] * shrink : value[i]) + rate * mean[i] / (root[i] / divisor + eps);
}

template <bool fused, class T>
void adagrad(const Rule& rule, const Update& update) {
  const auto step = static_cast<double>(update.step);
  const T rate = rounded<T>(-(rule.lr / (1 + (step - 1) * rule.lr_decay)));
  const T decay = rounded<T>(rule.weight_decay), eps = rounded<T>(rule.eps);
  const bool decays = rule.weight_decay != 0, maximize = rule.maximize;
  const T* __restrict value = of<T>(update.value);
  const T* __restrict gradient = of<T>(update.gradient);
  T* __restrict out = of<T>(update.out);
  T* __restrict sum = of<T>(update.state[0]);
  T* __restrict root = of<T>(update.scratch);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    sum[i] = add_product<fused>(sum[i], g, g);
  }
  update.roots(kDType<T>, root, sum, update.count);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    out[i] = value[i] + rate * g / (root[i] + eps);
  }
}

template <bool fused, class T>
void rmsprop(const Rule& rule, const Update& update) {
  const T rate = rounded<T>(-rule.lr), decay = rounded<T>(rule.weight_decay), eps = rounded<T>(rule.eps);
  const T keep = rounded<T>(rule.alpha), fresh = rounded<T>(1 - rule.alpha), momentum = rounded<T>(rule.momentum);
  const bool decays = rule.weight_decay != 0, maximize = rule.maximize, centered = rule.centered;
  const bool small = (fresh < 0 ? -fresh : fresh) < T{0.5}, moves = rule.momentum > 0;
  const T* __restrict value = of<T>(update.value);
  const T* __restrict gradient = of<T>(update.gradient);
  T* __restrict out = of<T>(update.out);
  T* __restrict square = of<T>(update.state[0]);
  T* __restrict mean = of<T>(update.state[1]);
  T* __restrict buffer = of<T>(update.state[2]);
  T* __restrict root = of<T>(update.scratch);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    const T s = add_product<fused>(square[i] * keep, fresh * g, g);
    square[i] = s;
    root[i] = s;
    if (!centered) continue;
    const T m = lerp<fused>(mean[i], g, fresh, small);
    mean[i] = m;
    root[i] = add_product<fused>(s, -m, m);
  }
  update.roots(kDType<T>, root, root, update.count);
  for (std::size_t i = 0; i < update.count; ++i) {
    const T g = decayed<fused>(gradient[i], value[i], maximize, decays, decay);
    const T average = root[i] + eps;
    if (moves) {
      const T b = momentum * buffer[i] + g / average;
      buffer[i] = b;
      out[i] = add_product<fused>(value[i], rate, b);
    } else {
      out[i] = value[i] + rate * g / average;
    }
  }
}

// The squares are summed in eight lanes whatever the instruction set, so all give the same bits.
template <bool fused, class T>
void rowwise_adagrad(const Rule& rule, const Update& update) {
  const T eps = rounded<T>(rule.eps), rate = rounded<T>(-rule.lr);
  for (std::size_t row = 0; row < update.count / update.width; ++row) {
    const T* __restrict value = of<T>(update.value) + row * update.width;
    const T* __restrict gradient = of<T>(update.gradient) + row * update.width;
    T* __restrict out = of<T>(update.out) + row * update.width;
    constexpr std::size_t kLanes = 8;
    T sums[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= update.width; i += kLanes)
      for (std::size_t lane = 0; lane < kLanes; ++lane)
        sums[lane] = add_product<fused>(sums[lane], gradient[i + lane], gradient[i + lane]);
    for (; i < update.width; ++i) sums[i % kLanes] = add_product<fused>(sums[i % kLanes], gradient[i], gradient[i]);
    const T squares = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    T& sum = of<T>(update.state[0])[row];
    sum += squares / static_cast<T>(update.width);
    const T step = rate / (std::sqrt(sum) + eps);
    for (i = 0; i < update.width; ++i) {
      const T g = rule.maximize ? -gradient[i] : gradient[i];
      out[i] = add_product<fused>(value[i], step, g);
    }
  }
}

template <bool fused, class T>
void update(const Rule& rule, const Update& update) {
  switch (rule.kind) {
    case Rule::Kind::sgd:
      return sgd<fused, T>(rule, update);
    case Rule::Kind::adam:
      return adam<fused, T>(rule, update);
    case Rule::Kind::adagrad:
      return adagrad<fused, T>(rule, update);
    case Rule::Kind::rmsprop:
      return rmsprop<fused, T>(rule, update);
    case Rule::Kind::rowwise_adagrad:
      return rowwise_adagrad<fused, T>(rule, update);
    default:
      return;
  }
}

}  // namespace
}  // namespace ringreduce::parameter_server::RINGREDUCE_TARGET
