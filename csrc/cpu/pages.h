// Pages of keys and values, of `page_size` tokens: how they lie there, and how they get there.
//
// Per KV head they are in the order that the dot products read:
//
//   bfloat16   keys  [dim / 2][page_size][2]     values  [page_size / 2][v_dim][2]
//   float32    keys  [dim][page_size]            values  [page_size][v_dim]
//   int8       as bfloat16, a byte for each; after the keys, and after the values, a float32 scale per position
#pragma once

#include <algorithm>

#include "vec.h"

namespace anyrig {

constexpr int TILE = 64;  // positions that attention looks at together; a multiple of the page size

// What one layer asks for (core/spec.py LayerSpec).
struct AttentionLayer {
  int heads, kv_heads, dim, v_dim;
  float scaling;
  int window = 0;     // 0: none
  float softcap = 0;  // 0: none
  const float* sinks = nullptr;
  int group() const { return heads / kv_heads; }
};

// Where a layer's pages are: page p of head h begins at base + p * page_stride + h * head_stride (bytes).
struct Pages {
  uint8_t* k = nullptr;
  uint8_t* v = nullptr;
  size_t page_stride = 0, head_stride = 0;
  size_t v_page_stride = 0, v_head_stride = 0;
  int page_size = 16;
  bool half = true;    // dot products take bfloat16 (bfloat16 and int8 pages), else float32
  bool bytes = false;  // int8

  int element() const { return bytes ? 1 : half ? 2 : 4; }
  // Bytes of one head's keys (or values) of `dim` numbers in one page.
  static size_t size(int page_size, int dim, bool half, bool bytes) {
    return size_t(page_size) * (bytes ? dim + 4 : half ? dim * 2 : dim * 4);
  }

  uint8_t* key(int page, int head) const { return k + page * page_stride + head * head_stride; }
  uint8_t* value(int page, int head) const { return v + page * v_page_stride + head * v_head_stride; }
};

// Quantises x [n] with one scale. What is not finite makes the scale NaN.
template <class Put>
inline void write_bytes(const float* x, int n, float* scale, Put&& put) {
  float most = 0, nothing = 0;
  for (int i = 0; i < n; ++i) {
    most = std::max(most, std::fabs(x[i]));
    nothing += x[i] * 0;
  }
  *scale = most / 127 + nothing;
  const float inverse = most > 0 && nothing == 0 ? 127 / most : 0;
  for (int i = 0; i < n; ++i) put(i, nothing == 0 ? int8_t(std::nearbyint(x[i] * inverse)) : int8_t(0));
}

// Pairs of bytes [n][16][2] (`step` bytes from one n to the next) as bfloat16 pairs: small integers, so exact.
inline void unpack_pairs(const uint8_t* from, size_t step, const uint8_t* next, int n, uint8_t* to) {
  for (int i = 0; i < n; ++i) {
    const auto both = load_u16(from + i * step);
    if (i % 2 == 0) __builtin_prefetch(next + i * step, 0, 2);
    const u32x16 low = bits_of<u32x16>(to_f32(both << 24 >> 24)), high = bits_of<u32x16>(to_f32(both << 16 >> 24));
    store(to + i * 64, (low >> 16) | (high & 0xffff0000u));
  }
}

// Writes one head's key [dim] and value [v_dim] of one position.
inline void write_kv(const Pages& pages, const int32_t* table, int position, int head, const float* key, int dim,
                     const float* value, int v_dim) {
  const int p = pages.page_size, page = table[position / p], slot = position % p;
  if (pages.bytes) {
    auto* k = reinterpret_cast<int8_t*>(pages.key(page, head)) + slot * 2;
    write_bytes(key, dim, reinterpret_cast<float*>(pages.key(page, head) + size_t(p) * dim) + slot,
                [&](int i, int8_t q) { k[i / 2 * p * 2 + i % 2] = q; });
    auto* v = reinterpret_cast<int8_t*>(pages.value(page, head)) + size_t(slot / 2) * v_dim * 2 + slot % 2;
    write_bytes(value, v_dim, reinterpret_cast<float*>(pages.value(page, head) + size_t(p) * v_dim) + slot,
                [&](int i, int8_t q) { v[i * 2] = q; });
  } else if (pages.half) {
    auto* k = reinterpret_cast<uint16_t*>(pages.key(page, head)) + slot * 2;
    for (int i = 0; i < dim; i += 2) {
      k[i / 2 * p * 2] = to_bf16(key[i]);
      k[i / 2 * p * 2 + 1] = to_bf16(key[i + 1]);
    }
    auto* v = reinterpret_cast<uint16_t*>(pages.value(page, head)) + slot / 2 * v_dim * 2 + slot % 2;
    for (int i = 0; i < v_dim; ++i) v[i * 2] = to_bf16(value[i]);
  } else {
    auto* k = reinterpret_cast<float*>(pages.key(page, head)) + slot;
    for (int i = 0; i < dim; ++i) k[i * p] = key[i];
    std::memcpy(pages.value(page, head) + size_t(slot) * v_dim * 4, value, size_t(v_dim) * 4);
  }
}

// Where a tile's keys and values lie, sixteen positions at a time.
struct TilePlaces {
  const uint8_t* key[TILE / LANES];
  const uint8_t* value[TILE / LANES];
  const float* key_scale[TILE / LANES];  // int8 pages
  const float* value_scale[TILE / LANES];

  // Those of `table` from position `at` on; positions beyond `last` repeat it.
  void find(const Pages& pages, const int32_t* table, int head, int at, int last, int dim, int v_dim) {
    const int p = pages.page_size;
    for (int i = 0; i < TILE / LANES; ++i) {
      const int position = std::min(at + i * LANES, last / LANES * LANES), page = table[position / p];
      key[i] = pages.key(page, head) + position % p * (pages.bytes ? 2 : 4);  // a pair, or one float, per position
      value[i] = pages.value(page, head) + size_t(position % p) * v_dim * pages.element();
      key_scale[i] = reinterpret_cast<const float*>(pages.key(page, head) + size_t(p) * dim) + position % p;
      value_scale[i] = reinterpret_cast<const float*>(pages.value(page, head) + size_t(p) * v_dim) + position % p;
    }
  }
};

}  // namespace anyrig
