// A whole decoder in one call per step: embedding, layers, final norm, logits or the best tokens (core/decoder.py).
//
// All threads run the same function and meet at a barrier after each phase. The residual stream and everything between
// two products is float32; only what enters a product or the pages is rounded.
#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>

#include "attention.h"
#include "best.h"
#include "buffer.h"
#include "layer.h"
#include "linear.h"
#include "pool.h"
#include "profile.h"

namespace anyrig {

// One step's ragged batch. Row r of the flat batch is token `tokens[r]`.
struct Step {
  int count = 0;
  const int32_t* tokens = nullptr;
  std::vector<Chunk> chunks;
  int wanted = 0;                  // rows whose logits are asked for
  const int32_t* rows = nullptr;   // [wanted]
  float* logits = nullptr;         // [wanted][vocab], or null where the best tokens are enough
  int32_t* best = nullptr;         // [wanted]
  float* best_logit = nullptr;     // [wanted], before scale and softcap; NaN where the row holds a NaN
};

class Decoder {
 public:
  int vocab = 0, hidden = 0;
  float eps = 1e-5f, embed_scale = 1, logit_scale = 1, final_softcap = 0;
  Linear embed, head;
  const float* final_norm = nullptr;
  std::vector<Layer> layers;
  std::vector<Rope> ropes;

  explicit Decoder(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), scratch_(pool_->size()) {}

  int threads() const { return pool_->active(); }
  int most_threads() const { return pool_->size(); }
  size_t workspace_bytes() const { return memory_.size() + head_memory_.size(); }

  const Profile& profile() const { return profile_; }
  void forget_profile() { profile_ = {}; }

  void run(const Step& step) {
    profile_.start();
    prepare(step);
    const std::function<void(int)> work = [&](int thread) { compute(step, thread); };
    pool_->run(work);
    profile_.end(Profile::head);
    for (int r = 0; r < step.wanted; ++r) {
      Best best;
      for (auto& scratch : scratch_) best.add(scratch.best[r]);
      best.result(step.best[r], step.best_logit[r]);
    }
  }

 private:
  struct Scratch {
    Unpacked unpacked;
    AttentionScratch attention;
    std::vector<float> row;
    std::vector<Best> best;
  };

