// Paged attention: prefill, decode and any mixture of them in one pass.
//
// A step's keys and values are written first and read back from the pages, so that a token sees the same bits whether it
// was computed now or earlier. A row (one query head of one token) walks over tiles of 64 positions at absolute places,
// within splits of 512 positions that are computed each from nothing and merged from first to last. So its bits depend
// neither on the other rows, nor on how the prompt was cut, nor on which thread took which split.
// (Online softmax: Milakov and Gimelshein 2018; split keys: FlashDecoding, Dao et al. 2023.)
#pragma once

#include "attention_plan.h"

namespace anyrig {

// Running softmax of `rows` rows: maximum, sum of exponentials, and weighted values [rows][v_dim].
struct Partial {
  float* top;
  float* sum;
  float* out;

  static size_t floats(int rows, int v_dim) { return size_t(rows) * (2 + v_dim) + 32; }
  static Partial at(float* memory, int rows) { return {memory, memory + rows, memory + round_up(2 * rows, LANES)}; }
};

// Scratch of one thread.
struct AttentionScratch {
  std::vector<float> memory;
  float* scores;
  uint8_t* weights;  // the exponentials in the values' dtype
  Partial now, all;
  std::vector<uint8_t> unpacked;  // int8 pages: the tile's keys and values as bfloat16

  // Four times sixteen positions of keys, then of values.
  uint8_t* key(int i, int dim) { return unpacked.data() + size_t(i) * dim * LANES * 2; }
  uint8_t* value(int i, int dim, int v_dim) { return key(TILE / LANES, dim) + size_t(i) * v_dim * LANES * 2; }

  void fit(int rows, int dim, int v_dim, bool bytes) {
    if (bytes) unpacked.resize(size_t(TILE) * (dim + v_dim) * 2);
    const size_t tile = size_t(rows) * TILE + LANES;
    memory.resize(2 * tile + 2 * Partial::floats(rows, v_dim) + 3 * LANES);
    float* p = memory.data();
    scores = p;
    weights = reinterpret_cast<uint8_t*>(p + tile);
    now = Partial::at(p + 2 * tile, rows);
    all = Partial::at(p + 2 * tile + Partial::floats(rows, v_dim), rows);
  }
};

// Scores of MR rows with 16 positions: queries [dim] in the keys' dtype. With FETCH, the lines at the same places of
// what comes next are fetched meanwhile.
template <int MR, bool FETCH>
ANYRIG_INLINE void scores_of(bool half, size_t step, const uint8_t* key, const uint8_t* next_key,
                             const uint8_t* next_value, int dim, const uint8_t* const* queries, float* out) {
  f32x16 acc[MR]{};
  if (half) {
    for (int i = 0; i < dim / 2; ++i) {
      const auto k = load<i32x16>(key + i * step);
      if (FETCH) {
        __builtin_prefetch(next_key + i * step, 0, 2);
        __builtin_prefetch(next_value + i * 64, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) acc[r] = dot_bf16(acc[r], k, load_i32(queries[r] + i * 4));
    }
  } else {
    for (int i = 0; i < dim; ++i) {
      const auto k = load<f32x16>(key + i * step);
      if (FETCH) {
        __builtin_prefetch(next_key + i * step, 0, 2);
        __builtin_prefetch(next_value + i * 64, 0, 2);
      }
#pragma GCC unroll 8
      for (int r = 0; r < MR; ++r) acc[r] += k * reinterpret_cast<const float*>(queries[r])[i];
    }
  }
  for (int r = 0; r < MR; ++r) store(out + r * TILE, acc[r]);
}

template <int MR>
ANYRIG_INLINE void scores_of(bool half, size_t step, const uint8_t* key, const uint8_t* next_key,
                             const uint8_t* next_value, int dim, const uint8_t* const* queries, float* out) {
  if (next_key) return scores_of<MR, true>(half, step, key, next_key, next_value, dim, queries, out);
  scores_of<MR, false>(half, step, key, nullptr, nullptr, dim, queries, out);
}

// out[r] = out[r] * decay[r] + weights[r] times the values of a tile, for MR rows and VEC * 16 dimensions.
template <int MR, int VEC>
ANYRIG_INLINE void add_values(bool half, const uint8_t* const* values, int count, int v_dim, int d,
                              const uint8_t* weights, const float* decay, float* out) {
  f32x16 acc[MR][VEC];
  for (int r = 0; r < MR; ++r)
    for (int j = 0; j < VEC; ++j) acc[r][j] = load<f32x16>(out + r * v_dim + d + j * LANES) * decay[r];
  for (int first = 0; first < count; first += LANES) {
    const int here = std::min(LANES, count - first);
    const uint8_t* v = values[first / LANES] + size_t(d) * 4;
    if (half) {
      for (int t = 0; t < here; t += 2, v += size_t(v_dim) * 4) {
        // A position that is not there yet: its weight is 0, but its place may hold NaN, and 0 * NaN is NaN.
        const i32x16 there = splat(t + 1 < here ? -1 : 0xffff);
        i32x16 two[VEC];
#pragma GCC unroll 4
        for (int j = 0; j < VEC; ++j) two[j] = load<i32x16>(v + j * 64) & there;
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          const int32_t pair = load_i32(weights + (size_t(r) * TILE + first + t) * 2);
#pragma GCC unroll 4
          for (int j = 0; j < VEC; ++j) acc[r][j] = dot_bf16(acc[r][j], two[j], pair);
        }
      }
    } else {
      for (int t = 0; t < here; ++t, v += size_t(v_dim) * 4)
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
          const float w = reinterpret_cast<const float*>(weights)[size_t(r) * TILE + first + t];
#pragma GCC unroll 4
          for (int j = 0; j < VEC; ++j) acc[r][j] += load<f32x16>(v + j * 64) * w;
        }
    }
  }
  for (int r = 0; r < MR; ++r)
    for (int j = 0; j < VEC; ++j) store(out + r * v_dim + d + j * LANES, acc[r][j]);
}

