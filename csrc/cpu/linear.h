// Products with packed weights: y[m, n] = sum over k of a[m, k] * w[n, k], for float32, bfloat16, int8 and int4 weights.
//
// Weights are cut into blocks of 16 outputs. A block is contiguous, so that one row of activations (decode) streams it
// from memory, and its inner order is that of the dot product instructions:
//
//   float32    [k]        [16]      float
//   bfloat16   [k / 2]    [16][2]
//   int8       [k / 4]    [16][4]   bytes, weight + 128; then 16 float scales
//   int4       per group of inputs: per 32 inputs [4][16][4] bytes, low nibbles inputs 0-15, high nibbles 16-31;
//              then 16 half-precision scales and, if asked for, 16 minima; weight = scale * nibble + minimum
//              (without minima: scale * (nibble - 8))
//
// int8 and int4 weights meet activations quantised to int8, one scale per 64 inputs. Unsigned weights need a correction
// by the sum of the activations, which is the same for all outputs: the integer accumulators start at -128 * sum (int8),
// or the minimum is multiplied by the sum (int4).
//
// Only outputs are divided among threads, and every sum runs over k in one order whatever the number of rows: a row's
// result has the same bits alone and in company.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "vec.h"

namespace anyrig {

enum class Kind { f32, bf16, int8, int4 };

constexpr int K_UNIT = 64;  // activations of one scale; k is padded with zeros to a multiple
constexpr int MOST_ROWS = 8;  // of one tile
constexpr int MOST_BLOCKS = 4;
constexpr int UNPACK_FROM = 5;  // rows from which on int4 blocks are unpacked once for all of them

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

// ---------------------------------------------------------------------------------------------------- packing

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

// ------------------------------------------------------------------------------------------------ activations

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

// ------------------------------------------------------------------------------------------------------ tiles

// int4 blocks unpacked for many rows: bytes in int8's order, scales and minima of every unit as floats.
struct Unpacked {
  std::vector<uint8_t> bytes;  // [blocks][kp / 4][16][4]
  std::vector<float> scales;   // [blocks][kp / unit][2][16]

  // Makes room for tiles of this matrix; never in the middle of a run, where memory must not run out.
  void fit(const Linear& w) {
    if (w.kind != Kind::int4) return;
    const size_t inputs = size_t(MOST_BLOCKS) * w.padded_k(), units = inputs / std::min(w.group, 64);
    if (bytes.size() < inputs * LANES) bytes.resize(inputs * LANES);
    if (scales.size() < units * 2 * LANES) scales.resize(units * 2 * LANES);
  }

  void fill(const Linear& w, int first, int blocks) {
    const int kp = w.padded_k(), unit = std::min(w.group, 64), units = kp / unit;
    for (int b = 0; b < blocks; ++b) {
      uint8_t* out = bytes.data() + size_t(b) * kp * LANES;
      float* scale_out = scales.data() + size_t(b) * units * 2 * LANES;
      for (int g = 0; g < kp / w.group; ++g) {
        const uint8_t* group = w.block(first + b) + g * w.group_bytes();
        const uint8_t* tail = group + size_t(w.group) * 8;
        const f32x16 scale = load_f16(tail), base = w.minimum ? load_f16(tail + 32) : scale * -8.0f;
        for (int u = 0; u < w.group / unit; ++u, scale_out += 2 * LANES) {
          store(scale_out, scale);
          store(scale_out + LANES, base);
        }
        for (int i = 0; i < w.group / 32; ++i, out += 512)
          for (int j = 0; j < 4; ++j) {
            const auto both = load<i32x16>(group + i * 256 + j * 64);
            store(out + j * 64, both & 0x0f0f0f0f);
            store(out + 256 + j * 64, bits_of<i32x16>(bits_of<u32x16>(both) >> 4) & 0x0f0f0f0f);
          }
      }
    }
  }
};

// Fetches one line of what is needed next into the second-level cache.
ANYRIG_INLINE void fetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// Rows m .. m+MR of `a` times blocks first .. first+NB of `w`, as float32 into tile [MR][NB * 16]. Meanwhile one block
// at `ahead` is fetched: few rows leave the memory idle while a block is used again and again.
template <int MR, int NB>
ANYRIG_INLINE void tile_float(const Linear& w, const Rows& a, int m, int first, const uint8_t* ahead, float* tile) {
  f32x16 acc[MR][NB]{};
  const uint8_t* rows[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) rows[i] = a.data + size_t(m + i) * a.row_bytes();
  const size_t step = w.block_bytes();
  const uint8_t* weights = w.block(first);
  // One step takes 64 bytes of a block: one input (float32) or two (bfloat16).
  const int steps = w.kind == Kind::f32 ? a.kp : a.kp / 2;
  if (w.kind == Kind::f32) {
    for (int s = 0; s < steps; ++s, weights += 64, ahead += 64) {
      fetch(ahead);
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) {
        const auto v = load<f32x16>(weights + j * step);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) acc[i][j] += v * reinterpret_cast<const float*>(rows[i])[s];
      }
    }
  } else {
    for (int s = 0; s < steps; ++s, weights += 64, ahead += 64) {
      fetch(ahead);
      i32x16 v[NB];
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) {
        v[j] = load<i32x16>(weights + j * step);
        if (MR == 1) __builtin_prefetch(weights + j * step + 1024);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const int32_t pair = load_i32(rows[i] + s * 4);
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) acc[i][j] = dot_bf16(acc[i][j], v[j], pair);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) store(tile + (i * NB + j) * LANES, acc[i][j]);
}

