// The most likely token of a row, found while its logits pass by.
#pragma once

#include "vec.h"

namespace anyrig {

// The best logit per lane so far, of one row.
struct Best {
  f32x16 value = splat(-INF);
  i32x16 id{};
  i32x16 nan{};

  ANYRIG_INLINE void see(f32x16 v, int first, int n) {
    const i32x16 lane = lanes_from(first);
    const i32x16 real = lane < n;
    nan |= (v != v) & real;
    const i32x16 better = (v > value) & real;
    value = select(better, v, value);
    id = select(better, lane, id);
  }

  void add(const Best& other) {
    for (int i = 0; i < LANES; ++i) {
      const bool better = other.value[i] > value[i] || (other.value[i] == value[i] && other.id[i] < id[i]);
      if (better) value.set(i, other.value[i]), id.set(i, other.id[i]);
      nan.set(i, nan[i] | other.nan[i]);
    }
  }

  void result(int32_t& best, float& logit) const {
    int at = 0;
    bool bad = false;
    for (int i = 0; i < LANES; ++i) {
      if (value[i] > value[at] || (value[i] == value[at] && id[i] < id[at])) at = i;
      bad |= nan[i] != 0;
    }
    best = id[at];
    logit = bad ? std::numeric_limits<float>::quiet_NaN() : value[at];
  }
};

}  // namespace anyrig
