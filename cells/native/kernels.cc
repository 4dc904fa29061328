#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>

#if defined(__SSE2__)
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

#define LOSSSCALE_INLINE inline __attribute__((always_inline))

// One loop, compiled for three generations of x86 and chosen at run time, so that one build runs everywhere. The
// loop gets `kFused` true where multiply-add is one instruction. Elsewhere there is only the plain build.
#if defined(__x86_64__) && !defined(LOSSSCALE_PORTABLE)
#define LOSSSCALE_VERSIONS(name, parameters, arguments)                                                     \
  __attribute__((target("avx512f,avx512dq,avx2,fma"))) void name##Avx512 parameters { name<true> arguments; } \
  __attribute__((target("avx2,fma"))) void name##Avx2 parameters { name<true> arguments; }                  \
  void name##Plain parameters { name<false> arguments; }                                                    \
  void name##Best parameters {                                                                              \
    switch (Level()) {                                                                                      \
      case 2:                                                                                               \
        return name##Avx512 arguments;                                                                      \
      case 1:                                                                                               \
        return name##Avx2 arguments;                                                                        \
      default:                                                                                              \
        return name##Plain arguments;                                                                       \
    }                                                                                                       \
  }
#else
#define LOSSSCALE_VERSIONS(name, parameters, arguments) \
  void name##Best parameters { name<false> arguments; }
#endif

namespace lossscale {
namespace {

constexpr int64_t kBlock = 1 << 15;        // values that one unit of work covers
constexpr int64_t kRow = 1 << 11;          // values worked on at once, so that temporaries stay in the first cache
constexpr int64_t kThreadValues = 1 << 21; // values that pay for one more thread
constexpr int64_t kStreamValues = 1 << 22; // outputs beyond this don't fit the caches and are written around them
constexpr int kMostThreads = 4;

#if defined(__x86_64__) && !defined(LOSSSCALE_PORTABLE)
int Level() {
  static const int level = [] {
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    return fma ? (avx512 ? 2 : 1) : 0;
  }();
  return level;
}
#endif

template <typename To, typename From>
LOSSSCALE_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

LOSSSCALE_INLINE float Widen(float value) { return value; }
LOSSSCALE_INLINE double Widen(double value) { return value; }
LOSSSCALE_INLINE float Widen(BFloat value) { return BitCast<float>(static_cast<uint32_t>(value.bits) << 16); }

// Exact for every value without a conversion instruction: the exponent is rebiased by a multiply, which also
// normalises subnormals, and inf and nan get the exponent of all ones back.
LOSSSCALE_INLINE float Widen(Half value) {
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rebiased = BitCast<uint32_t>(BitCast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return BitCast<float>(rebiased | special | sign);
}

// The top bit of the result is set exactly for inf and nan.
LOSSSCALE_INLINE uint32_t NonfiniteBit(float value) {
  return (BitCast<uint32_t>(value) & 0x7fffffffu) + 0x00800000u;
}
LOSSSCALE_INLINE uint64_t NonfiniteBit(double value) {
  return (BitCast<uint64_t>(value) & 0x7fffffffffffffffu) + 0x0010000000000000u;
}
LOSSSCALE_INLINE bool TopBit(uint32_t bits) { return (bits >> 31) != 0; }
LOSSSCALE_INLINE bool TopBit(uint64_t bits) { return (bits >> 63) != 0; }

template <bool kFused>
LOSSSCALE_INLINE float MultiplyAdd(float a, float b, float c) {
  return kFused ? __builtin_fmaf(a, b, c) : a * b + c;
}

// Copies around the caches where the target allows it: the values are not read again before they would be evicted.
LOSSSCALE_INLINE void StreamCopy(void *target, const void *source, int64_t bytes) {
#if defined(__SSE2__)
  auto *to = static_cast<char *>(target);
  const auto *from = static_cast<const char *>(source);
  const auto offset = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) & 15u);
  const int64_t head = std::min(bytes, offset == 0 ? int64_t{0} : 16 - offset);
  std::memcpy(to, from, static_cast<size_t>(head));
  int64_t at = head;
  for (; at + 16 <= bytes; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i *>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + at)));
  }
  std::memcpy(to + at, from + at, static_cast<size_t>(bytes - at));
#else
  std::memcpy(target, source, static_cast<size_t>(bytes));
#endif
}

// One unit of work: values begin..end of tensor `index`, and what was found there.
struct Block {
  size_t index;
  int64_t begin;
  int64_t end;
  bool nonfinite;
  double sum_of_squares;
};