template <int MR, int NB>
ANYRIG_INLINE void tile_int8(const Linear& w, const Rows& a, int m, int first, const uint8_t* ahead, float* tile) {
  f32x16 acc[MR][NB]{};
  const int groups = a.kp / K_UNIT;
  const size_t step = w.block_bytes();
  const uint8_t* weights = w.block(first);
  for (int g = 0; g < groups; ++g) {
    i32x16 sum[MR][NB];
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const i32x16 start = splat(a.start[size_t(m + i) * groups + g]);
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) sum[i][j] = start;
    }
    const uint8_t* row = a.data + size_t(m) * a.kp + g * K_UNIT;
#pragma GCC unroll 4
    for (int s = 0; s < K_UNIT / 4; ++s, weights += 64, ahead += 64) {
      fetch(ahead);
      i32x16 v[NB];
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) {
        v[j] = load<i32x16>(weights + j * step);
        if (MR == 1) __builtin_prefetch(weights + j * step + 1024);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const int32_t four = load_i32(row + size_t(i) * a.kp + s * 4);
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) sum[i][j] = dot_u8s8(sum[i][j], v[j], four);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const float scale = a.scales[size_t(m + i) * groups + g];
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) acc[i][j] += to_f32(sum[i][j]) * scale;
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < NB; ++j) {
    const auto scale = load<f32x16>(w.block(first + j) + size_t(a.kp) * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) store(tile + (i * NB + j) * LANES, acc[i][j] * scale);
  }
}

// The end of a unit of an int4 group: what both ways below must do in the same order.
ANYRIG_INLINE f32x16 add_unit(f32x16 acc, i32x16 sum, float a_scale, float a_sum, f32x16 scale, f32x16 base) {
  acc += (to_f32(sum) * a_scale) * scale;
  return acc + base * a_sum;
}