  // Everything that a step allocates or plans, before the threads start.
  void prepare(const Step& step) {
    const int m = step.count;
    int widest_qkv = 0, widest_q = 0, widest_o = 0, widest_mlp = 0, longest = hidden, most_rows = 1, widest_k = 2, widest_v = LANES;
    bool bytes = false;
    size_t partial = 0;
    plans_.clear();
    for (auto& layer : layers) {
      const auto& a = layer.attention;
      widest_qkv = std::max(widest_qkv, a.heads * a.dim + a.kv_heads * (a.dim + a.v_dim));
      widest_q = std::max(widest_q, a.heads * a.dim);
      widest_o = std::max(widest_o, a.heads * a.v_dim);
      widest_mlp = std::max(widest_mlp, layer.down.k);
      auto& plan = plan_of(a);
      if (plan.chunks.empty()) {
        plan.chunks = step.chunks;
        plan.build(a.group(), a.kv_heads, threads(), true);
      }
      partial = std::max(partial, size_t(plan.partials) * a.kv_heads * Partial::floats(plan.rows, a.v_dim));
      most_rows = std::max(most_rows, plan.rows), bytes |= layer.pages.bytes;
      widest_k = std::max(widest_k, a.dim), widest_v = std::max(widest_v, a.v_dim);
      for (auto& scratch : scratch_)
        for (const Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) scratch.unpacked.fit(*w);
    }
    for (auto& scratch : scratch_) {
      scratch.attention.fit(most_rows, widest_k, widest_v, bytes);
      scratch.unpacked.fit(head);
    }
    longest = std::max({longest, widest_qkv, widest_o, widest_mlp});
    int pairs = 0;
    for (auto& rope : ropes) pairs += int(rope.inv_freq.size());

    auto padded = [&](int k) { return round_up(k, 128); };
    size_t size = 0;
    auto reserve = [&](size_t bytes) {
      const size_t at = size;
      size += (bytes + 127) / 64 * 64;
      return at;
    };
    const size_t x = reserve(size_t(m) * hidden * 4), y = reserve(size_t(m) * hidden * 4);
    const size_t qkv = reserve(size_t(m) * widest_qkv * 4), q = reserve(size_t(m) * widest_q * 4);
    const size_t a = reserve(size_t(m) * widest_o * 4), mlp = reserve(size_t(m) * widest_mlp * 4);
    const size_t in = reserve(Rows::bytes(layers.empty() ? head.kind : layers[0].qkv.kind, m, padded(longest)));
    const size_t angles = reserve(size_t(m) * pairs * 8), parts = reserve(size_t(partial) * 4);
    const size_t owners = reserve(size_t(m) * 4);
    uint8_t* base = memory_.fit(size);
    x_ = reinterpret_cast<float*>(base + x), y_ = reinterpret_cast<float*>(base + y);
    qkv_ = reinterpret_cast<float*>(base + qkv), q_ = base + q;
    attention_ = reinterpret_cast<float*>(base + a), mlp_ = reinterpret_cast<float*>(base + mlp);
    rows_ = base + in, angles_ = reinterpret_cast<float*>(base + angles);
    partials_ = reinterpret_cast<float*>(base + parts), chunk_of_ = reinterpret_cast<int32_t*>(base + owners);
    head_rows_ = head_memory_.fit(Rows::bytes(head.kind, step.wanted, head.padded_k()));
    for (int c = 0; c < int(step.chunks.size()); ++c)
      std::fill_n(chunk_of_ + step.chunks[c].first, step.chunks[c].length, c);
    for (auto& scratch : scratch_) {
      scratch.row.resize(std::max(longest, hidden) + LANES);
      scratch.best.assign(step.wanted, Best{});
    }
    const size_t phases = layers.size() * PHASES + 1;
    if (tickets_.size() != phases) tickets_ = std::vector<Tickets>(phases);
    for (auto& tickets : tickets_) tickets.reset();
  }

  AttentionPlan& plan_of(const AttentionLayer& a) {
    for (auto& [group, plan] : plans_)
      if (group == a.group()) return *plan;
    return *plans_.emplace_back(a.group(), std::make_unique<AttentionPlan>()).second;
  }

  // -------------------------------------------------------------------------------------------------- threads

  // Rows of a phase are dealt evenly: each costs the same.
  template <class Work>
  void each_row(int m, int thread, Work&& work) {
    for (int r = int(long(m) * thread / threads()), end = int(long(m) * (thread + 1) / threads()); r < end; ++r) work(r);
  }

  // A thread's own stretch of a product's blocks, where they are not taken in turns.
  std::pair<int, int> stretch(const Linear& w, int thread) const {
    const int blocks = w.blocks(), share = round_up(ceil_div(blocks, threads()), 2);
    return {std::min(blocks, share * thread), std::min(blocks, share * (thread + 1))};
  }

  // Few rows, where reading the weights takes as long as computing: one stretch for each thread, and the first blocks
  // of the product that comes `next` are fetched at the end. Many rows: blocks are taken in turns.
  template <class Done>
  void multiply(const Linear& w, const Rows& a, int m, bool even, int phase, int thread, const Linear* next, Done&& done) {
    auto& scratch = scratch_[thread].unpacked;
    if (m <= ROWS_IN_STRETCHES) {
      const auto [first, last] = stretch(w, thread);
      const uint8_t* then = next ? next->block(stretch(*next, thread).first) : nullptr;
      return product(w, a, m, first, last, even, then, scratch, done);
    }
    const int blocks = w.blocks(), unit = even ? 4 : 6, size = std::max(unit, blocks / (threads() * 8) / unit * unit);
    for (int first; (first = tickets_[phase].take() * size) < blocks;)
      product(w, a, m, first, std::min(blocks, first + size), even, nullptr, scratch, done);
  }

