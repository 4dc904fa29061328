// The arithmetic of fused optimizers over many tensors, free of MindSpore.
#ifndef LOSSSCALE_CELLS_NATIVE_OPTIMIZERS_H_
#define LOSSSCALE_CELLS_NATIVE_OPTIMIZERS_H_

#include <vector>

#include "kernels.h"

namespace lossscale {

// One tensor of an optimizer: float32 weight and states, all of gradient.size values.
struct MomentumTensor {
  Input gradient;
  float *weight;
  float *moment;
  float learning_rate;
  float weight_decay;
};

struct SgdTensor {
  Input gradient;
  float *weight;
  float *accumulation;
  float *fresh;  // MindSpore's `stat`: not 0 where the accumulation still has to begin
  float learning_rate;
  float weight_decay;
};

struct SgdConstants {
  float momentum;
  float dampening;
  bool nesterov;
};

struct AdamTensor {
  Input gradient;
  float *weight;
  float *moment1;
  float *moment2;
  float learning_rate;  // of `ApplyAdam`: with the bias correction in it
  float weight_decay;
};

struct AdamConstants {
  float beta1;
  float beta2;
  float rest1;  // 1 - beta1
  float rest2;  // 1 - beta2
  float epsilon;
  bool nesterov;           // of `ApplyAdam`
  float correction1;       // of `ApplyAdamW`: 1 - beta1^step
  float correction2_root;  // of `ApplyAdamW`: sqrt(1 - beta2^step)
};

// Gradients are multiplied by the factor exactly, then rounded to float32; the update itself is done in the calling
// thread's floating-point mode, like the host's own optimizers.
void ApplyMomentum(double factor, float momentum, const std::vector<MomentumTensor> &tensors);
void ApplySgd(double factor, const SgdConstants &constants, const std::vector<SgdTensor> &tensors);
void ApplyAdam(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors);
void ApplyAdamWeightDecay(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors);
void ApplyAdamW(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors);

}  // namespace lossscale

#endif  // LOSSSCALE_CELLS_NATIVE_OPTIMIZERS_H_
