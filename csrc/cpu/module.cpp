// What Python sees of the kernels. Compiled once per instruction set into a module of its own (CMakeLists.txt).
//
// Array arguments never convert: a mistyped or sliced array would be copied silently, and what is written to it lost.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "features.h"
#include "kv_cache.h"
#include "measure.h"
#include "sample.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace anyrig;

namespace {

// Raise when the order of packed weights changes: prepared files of another number are made anew.
constexpr int LAYOUT = 2;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Cube = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

Kind kind_of(const std::string& name) {
  if (name == "float32") return Kind::f32;
  if (name == "bfloat16") return Kind::bf16;
  if (name == "int8") return Kind::int8;
  if (name == "int4") return Kind::int4;
  refuse("kind must be float32, bfloat16, int8 or int4. Given: " + name);
}

Linear shape_of(const std::string& kind, int n, int k, int group, bool minimum) {
  Linear w;
  w.kind = kind_of(kind), w.n = n, w.k = k, w.group = group, w.minimum = minimum;
  if (n < 1 || k < 1) refuse("a matrix needs rows and columns");
  if (w.kind == Kind::int4 && group != 32 && group != 64 && group != 128)
    refuse("group must be 32, 64 or 128. Given: " + std::to_string(group));
  return w;
}

Linear packed_of(const Vector<const uint8_t>& data, const std::string& kind, int n, int k, int group, bool minimum) {
  Linear w = shape_of(kind, n, k, group, minimum);
  if (data.size() != w.bytes())
    refuse("packed weights have " + std::to_string(data.size()) + " bytes, not " + std::to_string(w.bytes()));
  w.data = data.data();
  return w;
}

// One team per size, shared by everything in the process; a caller holds it for one step.
struct Team {
  std::shared_ptr<Pool> pool;
  std::shared_ptr<std::mutex> busy;
  std::shared_ptr<std::vector<DrawScratch>> draws;

  // What all teams hang on; never freed: threads may outlive static objects.
  struct Register {
    std::mutex guard;
    std::map<int, Team> teams;
  };
  static Register& all() {
    static auto* teams = [] {
      auto* made = new Register;
      // A thread of the parent may have held these at the time of the fork; in the child nobody does.
      pthread_atfork(nullptr, nullptr, [] {
        new (&all().guard) std::mutex;
        for (auto& [size, team] : all().teams) new (team.busy.get()) std::mutex;
      });
      return made;
    }();
    return *teams;
  }

  static Team of(int threads) {
    if (threads < 1 || threads > Pool::MOST)
      refuse("threads must be 1 to " + std::to_string(Pool::MOST) + ". Given: " + std::to_string(threads));
    std::lock_guard lock(all().guard);
    auto& team = all().teams[threads];
    if (!team.pool)
      team = {std::make_shared<Pool>(threads), std::make_shared<std::mutex>(),
              std::make_shared<std::vector<DrawScratch>>(threads)};
    return team;
  }
};

size_t packed_size(const std::string& kind, int n, int k, int group, bool minimum) {
  return shape_of(kind, n, k, group, minimum).bytes();
}

void pack(const std::string& kind, Matrix<const float> w, Vector<uint8_t> out, int row, int n, int group, bool minimum) {
  Linear shape = shape_of(kind, n, int(w.shape(1)), group, minimum);
  const int rows = int(w.shape(0));
  if (out.size() != shape.bytes()) refuse("`out` must have packed_size(...) bytes");
  if (row < 0 || row % LANES || row + rows > n || (rows % LANES && row + rows != n))
    refuse("rows are packed by sixteens, within the matrix");
  nb::gil_scoped_release release;
  for (int r = 0; r < rows; r += LANES)
    pack_block(shape, w.data() + size_t(r) * shape.k, shape.k, std::min(LANES, rows - r),
               out.data() + shape.block_bytes() * ((row + r) / LANES));
}

void unpack(const std::string& kind, Vector<const uint8_t> data, Matrix<float> out, int row, int n, int group,
            bool minimum) {
  const Linear w = packed_of(data, kind, n, int(out.shape(1)), group, minimum);
  if (row < 0 || row + int(out.shape(0)) > n) refuse("rows outside of the matrix");
  for (int r = 0; r < int(out.shape(0)); ++r) unpack_row(w, row + r, out.data() + size_t(r) * w.k);
}

// The product alone, for models that run module by module.
class LinearOp {
 public:
  LinearOp(Vector<const uint8_t> data, const std::string& kind, int n, int k, int group, bool minimum, int threads)
      : keep_(nb::cast(data)), w_(packed_of(data, kind, n, k, group, minimum)), team_(Team::of(threads)) {}

