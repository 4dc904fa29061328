// Test of the kernels by themselves, for the sanitizers: heap buffers of the exact size, against plain loops.
#include "../../../cells/native/kernels.h"
#include "../../../cells/native/optimizers.h"
#include "../../../cells/native/update_scale.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

extern "C" int lossscale_unscale(int, void **, int *, int64_t **, const char **, void *, void *);
extern "C" int lossscale_momentum(int, void **, int *, int64_t **, const char **, void *, void *);

namespace {

using lossscale::DType;
using lossscale::Input;

void Check(bool condition, const char *what, int line) {
  if (!condition) {
    std::fprintf(stderr, "line %d: %s\n", line, what);
    std::exit(1);
  }
}
#define CHECK(condition) Check(condition, #condition, __LINE__)

template <typename T>
std::unique_ptr<T[]> Filled(int64_t size, T value) {
  std::unique_ptr<T[]> buffer(new T[static_cast<size_t>(size)]);
  for (int64_t i = 0; i < size; ++i) {
    buffer[static_cast<size_t>(i)] = value;
  }
  return buffer;
}

template <typename In, typename Out>
void TestSizes(DType dtype, In one, In bad) {
  for (int64_t size = 0; size <= 70; ++size) {
    auto in = Filled<In>(size, one);
    auto out = Filled<Out>(size, Out(0));
    for (int64_t index = -1; index < size; ++index) {
      if (index >= 0) {
        in[static_cast<size_t>(index)] = bad;
      }
      bool flag = false;
      double squares = 0;
      void *outputs[] = {out.get()};
      lossscale::MultiplyAndCheck(0.5, {{in.get(), size, dtype}}, outputs, &flag, &squares);
      CHECK(flag == (index >= 0));
      for (int64_t i = 0; i < size; ++i) {
        CHECK(i == index || out[static_cast<size_t>(i)] == Out(0.5));
      }
      CHECK(index >= 0 || squares == 0.25 * static_cast<double>(size));
      if (index >= 0) {
        in[static_cast<size_t>(index)] = one;
      }
    }
  }
}

void TestUnalignedAndLarge() {
  constexpr int64_t kSize = 5000003;
  auto in = Filled<float>(kSize + 1, 3.0f);
  auto out = Filled<float>(kSize + 3, 0.0f);
  in[kSize] = std::numeric_limits<float>::infinity();  // the last one that is looked at
  bool flags[] = {false, true};
  void *outputs[] = {out.get() + 3, nullptr};
  lossscale::MultiplyAndCheck(2, {{in.get() + 1, kSize, DType::kFloat32}, {nullptr, 0, DType::kFloat64}}, outputs,
                              flags, nullptr);
  CHECK(flags[0] && !flags[1]);
  CHECK(out[0] == 0 && out[3] == 6 && out[kSize + 1] == 6 && std::isinf(out[kSize + 2]));
}

void TestSubnormalsCount() {
#if defined(__SSE2__)
  const unsigned before = _mm_getcsr() | 0x8040u;
  _mm_setcsr(before);
#endif
  uint32_t subnormal = 1;
  float in = 0;
  std::memcpy(&in, &subnormal, sizeof(in));
  float out = 0;
  bool flag = true;
  void *outputs[] = {&out};
  lossscale::MultiplyAndCheck(1, {{&in, 1, DType::kFloat32}}, outputs, &flag, nullptr);
  CHECK(std::memcmp(&in, &out, sizeof(in)) == 0 && !flag);
#if defined(__SSE2__)
  CHECK(_mm_getcsr() == before);
  _mm_setcsr(before & ~0x8040u);
#endif
}

// Values that differ from place to place, so that an error of an index shows.
std::unique_ptr<float[]> Varied(int64_t size, float start) {
  auto buffer = Filled<float>(size, start);
  for (int64_t i = 0; i < size; ++i) {
    buffer[static_cast<size_t>(i)] += static_cast<float>(i % 9973) / 9973;
  }
  return buffer;
}

struct State {
  double weight, first, second;
};

// Runs `apply` on tensors of several sizes and compares every value with what `expect` says for its gradient.
template <typename Apply, typename Expect>
void TestOptimizer(Apply apply, Expect expect) {
  for (int64_t size : {0, 1, 7, 33, 40000}) {
    auto gradient = Varied(size, 2.0f);
    auto weight = Varied(size, 1.0f);
    auto first = Varied(size, 0.5f);
    auto second = Varied(size, 0.25f);
    const auto old_weight = Varied(size, 1.0f), old_first = Varied(size, 0.5f), old_second = Varied(size, 0.25f);
    apply(Input{gradient.get(), size, DType::kFloat32}, weight.get(), first.get(), second.get());
    for (int64_t at = 0; at < size; ++at) {
      const auto i = static_cast<size_t>(at);
      const State wanted = expect(gradient[i] * 0.5, State{old_weight[i], old_first[i], old_second[i]});
      CHECK(std::fabs(weight[i] - wanted.weight) < 1e-6);
      CHECK(std::fabs(first[i] - wanted.first) < 1e-6);
      CHECK(std::fabs(second[i] - wanted.second) < 1e-6);
    }
  }
}

void TestOptimizers() {
  const lossscale::AdamConstants constants{0.9f, 0.999f, 1 - 0.9f, 1 - 0.999f, 1e-6f, false, 0.5f, 0.25f};
  TestOptimizer(
      [](Input input, float *weight, float *first, float *) {
        lossscale::ApplyMomentum(0.5, 0.9f, {{input, weight, first, 0.1f, 0.01f}});
      },
      [](double g, State old) {
        const double moment = old.first * 0.9 + g + old.weight * 0.01;
        return State{old.weight - moment * 0.1, moment, old.second};
      });
  TestOptimizer(
      [](Input input, float *weight, float *first, float *) {
        auto begun = Filled<float>(input.size, 0.0f);
        lossscale::ApplySgd(0.5, {0.9f, 0.25f, true}, {{input, weight, first, begun.get(), 0.1f, 0.01f}});
      },
      [](double g, State old) {
        const double decayed = g + old.weight * 0.01;
        const double sum = old.first * 0.9 + decayed * 0.75;
        return State{old.weight - 0.1 * (decayed + sum * 0.9), sum, old.second};
      });
  TestOptimizer(
      [](Input input, float *weight, float *first, float *) {
        auto fresh = Filled<float>(input.size, 1.0f);
        lossscale::ApplySgd(0.5, {0.9f, 0.25f, false}, {{input, weight, first, fresh.get(), 0.1f, 0.0f}});
        CHECK(input.size == 0 || (fresh[0] == 0 && fresh[static_cast<size_t>(input.size - 1)] == 0));
      },
      [](double g, State old) { return State{old.weight - 0.1 * g, g, old.second}; });
  TestOptimizer(
      [&](Input input, float *weight, float *first, float *second) {
        lossscale::ApplyAdam(0.5, constants, {{input, weight, first, second, 0.1f, 0.01f}});
      },
      [](double g, State old) {
        const double decayed = g + old.weight * 0.01;
        const double m = old.first * 0.9 + decayed * 0.1, v = old.second * 0.999 + decayed * decayed * 0.001;
        return State{old.weight - 0.1 * m / (std::sqrt(v) + 1e-6), m, v};
      });
  TestOptimizer(
      [&](Input input, float *weight, float *first, float *second) {
        lossscale::ApplyAdamWeightDecay(0.5, constants, {{input, weight, first, second, 0.1f, 0.01f}});
      },
      [](double g, State old) {
        const double m = old.first * 0.9 + g * 0.1, v = old.second * 0.999 + g * g * 0.001;
        return State{old.weight - 0.1 * (m / (std::sqrt(v) + 1e-6) + 0.01 * old.weight), m, v};
      });
  TestOptimizer(
      [&](Input input, float *weight, float *first, float *second) {
        lossscale::ApplyAdamW(0.5, constants, {{input, weight, first, second, 0.1f, 0.01f}});
      },
      [](double g, State old) {
        const double m = old.first * 0.9 + g * 0.1, v = old.second * 0.999 + g * g * 0.001;
        return State{old.weight * (1 - 0.1 * 0.01) - 0.1 / 0.5 * m / (std::sqrt(v) / 0.25 + 1e-6), m, v};
      });
}

void TestEntryPoints() {
  float scale = 4, gradient[] = {8, 12}, product[] = {0, 0};
  bool overflow = true, flag = true;
  void *data[] = {&scale, gradient, &overflow, &flag, product};
  int ndims[] = {0, 1, 1, 1, 1};
  int64_t one[] = {1}, two[] = {2};
  int64_t *shapes[] = {nullptr, two, one, one, two};
  const char *dtypes[] = {"float32", "float32", "bool", "bool", "float32"};
  CHECK(lossscale_unscale(5, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(!overflow && !flag && product[0] == 2 && product[1] == 3);
  CHECK(lossscale_unscale(4, data, ndims, shapes, dtypes, nullptr, nullptr) != 0);
  dtypes[1] = "int32";
  CHECK(lossscale_unscale(5, data, ndims, shapes, dtypes, nullptr, nullptr) != 0);
}

void TestMomentumSkipsOverflow() {
  float scale = 2, lr = 0.1f, decay = 0, momentum = 0.9f, mode = 1, weight[] = {1, 2}, moment[] = {0, 0};
  float gradient[] = {1, std::numeric_limits<float>::quiet_NaN()};
  bool skip = false, overflow = false, flag = false;
  int32_t steps = 0;
  void *data[] = {&scale, &skip, &lr, &decay, &momentum, &mode, gradient, weight, moment, &steps, &overflow, &flag};
  int ndims[] = {0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0};
  int64_t two[] = {2};
  int64_t *none = nullptr;
  int64_t *shapes[] = {none, none, none, none, none, none, two, two, two, none, none, none};
  const char *f = "float32";
  const char *dtypes[] = {f, "bool", f, f, f, f, f, f, f, "int32", "bool", "bool"};
  CHECK(lossscale_momentum(12, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(overflow && flag && weight[0] == 1 && moment[0] == 0 && steps == 0);
  gradient[1] = 1;
  CHECK(lossscale_momentum(12, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(!overflow && !flag && moment[0] == 0.5f && weight[0] == 1 - 0.5f * 0.1f && steps == 1);
  mode = 2;  // a factor, and a flag that says to skip
  skip = true;
  CHECK(lossscale_momentum(12, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(overflow && moment[0] == 0.5f && steps == 1);
  skip = false;
  CHECK(lossscale_momentum(12, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(!overflow && moment[0] == 0.5f * 0.9f + 2 && steps == 2);
  CHECK(lossscale_momentum(11, data, ndims, shapes, dtypes, nullptr, nullptr) != 0);
}

void TestUpdateScale() {
  const lossscale::ScaleRule rule{2, 0.5f, 1, 16, 2, 2};
  float scale = 4;
  int32_t step = 1, last = 0, in_a_row = 0, total = 0;
  const bool overflows[] = {true, true, false, false, false, false};
  const float wanted[] = {4, 2, 2, 4, 4, 8};
  for (int i = 0; i < 6; ++i) {
    lossscale::UpdateScale(overflows[i], rule, {&scale, &step, &last, &in_a_row, &total});
    CHECK(scale == wanted[i]);
  }
  CHECK(step == 7 && last == 6 && in_a_row == 0 && total == 2);
}

}  // namespace

int main() {
  TestSizes<uint16_t, float>(DType::kFloat16, 0x3c00, 0x7c01);
  TestSizes<uint16_t, float>(DType::kBFloat16, 0x3f80, 0xff80);
  TestSizes<float, float>(DType::kFloat32, 1.0f, -std::numeric_limits<float>::infinity());
  TestSizes<double, double>(DType::kFloat64, 1.0, std::numeric_limits<double>::quiet_NaN());
  TestUnalignedAndLarge();
  TestSubnormalsCount();
  TestOptimizers();
  TestEntryPoints();
  TestMomentumSkipsOverflow();
  TestUpdateScale();
  return 0;
}
