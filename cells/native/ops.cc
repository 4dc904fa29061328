// MindSpore's entry points (ops.Custom, func_type="aot"). Each returns 0, or another number for a bad call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include "blocks.h"
#include "kernels.h"
#include "optimizers.h"

namespace {

using lossscale::DType;
using lossscale::Input;

constexpr int kDone = 0;
constexpr int kBadCount = 1;
constexpr int kBadDtype = 2;
constexpr int kNoMemory = 3;

// The arguments that MindSpore passes, inputs first, then outputs.
struct Arguments {
  int count;
  void **data;
  int *ndims;
  int64_t **shapes;
  const char **dtypes;

  int64_t Size(int i) const {
    int64_t size = 1;
    for (int axis = 0; axis < ndims[i]; ++axis) {
      size *= shapes[i][axis];
    }
    return size;
  }

  bool Get(int i, Input *input) const {
    input->data = data[i];
    input->size = Size(i);
    if (std::strcmp(dtypes[i], "float32") == 0) {
      input->dtype = DType::kFloat32;
    } else if (std::strcmp(dtypes[i], "float16") == 0) {
      input->dtype = DType::kFloat16;
    } else if (std::strcmp(dtypes[i], "bfloat16") == 0) {
      input->dtype = DType::kBFloat16;
    } else if (std::strcmp(dtypes[i], "float64") == 0) {
      input->dtype = DType::kFloat64;
    } else {
      return false;
    }
    return true;
  }

  bool Get(int first, int n, std::vector<Input> *inputs) const {
    inputs->resize(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) {
      if (!Get(first + i, &(*inputs)[static_cast<size_t>(i)])) {
        return false;
      }
    }
    return true;
  }

  bool GetScalar(int i, double *value, int place = 0) const {
    if (std::strcmp(dtypes[i], "float32") == 0) {
      *value = static_cast<double>(static_cast<const float *>(data[i])[place]);
    } else if (std::strcmp(dtypes[i], "float64") == 0) {
      *value = static_cast<const double *>(data[i])[place];
    } else {
      return false;
    }
    return true;
  }
};

bool Any(const bool *flags, int n) {
  bool any = false;
  for (int i = 0; i < n; ++i) {
    any |= flags[i];
  }
  return any;
}

// Inputs: [factor,] n gradients. Outputs: overflow (1,), flags (n,) [, sums of squares (n,) or (1,)] [, n products].
// A factor of shape (n,) has one number for each gradient.
int Multiply(const Arguments &arguments, bool has_factor, bool reciprocal, bool has_norm, bool has_outputs) {
  const int first = has_factor ? 1 : 0;
  const int fixed = first + 2 + (has_norm ? 1 : 0);
  const int n = (arguments.count - fixed) / (has_outputs ? 2 : 1);
  if (n < 1 || fixed + n * (has_outputs ? 2 : 1) != arguments.count) {
    return kBadCount;
  }
  const lossscale::ExactSubnormals exact;
  double factor = 1;
  std::vector<Input> gradients{};
  if ((has_factor && !arguments.GetScalar(0, &factor)) || !arguments.Get(first, n, &gradients)) {
    return kBadDtype;
  }
  if (reciprocal) {
    factor = 1 / factor;
  }
  void **output = arguments.data + first + n;
  auto *overflow = static_cast<bool *>(output[0]);
  auto *flags = static_cast<bool *>(output[1]);
  void **products = has_outputs ? output + (has_norm ? 3 : 2) : nullptr;
  std::vector<double> squares(has_norm ? static_cast<size_t>(n) : 0);
  double *sums = has_norm ? squares.data() : nullptr;
  if (has_factor && n > 1 && arguments.Size(0) == n) {
    for (int i = 0; i < n; ++i) {
      if (!arguments.GetScalar(0, &factor, i)) {
        return kBadDtype;
      }
      lossscale::MultiplyAndCheck(reciprocal ? 1 / factor : factor, {gradients[static_cast<size_t>(i)]},
                                  products == nullptr ? nullptr : products + i, flags + i,
                                  sums == nullptr ? nullptr : sums + i);
    }
  } else {
    lossscale::MultiplyAndCheck(factor, gradients, products, flags, sums);
  }
  if (has_norm) {
    auto *written = static_cast<double *>(output[2]);
    if (arguments.Size(first + n + 2) == n) {
      std::copy(squares.begin(), squares.end(), written);
    } else {
      *written = std::accumulate(squares.begin(), squares.end(), 0.0);
    }
  }
  *overflow = Any(flags, n);
  return kDone;
}

// Per-tensor numbers come as one vector of length n, or of length 1 for all.
float Each(const Arguments &arguments, int i, int tensor) {
  const auto *values = static_cast<const float *>(arguments.data[i]);
  return values[arguments.Size(i) == 1 ? 0 : tensor];
}

// What the first input of a fused optimizer is, and who decides whether to step: the last of its options.
enum class FusedMode { kScaleUnchecked, kScaleChecked, kFactor };

// The first inputs of a fused optimizer: scale or factor, whether to skip (read with a factor alone), learning rates,
// weight decays, a number, options. Then n gradients, n weights, n of each state, so many float32 scalars, all written
// in place, and the int32 count of steps, which grows by 1 with each update.
struct FusedStep {
  static constexpr int kFixed = 6;
  Arguments arguments;
  int states;
  int scalars;
  int n = 0;
  double factor = 1;
  float number = 0;
  const float *options = nullptr;
  std::vector<Input> gradients{};
  bool skip = false;

