// Packed weights: float32, bfloat16, int8 and int4.
//
// A matrix is cut into blocks of 16 outputs. A block is contiguous, so that one row of activations (decode) streams it
// from memory, and its inner order is that of the dot product instructions:
//
//   float32    [k]        [16]      float
//   bfloat16   [k / 2]    [16][2]
//   int8       [k / 4]    [16][4]   bytes, weight + 128; then 16 float scales
//   int4       per group of inputs: per 32 inputs [4][16][4] bytes, low nibbles inputs 0-15, high nibbles 16-31;
//              then 16 half-precision scales and, if asked for, 16 minima; weight = scale * nibble + minimum
//              (without minima: scale * (nibble - 8))
#pragma once

#include <algorithm>

#include "vec.h"

namespace anyrig {

enum class Kind { f32, bf16, int8, int4 };

constexpr int K_UNIT = 64;  // activations of one scale; k is padded with zeros to a multiple

// A packed matrix of `n` outputs and `k` inputs.
struct Linear {
  const uint8_t* data = nullptr;
  Kind kind = Kind::f32;
  int n = 0, k = 0;
  int group = 0;  // int4: 32, 64 or 128
  bool minimum = false;

  int padded_k() const { return round_up(k, kind == Kind::int4 ? std::max(K_UNIT, group) : K_UNIT); }
  int blocks() const { return ceil_div(n, LANES); }
  size_t group_bytes() const { return size_t(group) * 8 + 32 + (minimum ? 32 : 0); }
  size_t block_bytes() const {
    const size_t kp = padded_k();
    switch (kind) {
      case Kind::f32: return kp * 64;
      case Kind::bf16: return kp * 32;
      case Kind::int8: return kp * 16 + 64;
      case Kind::int4: return kp / group * group_bytes();
    }
    return 0;
  }
  size_t bytes() const { return block_bytes() * blocks(); }
  const uint8_t* block(int b) const { return data + block_bytes() * b; }
};

// Packs up to 16 rows of float32 `w` [rows, k] into one block; int8 and int4 rows with a weight that is not finite get a
// scale that is not a number. Missing rows and columns are zeros.
inline void pack_block(const Linear& shape, const float* w, size_t stride, int rows, uint8_t* out) {
  const int k = shape.k, kp = shape.padded_k();
  std::memset(out, 0, shape.block_bytes());
  if (shape.kind == Kind::f32) {
    auto* o = reinterpret_cast<float*>(out);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < k; ++i) o[i * LANES + r] = w[r * stride + i];
  } else if (shape.kind == Kind::bf16) {
    auto* o = reinterpret_cast<uint16_t*>(out);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < k; ++i) o[(i / 2 * LANES + r) * 2 + i % 2] = to_bf16(w[r * stride + i]);
  } else if (shape.kind == Kind::int8) {
    std::memset(out, 128, size_t(kp) * LANES);
    auto* scales = reinterpret_cast<float*>(out + size_t(kp) * LANES);
    for (int r = 0; r < rows; ++r) {
      float most = 0, nothing = 0;
      for (int i = 0; i < k; ++i) {
        most = std::max(most, std::fabs(w[r * stride + i]));
        nothing += w[r * stride + i] * 0;
      }
      scales[r] = most / 127 + nothing;  // NaN where a weight is not finite: it must not become some small integer
      if (nothing != nothing) continue;
      const float inverse = most > 0 ? 127 / most : 0;
      for (int i = 0; i < k; ++i)
        out[(i / 4 * LANES + r) * 4 + i % 4] = uint8_t(128 + int(std::nearbyint(w[r * stride + i] * inverse)));
    }
  } else {
    for (int g = 0; g < kp / shape.group; ++g) {
      uint8_t* o = out + g * shape.group_bytes();
      auto* scales = reinterpret_cast<uint16_t*>(o + size_t(shape.group) * 8);
      for (int r = 0; r < rows; ++r) {
        const int first = g * shape.group, last = std::min(k, first + shape.group);
        float low = first < last ? w[r * stride + first] : 0, high = low, nothing = 0;
        for (int i = first; i < last; ++i) {
          nothing += w[r * stride + i] * 0;
          low = std::min(low, w[r * stride + i]);
          high = std::max(high, w[r * stride + i]);
        }
        if (!shape.minimum) {  // nibble 0 stands for -8 scales, 15 for +7; the larger side decides
          const float most = std::max(-low / 8, high / 7);
          scales[r] = to_f16(most);
        } else {
          scales[r] = to_f16((high - low) / 15);
          scales[LANES + r] = to_f16(low);
        }
        if (nothing != nothing) {
          scales[r] = to_f16(nothing);
          continue;
        }
        const float scale = from_f16(scales[r]), base = shape.minimum ? from_f16(scales[LANES + r]) : -8 * scale;
        const float inverse = scale > 0 ? 1 / scale : 0;
        for (int i = first; i < last; ++i) {
          const float level = std::nearbyint((w[r * stride + i] - base) * inverse);
          const auto nibble = uint8_t(std::clamp(level, 0.0f, 15.0f));
          const int at = i - first, in = at % 32;
          o[at / 32 * 256 + (in % 16 / 4 * LANES + r) * 4 + in % 4] |= uint8_t(nibble << (in < 16 ? 0 : 4));
        }
      }
    }
  }
}

// One row of the matrix as float32 [k]: what an embedding looks up.
inline void unpack_row(const Linear& w, int row, float* out) {
  const uint8_t* block = w.block(row / LANES);
  const int r = row % LANES;
  if (w.kind == Kind::f32) {
    for (int i = 0; i < w.k; ++i) out[i] = reinterpret_cast<const float*>(block)[i * LANES + r];
  } else if (w.kind == Kind::bf16) {
    const auto* b = reinterpret_cast<const uint16_t*>(block);
    for (int i = 0; i < w.k; ++i) out[i] = from_bf16(b[(i / 2 * LANES + r) * 2 + i % 2]);
  } else if (w.kind == Kind::int8) {
    const float scale = reinterpret_cast<const float*>(block + size_t(w.padded_k()) * LANES)[r];
    for (int i = 0; i < w.k; ++i) out[i] = (int(block[(i / 4 * LANES + r) * 4 + i % 4]) - 128) * scale;
  } else {
    for (int i = 0; i < w.k; ++i) {
      const uint8_t* group = block + size_t(i / w.group) * w.group_bytes();
      const auto* scales = reinterpret_cast<const uint16_t*>(group + size_t(w.group) * 8);
      const float scale = from_f16(scales[r]), base = w.minimum ? from_f16(scales[LANES + r]) : -8 * scale;
      const int at = i % w.group, in = at % 32;
      const uint8_t byte = group[at / 32 * 256 + (in % 16 / 4 * LANES + r) * 4 + in % 4];
      out[i] = scale * (in < 16 ? byte & 15 : byte >> 4) + base;
    }
  }
}

}  // namespace anyrig