  static constexpr int ROWS_IN_STRETCHES = 192;
  static constexpr int SPREAD = 8;  // tiles of outputs over which fetching the rows' pages is spread
  static constexpr int PHASES = 5;  // of a layer that deal out tickets

  void compute(const Step& step, int thread) {
    const int m = step.count;
    each_row(m, thread, [&](int r) {
      unpack_row(embed, step.tokens[r], x_ + size_t(r) * hidden);
      if (embed_scale != 1)
        for (int i = 0; i < hidden; ++i) x_[size_t(r) * hidden + i] *= embed_scale;
      turn(step, r);
    });
    for (size_t i = 0; i < layers.size(); ++i) {
      attention(step, layers[i], int(i) * PHASES, thread);
      mlp(step, layers[i], i + 1 < layers.size() ? layers[i + 1].qkv : head, int(i) * PHASES + 3, thread);
    }
    logits(step, int(layers.size()) * PHASES, thread);
  }

  // Sines and cosines of row r, for every rope: what Transformers computes in float32 too.
  void turn(const Step& step, int r) {
    const Chunk& chunk = step.chunks[chunk_of_[r]];
    const auto position = float(chunk.start + r - chunk.first);
    float* out = angles_;
    for (auto& rope : ropes) {
      const size_t n = rope.inv_freq.size();
      float *cos = out + size_t(r) * 2 * n, *sin = cos + n;
      for (size_t i = 0; i < n; ++i) {
        const float angle = position * rope.inv_freq[i];
        cos[i] = std::cos(angle) * rope.scaling;
        sin[i] = std::sin(angle) * rope.scaling;
      }
      out += size_t(step.count) * 2 * n;
    }
  }

  const float* angles(int rope, int m, int r) const {
    const float* out = angles_;
    for (int i = 0; i < rope; ++i) out += size_t(m) * 2 * ropes[i].inv_freq.size();
    return out + size_t(r) * 2 * ropes[rope].inv_freq.size();
  }

  // rows_ = norm(x), once the row's own thread has computed it.
  void norm(const Rows& into, int m, const float* weight, Profile::Part before, int thread) {
    meet(thread, before);
    float* row = scratch_[thread].row.data();
    each_row(m, thread, [&](int r) {
      rms_norm(x_ + size_t(r) * hidden, weight, hidden, eps, row);
      into.put(r, 0, hidden, row);
    });
    meet(thread, Profile::norm);
  }

  // x += multiplier * (w a + bias), with a norm in between where there is one.
  void add_product(const Linear& w, const Rows& a, int m, const float* bias, const float* out_norm, float multiplier,
                   int phase, int thread, const Linear& next) {
    float* into = out_norm ? y_ : x_;
    multiply(w, a, m, false, phase, thread, &next, [&](int row, int rows, int block, int blocks, const float* tile) {
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < blocks; ++j) {
          const int n = (block + j) * LANES, width = std::min(LANES, hidden - n);
          float* to = into + size_t(row + i) * hidden + n;
          auto v = load<f32x16>(tile + (i * blocks + j) * LANES);
          if (bias && width == LANES) v += load<f32x16>(bias + n);
          if (width == LANES) {
            store(to, out_norm ? v : load<f32x16>(to) + v * multiplier);
          } else {
            for (int c = 0; c < width; ++c) {
              const float value = v[c] + (bias ? bias[n + c] : 0.0f);
              to[c] = out_norm ? value : to[c] + value * multiplier;
            }
          }
        }
    });
    if (!out_norm) return;
    pool_->barrier();
    float* row = scratch_[thread].row.data();
    each_row(m, thread, [&](int r) {
      rms_norm(y_ + size_t(r) * hidden, out_norm, hidden, eps, row);
      for (int i = 0; i < hidden; ++i) x_[size_t(r) * hidden + i] += row[i] * multiplier;
    });
  }

