// Decoder layers of Llama's family on the CPU, a whole stack of them in one call.
//
// B batch rows   n new rows of each   m of them and of their drafted ancestors   S cache slots   H hidden size
// h query heads  g key/value heads    d head size     F intermediate size
//
// The matrix products are those of matrix.h, or oneDNN's, over weights packed once (heads/linear.py). What stands
// between them is here: norms, rotary positions, tree attention, the gated activation. A few kilobytes are touched there,
// so what counts is not to leave the cache, not to start a thread and not to allocate.
//
// A row's result depends on that row alone: sums run over the keys that it sees, in the order of its own path, whatever
// other rows stand beside it and whichever slots its ancestors lie in. A tree therefore gives the bits of a plain
// forward, as far as the matrix products do: those of matrix.h.

#include "matrix.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using Vec = treedraft::FloatVec;

constexpr int64_t kGrain = 4096;  // numbers an activation must have before a second thread helps

// ---------------------------------------------------------------------------------------------------- row arithmetic

using treedraft::kLanes;
using Lanes = treedraft::Sum;

inline Lanes wide(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline Lanes wide(const at::BFloat16* from) {
  Lanes to;
  for (int64_t j = 0; j < kLanes; ++j) to[j] = static_cast<float>(from[j]);
  return to;
}

// The sum of all lanes: halves are added to halves, within the register.
inline float total(Lanes sums) {
  typedef int32_t Places __attribute__((vector_size(sizeof(Lanes))));
  Places place;
#pragma GCC unroll 16
  for (int64_t j = 0; j < kLanes; ++j) place[j] = static_cast<int32_t>(j);
#pragma GCC unroll 4
  for (int32_t step = kLanes / 2; step; step /= 2) sums += __builtin_shuffle(sums, place ^ step);
  return sums[0];
}

// a . b
template <typename A, typename B>
inline float dot(const A* a, const B* b, int64_t size) {
  Lanes even{}, odd{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    even += wide(a + i) * wide(b + i);
    odd += wide(a + i + kLanes) * wide(b + i + kLanes);
  }
  float sum = total(even + odd);
  for (; i < size; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum;
}

template <typename T>
void rms_norm(const T* __restrict x, const T* __restrict weight, T* __restrict out, int64_t size, float eps) {
  const float scale = 1.0f / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<T>(static_cast<float>(x[i]) * scale * static_cast<float>(weight[i]));
}

// Rotary positions in half-rotation form; cos and sin hold d numbers, the two halves alike.
template <typename T, typename U>
void rotate(const T* __restrict x, const T* __restrict cos, const T* __restrict sin, U* __restrict out, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = static_cast<float>(x[i]), b = static_cast<float>(x[i + half]);
    out[i] = static_cast<U>(a * static_cast<float>(cos[i]) - b * static_cast<float>(sin[i]));
    out[i + half] = static_cast<U>(b * static_cast<float>(cos[i + half]) + a * static_cast<float>(sin[i + half]));
  }
}

enum class Activation { silu, gelu, gelu_tanh };

inline Vec activate(Activation kind, Vec x) {
  const Vec one(1.0f), half(0.5f);
  switch (kind) {
    case Activation::silu:
      return x / (one + x.neg().exp());
    case Activation::gelu:
      return x * half * (one + (x * Vec(static_cast<float>(M_SQRT1_2))).erf());
    default:
      const Vec inner = (x + Vec(0.044715f) * x * x * x) * Vec(static_cast<float>(M_2_SQRTPI * M_SQRT1_2));
      return x * half * (one + inner.tanh());
  }
}

inline Vec load(const float* from, int64_t count) { return Vec::loadu(from, count); }
inline Vec load(const at::BFloat16* from, int64_t count) {
  float wide[Vec::size()] = {};
  for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(from[i]);
  return Vec::loadu(wide);
}
inline void store(Vec value, float* to, int64_t count) { value.store(to, count); }
inline void store(Vec value, at::BFloat16* to, int64_t count) {
  float wide[Vec::size()];
  value.store(wide);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<at::BFloat16>(wide[i]);
}

// out[i] = activation(gate[i]) * up[i]
template <typename T>
void gated(Activation kind, const T* gate, const T* up, T* out, int64_t size) {
  for (int64_t i = 0; i < size; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), size - i);
    store(activate(kind, load(gate + i, count)) * load(up + i, count), out + i, count);
  }
}