template <int MR>
void add_rows(bool half, const uint8_t* const* values, int count, int v_dim, const uint8_t* weights,
              const float* decay, float* out) {
  int d = 0;
  for (; d + 4 * LANES <= v_dim; d += 4 * LANES) add_values<MR, 4>(half, values, count, v_dim, d, weights, decay, out);
  for (; d < v_dim; d += LANES) add_values<MR, 1>(half, values, count, v_dim, d, weights, decay, out);
}

// The softmax of one row over one split, begun by the caller.
class AttentionItem {
 public:
  AttentionItem(const AttentionLayer& layer, const Pages& pages, const AttentionPlan& plan, const WorkItem& item,
                int head, const uint8_t* queries, AttentionScratch& scratch, const TilePlaces* after = nullptr)
      : after_(after), layer_(layer), pages_(pages), chunk_(plan.chunks[item.chunk]), item_(item), head_(head), scratch_(scratch),
        rows_((item.t1 - item.t0) * layer.group()), last_(chunk_.start + item.t1 - 1), element_(pages.half ? 2 : 4) {
    // Row (t, g) is query head head * group + g of token t; queries are [tokens][heads][dim].
    for (int r = 0; r < rows_; ++r) {
      const size_t token = chunk_.first + item.t0 + r / layer.group();
      const size_t query = token * layer.heads + head * layer.group() + r % layer.group();
      query_[r] = queries + query * layer.dim * element_;
      position_[r] = chunk_.start + item.t0 + r / layer.group();
    }
  }

  // All splits of the item, merged; the result is in scratch.all.
  void run() {
    for (int s = item_.s0; s < item_.s1; ++s) {
      const Partial& into = s == item_.s0 ? scratch_.all : scratch_.now;
      split(s, into);
      if (s > item_.s0) merge(scratch_.all, scratch_.now, rows_, layer_.v_dim);
    }
  }

