#include "kernels.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#include <xmmintrin.h>
#endif

#include "blocks.h"

namespace lossscale {
namespace {

constexpr int64_t kStreamValues = 1 << 22;  // outputs beyond this don't fit the caches and are written around them

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

}  // namespace lossscale
