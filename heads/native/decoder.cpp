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

// out[0..N vectors) = sum over i of shares[i] * rows[slots[i]]
template <int N, typename T>
inline void weigh(const float* shares, const T* rows, const int64_t* slots, int64_t count, int64_t stride, float scale, T* out) {
  Lanes sums[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) sums[j] = Lanes{};
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows + slots[i] * stride;
    const float share = shares[i];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[j] += share * wide(row + j * kLanes);
  }
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j)
    for (int64_t lane = 0; lane < kLanes; ++lane) out[j * kLanes + lane] = static_cast<T>(sums[j][lane] * scale);
}

template <typename T>
void rms_norm(const T* x, const T* weight, T* out, int64_t size, float eps) {
  const float scale = 1.0f / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<T>(static_cast<float>(x[i]) * scale * static_cast<float>(weight[i]));
}

// Rotary positions in half-rotation form; cos and sin hold d numbers, the two halves alike.
template <typename T, typename U>
void rotate(const T* x, const T* cos, const T* sin, U* out, int64_t size) {
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

// Attention of one query to `count` slots of keys and values, in their order. `scores` has room for a vector more.
template <typename T>
void attend_row(const float* query, const T* keys, const T* values, int64_t key_stride, int64_t value_stride,
                const int64_t* slots, int64_t count, int64_t size, float* scores, T* out) {
  Vec largest(-std::numeric_limits<float>::infinity()), sums(0.0f);
  for (int64_t i = 0; i < count; ++i) scores[i] = dot(query, keys + slots[i] * key_stride, size);
  for (int64_t i = count; i < count + kLanes; ++i) scores[i] = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; i += kLanes) largest = at::vec::maximum(largest, Vec::loadu(scores + i));
  const Vec top(at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return at::vec::maximum(a, b); }, largest));
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec share = (Vec::loadu(scores + i) - top).exp();
    share.store(scores + i);
    sums = sums + share;
  }
  const float scale = 1.0f / total(treedraft::as_sum(sums));
  int64_t j = 0;
  for (; j + 8 * kLanes <= size; j += 8 * kLanes) weigh<8>(scores, values + j, slots, count, value_stride, scale, out + j);
  for (; j + 2 * kLanes <= size; j += 2 * kLanes) weigh<2>(scores, values + j, slots, count, value_stride, scale, out + j);
  for (; j < size; ++j) {
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += scores[i] * static_cast<float>(values[slots[i] * value_stride + j]);
    out[j] = static_cast<T>(sum * scale);
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
  at::parallel_for(0, sight.batch * h * n, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> query(d), scores;
    std::vector<T> normed(d);
    std::vector<int64_t> slots;
    int64_t filled = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / (h * n), head = task / n % h, i = row * n + task % n;
      const int64_t group = head / (h / g), held = sight.held[row];
      if (filled != row) {
        scores.resize(std::max<int64_t>(scores.size(), held + m + kLanes));
        slots.resize(held);
        std::iota(slots.begin(), slots.end(), 0);
        filled = row;
      }
      const T* own = input + i * width + head * d;
      if (layer.q_norm) {
        rms_norm(own, layer.q_norm->const_data_ptr<T>(), normed.data(), d, layer.eps);
        own = normed.data();
      }
      rotate(own, cosine + i * d, sine + i * d, query.data(), d);
      for (float& number : query) number *= static_cast<float>(layer.scaling);
      const int64_t first = layer.window ? std::max<int64_t>(0, sight.positions[i] - layer.window + 1) : 0;
      slots.resize(held);
      for (int64_t j = 0; j < m; ++j)
        if (sight.ancestors[i * m + j] && (!layer.window || sight.positions[row * n + j] >= first))
          slots.push_back(sight.start[row] + j);
      const int64_t from = std::min(first, held);
      attend_row(query.data(), key_slots.at(row, group, 0), value_slots.at(row, group, 0), key_slots.slot_stride,
                 value_slots.slot_stride, slots.data() + from, static_cast<int64_t>(slots.size()) - from, d,
                 scores.data(), result + i * h * d + head * d);
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
  library.def("linear(Tensor x, Tensor panels, Tensor? scale, Tensor? bias, int outputs) -> Tensor", linear);
  library.class_<Layers>("Layers")
      .def(torch::init<>())
      .def("add_linear", &Layers::add_linear)
      .def("add_layer", &Layers::add_layer)
      .def("run", &Layers::run);
}

}  // namespace