// ------------------------------------------------------------------------------------------------------------ layers

// A linear layer over weights packed once: in panels (matrix.h), or by oneDNN (outputs = 0).
struct Linear {
  Tensor packed;
  std::optional<Tensor> scale, bias;
  int64_t outputs;

  Tensor operator()(const Tensor& x) const {
    RECORD_FUNCTION("treedraft::linear", {});
    if (outputs) return treedraft::multiply(x, packed, scale, bias, outputs);
    static const auto product = c10::Dispatcher::singleton()
        .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
        .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
                      c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>)>();
    return product.call(x, packed, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
  }
};

struct Layer {
  std::optional<Tensor> input_norm, q_norm, k_norm;
  Tensor mlp_norm;
  std::array<Linear, 4> linears;  // queries, keys and values; output; gate and up; down
  int64_t heads, groups, window;  // window: positions seen, the own one included; 0 is all
  double eps, scaling;
  Activation activation;
};

// What the new rows of a batch see: slots [0, held) of their row, and of the m slots from `start` on those that
// `ancestors` names. The new rows themselves are the last n of these m, and are written there.
struct Sight {
  const int64_t *held, *start, *positions;
  const bool* ancestors;
  int64_t batch, rows, drafted;
};

template <typename T>
struct Slots {
  T* data;
  int64_t row_stride, head_stride, slot_stride;
  explicit Slots(const Tensor& block)
      : data(block.data_ptr<T>()), row_stride(block.stride(0)), head_stride(block.stride(1)), slot_stride(block.stride(2)) {}
  T* at(int64_t row, int64_t head, int64_t slot) const {
    return data + row * row_stride + head * head_stride + slot * slot_stride;
  }
};

constexpr int64_t kBlock = 24;   // queries that read the same keys and values one after the other
constexpr int64_t kAtOnce = 6;   // of them, whose sums stay in registers

// rows [count <= a vector's lanes, size] to columns [size, lanes], so that scores of all rows are added up side by side.
template <typename T>
void columns_of(const T* rows, int64_t stride, int64_t count, int64_t size, float* columns) {
  int64_t k = 0;
  if constexpr (std::is_same_v<T, float>)
    for (; count == kLanes && k + kLanes <= size; k += kLanes)
      at::vec::transpose_mxn<float, static_cast<int>(kLanes), static_cast<int>(kLanes)>(rows + k, stride, columns + k * kLanes, kLanes);
  for (; k < size; ++k)
    for (int64_t i = 0; i < count; ++i) columns[k * kLanes + i] = static_cast<float>(rows[i * stride + k]);
}

// scores[q][0..lanes) = queries[q] . columns; a sum's order is that of the numbers, whoever else is scored.
template <int Q>
void score(int64_t many, const float* queries, int64_t size, const float* columns, float* scores, int64_t stride) {
  if (many < Q) {
    if constexpr (Q > 1) score<Q - 1>(many, queries, size, columns, scores, stride);
    return;
  }
  Lanes even[Q], odd[Q];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) even[q] = odd[q] = Lanes{};
  for (int64_t k = 0; k < size; k += 2) {  // rotary positions make the size even
    const Lanes left = wide(columns + k * kLanes), right = wide(columns + (k + 1) * kLanes);
#pragma GCC unroll 8
    for (int q = 0; q < Q; ++q) {
      even[q] += queries[q * size + k] * left;
      odd[q] += queries[q * size + k + 1] * right;
    }
  }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) *reinterpret_cast<Lanes*>(scores + q * stride) = even[q] + odd[q];
}

// scores[q][i] = queries[q] . keys[i] for many queries, each number of which is read once for all; up to a vector's
// lanes more than `count` are written.
template <typename T>
void score_all(const float* queries, int64_t many, const T* keys, int64_t key_stride, int64_t count, int64_t size,
               float* columns, float* scores, int64_t stride) {
  for (int64_t i = 0; i < count; i += kLanes) {
    columns_of(keys + i * key_stride, key_stride, std::min(kLanes, count - i), size, columns);
    for (int64_t q = 0; q < many; q += kAtOnce)
      score<kAtOnce>(std::min(kAtOnce, many - q), queries + q * size, size, columns, scores + q * stride + i, stride);
  }
}

