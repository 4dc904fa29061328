// MindSpore's entry points (ops.Custom, func_type="aot"). Each returns 0, or another number for a bad call.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>
#include <vector>

#include "kernels.h"

namespace {

using lossscale::DType;
using lossscale::Input;

constexpr int kDone = 0;
constexpr int kBadCount = 1;
constexpr int kBadDtype = 2;

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
  std::vector<Input> gradients;
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

// The first inputs of a fused optimizer: scale, learning rates, weight decays, options (the last one says whether to
// look for overflow), then n gradients, n weights and n of each state.
struct FusedStep {
  static constexpr int kFixed = 4;
  int n;
  double factor;
  const float *options;
  std::vector<Input> gradients;
  bool overflow;

  // Reads them for an optimizer of so many states and options, and writes the flags, which are the last two outputs.
  int Begin(const Arguments &arguments, int states) {
    n = (arguments.count - kFixed - 2) / (2 + states);
    if (n < 1 || kFixed + (2 + states) * n + 2 != arguments.count) {
      return kBadCount;
    }
    double scale = 1;
    if (!arguments.GetScalar(0, &scale) || !arguments.Get(kFixed, n, &gradients)) {
      return kBadDtype;
    }
    factor = 1 / scale;
    options = static_cast<const float *>(arguments.data[3]);
    auto *any = static_cast<bool *>(arguments.data[arguments.count - 2]);
    auto *flags = static_cast<bool *>(arguments.data[arguments.count - 1]);
    if (options[arguments.Size(3) - 1] != 0) {
      lossscale::MultiplyAndCheck(factor, gradients, nullptr, flags, nullptr);
    } else {
      std::fill(flags, flags + n, false);
    }
    overflow = *any = Any(flags, n);
    return kDone;
  }
};

}  // namespace

#define LOSSSCALE_OP(name)                                                                                  \
  extern "C" __attribute__((visibility("default"))) int name(int count, void **data, int *ndims,            \
                                                             int64_t **shapes, const char **dtypes, void *, \
                                                             void *)

LOSSSCALE_OP(lossscale_unscale) { return Multiply({count, data, ndims, shapes, dtypes}, true, true, false, true); }
LOSSSCALE_OP(lossscale_unscale_norm) { return Multiply({count, data, ndims, shapes, dtypes}, true, true, true, true); }
LOSSSCALE_OP(lossscale_multiply) { return Multiply({count, data, ndims, shapes, dtypes}, true, false, false, true); }
LOSSSCALE_OP(lossscale_look) { return Multiply({count, data, ndims, shapes, dtypes}, true, true, false, false); }
LOSSSCALE_OP(lossscale_look_norm) { return Multiply({count, data, ndims, shapes, dtypes}, true, true, true, false); }
LOSSSCALE_OP(lossscale_check) { return Multiply({count, data, ndims, shapes, dtypes}, false, false, false, false); }
LOSSSCALE_OP(lossscale_check_norm) { return Multiply({count, data, ndims, shapes, dtypes}, false, false, true, false); }

// Options: momentum, checks. One state, the moments. Weights and moments are written in place.
LOSSSCALE_OP(lossscale_momentum) {
  const Arguments arguments{count, data, ndims, shapes, dtypes};
  FusedStep step;
  const int bad = step.Begin(arguments, 1);
  if (bad != kDone || step.overflow) {
    return bad;
  }
  std::vector<lossscale::MomentumTensor> tensors;
  for (int i = 0; i < step.n; ++i) {
    const auto written = [&](int k) { return static_cast<float *>(data[FusedStep::kFixed + k * step.n + i]); };
    tensors.push_back({step.gradients[static_cast<size_t>(i)], written(1), written(2), Each(arguments, 1, i),
                       Each(arguments, 2, i)});
  }
  lossscale::ApplyMomentum(step.factor, step.options[0], tensors);
  return kDone;
}

// Options: beta1, beta2, epsilon, checks. Two states, the moments. Weights and moments are written in place.
LOSSSCALE_OP(lossscale_adam_weight_decay) {
  const Arguments arguments{count, data, ndims, shapes, dtypes};
  FusedStep step;
  const int bad = step.Begin(arguments, 2);
  if (bad != kDone || step.overflow) {
    return bad;
  }
  std::vector<lossscale::AdamTensor> tensors;
  for (int i = 0; i < step.n; ++i) {
    const auto written = [&](int k) { return static_cast<float *>(data[FusedStep::kFixed + k * step.n + i]); };
    tensors.push_back({step.gradients[static_cast<size_t>(i)], written(1), written(2), written(3),
                       Each(arguments, 1, i), Each(arguments, 2, i)});
  }
  lossscale::ApplyAdamWeightDecay(step.factor, {step.options[0], step.options[1], step.options[2]}, tensors);
  return kDone;
}
