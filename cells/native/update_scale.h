// The rule of a dynamic loss scale: the twin of advance() in cells/scale_rule.py. Change both, or neither.
#ifndef LOSSSCALE_CELLS_NATIVE_UPDATE_SCALE_H_
#define LOSSSCALE_CELLS_NATIVE_UPDATE_SCALE_H_

#include <cstdint>

namespace lossscale {

struct ScaleRule {
  float scale_factor;
  float backoff_factor;
  float min_loss_scale;
  float max_loss_scale;
  int32_t scale_window;
  int32_t hysteresis;
};

// The Parameters of DynamicLossScaleUpdateCell. Clean steps are step - 1 - last.
struct ScaleState {
  float *loss_scale;
  int32_t *step;      // number of the step that runs now
  int32_t *last;      // step of the last overflow or growth
  int32_t *in_a_row;  // overflows in a row up to the last step
  int32_t *total;     // overflows in all
};

void UpdateScale(bool overflow, const ScaleRule &rule, const ScaleState &state) noexcept;

}  // namespace lossscale

#endif  // LOSSSCALE_CELLS_NATIVE_UPDATE_SCALE_H_