template <typename In, typename Out>
LOSSSCALE_INLINE bool MultiplyRow(const In *in, Out factor, Out *out, int64_t size) {
  decltype(NonfiniteBit(Out{})) bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Out value = Widen(in[i]) * factor;
    out[i] = value;
    bits |= NonfiniteBit(value);
  }
  return TopBit(bits);
}

template <typename In, typename Out>
LOSSSCALE_INLINE bool CheckRow(const In *in, Out factor, int64_t size) {
  decltype(NonfiniteBit(Out{})) bits = 0;
  for (int64_t i = 0; i < size; ++i) {
    bits |= NonfiniteBit(Widen(in[i]) * factor);
  }
  return TopBit(bits);
}

// Sixteen running sums: the order of additions is the same on every machine and wide enough for its registers.
template <typename Out>
LOSSSCALE_INLINE double SumOfSquaresRow(const Out *values, int64_t size) {
  constexpr int kLanes = 16;
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      sums[lane] += value * value;
    }
  }
  for (; i < size; ++i) {
    const auto value = static_cast<double>(values[i]);
    sums[0] += value * value;
  }
  double total = 0;
  for (double sum : sums) {
    total += sum;
  }
  return total;
}

template <typename In, typename Out>
LOSSSCALE_INLINE void MultiplyBlock(const In *in, Out factor, Out *out, bool stream, bool norm, Block *block) {
  Out row[kRow];
  bool nonfinite = false;
  double sum_of_squares = 0;
  for (int64_t begin = block->begin; begin < block->end; begin += kRow) {
    const int64_t size = std::min(kRow, block->end - begin);
    if (out == nullptr && !norm) {
      nonfinite |= CheckRow(in + begin, factor, size);
      continue;
    }
    const bool through_row = out == nullptr || stream;
    Out *target = through_row ? row : out + begin;
    nonfinite |= MultiplyRow(in + begin, factor, target, size);
    if (norm) {
      sum_of_squares += SumOfSquaresRow(target, size);
    }
    if (through_row && out != nullptr) {
      StreamCopy(out + begin, row, size * static_cast<int64_t>(sizeof(Out)));
    }
  }
  block->nonfinite = nonfinite;
  block->sum_of_squares = sum_of_squares;
}

template <bool kFused>
LOSSSCALE_INLINE void Multiply(const Input &input, double factor, void *out, bool stream, bool norm, Block *block) {
  const auto narrow = static_cast<float>(factor);
  switch (input.dtype) {
    case DType::kFloat16:
      return MultiplyBlock(static_cast<const Half *>(input.data), narrow, static_cast<float *>(out), stream, norm,
                           block);
    case DType::kBFloat16:
      return MultiplyBlock(static_cast<const BFloat *>(input.data), narrow, static_cast<float *>(out), stream, norm,
                           block);
    case DType::kFloat32:
      return MultiplyBlock(static_cast<const float *>(input.data), narrow, static_cast<float *>(out), stream, norm,
                           block);
    case DType::kFloat64:
      return MultiplyBlock(static_cast<const double *>(input.data), factor, static_cast<double *>(out), stream, norm,
                           block);
  }
}

LOSSSCALE_VERSIONS(Multiply,
                   (const Input &input, double factor, void *out, bool stream, bool norm, Block *block),
                   (input, factor, out, stream, norm, block))

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
    if (tensor.weight_decay != 0) {
      for (int64_t i = 0; i < size; ++i) {
        gradient[i] = weight[i] * tensor.weight_decay + gradient[i];
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      moment[i] = moment[i] * momentum + gradient[i];
      weight[i] -= moment[i] * lr;
    }
  }
}

LOSSSCALE_VERSIONS(Momentum,
                   (const MomentumTensor &tensor, double factor, float momentum, int64_t begin, int64_t end),
                   (tensor, factor, momentum, begin, end))