  void split(int s, const Partial& into) {
    std::fill(into.top, into.top + rows_, -INF);
    std::fill(into.sum, into.sum + rows_, 0.0f);
    std::fill(into.out, into.out + size_t(rows_) * layer_.v_dim, 0.0f);
    const int seen = last_ + 1;
    const int oldest = layer_.window ? std::max(0, position_[0] - layer_.window + 1) : 0;
    const int end = std::min((s + 1) * SPLIT, seen), first = std::max(s * SPLIT, oldest / TILE * TILE);
    if (first >= end) return;
    TilePlaces here, next;
    find(here, first);
    for (int at = first; at < end; at += TILE) {
      if (at + TILE < end)
        find(next, at + TILE);
      else if (after_)
        next = *after_;
      tile(here, at + TILE < end || after_ ? next : here, at, std::min(TILE, seen - at), into);
      here = next;
    }
  }

  // a = a with b added, for every row; a row of b that saw nothing leaves a as it is.
  static void merge(const Partial& a, const Partial& b, int rows, int v_dim) {
    for (int r = 0; r < rows; ++r) {
      if (b.sum[r] == 0) continue;
      const float top = std::max(a.top[r], b.top[r]);
      const float left = a.sum[r] == 0 ? 0 : exp_of(a.top[r] - top), right = exp_of(b.top[r] - top);
      a.top[r] = top;
      a.sum[r] = a.sum[r] * left + b.sum[r] * right;
      for (int d = 0; d < v_dim; d += LANES)
        store(a.out + r * v_dim + d,
              load<f32x16>(a.out + r * v_dim + d) * left + load<f32x16>(b.out + r * v_dim + d) * right);
    }
  }

  // The row's attention [v_dim] in place of its weighted values.
  static float* finish(const AttentionLayer& layer, const Partial& all, int r, int query_head) {
    float sum = all.sum[r], scale = 1;
    if (layer.sinks) {
      const float sink = layer.sinks[query_head], top = std::max(all.top[r], sink);
      scale = exp_of(all.top[r] - top);
      sum = sum * scale + exp_of(sink - top);
    }
    float* out = all.out + size_t(r) * layer.v_dim;
    const float inverse = sum > 0 ? scale / sum : 0;
    for (int d = 0; d < layer.v_dim; d += LANES) store(out + d, load<f32x16>(out + d) * inverse);
    return out;
  }

  int rows() const { return rows_; }

 private:
  static float exp_of(float x) { return exp(splat(x))[0]; }

  void tile(TilePlaces here, const TilePlaces& next, int at, int count, const Partial& into) {
    size_t step = size_t(pages_.page_size) * 4;
    if (pages_.bytes) {
      for (int i = 0; i * LANES < count; ++i) {
        const int dim = layer_.dim, v_dim = layer_.v_dim;
        unpack_pairs(here.key[i], step / 2, next.key[i], dim / 2, scratch_.key(i, dim));
        // Values of eight pairs of positions, [8][v_dim][2]: sixteen dimensions at a time.
        unpack_pairs(here.value[i], 32, next.value[i], LANES / 2 * v_dim / LANES, scratch_.value(i, dim, v_dim));
        here.key[i] = scratch_.key(i, dim), here.value[i] = scratch_.value(i, dim, v_dim);
      }
      step = LANES * 4;
    }
    for (int i = 0; i * LANES < count; ++i)
      for (int r = 0; r < rows_; r += 4) {
        float* out = scratch_.scores + size_t(r) * TILE + i * LANES;
        const bool fetch = r == 0 && !pages_.bytes;
        const uint8_t *key = here.key[i], *next_key = fetch ? next.key[i] : nullptr, *next_value = next.value[i];
        switch (std::min(4, rows_ - r)) {
          case 4: scores_of<4>(pages_.half, step, key, next_key, next_value, layer_.dim, &query_[r], out); break;
          case 3: scores_of<3>(pages_.half, step, key, next_key, next_value, layer_.dim, &query_[r], out); break;
          case 2: scores_of<2>(pages_.half, step, key, next_key, next_value, layer_.dim, &query_[r], out); break;
          case 1: scores_of<1>(pages_.half, step, key, next_key, next_value, layer_.dim, &query_[r], out); break;
        }
      }
    for (int r = 0; r < rows_; ++r) softmax(here, at, count, r, into);
    for (int r = 0; r < rows_; r += 4) {
      const uint8_t* w = scratch_.weights + size_t(r) * TILE * element_;
      float* out = into.out + size_t(r) * layer_.v_dim;
      switch (std::min(4, rows_ - r)) {
        case 4: add_rows<4>(pages_.half, here.value, count, layer_.v_dim, w, decay_ + r, out); break;
        case 3: add_rows<3>(pages_.half, here.value, count, layer_.v_dim, w, decay_ + r, out); break;
        case 2: add_rows<2>(pages_.half, here.value, count, layer_.v_dim, w, decay_ + r, out); break;
        case 1: add_rows<1>(pages_.half, here.value, count, layer_.v_dim, w, decay_ + r, out); break;
      }
    }
  }

