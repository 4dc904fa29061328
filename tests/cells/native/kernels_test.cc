// Test of the kernels by themselves, for the sanitizers: heap buffers of the exact size, against plain loops.
#include "../../../cells/native/kernels.h"
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

void TestOptimizers() {
  for (int64_t size : {0, 1, 7, 33, 40000}) {
    auto gradient = Filled<float>(size, 2.0f);
    auto weight = Filled<float>(size, 1.0f);
    auto first = Filled<float>(size, 0.5f);
    auto second = Filled<float>(size, 0.25f);
    const Input input{gradient.get(), size, DType::kFloat32};
    lossscale::ApplyMomentum(0.5, 0.9f, {{input, weight.get(), first.get(), 0.1f, 0.0f}});
    const float moment = 0.5f * 0.9f + 1.0f;
    const float moved = 1.0f - moment * 0.1f;
    for (int64_t i = 0; i < size; ++i) {
      CHECK(first[static_cast<size_t>(i)] == moment && weight[static_cast<size_t>(i)] == moved);
    }
    lossscale::ApplyAdamWeightDecay(0.5, {0.9f, 0.999f, 1e-6f},
                                    {{input, weight.get(), first.get(), second.get(), 0.1f, 0.01f}});
    const float m = moment + (1.0f - moment) * (1 - 0.9f);
    const float v = 0.25f + 0.75f * (1 - 0.999f);
    const double update = m / (std::sqrt(static_cast<double>(v)) + 1e-6) + 0.01 * moved;
    for (int64_t i = 0; i < size; ++i) {
      CHECK(std::fabs(first[static_cast<size_t>(i)] - m) < 1e-6f);
      CHECK(std::fabs(second[static_cast<size_t>(i)] - v) < 1e-6f);
      CHECK(std::fabs(weight[static_cast<size_t>(i)] - (moved - 0.1 * update)) < 1e-6);
    }
  }
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
  float scale = 2, lr = 0.1f, decay = 0, weight[] = {1, 2}, moment[] = {0, 0};
  float gradient[] = {1, std::numeric_limits<float>::quiet_NaN()};
  float options[] = {0.9f, 1};
  bool overflow = false, flag = false;
  void *data[] = {&scale, &lr, &decay, options, gradient, weight, moment, &overflow, &flag};
  int ndims[] = {0, 0, 0, 1, 1, 1, 1, 1, 1};
  int64_t one[] = {1}, two[] = {2};
  int64_t *shapes[] = {nullptr, nullptr, nullptr, two, two, two, two, one, one};
  const char *f = "float32";
  const char *dtypes[] = {f, f, f, f, f, f, f, "bool", "bool"};
  CHECK(lossscale_momentum(9, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(overflow && flag && weight[0] == 1 && moment[0] == 0);
  gradient[1] = 1;
  CHECK(lossscale_momentum(9, data, ndims, shapes, dtypes, nullptr, nullptr) == 0);
  CHECK(!overflow && !flag && moment[0] == 0.5f && weight[0] == 1 - 0.5f * 0.1f);
  CHECK(lossscale_momentum(8, data, ndims, shapes, dtypes, nullptr, nullptr) != 0);
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
