#include "update_scale.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "kernels.h"

namespace lossscale {

namespace {

constexpr int32_t kEnd = std::numeric_limits<int32_t>::max();

// Counters stop at the end of int32.
int32_t Next(int64_t count, int32_t end) { return static_cast<int32_t>(std::min<int64_t>(count + 1, end)); }

}  // namespace

void UpdateScale(bool overflow, const ScaleRule &rule, const ScaleState &state) noexcept {
  const ExactSubnormals exact;
  const float scale = *state.loss_scale;
  int32_t clean_steps = 0;
  if (overflow) {
    *state.in_a_row = Next(*state.in_a_row, kEnd);
    *state.total = Next(*state.total, kEnd);
    if (*state.in_a_row >= rule.hysteresis) {
      *state.loss_scale = std::min(scale, std::max(scale * rule.backoff_factor, rule.min_loss_scale));
    }
  } else {
    *state.in_a_row = 0;
    clean_steps = Next(int64_t{*state.step} - 1 - *state.last, kEnd - 1);
    if (clean_steps >= rule.scale_window) {
      clean_steps = 0;
      if (std::isfinite(scale * rule.scale_factor)) {
        *state.loss_scale = std::max(scale, std::min(scale * rule.scale_factor, rule.max_loss_scale));
      }
    }
  }
  *state.step = Next(*state.step, kEnd);
  *state.last = *state.step - 1 - clean_steps;
}

}  // namespace lossscale

// MindSpore's entry point, see ops.cc. Inputs: overflow, scale_factor, backoff_factor, min_loss_scale, max_loss_scale,
// scale_window, hysteresis, then loss_scale and four counters, written in place. Output: overflow. All of one value.
extern "C" __attribute__((visibility("default"))) int lossscale_update_scale(int count, void **data, int *ndims,
                                                                             int64_t **shapes, const char **dtypes,
                                                                             void *, void *) noexcept {
  static const char *const kDtypes[] = {"bool",  "float32", "float32", "float32", "float32", "int32", "int32",
                                        "float32", "int32", "int32",   "int32",   "int32",   "bool"};
  if (count != static_cast<int>(std::size(kDtypes))) {
    return 1;
  }
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(dtypes[i], kDtypes[i]) != 0 ||
        std::any_of(shapes[i], shapes[i] + ndims[i], [](int64_t length) { return length != 1; })) {
      return 2;
    }
  }
  const bool overflow = *static_cast<const bool *>(data[0]);
  const auto number = [data](int i) { return static_cast<float *>(data[i]); };
  const auto counter = [data](int i) { return static_cast<int32_t *>(data[i]); };
  lossscale::UpdateScale(overflow, {*number(1), *number(2), *number(3), *number(4), *counter(5), *counter(6)},
                         {number(7), counter(8), counter(9), counter(10), counter(11)});
  *static_cast<bool *>(data[12]) = overflow;
  return 0;
}
