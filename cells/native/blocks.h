// What the loops of kernels.cc and optimizers.cc share: values of any dtype, blocks of work, threads.
#ifndef LOSSSCALE_CELLS_NATIVE_BLOCKS_H_
#define LOSSSCALE_CELLS_NATIVE_BLOCKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "kernels.h"

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

constexpr int64_t kBlock = 1 << 15;        // values that one unit of work covers
constexpr int64_t kRow = 1 << 11;          // values worked on at once, so that temporaries stay in the first cache
constexpr int64_t kThreadValues = 1 << 21; // values that pay for one more thread
constexpr int kMostThreads = 4;

#if defined(__x86_64__) && !defined(LOSSSCALE_PORTABLE)
// The best that this machine has, or less where the environment variable LOSSSCALE_ISA asks for it, as tests do.
inline int Level() {
  static const int level = [] {
    __builtin_cpu_init();
    const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    const int best = fma ? (avx512 ? 2 : 1) : 0;
    const char *asked = std::getenv("LOSSSCALE_ISA");
    if (asked != nullptr && std::strcmp(asked, "portable") == 0) {
      return 0;
    }
    return asked != nullptr && std::strcmp(asked, "avx2") == 0 ? std::min(best, 1) : best;
  }();
  return level;
}
#else
inline int Level() { return 0; }
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

// One unit of work: values begin..end of tensor `index`, and what was found there.
struct Block {
  size_t index;
  int64_t begin;
  int64_t end;
  bool nonfinite;
  double sum_of_squares;
};

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

inline int64_t ValuesIn(const std::vector<Block> &blocks) {
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

}  // namespace lossscale

#endif  // LOSSSCALE_CELLS_NATIVE_BLOCKS_H_
