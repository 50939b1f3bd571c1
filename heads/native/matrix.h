// x W^T for a few rows x and a large W, fp32 sums: what a forward over a small tree spends its time on.
//
// W [N, K] is packed once into panels of P outputs, [N / P, K, P], P being two vectors of the processor, so that a panel
// is read from memory once, in order, and every number read is used for up to six rows that stay in registers. Numbers
// are fp32, bf16, fp16 or int8 (with a scale for each output). Widening bf16 is a shift for one vector and a mask for the
// other, if the two vectors' outputs lie in turns; fp16 and int8 take what costs a third of a product of many rows, which
// are therefore widened once for all of them.
//
// Each output is one chain of multiply-adds over k = 0 .. K - 1, whatever the number of rows: a row's result is the same
// to the bit alone and in a tree.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace treedraft {

using at::Tensor;
using FloatVec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = FloatVec::size();
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kTile = kLanes == 16 ? 12 : 6;  // rows: their sums, 2 a row, fit AVX-512's 32 registers, AVX2's 16
constexpr int64_t kTileBlock = 64;                // tiles that stay in the cache while panels pass by
constexpr int64_t kAhead = kLanes == 16 ? 2048 : 512;  // numbers that are asked for before they are needed

// The compiler's own vectors: at::vec's are classes, which gcc does not always keep in registers.
typedef float Sum __attribute__((vector_size(sizeof(FloatVec)), aligned(4), may_alias));

typedef uint32_t Words __attribute__((vector_size(sizeof(FloatVec)), aligned(2), may_alias));

inline Sum as_sum(FloatVec from) {
  Sum to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

struct Pair {
  Sum left, right;
};

inline Pair widen(const float* from) {
  return {*reinterpret_cast<const Sum*>(from), *reinterpret_cast<const Sum*>(from + kLanes)};
}
inline Pair widen(const at::BFloat16* from) {
  const Words both = *reinterpret_cast<const Words*>(from);
  return {reinterpret_cast<Sum>(both << 16), reinterpret_cast<Sum>(both & 0xffff0000u)};
}
inline Pair widen(const at::Half* from) {
  const auto [left, right] = at::vec::convert_half_float(at::vec::Vectorized<at::Half>::loadu(from));
  return {as_sum(left), as_sum(right)};
}
inline Pair widen(const int8_t* from) {
  using Bytes = at::vec::Vectorized<int8_t>;
  return {as_sum(at::vec::convert_int8_to_float(Bytes::loadu(from, kLanes))),
          as_sum(at::vec::convert_int8_to_float(Bytes::loadu(from + kLanes, kLanes)))};
}

// out[m, 0..P) of M rows for one panel. x: [K, M], so that one stream of numbers goes in beside the panel's.
template <int M, typename W>
void tile(const float* __restrict x, int64_t inner, const W* __restrict panel, float* __restrict out, int64_t stride) {
  Sum sums[M][2];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) sums[m][0] = sums[m][1] = Sum{};
#pragma GCC unroll 2
  for (int64_t k = 0; k < inner; ++k) {
    __builtin_prefetch(panel + k * kPanel + kAhead);
    const auto [left, right] = widen(panel + k * kPanel);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const float number = x[k * M + m];
      sums[m][0] += number * left;
      sums[m][1] += number * right;
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    *reinterpret_cast<Sum*>(out + m * stride) = sums[m][0];
    *reinterpret_cast<Sum*>(out + m * stride + kLanes) = sums[m][1];
  }
}

template <int M, typename W>
void tile_of(int64_t rows, const float* x, int64_t inner, const W* panel, float* out, int64_t stride) {
  if (rows == M) tile<M>(x, inner, panel, out, stride);
  else if constexpr (M > 1) tile_of<M - 1>(rows, x, inner, panel, out, stride);
}

// The rows cut into tiles as even as can be.
struct Tiles {
  int64_t rows, count;

  explicit Tiles(int64_t all) : rows(all), count((all + kTile - 1) / kTile) {}
  int64_t start(int64_t tile) const { return tile * rows / count; }
};

// x [R, K] with the rows of every tile side by side, [K, M] each.
inline std::unique_ptr<float[]> interleaved(const float* x, Tiles tiles, int64_t inner) {
  auto out = std::make_unique_for_overwrite<float[]>(tiles.rows * inner);
  at::parallel_for(0, tiles.count, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t top = tiles.start(t), height = tiles.start(t + 1) - top;
      at::vec::transpose_mxn<float>(x + top * inner, inner, &out[top * inner], height, static_cast<int>(height), static_cast<int>(inner));
    }
  });
  return out;
}