// The exponentials of scores[0..count) over their largest, in place: shares but for the factor that is returned. There
// is room for a vector more.
inline float exponentials(float* scores, int64_t count) {
  Vec largest(-std::numeric_limits<float>::infinity()), sums(0.0f);
  for (int64_t i = count; i < count + kLanes; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i += kLanes) largest = at::vec::maximum(largest, Vec::loadu(scores + i));
  const Vec top(at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, largest));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec share = (Vec::loadu(scores + i) - top).exp();
    share.store(scores + i);
    sums = sums + share;
  }
  return 1.0f / total(treedraft::as_sum(sums));
}

// A query's part in a block: which of the drafted slots it sees, and its shares, first of the held slots, then of those.
template <typename T>
struct Query {
  std::vector<int64_t> drafted;
  float* shares;
  float scale;
  int64_t from;  // the first held slot that it sees
  T* out;
};

// For Q queries that see the same held slots: out[0..N vectors) = sum of share * value, in the order of the slots.
template <int N, int Q, typename T>
void weigh(const Query<T>* queries, const T* held, int64_t count, const T* drafted, int64_t stride, int64_t column) {
  Lanes sums[Q][N];
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[q][j] = Lanes{};
  for (int64_t i = 0; i < count; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) {
      const Lanes value = wide(held + i * stride + column + j * kLanes);
#pragma GCC unroll 8
      for (int q = 0; q < Q; ++q) sums[q][j] += queries[q].shares[i] * value;
    }
#pragma GCC unroll 8
  for (int q = 0; q < Q; ++q) {
    const float* share = queries[q].shares + count;
    for (const int64_t slot : queries[q].drafted) {
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sums[q][j] += *share * wide(drafted + slot * stride + column + j * kLanes);
      ++share;
    }
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      for (int64_t lane = 0; lane < kLanes; ++lane)
        queries[q].out[column + j * kLanes + lane] = static_cast<T>(sums[q][j][lane] * queries[q].scale);
  }
}

template <int Q, typename T>
void weigh_all(const Query<T>* queries, const T* held, int64_t count, const T* drafted, int64_t stride, int64_t size) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= size; j += 4 * kLanes) weigh<4, Q>(queries, held, count, drafted, stride, j);
  for (; j + kLanes <= size; j += kLanes) weigh<1, Q>(queries, held, count, drafted, stride, j);
  for (; j < size; ++j)
    for (int q = 0; q < Q; ++q) {
      const float* share = queries[q].shares;
      float sum = 0.0f;
      for (int64_t i = 0; i < count; ++i) sum += *share++ * static_cast<float>(held[i * stride + j]);
      for (const int64_t slot : queries[q].drafted) sum += *share++ * static_cast<float>(drafted[slot * stride + j]);
      queries[q].out[j] = static_cast<T>(sum * queries[q].scale);
    }
}

