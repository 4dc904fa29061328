#include "optimizers.h"

#include <algorithm>

#include "blocks.h"

namespace lossscale {
namespace {

// The unscaled gradient as float32, like the separate unscaling stage would have handed it to the optimizer.
template <typename In>
LOSSSCALE_INLINE void UnscaleRow(const In *in, double factor, float *out, int64_t size) {
  const auto narrow = static_cast<float>(factor);
  for (int64_t i = 0; i < size; ++i) {
    out[i] = Widen(in[i]) * narrow;
  }
}
LOSSSCALE_INLINE void UnscaleRow(const double *in, double factor, float *out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    out[i] = static_cast<float>(in[i] * factor);
  }
}

LOSSSCALE_INLINE void UnscaleRow(const Input &input, double factor, int64_t begin, float *out, int64_t size) {
  const ExactSubnormals exact;
  switch (input.dtype) {
    case DType::kFloat16:
      return UnscaleRow(static_cast<const Half *>(input.data) + begin, factor, out, size);
    case DType::kBFloat16:
      return UnscaleRow(static_cast<const BFloat *>(input.data) + begin, factor, out, size);
    case DType::kFloat32:
      return UnscaleRow(static_cast<const float *>(input.data) + begin, factor, out, size);
    case DType::kFloat64:
      return UnscaleRow(static_cast<const double *>(input.data) + begin, factor, out, size);
  }
}

// Adds weight_decay * weight to the gradient, as `nn.Optimizer.decay_weight` does.
LOSSSCALE_INLINE void DecayRow(const float *weight, float weight_decay, float *gradient, int64_t size) {
  if (weight_decay == 0) {
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    gradient[i] = weight[i] * weight_decay + gradient[i];
  }
}

// In MindSpore's order, without multiply-add: its own kernel has none either.
template <bool kFused>
LOSSSCALE_INLINE void Momentum(const MomentumTensor &tensor, double factor, float momentum,
                               int64_t block_begin, int64_t block_end) {
  float gradient[kRow];
  const float lr = tensor.learning_rate;
  for (int64_t begin = block_begin; begin < block_end; begin += kRow) {
    const int64_t size = std::min(kRow, block_end - begin);
    UnscaleRow(tensor.gradient, factor, begin, gradient, size);
    float *__restrict weight = tensor.weight + begin;
    float *__restrict moment = tensor.moment + begin;
    DecayRow(weight, tensor.weight_decay, gradient, size);
    for (int64_t i = 0; i < size; ++i) {
      moment[i] = moment[i] * momentum + gradient[i];
      weight[i] -= moment[i] * lr;
    }
  }
}

LOSSSCALE_VERSIONS(Momentum,
                   (const MomentumTensor &tensor, double factor, float momentum, int64_t begin, int64_t end),
                   (tensor, factor, momentum, begin, end))

// Whether any accumulation of the row still has to begin: after the first step, none.
LOSSSCALE_INLINE bool AnyFresh(const float *fresh, int64_t size) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    bits |= BitCast<uint32_t>(fresh[i]);
  }
  return bits != 0;
}

