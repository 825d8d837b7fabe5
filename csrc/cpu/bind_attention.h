// Attention alone.
#pragma once

#include <map>
#include <optional>

#include "arrays.h"
#include "attention.h"
#include "buffer.h"
#include "team.h"

namespace anyrig {

// Attention alone (ops/attention.py), on pages that Python allocates.
class AttentionOp {
 public:
  AttentionOp(int page_size, int threads) : page_size_(page_size), team_(Team::of(threads)), scratch_(threads) {
    if (page_size < LANES || page_size > TILE || TILE % page_size) refuse("page_size must be 16, 32 or 64");
  }

  void prepare(Vector<const int32_t> lengths, Vector<const int32_t> starts, Vector<const int32_t> table,
               Vector<const int32_t> offsets, int num_pages) {
    table_.assign(table.data(), table.data() + table.size());
    chunks_ = chunks_of(lengths, starts, table, offsets, page_size_, num_pages, 1 << 30);
    for (auto& chunk : chunks_) chunk.table = table_.data() + (chunk.table - table.data());
    num_pages_ = num_pages;
    plans_.clear();
  }

  // q [tokens, heads, dim], k [tokens, kv_heads, dim], v [tokens, kv_heads, v_dim], out [tokens, heads, v_dim].
  template <class T>
  void attend(Cube<const float> q, Cube<const float> k, Cube<const float> v, nb::ndarray<T, nb::ndim<4>, nb::c_contig> kp,
              nb::ndarray<T, nb::ndim<4>, nb::c_contig> vp, float scaling, int window, float softcap,
              std::optional<Vector<const float>> sinks, bool write, Cube<float> out) {
    AttentionLayer a{int(q.shape(1)), int(k.shape(1)), int(q.shape(2)), int(v.shape(2)), scaling, window, softcap, nullptr};
    if (sinks && sinks->size() != q.shape(1)) refuse("one sink per head");
    if (sinks) a.sinks = sinks->data();
    const int tokens = int(q.shape(0));
    if (k.shape(0) != q.shape(0) || v.shape(0) != q.shape(0) || k.shape(2) != q.shape(2) || v.shape(1) != k.shape(1))
      refuse("q, k and v must be [tokens, heads, dim] of the same tokens");
    if (out.shape(0) != q.shape(0) || out.shape(1) != q.shape(1) || out.shape(2) != v.shape(2))
      refuse("out must be [tokens, heads, v_dim]");
    if (vp.shape(0) != kp.shape(0) || vp.shape(2) != kp.shape(2)) refuse("pages of keys and values must be of one shape");
    if (a.kv_heads < 1 || a.dim % 2 || a.v_dim % LANES || a.heads % a.kv_heads || a.group() > MOST_ROWS_OF_ITEM)
      refuse("attention of this shape is not supported");
    if (int(kp.shape(0)) != a.kv_heads || int(kp.shape(1)) < num_pages_ || int(kp.shape(2)) != page_size_ ||
        int(kp.shape(3)) != a.dim || int(vp.shape(3)) != a.v_dim || vp.shape(1) != kp.shape(1))
      refuse("pages do not fit the layer");
    if (!chunks_.empty() && chunks_.back().first + chunks_.back().length > tokens) refuse("fewer rows than the plan's");
    const size_t element = sizeof(T);
    Pages pages{reinterpret_cast<uint8_t*>(kp.data()), reinterpret_cast<uint8_t*>(vp.data())};
    pages.page_stride = size_t(page_size_) * a.dim * element, pages.head_stride = pages.page_stride * kp.shape(1);
    pages.v_page_stride = size_t(page_size_) * a.v_dim * element;
    pages.v_head_stride = pages.v_page_stride * kp.shape(1);
    pages.page_size = page_size_, pages.half = element == 2;
    nb::gil_scoped_release release;
    std::lock_guard lock(*team_.busy);
    run(a, pages, q.data(), k.data(), v.data(), tokens, write, out.data());
  }

 private:
  void run(const AttentionLayer& a, const Pages& pages, const float* q, const float* k, const float* v, int tokens,
           bool write, float* out) {
    Pool& pool = *team_.pool;
    auto found = plans_.find({a.group(), a.kv_heads});
    if (found == plans_.end()) {
      found = plans_.emplace(std::pair{a.group(), a.kv_heads}, AttentionPlan{}).first;
      found->second.chunks = chunks_;
      found->second.build(a.group(), a.kv_heads, pool.size(), false);
    }
    AttentionPlan& plan = found->second;
    const size_t element = pages.half ? 2 : 4, width = size_t(a.heads) * a.dim;
    uint8_t* queries = queries_.fit(size_t(tokens) * width * element);
    const int computed = chunks_.empty() ? 0 : chunks_.back().first + chunks_.back().length;
    std::fill(out + size_t(computed) * a.heads * a.v_dim, out + size_t(tokens) * a.heads * a.v_dim, 0.0f);
    for (auto& scratch : scratch_) scratch.fit(std::max(plan.rows, 1), a.dim, a.v_dim, false);
    tickets_.reset();
    pool.run([&](int thread) {
      for (size_t c = thread; c < chunks_.size(); c += pool.active()) {
        const Chunk& chunk = chunks_[c];
        for (int t = 0; t < chunk.length; ++t) {
          const size_t row = chunk.first + t;
          if (pages.half)
            for (size_t i = 0; i < width; ++i)
              reinterpret_cast<uint16_t*>(queries)[row * width + i] = to_bf16(q[row * width + i]);
          else
            std::memcpy(queries + row * width * 4, q + row * width, width * 4);
          if (!write) continue;
          for (int h = 0; h < a.kv_heads; ++h)
            write_kv(pages, chunk.table, chunk.start + t, h, k + (row * a.kv_heads + h) * a.dim, a.dim,
                     v + (row * a.kv_heads + h) * a.v_dim, a.v_dim);
        }
      }
      pool.barrier();
      const int tasks = int(plan.items.size()) * a.kv_heads;
      for (int t; (t = tickets_.take()) < tasks;) {
        const WorkItem& item = plan.items[t / a.kv_heads];
        const int head = t % a.kv_heads;
        AttentionItem work(a, pages, plan, item, head, queries, scratch_[thread]);
        work.run();
        for (int r = 0; r < work.rows(); ++r) {
          const int query = head * a.group() + r % a.group();
          const size_t row = chunks_[item.chunk].first + item.t0 + r / a.group();
          std::memcpy(out + (row * a.heads + query) * a.v_dim,
                      AttentionItem::finish(a, scratch_[thread].all, r, query), size_t(a.v_dim) * 4);
        }
      }
    });
  }

  int page_size_, num_pages_ = 0;
  Team team_;
  std::vector<int32_t> table_;
  std::vector<Chunk> chunks_;
  std::map<std::pair<int, int>, AttentionPlan> plans_;
  std::vector<AttentionScratch> scratch_;
  Buffer queries_;
  Tickets tickets_;
};

}  // namespace anyrig