  void run(Matrix<const float> x, Matrix<float> out) {
    const int m = int(x.shape(0));
    if (int(x.shape(1)) != w_.k || int(out.shape(0)) != m || int(out.shape(1)) != w_.n)
      refuse("x must be [m, k] and out [m, n]");
    const float* in = x.data();
    float* to = out.data();
    nb::gil_scoped_release release;
    std::lock_guard lock(*team_.busy);
    Pool& pool = *team_.pool;
    const Rows rows = Rows::at(memory_.fit(Rows::bytes(w_.kind, m, w_.padded_k())), w_, m);
    scratch_.resize(pool.size());
    for (auto& unpacked : scratch_) unpacked.fit(w_);
    tickets_.reset();
    const int unit = std::max(6, w_.blocks() / (pool.active() * 8) / 6 * 6);
    pool.run([&](int thread) {
      const int threads = pool.active();
      for (int r = m * thread / threads; r < m * (thread + 1) / threads; ++r) rows.put(r, 0, w_.k, in + size_t(r) * w_.k);
      pool.barrier();
      for (int first; (first = tickets_.take() * unit) < w_.blocks();)
        product(w_, rows, m, first, std::min(w_.blocks(), first + unit), false, nullptr, scratch_[thread],
                [&](int row, int count, int block, int blocks, const float* tile) {
                  const int n = block * LANES, width = std::min(blocks * LANES, w_.n - n);
                  for (int i = 0; i < count; ++i)
                    std::memcpy(to + size_t(row + i) * w_.n + n, tile + i * blocks * LANES, size_t(width) * 4);
                });
    });
  }

