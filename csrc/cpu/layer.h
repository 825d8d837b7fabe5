// One layer of a decoder: its shapes, matrices and vectors (core/decoder.py).
#pragma once

#include <vector>

#include "elementwise.h"
#include "pages.h"
#include "weights.h"

namespace anyrig {

struct Rope {
  std::vector<float> inv_freq;
  float scaling = 1;
  bool interleaved = false;
};

// Pointers belong to the caller and outlive the decoder; null where the layer has no such vector.
struct Layer {
  AttentionLayer attention;
  int rope = -1;
  Activation activation = Activation::silu;
  float multiplier = 1;
  Linear qkv, o, gate_up, down;
  const float *attn_norm = nullptr, *mlp_norm = nullptr, *attn_out_norm = nullptr, *mlp_out_norm = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr;
  const float *qkv_bias = nullptr, *o_bias = nullptr, *gate_up_bias = nullptr, *down_bias = nullptr;
  Pages pages;
};

}  // namespace anyrig
