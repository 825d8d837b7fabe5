"""What a piece of work costs, held against torch's own count of operations."""

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from anyrig.bench.ceilings import Ceilings
from anyrig.bench.cost import Cost, Shape, phases, shape_of
from anyrig.bench.roofline import reached
from anyrig.models.load import load_random

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def shape(config: dict) -> Shape:
    model = load_random({**config, "_attn_implementation": "eager"}, dtype=torch.float32)
    return shape_of(config, {name: prod(p.shape) for name, p in model.named_parameters()})


def cost(shape: Shape, lengths: list[tuple[int, int]], decode_steps: int = 1, itemsize: int = 2) -> tuple[Cost, Cost]:
    return phases(
        shape,
        lengths,
        prefill_steps=1,
        decode_steps=decode_steps,
        weight_bytes=shape.parameters * itemsize,
        kv_itemsize=itemsize,
    )


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_decoded_token_costs_what_torch_counts(tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    model = load_random(config, dtype=torch.float32)
    model.set_attn_implementation("eager")
    past = model(input_ids=torch.arange(40)[None], use_cache=True).past_key_values
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.tensor([[7]]), past_key_values=past)
    _, decode = cost(shape(config), [(40, 2)])
    assert decode.flops == pytest.approx(counted.get_total_flops(), rel=0.01), "norms and rope are left out"


def test_a_tied_table_is_read_as_the_head_and_another_one_is_not() -> None:
    tied, untied = (shape({**LLAMA, "tie_word_embeddings": t}) for t in (True, False))
    assert tied.table == 0
    assert untied.table == untied.head == 300 * 64
    assert untied.parameters - tied.parameters == 300 * 64
    a, b = (cost(s, [(5, 3)], decode_steps=2)[1] for s in (tied, untied))
    assert a.weight_bytes == pytest.approx(b.weight_bytes) == 2 * 2 * tied.parameters


def test_weights_are_read_once_per_step_and_keys_and_values_by_every_token() -> None:
    s = shape(LLAMA)
    per_token = 3 * 2 * (16 + 16) * 2  # layers, heads, keys and values, bytes
    one, many = (cost(s, [(10, 5)] * n, decode_steps=4)[1] for n in (1, 8))
    assert many.weight_bytes == one.weight_bytes
    assert one.kv_bytes == per_token * (sum(range(11, 15)) + 4)
    assert many.kv_bytes == 8 * one.kv_bytes
    assert many.flops == 8 * one.flops


def test_a_window_bounds_what_a_token_sees() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    windowed, mixed = shape(config), shape({**config, "layer_types": kinds})
    assert [a.window for a in windowed.attention] == [8, 8, 8]
    assert [a.window for a in mixed.attention] == [8, None, 8]
    attention = windowed.attention[0].flops
    _, decode = cost(windowed, [(5, 8)])  # tokens at positions 5 .. 11 see 6, 7, 8, 8, ... positions
    assert decode.flops - 2 * (windowed.body + windowed.head) * 7 == 3 * attention * (6 + 7 + 5 * 8)


def test_a_token_meets_its_share_of_the_experts_and_a_batch_most_of_them() -> None:
    config = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    s = shape(config)
    assert s.expert_share == 0.5
    assert s.experts == 3 * 4 * 3 * 64 * 96
    one, many = (cost(s, [(1, 2)] * n)[1] for n in (1, 64))
    assert one.weight_bytes == pytest.approx(2 * (s.body + s.head + s.experts / 2))
    assert many.weight_bytes == pytest.approx(2 * (s.body + s.head + s.experts))
    assert many.flops == 64 * one.flops


def test_each_phase_takes_as_long_as_its_slower_resource() -> None:
    limits = Ceilings(10.0, 100.0, None, None, 2, "made up")
    prefill, decode = Cost(flops=200e9, weight_bytes=1e9), Cost(flops=1e9, weight_bytes=30e9)
    got = reached(prefill, decode, 10.0, 100, "bfloat16", limits)
    assert got["roofline_tokens_per_s"] == pytest.approx(100 / (2.0 + 3.0))
    assert got["roofline_share"] == pytest.approx(0.5)
    assert got["memory_share"] == pytest.approx(3.1 / 10)
    assert "compute_share" not in reached(prefill, decode, 10.0, 100, "int8", limits), "its ceiling is unknown"