 private:
  nb::object keep_;
  Linear w_;
  Team team_;
  Buffer memory_;
  std::vector<Unpacked> scratch_;
  Tickets tickets_;
};

// The ragged batch as Python lays it out: chunk c is tokens[first[c]] ..., pages table[offset[c]] ...
std::vector<Chunk> chunks_of(const Vector<const int32_t>& lengths, const Vector<const int32_t>& starts,
                             const Vector<const int32_t>& table, const Vector<const int32_t>& offsets, int page_size,
                             int num_pages, int count) {
  const size_t n = lengths.size();
  if (starts.size() != n || offsets.size() != n + 1) refuse("a step has one start and one stretch of the table per chunk");
  std::vector<Chunk> chunks(n);
  int first = 0;
  for (size_t c = 0; c < n; ++c) {
    const int length = lengths.data()[c], start = starts.data()[c];
    const int from = offsets.data()[c], to = offsets.data()[c + 1];
    if (length < 1 || start < 0 || from < 0 || to < from || size_t(to) > table.size() ||
        to - from < ceil_div(start + length, page_size))
      refuse("chunk " + std::to_string(c) + " has no pages for its positions");
    for (int i = from; i < to; ++i)
      if (table.data()[i] < 0 || table.data()[i] >= num_pages) refuse("a page that does not exist");
    chunks[c] = {first, length, start, table.data() + from};
    first += length;
  }
  if (first > count) refuse("chunks are longer than the flat batch");
  return chunks;
}

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

// Draws one token for each of rows[i] of the logits, which are overwritten (sample.h).
void draw(Matrix<float> logits, Vector<const int32_t> rows, Vector<const float> temperature, Vector<const double> uniform,
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

// The decoder with everything that it points to.
class DecoderOp {
 public:
  DecoderOp(int threads, int vocab, int hidden, float eps, const std::string& kind, int group, bool minimum,
            float embed_scale, float logit_scale, float final_softcap)
      : team_(Team::of(threads)), decoder_(team_.pool), kind_(kind), group_(group), minimum_(minimum) {
    decoder_.vocab = vocab, decoder_.hidden = hidden, decoder_.eps = eps;
    decoder_.embed_scale = embed_scale, decoder_.logit_scale = logit_scale, decoder_.final_softcap = final_softcap;
    shape_of(kind, vocab, hidden, group, minimum);
  }

  void set_ends(const std::string& kind, Vector<const uint8_t> embed, Vector<const uint8_t> head,
                Vector<const float> final_norm) {
    decoder_.embed = matrix(embed, kind, decoder_.vocab, decoder_.hidden);
    decoder_.head = matrix(head, kind, decoder_.vocab, decoder_.hidden);
    decoder_.final_norm = vector(final_norm, decoder_.hidden, "final_norm");
  }

  void add_rope(Vector<const float> inv_freq, float scaling, bool interleaved) {
    decoder_.ropes.push_back({{inv_freq.data(), inv_freq.data() + inv_freq.size()}, scaling, interleaved});
  }

  void add_layer(int heads, int kv_heads, int dim, int v_dim, float scaling, int window, float softcap, int rope,
                 int intermediate, const std::string& activation, float multiplier, Vector<const uint8_t> qkv,
                 Vector<const uint8_t> o, Vector<const uint8_t> gate_up, Vector<const uint8_t> down, nb::dict vectors) {
    Layer layer;
    if (kv_heads < 1 || heads % kv_heads || dim % 2 || v_dim % LANES || heads / kv_heads > MOST_ROWS_OF_ITEM)
      refuse("attention of this shape is not supported");
    if (rope >= int(decoder_.ropes.size())) refuse("no such rope");
    if (rope >= 0 && int(decoder_.ropes[rope].inv_freq.size()) * 2 > dim) refuse("the rope is wider than a head");
    layer.attention = {heads, kv_heads, dim, v_dim, scaling, window, softcap, nullptr};
    layer.rope = rope, layer.multiplier = multiplier;
    if (activation == "silu")
      layer.activation = Activation::silu;
    else if (activation == "gelu")
      layer.activation = Activation::gelu;
    else if (activation == "gelu_tanh")
      layer.activation = Activation::gelu_tanh;
    else
      refuse("activation must be silu, gelu or gelu_tanh. Given: " + activation);
    const int hidden = decoder_.hidden, inner = round_up(intermediate, LANES);
    const int width = heads * dim + kv_heads * (dim + v_dim);
    layer.qkv = matrix(qkv, kind_, width, hidden);
    layer.o = matrix(o, kind_, hidden, heads * v_dim);
    layer.gate_up = matrix(gate_up, kind_, 2 * inner, hidden);
    layer.down = matrix(down, kind_, hidden, inner);
    auto get = [&](const char* name, int size) -> const float* {
      if (!vectors.contains(name)) return nullptr;
      return vector(nb::cast<Vector<const float>>(vectors[name]), size, name);
    };
    layer.attn_norm = get("attn_norm", hidden), layer.mlp_norm = get("mlp_norm", hidden);
    if (!layer.attn_norm || !layer.mlp_norm) refuse("a layer needs attn_norm and mlp_norm");
    layer.attn_out_norm = get("attn_out_norm", hidden), layer.mlp_out_norm = get("mlp_out_norm", hidden);
    layer.q_norm = get("q_norm", dim), layer.k_norm = get("k_norm", dim);
    layer.qkv_bias = get("qkv_bias", width), layer.o_bias = get("o_bias", hidden);
    layer.gate_up_bias = get("gate_up_bias", 2 * inner), layer.down_bias = get("down_bias", hidden);
    layer.attention.sinks = get("sinks", heads);
    decoder_.layers.push_back(std::move(layer));
  }

  size_t page_bytes(int page_size, const std::string& kind) const {
    return KvCache::bytes_of_page(attention_layers(), page_size, kind_of(kind) != Kind::f32, kind_of(kind) == Kind::int8);
  }

  size_t allocate(int num_pages, int page_size, const std::string& kind, bool pinned) {
    const Kind of = kind_of(kind);
    if (of == Kind::int4) refuse("keys and values are float32, bfloat16 or int8");
    if (page_size < LANES || page_size > TILE || TILE % page_size) refuse("page_size must be 16, 32 or 64");
    if (num_pages < 1) refuse("no pages");
    num_pages_ = 0;
    const auto pages = cache_.allocate(attention_layers(), num_pages, page_size, of != Kind::f32, of == Kind::int8, pinned);
    for (size_t i = 0; i < pages.size(); ++i) decoder_.layers[i].pages = pages[i];
    page_size_ = page_size, num_pages_ = num_pages;
    return cache_.bytes();
  }

  void scrub(const std::vector<int>& pages) {
    for (int page : pages) cache_.scrub(page);
  }

  // Without `logits` only the best token of every wanted row is found.
  void step(Vector<const int32_t> tokens, Vector<const int32_t> lengths, Vector<const int32_t> starts,
            Vector<const int32_t> table, Vector<const int32_t> offsets, Vector<const int32_t> rows, Vector<int32_t> best,
            Vector<float> best_logit, std::optional<Matrix<float>> logits) {
    Step step;
    step.count = int(tokens.size());
    if (num_pages_ == 0 || !decoder_.final_norm) refuse("the decoder is not complete");
    step.chunks = chunks_of(lengths, starts, table, offsets, page_size_, num_pages_, step.count);
    if (step.chunks.empty() || step.chunks.back().first + step.chunks.back().length != step.count)
      refuse("chunks must cover the flat batch");
    step.tokens = tokens.data();
    for (int i = 0; i < step.count; ++i)
      if (step.tokens[i] < 0 || step.tokens[i] >= decoder_.vocab) refuse("a token outside of the vocabulary");
    step.wanted = int(rows.size()), step.rows = rows.data();
    for (int i = 0; i < step.wanted; ++i)
      if (step.rows[i] < 0 || step.rows[i] >= step.count) refuse("a row outside of the batch");
    if (best.size() != rows.size() || best_logit.size() != rows.size()) refuse("one best token per wanted row");
    step.best = best.data(), step.best_logit = best_logit.data();
    if (logits) {
      if (logits->shape(0) != rows.size() || int(logits->shape(1)) != decoder_.vocab) refuse("logits must be [rows, vocab]");
      step.logits = logits->data();
    }
    nb::gil_scoped_release release;
    std::lock_guard lock(*team_.busy);
    decoder_.run(step);
  }

  // Seconds by part of the step since the last call.
  nb::dict profile() {
    nb::dict parts;
    for (int i = 0; i < Profile::PARTS_OF_STEP; ++i) parts[Profile::names[i]] = decoder_.profile().seconds[i];
    decoder_.forget_profile();
    return parts;
  }

  int threads() const { return decoder_.most_threads(); }
  size_t workspace_bytes() const { return decoder_.workspace_bytes(); }

 private:
  std::vector<AttentionLayer> attention_layers() const {
    std::vector<AttentionLayer> layers;
    for (auto& layer : decoder_.layers) layers.push_back(layer.attention);
    return layers;
  }

  Linear matrix(const Vector<const uint8_t>& data, const std::string& kind, int n, int k) {
    keep_.push_back(nb::cast(data));
    return packed_of(data, kind, n, k, group_, minimum_);
  }

  const float* vector(const Vector<const float>& data, int size, const char* name) {
    if (int(data.size()) != size)
      refuse(std::string(name) + " has " + std::to_string(data.size()) + " numbers, not " + std::to_string(size));
    keep_.push_back(nb::cast(data));
    return data.data();
  }

  Team team_;
  Decoder decoder_;
  KvCache cache_;
  std::string kind_;
  int group_;
  bool minimum_;
  int page_size_ = 0, num_pages_ = 0;
  std::vector<nb::object> keep_;
};

}  // namespace

NB_MODULE(ANYRIG_MODULE, m) {
  m.def("features", &features);
#if defined(__AVX512BF16__)
  m.attr("isa") = "avx512";
#elif defined(__AVX2__)
  m.attr("isa") = "avx2";
#else
  m.attr("isa") = "portable";
#endif
  m.attr("LAYOUT") = LAYOUT;

  m.def("packed_size", &packed_size, "kind"_a, "n"_a, "k"_a, "group"_a = 0, "minimum"_a = false,
        "Bytes of a packed [n, k] matrix.");
  m.def("pack", &pack, "kind"_a, "w"_a.noconvert(), "out"_a.noconvert(), "row"_a, "n"_a, "group"_a = 0,
        "minimum"_a = false, "Packs rows row .. row + len(w) of a matrix of n rows.");
  m.def("unpack", &unpack, "kind"_a, "data"_a.noconvert(), "out"_a.noconvert(), "row"_a, "n"_a, "group"_a = 0,
        "minimum"_a = false, "The opposite of pack, with what rounding left.");
  m.def("measure_read", [](size_t bytes, int threads) {
    nb::gil_scoped_release release;
    Pool pool(threads);
    return measure_read(pool, bytes) / 1e9;
  }, "bytes"_a, "threads"_a, "GB/s of reading that many bytes.");
  m.def("measure_gemm", [](const std::string& kind, int rows, int n, int k, int threads) {
    shape_of(kind, n, k, 32, true);
    nb::gil_scoped_release release;
    Pool pool(threads);
    return measure_product(pool, kind_of(kind), rows, n, k) / 1e9;
  }, "kind"_a, "m"_a, "n"_a, "k"_a, "threads"_a, "GFLOP/s (or GOP/s) of an [m, k] x [k, n] product.");

  m.def("draw", &draw, "logits"_a.noconvert(), "rows"_a.noconvert(), "temperature"_a.noconvert(),
        "uniform"_a.noconvert(), "min_p"_a.noconvert(), "top_k"_a.noconvert(), "top_p"_a.noconvert(),
        "ids"_a.noconvert(), "mark_dropped"_a, "threads"_a, "One token per row, at the caller's random numbers.");

  nb::class_<LinearOp>(m, "Linear")
      .def(nb::init<Vector<const uint8_t>, const std::string&, int, int, int, bool, int>(), "data"_a.noconvert(),
           "kind"_a, "n"_a, "k"_a, "group"_a, "minimum"_a, "threads"_a)
      .def("run", &LinearOp::run, "x"_a.noconvert(), "out"_a.noconvert());

  nb::class_<AttentionOp>(m, "Attention")
      .def(nb::init<int, int>(), "page_size"_a, "threads"_a)
      .def("prepare", &AttentionOp::prepare, "lengths"_a.noconvert(), "starts"_a.noconvert(), "table"_a.noconvert(),
           "offsets"_a.noconvert(), "num_pages"_a)
      .def("attend", &AttentionOp::attend<uint16_t>, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
           "k_pages"_a.noconvert(), "v_pages"_a.noconvert(), "scaling"_a, "window"_a, "softcap"_a,
           "sinks"_a.noconvert().none(), "write"_a, "out"_a.noconvert())
      .def("attend", &AttentionOp::attend<float>, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
           "k_pages"_a.noconvert(), "v_pages"_a.noconvert(), "scaling"_a, "window"_a, "softcap"_a,
           "sinks"_a.noconvert().none(), "write"_a, "out"_a.noconvert());

  nb::class_<DecoderOp>(m, "Decoder")
      .def(nb::init<int, int, int, float, const std::string&, int, bool, float, float, float>(), "threads"_a, "vocab"_a,
           "hidden"_a, "eps"_a, "kind"_a, "group"_a, "minimum"_a, "embed_scale"_a, "logit_scale"_a, "final_softcap"_a)
      .def("set_ends", &DecoderOp::set_ends, "kind"_a, "embed"_a.noconvert(), "head"_a.noconvert(), "final_norm"_a.noconvert())
      .def("add_rope", &DecoderOp::add_rope, "inv_freq"_a.noconvert(), "scaling"_a, "interleaved"_a)
      .def("add_layer", &DecoderOp::add_layer, nb::kw_only(), "heads"_a, "kv_heads"_a, "dim"_a, "v_dim"_a, "scaling"_a,
           "window"_a, "softcap"_a, "rope"_a, "intermediate"_a, "activation"_a, "multiplier"_a, "qkv"_a.noconvert(),
           "o"_a.noconvert(), "gate_up"_a.noconvert(), "down"_a.noconvert(), "vectors"_a)
      .def("allocate", &DecoderOp::allocate, "num_pages"_a, "page_size"_a, "kind"_a, "pinned"_a)
      .def("page_bytes", &DecoderOp::page_bytes, "page_size"_a, "kind"_a)
      .def("scrub", &DecoderOp::scrub, "pages"_a)
      .def("step", &DecoderOp::step, "tokens"_a.noconvert(), "lengths"_a.noconvert(), "starts"_a.noconvert(),
           "table"_a.noconvert(), "offsets"_a.noconvert(), "rows"_a.noconvert(), "best"_a.noconvert(),
           "best_logit"_a.noconvert(), "logits"_a.noconvert().none())
      .def("profile", &DecoderOp::profile)
      .def_prop_ro("threads", &DecoderOp::threads)
      .def_prop_ro("workspace_bytes", &DecoderOp::workspace_bytes);
}
