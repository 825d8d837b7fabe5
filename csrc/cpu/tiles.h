// A tile of a product: some rows of activations times some blocks of weights, in registers.
//
// int8 and int4 weights meet activations quantised to int8, one scale per 64 inputs. Unsigned weights need a correction
// by the sum of the activations, which is the same for all outputs: the integer accumulators start at -128 * sum (int8),
// or the minimum is multiplied by the sum (int4).
//
// Only outputs are divided among threads, and every sum runs over k in one order whatever the number of rows: a row's
// result has the same bits alone and in company.
#pragma once

#include <vector>

#include "activations.h"

namespace anyrig {

constexpr int MOST_ROWS = 8;    // of one tile
constexpr int MOST_BLOCKS = 4;
constexpr int UNPACK_FROM = 5;  // rows from which on int4 blocks are unpacked once for all of them

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

// The sums of a tile to where it is handed on, [MR][NB * 16].
template <int MR, int NB>
ANYRIG_INLINE void store_tile(const f32x16 (&acc)[MR][NB], float* tile) {
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) store(tile + (i * NB + j) * LANES, acc[i][j]);
}

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
  store_tile(acc, tile);
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

// The end of unit u of int4 groups: what both ways below must do in the same order.
template <int MR, int NB>
ANYRIG_INLINE void add_unit(f32x16 (&acc)[MR][NB], const i32x16 (&sum)[MR][NB], const Rows& a, int m, int u,
                            const f32x16 (&scale)[NB], const f32x16 (&base)[NB]) {
  const int units = a.kp / a.unit, scales = a.kp / K_UNIT;
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
    const float a_scale = a.scales[size_t(m + i) * scales + u * a.unit / K_UNIT];
    const float a_sum = a.sums[size_t(m + i) * units + u];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
      acc[i][j] += (to_f32(sum[i][j]) * a_scale) * scale[j];
      acc[i][j] += base[j] * a_sum;
    }
  }
}

// Few rows: nibbles are taken apart in registers.
template <int MR, int NB>
ANYRIG_INLINE void tile_int4(const Linear& w, const Rows& a, int m, int first, float* tile) {
  f32x16 acc[MR][NB]{};
  const int unit = a.unit, units = a.kp / unit, per_group = w.group / unit;
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
      add_unit(acc, sum, a, m, u, scale, base);
    }
  }
  store_tile(acc, tile);
}

// Many rows: the blocks that were unpacked.
template <int MR, int NB>
ANYRIG_INLINE void tile_unpacked(const Unpacked& w, const Rows& a, int m, const uint8_t* ahead, float* tile) {
  f32x16 acc[MR][NB]{};
  const int unit = a.unit, units = a.kp / unit;
  const size_t step = size_t(a.kp) * LANES, scale_step = size_t(units) * 2 * LANES;
  const uint8_t* weights = w.bytes.data();
  const float* scale = w.scales.data();
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
    add_unit(acc, sum, a, m, u, each, base);
  }
  store_tile(acc, tile);
}

}  // namespace anyrig