// qkv: [B * n, (h + 2g) d]. Writes keys and values to their slots; returns [B * n, h d].
template <typename T>
Tensor attend(const Layer& layer, const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& keys,
              const Tensor& values, const Sight& sight) {
  RECORD_FUNCTION("treedraft::scaled_dot_product_attention", {});
  const int64_t h = layer.heads, g = layer.groups, n = sight.rows, m = sight.drafted;
  const int64_t width = qkv.size(1), d = width / (h + 2 * g);
  Tensor out = at::empty({qkv.size(0), h * d}, qkv.options());
  const T *input = qkv.const_data_ptr<T>(), *cosine = cos.const_data_ptr<T>(), *sine = sin.const_data_ptr<T>();
  T* result = out.data_ptr<T>();
  const Slots<T> key_slots(keys), value_slots(values);
  for (int64_t i = 0; i < sight.batch * n; ++i) {
    const int64_t row = i / n, slot = sight.start[row] + m - n + i % n;
    for (int64_t group = 0; group < g; ++group) {
      const T* key = input + i * width + (h + group) * d;
      std::vector<T> normed;
      if (layer.k_norm) {
        normed.resize(d);
        rms_norm(key, layer.k_norm->const_data_ptr<T>(), normed.data(), d, layer.eps);
        key = normed.data();
      }
      rotate(key, cosine + i * d, sine + i * d, key_slots.at(row, group, slot), d);
      const T* value = input + i * width + (h + g + group) * d;
      std::copy(value, value + d, value_slots.at(row, group, slot));
    }
  }
  // Queries of one row's group of heads stand side by side: a thread reads keys and values once for a block of them.
  at::parallel_for(0, sight.batch * h * n, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> turned(kBlock * d), columns(d * kLanes), scores, apart;
    std::vector<T> normed(d);
    std::vector<Query<T>> block(kBlock);
    for (int64_t task = begin; task < end;) {
      const int64_t row = task / (h * n), group = task / n % h / (h / g), held = sight.held[row], start = sight.start[row];
      const int64_t stop = std::min({end, task + kBlock, (row * h + (group + 1) * (h / g)) * n}), many = stop - task;
      int64_t from = held;
      for (int64_t q = 0; q < many; ++q) {
        const int64_t head = (task + q) / n % h, at = (task + q) % n, i = row * n + at;
        const T* own = input + i * width + head * d;
        if (layer.q_norm) {
          rms_norm(own, layer.q_norm->const_data_ptr<T>(), normed.data(), d, layer.eps);
          own = normed.data();
        }
        float* query = turned.data() + q * d;
        rotate(own, cosine + i * d, sine + i * d, query, d);
        for (int64_t k = 0; k < d; ++k) query[k] *= static_cast<float>(layer.scaling);
        const int64_t first = layer.window ? std::max<int64_t>(0, sight.positions[i] - layer.window + 1) : 0;
        block[q].from = std::min(first, held);
        from = std::min(from, block[q].from);
        block[q].out = result + i * h * d + head * d;
        block[q].drafted.clear();
        for (int64_t j = 0; j < m; ++j)
          if (sight.ancestors[i * m + j] && (!layer.window || sight.positions[row * n + j] >= first))
            block[q].drafted.push_back(j);
      }
      const int64_t seen = held - from, stride = seen + m + 2 * kLanes;
      scores.resize(std::max<int64_t>(scores.size(), many * stride));
      apart.resize(std::max<int64_t>(apart.size(), many * (m + kLanes)));
      score_all(turned.data(), many, key_slots.at(row, group, from), key_slots.slot_stride, seen, d, columns.data(), scores.data(), stride);
      score_all(turned.data(), many, key_slots.at(row, group, start), key_slots.slot_stride, m, d, columns.data(), apart.data(), m + kLanes);
      for (int64_t q = 0; q < many; ++q) {
        Query<T>& query = block[q];
        query.shares = scores.data() + q * stride + query.from - from;
        float* end_of_held = scores.data() + q * stride + seen;
        for (const int64_t slot : query.drafted) *end_of_held++ = apart[q * (m + kLanes) + slot];
        query.scale = exponentials(query.shares, end_of_held - query.shares);
      }
      const T* drafted = value_slots.at(row, group, start);
      for (int64_t q = 0; q < many;) {
        const bool pair = q + 1 < many && block[q].from == block[q + 1].from;
        const T* first = value_slots.at(row, group, block[q].from);
        const int64_t count = held - block[q].from;
        if (pair) weigh_all<2>(&block[q], first, count, drafted, value_slots.slot_stride, d);
        else weigh_all<1>(&block[q], first, count, drafted, value_slots.slot_stride, d);
        q += pair ? 2 : 1;
      }
      task = stop;
    }
  });
  return out;
}

template <typename T>
Tensor normed(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = at::empty(x.sizes(), x.options());
  const int64_t size = x.size(1);
  const T *from = x.const_data_ptr<T>(), *scale = weight.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  at::parallel_for(0, x.size(0), std::max<int64_t>(1, 4 * kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) rms_norm(from + i * size, scale, to + i * size, size, eps);
  });
  return out;
}