  // Scores of row r -> weights; remembers by how much the sums so far shrink.
  void softmax(const TilePlaces& here, int at, int count, int r, const Partial& into) {
    float* scores = scratch_.scores + size_t(r) * TILE;
    const int last = position_[r], first = layer_.window ? last - layer_.window + 1 : 0;
    const int vectors = ceil_div(count, LANES);
    f32x16 v[TILE / LANES], most = splat(-INF);
    for (int j = 0; j < vectors; ++j) {
      v[j] = load<f32x16>(scores + j * LANES) * layer_.scaling;
      if (pages_.bytes) v[j] *= load<f32x16>(here.key_scale[j]);
      if (layer_.softcap != 0) v[j] = tanh(v[j] / layer_.softcap) * layer_.softcap;
      const i32x16 position = lanes_from(at + j * LANES);
      v[j] = select((position <= last) & (position >= first), v[j], splat(-INF));
      most = max(most, v[j]);
    }
    const float top = std::max(into.top[r], reduce_max(most));
    const float base = top == -INF ? 0 : top;
    f32x16 sum{};
    for (int j = 0; j < TILE / LANES; ++j) {
      f32x16 e = j < vectors ? select(v[j] == -INF, f32x16{}, exp(v[j] - base)) : f32x16{};
      sum += e;
      // The values' scales go into the weights; what lies beyond the sequence may have any scale.
      if (pages_.bytes && j < vectors) e = select(e == 0.0f, f32x16{}, e * load<f32x16>(here.value_scale[j]));
      if (pages_.half)
        store_bf16(scratch_.weights + (size_t(r) * TILE + j * LANES) * 2, e);
      else
        store(scratch_.weights + (size_t(r) * TILE + j * LANES) * 4, e);
    }
    decay_[r] = into.top[r] == -INF ? 0 : exp_of(into.top[r] - base);
    into.sum[r] = into.sum[r] * decay_[r] + reduce_add(sum);
    into.top[r] = top;
  }

  void find(TilePlaces& places, int at) const { places.find(pages_, chunk_.table, head_, at, last_, layer_.dim, layer_.v_dim); }

  const TilePlaces* after_;  // what the thread is going to read next, if it is known
  const AttentionLayer& layer_;
  const Pages& pages_;
  const Chunk& chunk_;
  const WorkItem& item_;
  const int head_;
  AttentionScratch& scratch_;
  const int rows_, last_;  // last_: position of the last row
  const size_t element_;
  float decay_[MOST_ROWS_OF_ITEM];
  const uint8_t* query_[MOST_ROWS_OF_ITEM];
  int position_[MOST_ROWS_OF_ITEM];  // ascending
};

}  // namespace anyrig