  // Reads them and writes the flags, which are the last two outputs. Where nothing is skipped, counts the step.
  int Begin() {
    const int others = kFixed + scalars + 1 + 2;
    n = (arguments.count - others) / (2 + states);
    if (n < 1 || others + (2 + states) * n != arguments.count) {
      return kBadCount;
    }
    double read = 0;
    if (!arguments.GetScalar(0, &factor) || !arguments.GetScalar(4, &read) || !arguments.Get(kFixed, n, &gradients)) {
      return kBadDtype;
    }
    number = static_cast<float>(read);
    options = static_cast<const float *>(arguments.data[5]);
    const auto mode = static_cast<FusedMode>(static_cast<int>(options[arguments.Size(5) - 1]));
    auto *any = static_cast<bool *>(arguments.data[arguments.count - 2]);
    auto *flags = static_cast<bool *>(arguments.data[arguments.count - 1]);
    std::fill(flags, flags + n, false);
    if (mode == FusedMode::kFactor) {
      skip = *static_cast<const bool *>(arguments.data[1]);
    } else {
      factor = 1 / factor;
      if (mode == FusedMode::kScaleChecked) {
        lossscale::MultiplyAndCheck(factor, gradients, nullptr, flags, nullptr);
      }
      skip = Any(flags, n);
    }
    *any = skip;
    if (!skip) {
      ++*Steps();
    }
    return kDone;
  }

  int32_t *Steps() const { return static_cast<int32_t *>(arguments.data[arguments.count - 3]); }
  float *Scalar(int i) const { return static_cast<float *>(arguments.data[kFixed + (2 + states) * n + i]); }
  // The weight (0) or a state (from 1 on) of one tensor.
  float *Written(int which, int tensor) const {
    return static_cast<float *>(arguments.data[kFixed + (1 + which) * n + tensor]);
  }
  float Rate(int tensor) const { return Each(arguments, 2, tensor); }
  float Decay(int tensor) const { return Each(arguments, 3, tensor); }
  const Input &Gradient(int tensor) const { return gradients[static_cast<size_t>(tensor)]; }

  std::vector<lossscale::AdamTensor> AdamTensors() const {
    std::vector<lossscale::AdamTensor> tensors;
    for (int i = 0; i < n; ++i) {
      tensors.push_back({Gradient(i), Written(0, i), Written(1, i), Written(2, i), Rate(i), Decay(i)});
    }
    return tensors;
  }
};

}  // namespace

// An exception must not leave an entry point: MindSpore's frames can't be unwound. What can be thrown is bad_alloc.
#define LOSSSCALE_OP(name)                                                                                  \
  static int name##_body(const Arguments &arguments);                                                       \
  extern "C" __attribute__((visibility("default"))) int name(int count, void **data, int *ndims,            \
                                                             int64_t **shapes, const char **dtypes, void *, \
                                                             void *) noexcept {                             \
    try {                                                                                                   \
      return name##_body({count, data, ndims, shapes, dtypes});                                             \
    } catch (...) {                                                                                         \
      return kNoMemory;                                                                                     \
    }                                                                                                       \
  }                                                                                                         \
  static int name##_body(const Arguments &arguments)

// For tests: which of the builds in blocks.h runs, 0 to 2.
extern "C" __attribute__((visibility("default"))) int lossscale_level() noexcept { return lossscale::Level(); }