// In MindSpore's order, without multiply-add: its own kernel has none either.
template <bool kFused>
LOSSSCALE_INLINE void Sgd(const SgdTensor &tensor, double factor, const SgdConstants &constants, int64_t block_begin,
                          int64_t block_end) {
  float gradient[kRow];
  const float lr = tensor.learning_rate;
  const float momentum = constants.momentum;
  const float rest = 1 - constants.dampening;
  for (int64_t begin = block_begin; begin < block_end; begin += kRow) {
    const int64_t size = std::min(kRow, block_end - begin);
    UnscaleRow(tensor.gradient, factor, begin, gradient, size);
    float *__restrict weight = tensor.weight + begin;
    float *__restrict accumulation = tensor.accumulation + begin;
    float *__restrict fresh = tensor.fresh + begin;
    DecayRow(weight, tensor.weight_decay, gradient, size);
    if (momentum > 0) {
      if (AnyFresh(fresh, size)) {
        for (int64_t i = 0; i < size; ++i) {
          const bool begins = fresh[i] > 0;
          accumulation[i] = begins ? gradient[i] : accumulation[i] * momentum + rest * gradient[i];
          fresh[i] = begins ? 0 : fresh[i];
        }
      } else {
        for (int64_t i = 0; i < size; ++i) {
          accumulation[i] = accumulation[i] * momentum + rest * gradient[i];
        }
      }
      if (constants.nesterov) {
        for (int64_t i = 0; i < size; ++i) {
          gradient[i] += accumulation[i] * momentum;
        }
      } else {
        std::copy(accumulation, accumulation + size, gradient);
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      weight[i] -= lr * gradient[i];
    }
  }
}

LOSSSCALE_VERSIONS(Sgd,
                   (const SgdTensor &tensor, double factor, const SgdConstants &constants, int64_t begin, int64_t end),
                   (tensor, factor, constants, begin, end))

// In MindSpore's order and precision, which computes by AVX2 and multiply-add in float32.
template <bool kFused>
LOSSSCALE_INLINE void Adam(const AdamTensor &tensor, double factor, const AdamConstants &constants,
                           int64_t block_begin, int64_t block_end) {
  float gradient[kRow];
  const float beta1 = constants.beta1;
  const float rest1 = constants.rest1;
  const float rest2 = constants.rest2;
  const float lr = tensor.learning_rate;
  const float epsilon = constants.epsilon;
  for (int64_t begin = block_begin; begin < block_end; begin += kRow) {
    const int64_t size = std::min(kRow, block_end - begin);
    UnscaleRow(tensor.gradient, factor, begin, gradient, size);
    float *__restrict weight = tensor.weight + begin;
    float *__restrict moment1 = tensor.moment1 + begin;
    float *__restrict moment2 = tensor.moment2 + begin;
    DecayRow(weight, tensor.weight_decay, gradient, size);
    for (int64_t i = 0; i < size; ++i) {
      const float g = gradient[i];
      const float m = MultiplyAdd<kFused>(g - moment1[i], rest1, moment1[i]);
      const float v = MultiplyAdd<kFused>(MultiplyAdd<kFused>(g, g, -moment2[i]), rest2, moment2[i]);
      moment1[i] = m;
      moment2[i] = v;
      const float direction = constants.nesterov ? MultiplyAdd<kFused>(rest1, g, m * beta1) : m;
      weight[i] -= lr * direction / (__builtin_sqrtf(v) + epsilon);
    }
  }
}

LOSSSCALE_VERSIONS(Adam,
                   (const AdamTensor &tensor, double factor, const AdamConstants &constants, int64_t begin,
                    int64_t end),
                   (tensor, factor, constants, begin, end))

// In MindSpore's order and precision: moments in float32 by multiply-add, the step itself in float64.
template <bool kFused>
LOSSSCALE_INLINE void AdamWeightDecay(const AdamTensor &tensor, double factor, const AdamConstants &constants,
                                      int64_t block_begin, int64_t block_end) {
  float gradient[kRow];
  const float rest1 = constants.rest1;
  const float rest2 = constants.rest2;
  const double lr = tensor.learning_rate;
  const double epsilon = constants.epsilon;
  for (int64_t begin = block_begin; begin < block_end; begin += kRow) {
    const int64_t size = std::min(kRow, block_end - begin);
    UnscaleRow(tensor.gradient, factor, begin, gradient, size);
    float *__restrict weight = tensor.weight + begin;
    float *__restrict moment1 = tensor.moment1 + begin;
    float *__restrict moment2 = tensor.moment2 + begin;
    for (int64_t i = 0; i < size; ++i) {
      const float g = gradient[i];
      const float m = MultiplyAdd<kFused>(g - moment1[i], rest1, moment1[i]);
      const float v = MultiplyAdd<kFused>(MultiplyAdd<kFused>(g, g, -moment2[i]), rest2, moment2[i]);
      moment1[i] = m;
      moment2[i] = v;
      const double update = static_cast<double>(m) / (__builtin_sqrt(static_cast<double>(v)) + epsilon) +
                            static_cast<double>(tensor.weight_decay * weight[i]);
      const double old = weight[i];
      weight[i] = static_cast<float>(kFused ? __builtin_fma(-lr, update, old) : old - lr * update);
    }
  }
}

LOSSSCALE_VERSIONS(AdamWeightDecay,
                   (const AdamTensor &tensor, double factor, const AdamConstants &constants, int64_t begin,
                    int64_t end),
                   (tensor, factor, constants, begin, end))

// In the order of MindSpore's ops, each of which rounds to float32.
template <bool kFused>
LOSSSCALE_INLINE void AdamW(const AdamTensor &tensor, double factor, const AdamConstants &constants,
                            int64_t block_begin, int64_t block_end) {
  float gradient[kRow];
  const float beta1 = constants.beta1;
  const float beta2 = constants.beta2;
  const float rest1 = constants.rest1;
  const float rest2 = constants.rest2;
  const float epsilon = constants.epsilon;
  const float root = constants.correction2_root;
  const float kept = 1 - tensor.learning_rate * tensor.weight_decay;
  const float step_size = tensor.learning_rate / constants.correction1;
  for (int64_t begin = block_begin; begin < block_end; begin += kRow) {
    const int64_t size = std::min(kRow, block_end - begin);
    UnscaleRow(tensor.gradient, factor, begin, gradient, size);
    float *__restrict weight = tensor.weight + begin;
    float *__restrict moment1 = tensor.moment1 + begin;
    float *__restrict moment2 = tensor.moment2 + begin;
    for (int64_t i = 0; i < size; ++i) {
      const float g = gradient[i];
      const float m = moment1[i] * beta1 + g * rest1;
      const float v = moment2[i] * beta2 + rest2 * (g * g);
      moment1[i] = m;
      moment2[i] = v;
      weight[i] = weight[i] * kept - m / (__builtin_sqrtf(v) / root + epsilon) * step_size;
    }
  }
}

LOSSSCALE_VERSIONS(AdamW,
                   (const AdamTensor &tensor, double factor, const AdamConstants &constants, int64_t begin,
                    int64_t end),
                   (tensor, factor, constants, begin, end))

// Calls update(tensor, begin, end) for every block of every tensor.
template <typename Tensor, typename Update>
void Apply(const std::vector<Tensor> &tensors, Update update) {
  std::vector<Block> blocks = BlocksOf(tensors, [](const Tensor &tensor) { return tensor.gradient.size; });
  ForEach(&blocks, [&](Block *block) { update(tensors[block->index], block->begin, block->end); });
}

}  // namespace

void ApplyMomentum(double factor, float momentum, const std::vector<MomentumTensor> &tensors) {
  Apply(tensors, [&](const MomentumTensor &tensor, int64_t begin, int64_t end) {
    MomentumBest(tensor, factor, momentum, begin, end);
  });
}

void ApplySgd(double factor, const SgdConstants &constants, const std::vector<SgdTensor> &tensors) {
  Apply(tensors, [&](const SgdTensor &tensor, int64_t begin, int64_t end) {
    SgdBest(tensor, factor, constants, begin, end);
  });
}

void ApplyAdam(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors) {
  Apply(tensors, [&](const AdamTensor &tensor, int64_t begin, int64_t end) {
    AdamBest(tensor, factor, constants, begin, end);
  });
}

void ApplyAdamWeightDecay(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors) {
  Apply(tensors, [&](const AdamTensor &tensor, int64_t begin, int64_t end) {
    AdamWeightDecayBest(tensor, factor, constants, begin, end);
  });
}

void ApplyAdamW(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors) {
  Apply(tensors, [&](const AdamTensor &tensor, int64_t begin, int64_t end) {
    AdamWBest(tensor, factor, constants, begin, end);
  });
}

}  // namespace lossscale
