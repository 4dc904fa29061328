// The arithmetic of unscaling, checking and fused optimizers over many tensors, free of MindSpore.
#ifndef LOSSSCALE_CELLS_NATIVE_KERNELS_H_
#define LOSSSCALE_CELLS_NATIVE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lossscale {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

struct Input {
  const void *data;  // contiguous; may be null where size is 0
  int64_t size;
  DType dtype;
};

// The calling thread's floating-point mode; a host may have set it to flush subnormals to zero.
uint64_t FloatingPointMode();
void SetFloatingPointMode(uint64_t mode);

// Arithmetic of IEEE 754 for one scope: subnormals count, whatever the calling thread has set.
class ExactSubnormals {
 public:
  ExactSubnormals();
  ~ExactSubnormals() { SetFloatingPointMode(saved_); }
  ExactSubnormals(const ExactSubnormals &) = delete;
  ExactSubnormals &operator=(const ExactSubnormals &) = delete;

 private:
  uint64_t saved_;
};

// flags[i] = any value of inputs[i] * factor is inf or nan. With `outputs` the products are written there, in
// float32 (float64 for float64). With `sums_of_squares` (double[n]) it receives those of each input's products.
// The factor is rounded to float32 for all but float64.
void MultiplyAndCheck(double factor, const std::vector<Input> &inputs, void *const *outputs, bool *flags,
                      double *sums_of_squares);

// One tensor of an optimizer: float32 weight and state, all of gradient.size values.
struct MomentumTensor {
  Input gradient;
  float *weight;
  float *moment;
  float learning_rate;
  float weight_decay;
};

struct AdamTensor {
  Input gradient;
  float *weight;
  float *moment1;
  float *moment2;
  float learning_rate;
  float weight_decay;
};

struct AdamConstants {
  float beta1;
  float beta2;
  float epsilon;
};

// Gradients are multiplied by the factor exactly, then rounded to float32; the update itself is done in the calling
// thread's floating-point mode, like the host's own optimizers.
void ApplyMomentum(double factor, float momentum, const std::vector<MomentumTensor> &tensors);
void ApplyAdamWeightDecay(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors);

}  // namespace lossscale

#endif  // LOSSSCALE_CELLS_NATIVE_KERNELS_H_