// In MindSpore's order and precision: moments in float32 by multiply-add, the step itself in float64.
template <bool kFused>
LOSSSCALE_INLINE void Adam(const AdamTensor &tensor, double factor, const AdamConstants &constants,
                           int64_t block_begin, int64_t block_end) {
  float gradient[kRow];
  const float rest1 = 1 - constants.beta1;
  const float rest2 = 1 - constants.beta2;
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

LOSSSCALE_VERSIONS(Adam,
                   (const AdamTensor &tensor, double factor, const AdamConstants &constants, int64_t begin,
                    int64_t end),
                   (tensor, factor, constants, begin, end))

template <typename Tensors, typename Size>
std::vector<Block> BlocksOf(const Tensors &tensors, Size size_of) {
  std::vector<Block> blocks;
  for (size_t index = 0; index < tensors.size(); ++index) {
    const int64_t size = size_of(tensors[index]);
    for (int64_t begin = 0; begin < size; begin += kBlock) {
      blocks.push_back({index, begin, std::min(size, begin + kBlock), false, 0.0});
    }
  }
  return blocks;
}

int64_t ValuesIn(const std::vector<Block> &blocks) {
  int64_t values = 0;
  for (const Block &block : blocks) {
    values += block.end - block.begin;
  }
  return values;
}

// Calls work(block) for every block. Threads are made for this call only and end with it: a pool of our own would
// wait beside MindSpore's and slow the rest of the step.
template <typename Work>
void ForEach(std::vector<Block> *blocks, Work work) {
  const int64_t values = ValuesIn(*blocks);
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  const int64_t wanted = std::min<int64_t>({values / kThreadValues, cores, kMostThreads});
  const auto workers = static_cast<size_t>(std::max<int64_t>(wanted, 1));
  const uint64_t mode = FloatingPointMode();
  auto run = [&](size_t worker) {
    SetFloatingPointMode(mode);
    const size_t first = blocks->size() * worker / workers;
    const size_t last = blocks->size() * (worker + 1) / workers;
    for (size_t i = first; i < last; ++i) {
      work(&(*blocks)[i]);
    }
#if defined(__SSE2__)
    _mm_sfence();  // streamed values become visible before the op ends
#endif
  };
  std::vector<std::thread> threads;
  size_t started = 1;
  try {
    for (; started < workers; ++started) {
      threads.emplace_back(run, started);
    }
  } catch (...) {  // no thread to be had: do its share here
  }
  run(0);
  for (size_t worker = started; worker < workers; ++worker) {
    run(worker);
  }
  for (std::thread &thread : threads) {
    thread.join();
  }
}

}  // namespace

#if defined(__SSE2__)
constexpr uint64_t kFlushing = 0x8040u;  // flush to zero, subnormals are zero
uint64_t FloatingPointMode() { return _mm_getcsr(); }
void SetFloatingPointMode(uint64_t mode) { _mm_setcsr(static_cast<unsigned>(mode)); }
#elif defined(__aarch64__)
constexpr uint64_t kFlushing = uint64_t{1} << 24;
uint64_t FloatingPointMode() {
  uint64_t mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
}
void SetFloatingPointMode(uint64_t mode) { asm volatile("msr fpcr, %0" ::"r"(mode)); }
#else
constexpr uint64_t kFlushing = 0;
uint64_t FloatingPointMode() { return 0; }
void SetFloatingPointMode(uint64_t) {}
#endif

ExactSubnormals::ExactSubnormals() : saved_(FloatingPointMode()) { SetFloatingPointMode(saved_ & ~kFlushing); }

void MultiplyAndCheck(double factor, const std::vector<Input> &inputs, void *const *outputs, bool *flags,
                      double *sums_of_squares) {
  std::vector<Block> blocks = BlocksOf(inputs, [](const Input &input) { return input.size; });
  const bool stream = outputs != nullptr && ValuesIn(blocks) > kStreamValues;
  const ExactSubnormals exact;
  ForEach(&blocks, [&](Block *block) {
    void *out = outputs == nullptr ? nullptr : outputs[block->index];
    MultiplyBest(inputs[block->index], factor, out, stream, sums_of_squares != nullptr, block);
  });
  std::fill(flags, flags + inputs.size(), false);
  if (sums_of_squares != nullptr) {
    std::fill(sums_of_squares, sums_of_squares + inputs.size(), 0.0);
  }
  for (const Block &block : blocks) {
    flags[block.index] |= block.nonfinite;
    if (sums_of_squares != nullptr) {
      sums_of_squares[block.index] += block.sum_of_squares;
    }
  }
}

void ApplyMomentum(double factor, float momentum, const std::vector<MomentumTensor> &tensors) {
  std::vector<Block> blocks = BlocksOf(tensors, [](const MomentumTensor &tensor) { return tensor.gradient.size; });
  ForEach(&blocks, [&](Block *block) {
    MomentumBest(tensors[block->index], factor, momentum, block->begin, block->end);
  });
}

void ApplyAdamWeightDecay(double factor, const AdamConstants &constants, const std::vector<AdamTensor> &tensors) {
  std::vector<Block> blocks = BlocksOf(tensors, [](const AdamTensor &tensor) { return tensor.gradient.size; });
  ForEach(&blocks, [&](Block *block) {
    AdamBest(tensors[block->index], factor, constants, block->begin, block->end);
  });
}

}  // namespace lossscale