struct Epilogue {
  const float *scale, *bias;  // of each output, or null

  void operator()(float* out, int64_t stride, int64_t rows, int64_t first, int64_t width) const {
    for (int64_t m = 0; m < rows && (scale || bias); ++m)
      for (int64_t j = 0; j < width; ++j)
        out[m * stride + j] = out[m * stride + j] * (scale ? scale[first + j] : 1.0f) + (bias ? bias[first + j] : 0.0f);
  }
};

template <typename W>
void product(const float* x, int64_t rows, int64_t inner, const W* panels, float* out, int64_t outputs, Epilogue finish) {
  const Tiles tiles(rows);
  std::unique_ptr<float[]> mixed;
  if (rows > 1) {
    mixed = interleaved(x, tiles, inner);
    x = mixed.get();
  }
  at::parallel_for(0, (outputs + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    constexpr bool slow = std::is_same_v<W, at::Half> || std::is_same_v<W, int8_t>;
    float spare[kTile * kPanel];
    std::vector<float> wide(slow && tiles.count > 1 ? inner * kPanel : 0);
    for (int64_t block = 0; block < tiles.count; block += kTileBlock)
      for (int64_t p = begin; p < end; ++p) {
        const W* panel = panels + p * inner * kPanel;
        for (int64_t k = 0; k < inner && !wide.empty(); ++k) {
          const auto [left, right] = widen(panel + k * kPanel);
          *reinterpret_cast<Sum*>(&wide[k * kPanel]) = left;
          *reinterpret_cast<Sum*>(&wide[k * kPanel + kLanes]) = right;
        }
        for (int64_t t = block; t < std::min(block + kTileBlock, tiles.count); ++t) {
          const int64_t top = tiles.start(t), height = tiles.start(t + 1) - top, width = std::min(kPanel, outputs - p * kPanel);
          float* place = out + top * outputs + p * kPanel;
          float* to = width == kPanel ? place : spare;
          const int64_t stride = width == kPanel ? outputs : kPanel;
          if (wide.empty()) tile_of<kTile>(height, x + top * inner, inner, panel, to, stride);
          else tile_of<kTile>(height, x + top * inner, inner, wide.data(), to, stride);
          finish(to, stride, height, p * kPanel, width);
          if (width < kPanel)
            for (int64_t m = 0; m < height; ++m) std::copy_n(to + m * kPanel, width, place + m * outputs);
        }
      }
  });
}

// x: [R, K] fp32; panels: [N / P, K, P]; scale, bias: [N] fp32. Returns [R, N].
inline Tensor multiply(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& scale,
                       const std::optional<Tensor>& bias, int64_t outputs) {
  const int64_t rows = x.size(0), inner = x.size(1);
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && panels.is_contiguous(), "contiguous fp32 rows");
  TORCH_CHECK(panels.dim() == 3 && panels.size(0) == (outputs + kPanel - 1) / kPanel && panels.size(1) == inner &&
              panels.size(2) == kPanel, "rows of ", inner, " numbers and panels of shape ", panels.sizes());
  for (const auto& each : {scale, bias})
    TORCH_CHECK(!each || (each->numel() == outputs && each->scalar_type() == at::kFloat && each->is_contiguous()), "one number for each output");
  Tensor out = at::empty({rows, outputs}, x.options());
  const auto of = [&](const auto* weights) {
    const Epilogue finish{scale ? scale->const_data_ptr<float>() : nullptr, bias ? bias->const_data_ptr<float>() : nullptr};
    product(x.const_data_ptr<float>(), rows, inner, weights, out.data_ptr<float>(), outputs, finish);
  };
  switch (panels.scalar_type()) {
    case at::kFloat: of(panels.const_data_ptr<float>()); break;
    case at::kBFloat16: of(panels.const_data_ptr<at::BFloat16>()); break;
    case at::kHalf: of(panels.const_data_ptr<at::Half>()); break;
    case at::kChar: of(panels.const_data_ptr<int8_t>()); break;
    default: TORCH_CHECK(false, "panels of fp32, bf16, fp16 or int8, got ", panels.dtype());
  }
  return out;
}

}  // namespace treedraft