// Few rows: nibbles are taken apart in registers.
template <int MR, int NB>
ANYRIG_INLINE void tile_int4(const Linear& w, const Rows& a, int m, int first, float* tile) {
  f32x16 acc[MR][NB]{};
  const int unit = a.unit, units = a.kp / unit, per_group = w.group / unit, scales = a.kp / K_UNIT;
  const size_t step = w.block_bytes(), group_bytes = w.group_bytes(), tail = size_t(w.group) * 8;
  const uint8_t* group = w.block(first);
  for (int u = 0; u < units; group += group_bytes) {
    f32x16 scale[NB], base[NB];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
      scale[j] = load_f16(group + j * step + tail);
      base[j] = w.minimum ? load_f16(group + j * step + tail + 32) : scale[j] * -8.0f;
    }
    for (int p = 0; p < per_group; ++p, ++u) {
      i32x16 sum[MR][NB]{};
      for (int half = 0; half < unit / 32; ++half) {
        const uint8_t* bytes = group + (p * unit + half * 32) * 8;
        const uint8_t* row = a.data + size_t(m) * a.kp + u * unit + half * 32;
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s)
#pragma GCC unroll 8
          for (int j = 0; j < NB; ++j) {
            const auto both = load<i32x16>(bytes + j * step + s * 64);
            __builtin_prefetch(bytes + j * step + s * 64 + 1280);
            const i32x16 low = both & 0x0f0f0f0f, high = bits_of<i32x16>(bits_of<u32x16>(both) >> 4) & 0x0f0f0f0f;
#pragma GCC unroll 8
            for (int i = 0; i < MR; ++i) {
              sum[i][j] = dot_u8s8(sum[i][j], low, load_i32(row + size_t(i) * a.kp + s * 4));
              sum[i][j] = dot_u8s8(sum[i][j], high, load_i32(row + size_t(i) * a.kp + 16 + s * 4));
            }
          }
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const float a_scale = a.scales[size_t(m + i) * scales + u * unit / K_UNIT];
        const float a_sum = a.sums[size_t(m + i) * units + u];
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) acc[i][j] = add_unit(acc[i][j], sum[i][j], a_scale, a_sum, scale[j], base[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) store(tile + (i * NB + j) * LANES, acc[i][j]);
}

// Many rows: block `at` and the following of what was unpacked.
template <int MR, int NB>
ANYRIG_INLINE void tile_unpacked(const Unpacked& w, const Rows& a, int m, int at, const uint8_t* ahead, float* tile) {
  f32x16 acc[MR][NB]{};
  const int unit = a.unit, units = a.kp / unit, scales = a.kp / K_UNIT;
  const size_t step = size_t(a.kp) * LANES, scale_step = size_t(units) * 2 * LANES;
  const uint8_t* weights = w.bytes.data() + at * step;
  const float* scale = w.scales.data() + at * scale_step;
  for (int u = 0; u < units; ++u, scale += 2 * LANES) {
    i32x16 sum[MR][NB]{};
    const uint8_t* row = a.data + size_t(m) * a.kp + u * unit;
    for (int s = 0; s < unit / 4; ++s, weights += 64) {
      if (s % 2) {  // packed, a block is about half as long
        fetch(ahead);
        ahead += 64;
      }
      i32x16 v[NB];
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) v[j] = load<i32x16>(weights + j * step);
#pragma GCC unroll 8
      for (int i = 0; i < MR; ++i) {
        const int32_t four = load_i32(row + size_t(i) * a.kp + s * 4);
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) sum[i][j] = dot_u8s8(sum[i][j], v[j], four);
      }
    }
    f32x16 each[NB], base[NB];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
      each[j] = load<f32x16>(scale + j * scale_step);
      base[j] = load<f32x16>(scale + j * scale_step + LANES);
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      const float a_scale = a.scales[size_t(m + i) * scales + u * unit / K_UNIT];
      const float a_sum = a.sums[size_t(m + i) * units + u];
#pragma GCC unroll 8
      for (int j = 0; j < NB; ++j) acc[i][j] = add_unit(acc[i][j], sum[i][j], a_scale, a_sum, each[j], base[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) store(tile + (i * NB + j) * LANES, acc[i][j]);
}

// ---------------------------------------------------------------------------------------------------- product

// Rows of a tile of `blocks`: as many as the registers hold (32 of AVX512; the integer kinds need two sums for each).
constexpr int tile_rows(bool integer, int blocks) {
  const int room = PARTS == 1 ? (integer ? 12 : 24) : (integer ? 4 : 6);
  return std::clamp(room / blocks, 1, MOST_ROWS);
}

template <int MR, int NB>
__attribute__((noinline)) void tile(const Linear& w, const Unpacked* unpacked, const Rows& a, int m, int block,
                                    const uint8_t* ahead, float* out) {
  if constexpr (MR <= tile_rows(true, NB)) {
    if (w.kind == Kind::int8) return tile_int8<MR, NB>(w, a, m, block, ahead, out);
    if (unpacked) return tile_unpacked<MR, NB>(*unpacked, a, m, 0, ahead, out);
    if constexpr (MR < UNPACK_FROM)
      if (w.kind == Kind::int4) return tile_int4<MR, NB>(w, a, m, block, out);
  }
  if constexpr (MR <= tile_rows(false, NB)) tile_float<MR, NB>(w, a, m, block, ahead, out);
}

using Tile = void (*)(const Linear&, const Unpacked*, const Rows&, int, int, const uint8_t*, float*);

template <int NB, int... MR>
constexpr auto tiles_of(std::integer_sequence<int, MR...>) {
  return std::array<Tile, sizeof...(MR)>{&tile<MR + 1, NB>...};
}

constexpr std::array<std::array<Tile, MOST_ROWS>, MOST_BLOCKS> TILES = {
    tiles_of<1>(std::make_integer_sequence<int, MOST_ROWS>{}), tiles_of<2>(std::make_integer_sequence<int, MOST_ROWS>{}),
    tiles_of<3>(std::make_integer_sequence<int, MOST_ROWS>{}), tiles_of<4>(std::make_integer_sequence<int, MOST_ROWS>{})};


// y = a w for the blocks first .. last, handed to done(m, rows, block, blocks, tile) tile by tile, where tile is
// float32 [rows][blocks * 16].
//
// `even`: tiles of an even number of blocks only (gate beside up). `next`: what the thread reads after the last block.
template <class Done>
void product(const Linear& w, const Rows& a, int m, int first, int last, bool even, const uint8_t* next,
             Unpacked& scratch, Done&& done) {
  alignas(64) float out[MOST_ROWS * MOST_BLOCKS * LANES];
  const bool unpack = w.kind == Kind::int4 && m >= UNPACK_FROM;
  // int4 blocks have their scales in registers too: narrower tiles of more rows.
  const int wide = unpack ? 2 : even || m == 1 ? 4 : 3;
  const size_t size = w.block_bytes();
  for (int block = first; block < last;) {
    const int blocks = std::min(wide, last - block);
    if (unpack) scratch.fill(w, block, blocks);
    const int most = tile_rows(w.kind == Kind::int8 || w.kind == Kind::int4, blocks);
    // Each tile of rows fetches one of the blocks that come next; further tiles find them there.
    const uint8_t* after = block + blocks < last ? w.block(block + blocks) : next ? next : w.block(block);
    for (int row = 0, turn = 0; row < m; ++turn) {
      const int rows = std::min(most, m - row);
      const uint8_t* ahead = turn < wide ? after + size * turn : w.block(block);
      TILES[blocks - 1][rows - 1](w, unpack ? &scratch : nullptr, a, row, block, ahead, out);
      done(row, rows, block, blocks, out);
      row += rows;
    }
    block += blocks;
  }
}

}  // namespace anyrig