LOSSSCALE_OP(lossscale_unscale) { return Multiply(arguments, true, true, false, true); }
LOSSSCALE_OP(lossscale_unscale_norm) { return Multiply(arguments, true, true, true, true); }
LOSSSCALE_OP(lossscale_multiply) { return Multiply(arguments, true, false, false, true); }
LOSSSCALE_OP(lossscale_look) { return Multiply(arguments, true, true, false, false); }
LOSSSCALE_OP(lossscale_look_norm) { return Multiply(arguments, true, true, true, false); }
LOSSSCALE_OP(lossscale_check) { return Multiply(arguments, false, false, false, false); }
LOSSSCALE_OP(lossscale_check_norm) { return Multiply(arguments, false, false, true, false); }

// Number: the momentum. Options: mode. State: the moments.
LOSSSCALE_OP(lossscale_momentum) {
  FusedStep step{arguments, 1, 0};
  const int bad = step.Begin();
  if (bad != kDone || step.skip) {
    return bad;
  }
  std::vector<lossscale::MomentumTensor> tensors;
  for (int i = 0; i < step.n; ++i) {
    tensors.push_back({step.Gradient(i), step.Written(0, i), step.Written(1, i), step.Rate(i), step.Decay(i)});
  }
  lossscale::ApplyMomentum(step.factor, step.number, tensors);
  return kDone;
}

// Number: the momentum. Options: dampening, nesterov, mode. States: accumulations, and where they have to begin.
LOSSSCALE_OP(lossscale_sgd) {
  FusedStep step{arguments, 2, 0};
  const int bad = step.Begin();
  if (bad != kDone || step.skip) {
    return bad;
  }
  std::vector<lossscale::SgdTensor> tensors;
  for (int i = 0; i < step.n; ++i) {
    tensors.push_back({step.Gradient(i), step.Written(0, i), step.Written(1, i), step.Written(2, i), step.Rate(i),
                       step.Decay(i)});
  }
  lossscale::ApplySgd(step.factor, {step.number, step.options[0], step.options[1] != 0}, tensors);
  return kDone;
}

// Options: beta1, beta2, epsilon, nesterov, mode. States: the two moments. Scalars: beta1^steps and beta2^steps.
LOSSSCALE_OP(lossscale_adam) {
  FusedStep step{arguments, 2, 2};
  const int bad = step.Begin();
  if (bad != kDone || step.skip) {
    return bad;
  }
  const float beta1 = step.options[0];
  const float beta2 = step.options[1];
  const float power1 = *step.Scalar(0) *= beta1;
  const float power2 = *step.Scalar(1) *= beta2;
  std::vector<lossscale::AdamTensor> tensors = step.AdamTensors();
  for (lossscale::AdamTensor &tensor : tensors) {
    tensor.learning_rate = tensor.learning_rate * std::sqrt(1 - power2) / (1 - power1);
  }
  lossscale::ApplyAdam(step.factor, {beta1, beta2, 1 - beta1, 1 - beta2, step.options[2], step.options[3] != 0, 1, 1},
                       tensors);
  return kDone;
}

// Options: beta1, beta2, epsilon, mode. States: the two moments.
LOSSSCALE_OP(lossscale_adam_weight_decay) {
  FusedStep step{arguments, 2, 0};
  const int bad = step.Begin();
  if (bad != kDone || step.skip) {
    return bad;
  }
  const float beta1 = step.options[0];
  const float beta2 = step.options[1];
  lossscale::ApplyAdamWeightDecay(step.factor, {beta1, beta2, 1 - beta1, 1 - beta2, step.options[2], false, 1, 1},
                                  step.AdamTensors());
  return kDone;
}

// Options: beta1, beta2, epsilon, mode. States: the two moments.
LOSSSCALE_OP(lossscale_adamw) {
  FusedStep step{arguments, 2, 0};
  const int bad = step.Begin();
  if (bad != kDone || step.skip) {
    return bad;
  }
  const float beta1 = step.options[0];
  const float beta2 = step.options[1];
  const auto steps = static_cast<float>(*step.Steps());
  const float correction1 = 1 - std::pow(beta1, steps);
  const float correction2 = 1 - std::pow(beta2, steps);
  lossscale::ApplyAdamW(step.factor, {beta1, beta2, 1 - beta1, 1 - beta2, step.options[2], false, correction1,
                                      std::sqrt(correction2)},
                        step.AdamTensors());
  return kDone;
}