  void attention(const Step& step, const Layer& layer, int phase, int thread) {
    const int m = step.count;
    const auto& a = layer.attention;
    const Rows in = Rows::at(rows_, layer.qkv, m);
    norm(in, m, layer.attn_norm, &layer == layers.data() ? Profile::embed : Profile::down, thread);
    const int width = layer.qkv.n;
    const int mine = int(long(m) * thread / threads()), end = int(long(m) * (thread + 1) / threads());
    multiply(layer.qkv, in, m, false, phase, thread, &layer.o, [&](int row, int rows, int block, int blocks, const float* tile) {
      // Spread over the product, which leaves the memory idle: what `place` is going to touch.
      for (int r = std::max(row, mine); r < std::min(row + rows, end); ++r)
        if (r % SPREAD == block / 3 % SPREAD) expect(step, layer, r);
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < blocks; ++j) {
          const int n = (block + j) * LANES;
          auto v = load<f32x16>(tile + (i * blocks + j) * LANES);
          float* to = qkv_ + size_t(row + i) * width + n;
          if (n + LANES <= width) {
            store(to, layer.qkv_bias ? v + load<f32x16>(layer.qkv_bias + n) : v);
          } else {
            for (int c = 0; n + c < width; ++c) to[c] = v[c] + (layer.qkv_bias ? layer.qkv_bias[n + c] : 0.0f);
          }
        }
    });
    meet(thread, Profile::qkv);
    each_row(m, thread, [&](int r) { place(step, layer, r); });
    meet(thread, Profile::place);
    const Rows out = Rows::at(rows_, layer.o, m);
    const bool whole = a.v_dim % K_UNIT == 0;  // a head's values fill units of the next product's input
    attend(layer, out, whole, phase + 1, thread);
    meet(thread, Profile::attention);
    if (!whole) {
      each_row(m, thread, [&](int r) { out.put(r, 0, layer.o.k, attention_ + size_t(r) * layer.o.k); });
      pool_->barrier();
    }
    add_product(layer.o, out, m, layer.o_bias, layer.attn_out_norm, layer.multiplier, phase + 2, thread, layer.gate_up);
  }

  // Fetches the lines that the row's keys and values are going to be written to, which are many and far apart.
  void expect(const Step& step, const Layer& layer, int r) const {
    const auto& a = layer.attention;
    const Chunk& chunk = step.chunks[chunk_of_[r]];
    const int position = chunk.start + r - chunk.first, p = layer.pages.page_size;
    if (chunk.length > 1) return;  // a prompt's rows write the same lines in turn
    const int page = chunk.table[position / p], slot = position % p;
    for (int h = 0; h < a.kv_heads; ++h) {
      const Pages& pages = layer.pages;
      const int wide = pages.bytes ? 2 : 4, steps = pages.half ? a.dim / 2 : a.dim;  // bytes of a position in a step
      const uint8_t* k = pages.key(page, h) + slot * wide;
      for (int i = 0; i < steps; ++i) __builtin_prefetch(k + size_t(i) * p * wide, 1, 3);
      const uint8_t* v = pages.value(page, h) + size_t(pages.half ? slot / 2 : slot) * a.v_dim * wide;
      for (int i = 0; i < a.v_dim * wide; i += 64) __builtin_prefetch(v + i, 1, 3);
    }
  }

  // Head norms and rope; then keys and values go to their pages, queries to q_.
  void place(const Step& step, const Layer& layer, int r) {
    const auto& a = layer.attention;
    const Chunk& chunk = step.chunks[chunk_of_[r]];
    float* q = qkv_ + size_t(r) * layer.qkv.n;
    float *k = q + a.heads * a.dim, *v = k + a.kv_heads * a.dim;
    const float *cos = nullptr, *sin = nullptr;
    int pairs = 0;
    bool interleaved = false;
    if (layer.rope >= 0) {
      pairs = int(ropes[layer.rope].inv_freq.size()), interleaved = ropes[layer.rope].interleaved;
      cos = angles(layer.rope, step.count, r), sin = cos + pairs;
    }
    for (int h = 0; h < a.heads + a.kv_heads; ++h) {
      float* x = q + size_t(h) * a.dim;
      const float* weight = h < a.heads ? layer.q_norm : layer.k_norm;
      if (weight) rms_norm(x, weight, a.dim, eps, x);
      if (cos) rotate(x, cos, sin, pairs, interleaved);
    }
    const size_t at = size_t(r) * a.heads * a.dim;
    if (layer.pages.half) {
      auto* out = reinterpret_cast<uint16_t*>(q_) + at;
      int i = 0;
      for (; i + LANES <= a.heads * a.dim; i += LANES) store_bf16(out + i, load<f32x16>(q + i));
      for (; i < a.heads * a.dim; ++i) out[i] = to_bf16(q[i]);
    } else {
      std::memcpy(q_ + at * 4, q, size_t(a.heads) * a.dim * 4);
    }
    const int position = chunk.start + r - chunk.first;
    for (int h = 0; h < a.kv_heads; ++h)
      write_kv(layer.pages, chunk.table, position, h, k + size_t(h) * a.dim, a.dim, v + size_t(h) * a.v_dim, a.v_dim);
  }

  void attend(const Layer& layer, const Rows& out, bool whole, int phase, int thread) {
    const auto& a = layer.attention;
    AttentionPlan& plan = plan_of(a);
    auto& scratch = scratch_[thread].attention;
    const int tasks = int(plan.items.size()) * a.kv_heads;
    auto deliver = [&](const WorkItem& item, int head, const Partial& all) {
      for (int r = 0; r < (item.t1 - item.t0) * a.group(); ++r) {
        const int query = head * a.group() + r % a.group(), row = plan.chunks[item.chunk].first + item.t0 + r / a.group();
        const float* values = AttentionItem::finish(a, all, r, query);
        if (whole)
          out.put(row, query * a.v_dim, a.v_dim, values);
        else
          std::memcpy(attention_ + size_t(row) * layer.o.k + query * a.v_dim, values, size_t(a.v_dim) * 4);
      }
    };
    const size_t slot = Partial::floats(plan.rows, a.v_dim);
    // The ticket after this one is taken early, so that its first tile can be fetched meanwhile.
    TilePlaces after;
    for (int t = tickets_[phase].take(), next; t < tasks; t = next) {
      const WorkItem& item = plan.items[t / a.kv_heads];
      const int head = t % a.kv_heads;
      next = tickets_[phase].take();
      if (next < tasks) {
        const WorkItem& then = plan.items[next / a.kv_heads];
        const Chunk& chunk = plan.chunks[then.chunk];
        const int last = chunk.start + then.t1 - 1, oldest = a.window ? std::max(0, chunk.start + then.t0 - a.window + 1) : 0;
        after.find(layer.pages, chunk.table, next % a.kv_heads, std::max(then.s0 * SPLIT, oldest / TILE * TILE), last, a.dim, a.v_dim);
      }
      AttentionItem work(a, layer.pages, plan, item, head, q_, scratch, next < tasks ? &after : nullptr);
      if (item.partial < 0) {
        work.run();
        deliver(item, head, scratch.all);
      } else {
        work.split(item.s0, Partial::at(partials_ + (size_t(item.partial) * a.kv_heads + head) * slot, work.rows()));
      }
    }
    if (plan.merges.empty()) return;
    pool_->barrier();
    for (int t = thread; t < int(plan.merges.size()) * a.kv_heads; t += threads()) {
      const WorkItem& item = plan.merges[t / a.kv_heads];
      const int head = t % a.kv_heads, rows = (item.t1 - item.t0) * a.group();
      auto part = [&](int s) {
        return Partial::at(partials_ + (size_t(item.partial + s) * a.kv_heads + head) * slot, rows);
      };
      for (int s = 1; s < item.s1; ++s) AttentionItem::merge(part(0), part(s), rows, a.v_dim);
      deliver(item, head, part(0));
    }
  }

  void mlp(const Step& step, const Layer& layer, const Linear& next, int phase, int thread) {
    const int m = step.count;
    const Rows in = Rows::at(rows_, layer.gate_up, m);
    norm(in, m, layer.mlp_norm, Profile::o, thread);
    const int width = layer.down.k;
    multiply(layer.gate_up, in, m, true, phase, thread, &layer.down, [&](int row, int rows, int block, int blocks, const float* tile) {
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < blocks; j += 2) {
          const int n = (block + j) * LANES;
          auto gate = load<f32x16>(tile + (i * blocks + j) * LANES);
          auto up = load<f32x16>(tile + (i * blocks + j + 1) * LANES);
          if (layer.gate_up_bias) {
            gate += load<f32x16>(layer.gate_up_bias + n);
            up += load<f32x16>(layer.gate_up_bias + n + LANES);
          }
          store(mlp_ + size_t(row + i) * width + n / 2, activate(layer.activation, gate) * up);
        }
    });
    meet(thread, Profile::gate_up);
    const Rows out = Rows::at(rows_, layer.down, m);
    each_row(m, thread, [&](int r) { out.put(r, 0, width, mlp_ + size_t(r) * width); });
    meet(thread, Profile::norm);
    add_product(layer.down, out, m, layer.down_bias, layer.mlp_out_norm, layer.multiplier, phase + 1, thread, next);
  }

  void logits(const Step& step, int phase, int thread) {
    meet(thread, layers.empty() ? Profile::embed : Profile::down);
    if (step.wanted == 0) return;
    const Rows in = Rows::at(head_rows_, head, step.wanted);
    float* row = scratch_[thread].row.data();
    each_row(step.wanted, thread, [&](int i) {
      rms_norm(x_ + size_t(step.rows[i]) * hidden, final_norm, hidden, eps, row);
      in.put(i, 0, hidden, row);
    });
    pool_->barrier();
    auto& best = scratch_[thread].best;
    multiply(head, in, step.wanted, false, phase, thread, nullptr, [&](int r, int rows, int block, int blocks, const float* tile) {
      for (int i = 0; i < rows; ++i)
        for (int j = 0; j < blocks; ++j) {
          const int n = (block + j) * LANES;
          auto v = load<f32x16>(tile + (i * blocks + j) * LANES);
          best[r + i].see(v, n, vocab);
          if (!step.logits) continue;
          if (logit_scale != 1) v *= logit_scale;
          if (final_softcap != 0) v = tanh(v / final_softcap) * final_softcap;
          float* to = step.logits + size_t(r + i) * vocab + n;
          if (n + LANES <= vocab)
            store(to, v);
          else
            for (int c = 0; n + c < vocab; ++c) to[c] = v[c];
        }
    });
  }

  // A part of the step is over: all threads meet.
  void meet(int thread, Profile::Part part) {
    pool_->barrier();
    if (thread == 0) profile_.end(part);
  }

  Profile profile_;
  std::shared_ptr<Pool> pool_;
  std::vector<Scratch> scratch_;
  std::vector<Tickets> tickets_;
  std::vector<std::pair<int, std::unique_ptr<AttentionPlan>>> plans_;
  Buffer memory_, head_memory_;
  float *x_ = nullptr, *y_ = nullptr, *qkv_ = nullptr, *attention_ = nullptr, *mlp_ = nullptr;
  float *angles_ = nullptr, *partials_ = nullptr;
  uint8_t *q_ = nullptr, *rows_ = nullptr, *head_rows_ = nullptr;
  int32_t* chunk_of_ = nullptr;
};

}  // namespace anyrig