template <typename T>
Tensor activated(Activation kind, const Tensor& gate_up) {
  const int64_t size = gate_up.size(1) / 2;
  Tensor out = at::empty({gate_up.size(0), size}, gate_up.options());
  const T* from = gate_up.const_data_ptr<T>();
  T* to = out.data_ptr<T>();
  // Cut at whole vectors, so that a number's place does not depend on how the work is shared out.
  const int64_t vectors = (size + Vec::size() - 1) / Vec::size();
  at::parallel_for(0, gate_up.size(0) * vectors, kGrain / Vec::size(), [&](int64_t begin, int64_t end) {
    for (int64_t v = begin; v < end;) {
      const int64_t row = v / vectors, at = (v % vectors) * Vec::size();
      const int64_t last = std::min(end, (row + 1) * vectors), stop = std::min((last - row * vectors) * Vec::size(), size);
      gated(kind, from + 2 * row * size + at, from + (2 * row + 1) * size + at, to + row * size + at, stop - at);
      v = last;
    }
  });
  return out;
}

// x + y into x
template <typename T>
void add_to(Tensor& x, const Tensor& y) {
  T* to = x.data_ptr<T>();
  const T* from = y.const_data_ptr<T>();
  const int64_t size = x.numel();
  for (int64_t i = 0; i < size; ++i) to[i] = static_cast<T>(static_cast<float>(to[i]) + static_cast<float>(from[i]));
}

template <typename T>
void run_layer(const Layer& layer, const Tensor& x, Tensor& residual, const Tensor& cos, const Tensor& sin,
               const Tensor& keys, const Tensor& values, const Sight& sight) {
  const Tensor qkv = layer.linears[0](layer.input_norm ? normed<T>(x, *layer.input_norm, layer.eps) : x);
  add_to<T>(residual, layer.linears[1](attend<T>(layer, qkv, cos, sin, keys, values, sight)));
  const Tensor gate_up = layer.linears[2](normed<T>(residual, layer.mlp_norm, layer.eps));
  add_to<T>(residual, layer.linears[3](activated<T>(layer.activation, gate_up)));
}

Activation activation_of(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  TORCH_CHECK(name == "gelu_tanh", "no activation called ", name);
  return Activation::gelu_tanh;
}

struct Layers : torch::CustomClassHolder {
  std::vector<Linear> linears;
  std::vector<Layer> layers;

  // The four linear layers of a layer come first, then what else it is.
  void add_linear(Tensor packed, std::optional<Tensor> scale, std::optional<Tensor> bias, int64_t outputs) {
    linears.push_back({std::move(packed), std::move(scale), std::move(bias), outputs});
  }

  void add_layer(std::optional<Tensor> input_norm, Tensor mlp_norm, std::optional<Tensor> q_norm,
                 std::optional<Tensor> k_norm, int64_t heads, int64_t groups, double eps, double scaling,
                 int64_t window, std::string activation) {
    TORCH_CHECK(linears.size() == 4, "a layer has four linear layers, got ", linears.size());
    layers.push_back({input_norm, q_norm, k_norm, mlp_norm, {linears[0], linears[1], linears[2], linears[3]},
                      heads, groups, window, eps, scaling, activation_of(activation)});
    linears.clear();
  }

