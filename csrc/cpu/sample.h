// Drawing tokens from rows of logits (contract: anyrig/ops/sample.py): temperature, min_p, top_k, top_p, then the
// cumulative distribution inverted at a random number that the caller brings.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "vec.h"

namespace anyrig {

struct Draw {
  float temperature;
  double uniform;
  float min_p = 0;
  int top_k = 0;
  float top_p = 1;
};

constexpr int SUM_BLOCK = 256;  // probabilities summed as one before the inversion

// Memory of one thread.
struct DrawScratch {
  std::vector<float> probs, copy;
  std::vector<int> ids;
  std::vector<double> sums;

  // Makes room for rows of n logits, so that drawing takes no memory.
  void fit(int n) {
    probs.reserve(round_up(n, LANES));
    copy.reserve(n), ids.reserve(n);
    sums.reserve(ceil_div(n, SUM_BLOCK));
  }
};

namespace sampling {

// logits = (logits - max) / temperature, in place; probs = softmax of that.
inline void softmax(float* logits, int n, float temperature, std::vector<float>& probs) {
  probs.resize(round_up(n, LANES));
  float top = -INF;
  f32x16 most = splat(-INF);
  int i = 0;
  for (; i + LANES <= n; i += LANES) most = max(most, load<f32x16>(logits + i));
  top = reduce_max(most);
  for (; i < n; ++i) top = std::max(top, logits[i]);
  f32x16 sum{};
  for (i = 0; i < n; i += LANES) {
    const int width = std::min(LANES, n - i);
    float tail[LANES];
    std::fill(tail, tail + LANES, -INF);
    std::memcpy(tail, logits + i, size_t(width) * 4);
    const f32x16 z = (load<f32x16>(tail) - top) / temperature;
    store(tail, z);
    std::memcpy(logits + i, tail, size_t(width) * 4);
    const f32x16 e = select(z < -87.33f, f32x16{}, exp(z));
    store(probs.data() + i, e);
    sum += e;
  }
  const f32x16 scale = splat(1.0f / reduce_add(sum));
  for (i = 0; i < n; i += LANES) store(probs.data() + i, load<f32x16>(probs.data() + i) * scale);
}

// First id at which the cumulative probability exceeds the share; always one above 0.
inline int invert(const float* probs, int n, double share, std::vector<double>& sums) {
  sums.clear();
  double total = 0;
  for (int b = 0; b < n; b += SUM_BLOCK) {
    f32x16 sum{};
    int i = b;
    const int end = std::min(n, b + SUM_BLOCK);
    for (; i < end; i += LANES) sum += load<f32x16>(probs + i);  // beyond n there are zeros
    sums.push_back(total += reduce_add(sum));
  }
  const double target = share * total;
  size_t b = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
  b = std::min(b, sums.size() - 1);
  while (b > 0 && sums[b] == sums[b - 1]) --b;
  double reached = b ? sums[b - 1] : 0;
  int best = -1;
  for (int i = int(b) * SUM_BLOCK, end = std::min(n, i + SUM_BLOCK); i < end; ++i) {
    if (probs[i] <= 0) continue;
    best = i;
    reached += probs[i];
    if (reached > target) break;
  }
  return best;
}

// ids of what passes the filters, best first (ties: lowest id first).
inline void filter(const std::vector<float>& probs, int n, const Draw& draw, DrawScratch& scratch) {
  constexpr float tiny = std::numeric_limits<float>::min();
  // What passes min_p and top_k is at least `exact`. With top_p alone a floor is guessed, and lowered if that failed.
  float exact = tiny;
  if (draw.min_p > 0) exact = std::max(exact, draw.min_p * *std::max_element(probs.begin(), probs.begin() + n));
  if (draw.top_k > 0 && draw.top_k < n) {
    auto& copy = scratch.copy;
    copy.assign(probs.begin(), probs.begin() + n);
    std::nth_element(copy.begin(), copy.begin() + draw.top_k - 1, copy.end(), std::greater<>());
    exact = std::max(exact, copy[draw.top_k - 1]);
  }
  const bool guess = draw.min_p <= 0 && draw.top_k <= 0;
  auto& ids = scratch.ids;
  for (float floor : {0x1p-12f, 0x1p-18f, tiny}) {
    if (!guess) floor = exact;
    ids.clear();
    const f32x16 low = splat(floor);
    for (int i = 0; i < n; i += LANES) {
      const i32x16 hit = load<f32x16>(probs.data() + i) >= low;
      bool any = false;
      for (int j = 0; j < PARTS; ++j)
        for (int l = 0; l < REGISTER / 4; ++l) any |= hit.p[j][l] != 0;
      if (!any) continue;
      for (int l = 0; l < LANES && i + l < n; ++l)
        if (probs[i + l] >= floor) ids.push_back(i + l);
    }
    std::sort(ids.begin(), ids.end(), [&](int a, int b) { return probs[a] > probs[b] || (probs[a] == probs[b] && a < b); });
    if (draw.top_p >= 1) return;
    double mass = 1;
    if (!guess) {
      mass = 0;
      for (int id : ids) mass += probs[id];
    }
    double reached = 0;
    for (size_t i = 0; i < ids.size(); ++i)
      if ((reached += probs[ids[i]]) >= draw.top_p * mass) {
        ids.resize(i + 1);
        return;
      }
    if (!guess || floor == tiny) return;
  }
}

}  // namespace sampling

// One token. The logits [n] become the scaled ones; with `mark`, what a filter dropped becomes -inf.
inline int draw_token(float* logits, int n, const Draw& draw, bool mark, DrawScratch& scratch) {
  sampling::softmax(logits, n, draw.temperature, scratch.probs);
  if (draw.min_p <= 0 && draw.top_k <= 0 && draw.top_p >= 1)
    return sampling::invert(scratch.probs.data(), n, draw.uniform, scratch.sums);
  sampling::filter(scratch.probs, n, draw, scratch);
  const auto& ids = scratch.ids;
  double total = 0, reached = 0;
  for (int id : ids) total += scratch.probs[id];
  size_t at = 0;
  for (; at + 1 < ids.size(); ++at)
    if ((reached += scratch.probs[ids[at]]) > draw.uniform * total) break;
  if (mark) {
    scratch.copy.resize(ids.size());
    for (size_t i = 0; i < ids.size(); ++i) scratch.copy[i] = logits[ids[i]];
    std::fill(logits, logits + n, -INF);
    for (size_t i = 0; i < ids.size(); ++i) logits[ids[i]] = scratch.copy[i];
  }
  return ids[at];
}

}  // namespace anyrig
