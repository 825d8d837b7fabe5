// What lies between the products of a layer: norm, activation, rope.
#pragma once

#include "vec.h"

namespace anyrig {

enum class Activation { silu, gelu, gelu_tanh };

// x / sqrt(mean(x^2) + eps) * weight, for one row. (RMSNorm: Zhang and Sennrich 2019.)
ANYRIG_INLINE void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  f32x16 squares{};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    const auto v = load<f32x16>(x + i);
    squares += v * v;
  }
  float sum = reduce_add(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / float(n) + eps);
  for (i = 0; i + LANES <= n; i += LANES) store(out + i, load<f32x16>(x + i) * scale * load<f32x16>(weight + i));
  for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

ANYRIG_INLINE f32x16 activate(Activation kind, f32x16 x) {
  switch (kind) {
    case Activation::silu: return x / (1.0f + exp(-x));
    case Activation::gelu_tanh: return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    case Activation::gelu: {
      for (int i = 0; i < LANES; ++i) x.set(i, 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678118f)));
      return x;
    }
  }
  return x;
}

ANYRIG_INLINE void rotate(float* x, const float* cos, const float* sin, int pairs, bool interleaved) {
  if (interleaved) {
    for (int i = 0; i < pairs; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cos[i] - b * sin[i];
      x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  int i = 0;
  for (; i + LANES <= pairs; i += LANES) {
    const auto a = load<f32x16>(x + i), b = load<f32x16>(x + pairs + i);
    const auto c = load<f32x16>(cos + i), s = load<f32x16>(sin + i);
    store(x + i, a * c - b * s);
    store(x + pairs + i, b * c + a * s);
  }
  for (; i < pairs; ++i) {
    const float a = x[i], b = x[pairs + i];
    x[i] = a * cos[i] - b * sin[i];
    x[pairs + i] = b * cos[i] + a * sin[i];
  }
}

}  // namespace anyrig
