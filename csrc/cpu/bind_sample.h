// Drawing tokens.
#pragma once

#include "arrays.h"
#include "sample.h"
#include "team.h"

namespace anyrig {

// Draws one token for each of rows[i] of the logits, which are overwritten (sample.h).
inline void draw(Matrix<float> logits, Vector<const int32_t> rows, Vector<const float> temperature, Vector<const double> uniform,
          Vector<const float> min_p, Vector<const int32_t> top_k, Vector<const float> top_p, Vector<int32_t> ids, bool mark,
          int threads) {
  const size_t n = rows.size();
  if (temperature.size() != n || uniform.size() != n || min_p.size() != n || top_k.size() != n || top_p.size() != n ||
      ids.size() != n)
    refuse("one of each for every row");
  for (size_t i = 0; i < n; ++i)
    if (rows.data()[i] < 0 || size_t(rows.data()[i]) >= logits.shape(0)) refuse("a row outside of the logits");
  const int width = int(logits.shape(1));
  Team team = Team::of(threads);
  Tickets tickets;
  tickets.reset();
  nb::gil_scoped_release release;
  std::lock_guard lock(*team.busy);
  auto& scratch = *team.draws;
  for (auto& one : scratch) one.fit(width);
  team.pool->run([&](int thread) {
    for (size_t i; (i = size_t(tickets.take())) < n;) {
      const Draw how{temperature.data()[i], uniform.data()[i], min_p.data()[i], top_k.data()[i], top_p.data()[i]};
      ids.data()[i] = draw_token(logits.data() + size_t(rows.data()[i]) * width, width, how, mark, scratch[thread]);
    }
  }, int(n));
}

}  // namespace anyrig
