// Rows of activations as the products take them: float32, bfloat16, or int8 with a scale per 64 inputs.
#pragma once

#include "weights.h"

namespace anyrig {

// Rows of activations in the form that a kind of weights takes. Columns k .. padded_k hold zeros.
struct Rows {
  Kind kind = Kind::f32;
  int k = 0, kp = 0;
  int unit = 64;             // inputs of one partial sum: 64, or 32 for int4 groups of 32
  uint8_t* data = nullptr;   // [m][kp] float, bfloat16 or int8
  float* scales = nullptr;   // [m][kp / 64]
  float* sums = nullptr;     // int4: [m][kp / unit], scale * sum of the unit's activations
  int32_t* start = nullptr;  // int8: [m][kp / 64], -128 * sum: what the accumulators begin with

  static size_t element(Kind kind) { return kind == Kind::f32 ? 4 : kind == Kind::bf16 ? 2 : 1; }
  size_t row_bytes() const { return kp * element(kind); }

  // Bytes for `m` rows, whatever of the above they need.
  static size_t bytes(Kind kind, int m, int kp) {
    return size_t(m) * (kp * element(kind) + (kp / K_UNIT) * 4 + (kp / 32) * 4 + (kp / K_UNIT) * 4) + 4 * 64;
  }

  // Lays the arrays out in `memory`, 64-byte aligned.
  static Rows at(uint8_t* memory, const Linear& w, int m) {
    Rows rows;
    rows.kind = w.kind, rows.k = w.k, rows.kp = w.padded_k();
    rows.unit = w.kind == Kind::int4 ? std::min(w.group, 64) : 64;
    auto take = [&](size_t size) {
      uint8_t* p = memory;
      memory += (size + 63) / 64 * 64;
      return p;
    };
    rows.data = take(size_t(m) * rows.row_bytes());
    rows.scales = reinterpret_cast<float*>(take(size_t(m) * (rows.kp / K_UNIT) * 4));
    rows.sums = reinterpret_cast<float*>(take(size_t(m) * (rows.kp / 32) * 4));
    rows.start = reinterpret_cast<int32_t*>(take(size_t(m) * (rows.kp / K_UNIT) * 4));
    return rows;
  }

  // Columns first .. first + n of row m from float32; `first` is a multiple of 64, and so is n unless it reaches k.
  void put(int m, int first, int n, const float* x) const {
    const int end = first + n == k ? kp - first : n;
    uint8_t* row = data + size_t(m) * row_bytes();
    int i = 0;
    if (kind == Kind::f32) {
      auto* o = reinterpret_cast<float*>(row) + first;
      std::memcpy(o, x, size_t(n) * 4);
      std::memset(o + n, 0, size_t(end - n) * 4);
    } else if (kind == Kind::bf16) {
      auto* o = reinterpret_cast<uint16_t*>(row) + first;
      for (; i + LANES <= n; i += LANES) store_bf16(o + i, load<f32x16>(x + i));
      for (; i < n; ++i) o[i] = to_bf16(x[i]);
      std::memset(o + n, 0, size_t(end - n) * 2);
    } else {
      float tail[K_UNIT];
      for (; i < end; i += K_UNIT) {
        const float* from = x + i;
        if (n - i < K_UNIT) {
          std::memset(tail, 0, sizeof tail);
          if (n > i) std::memcpy(tail, from, size_t(n - i) * 4);
          from = tail;
        }
        quantise(m, (first + i) / K_UNIT, from);
      }
    }
  }

 private:
  void quantise(int m, int g, const float* x) const {
    f32x16 v[4], most{}, nothing{};
    for (int j = 0; j < 4; ++j) {
      v[j] = load<f32x16>(x + j * LANES);
      most = max(most, abs(v[j]));
      nothing += v[j] * 0.0f;
    }
    // What is not finite must not end as some small integer: it makes the scale NaN.
    const float top = reduce_max(most), scale = top / 127 + reduce_add(nothing);
    const f32x16 inverse = splat(top > 0 ? 127 / top : 0.0f);
    auto* out = reinterpret_cast<int8_t*>(data) + size_t(m) * kp + g * K_UNIT;
    u32x16 sum[2]{};  // unsigned: it may wrap around where the scale is NaN
    for (int j = 0; j < 4; ++j) {
      const i32x16 q = round_i32(v[j] * inverse);
      store_i8(out + j * LANES, q);
      sum[j / 2] += bits_of<u32x16>(q);
    }
    const uint32_t whole[2] = {reduce_add(sum[0]), reduce_add(sum[1])};
    const int32_t total[2] = {int32_t(whole[0]), int32_t(whole[1])};
    scales[size_t(m) * (kp / K_UNIT) + g] = scale;
    if (kind == Kind::int8) {
      start[size_t(m) * (kp / K_UNIT) + g] = int32_t(-128u * (whole[0] + whole[1]));
    } else if (unit == 32) {
      sums[size_t(m) * (kp / 32) + 2 * g] = scale * float(total[0]);
      sums[size_t(m) * (kp / 32) + 2 * g + 1] = scale * float(total[1]);
    } else {
      sums[size_t(m) * (kp / 64) + g] = scale * (float(total[0]) + float(total[1]));
    }
  }
};

}  // namespace anyrig
