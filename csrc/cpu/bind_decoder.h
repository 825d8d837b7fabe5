// The decoder, and the checks of what Python gives it.
#pragma once

#include <optional>

#include "arrays.h"
#include "decoder.h"
#include "kv_cache.h"
#include "team.h"

namespace anyrig {

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

}  // namespace anyrig