  // x: [B, n, X]; residual: [B, n, H] or none where it is x; cos, sin: [B, n, d]; keys, values: [B, g, S, d] of every
  // layer; held, start: [B]; ancestors: [B, n, m] bool; positions: [B, n]. Returns the states [B, n, H] that enter the
  // layers of the ids `taps`, ascending; the number of layers names the last one's output.
  std::vector<Tensor> run(Tensor x, std::optional<Tensor> residual, Tensor cos, Tensor sin, std::vector<Tensor> keys,
                          std::vector<Tensor> values, Tensor held, Tensor start, Tensor ancestors, Tensor positions,
                          std::vector<int64_t> taps) {
    const int64_t batch = x.size(0), rows = x.size(1), drafted = ancestors.size(2);
    TORCH_CHECK(keys.size() == layers.size() && values.size() == layers.size(), "keys and values of every layer");
    TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "fp32 or bf16, got ", x.dtype());
    TORCH_CHECK(ancestors.scalar_type() == at::kBool && ancestors.size(0) == batch && ancestors.size(1) == rows &&
                held.numel() == batch && start.numel() == batch && positions.numel() == batch * rows, "sizes differ");
    for (Tensor* each : {&held, &start, &ancestors, &positions, &cos, &sin, &x}) *each = each->contiguous();
    const Sight sight{held.const_data_ptr<int64_t>(), start.const_data_ptr<int64_t>(),
                      positions.const_data_ptr<int64_t>(), ancestors.const_data_ptr<bool>(), batch, rows, drafted};
    int64_t needed = 0;
    for (int64_t b = 0; b < batch; ++b)
      needed = std::max({needed, sight.held[b], sight.start[b] + drafted});
    const Tensor first = x.flatten(0, 1);
    Tensor state = residual ? residual->flatten(0, 1).clone(at::MemoryFormat::Contiguous) : first.clone();
    std::vector<Tensor> found;
    const auto shape = std::vector<int64_t>{batch, rows, state.size(1)};
    for (size_t i = 0; i <= layers.size(); ++i) {
      if (std::find(taps.begin(), taps.end(), static_cast<int64_t>(i)) != taps.end()) {
        found.push_back(state.view(shape));
        if (found.size() == taps.size()) return found;
        state = state.clone();
      }
      if (i == layers.size()) break;
      TORCH_CHECK(keys[i].size(2) >= needed && values[i].size(2) >= needed && keys[i].stride(3) == 1 &&
                  values[i].stride(3) == 1, needed, " slots are needed, got ", keys[i].size(2));
      const Tensor& input = i == 0 && residual ? first : state;
      if (x.scalar_type() == at::kFloat)
        run_layer<float>(layers[i], input, state, cos, sin, keys[i], values[i], sight);
      else
        run_layer<at::BFloat16>(layers[i], input, state, cos, sin, keys[i], values[i], sight);
    }
    return found;
  }
};

// x: [..., K] fp32 to [..., N]
Tensor linear(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& scale,
              const std::optional<Tensor>& bias, int64_t outputs) {
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  return treedraft::multiply(x.reshape({-1, x.size(-1)}).contiguous(), panels, scale, bias, outputs).view(shape);
}

// x [..., H] fp32 over its root-mean-square, times weight [H].
Tensor root_mean_square_norm(const Tensor& x, const Tensor& weight, double eps) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.scalar_type() == at::kFloat && weight.is_contiguous() &&
              weight.numel() == x.size(-1), "fp32 rows and a weight of their length");
  return normed<float>(x.reshape({-1, x.size(-1)}).contiguous(), weight, eps).view(x.sizes());
}

// The largest of each row of x [..., V] fp32 and the first place that holds it; NaN if there is one anywhere.
std::tuple<Tensor, Tensor> largest(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() > 0, "contiguous fp32 rows");
  const auto shape = x.sizes().slice(0, x.dim() - 1);
  const int64_t size = x.size(-1), rows = x.numel() / size;
  Tensor values = at::empty(shape, x.options()), places = at::empty(shape, x.options().dtype(at::kLong));
  const float* from = x.const_data_ptr<float>();
  float* best = values.data_ptr<float>();
  int64_t* place = places.data_ptr<int64_t>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* row = from + i * size;
      best[i] = at::vec::reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, row, size);
      place[i] = std::isnan(best[i]) ? 0 : std::find(row, row + size, best[i]) - row;
    }
  });
  return {values, places};
}

TORCH_LIBRARY(treedraft, library) {
  library.def("panel() -> int", []() { return treedraft::kPanel; });
  library.def("largest(Tensor x) -> (Tensor values, Tensor places)", largest);
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", root_mean_square_norm);
  library.def("linear(Tensor x, Tensor panels, Tensor? scale, Tensor? bias, int outputs) -> Tensor", linear);
  library.class_<Layers>("Layers")
      .def(torch::init<>())
      .def("add_linear", &Layers::add_linear)
      .def("add_layer", &Layers::add_layer)
      .def("run", &Layers::run);
}

}  // namespace
