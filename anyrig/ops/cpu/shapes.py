"""What the kernels' attention can't compute: the same answer for the fused decoder and for models run by modules."""

from collections.abc import Sequence

from anyrig.core.spec import LayerSpec

PAGE_SIZES = (16, 32, 64)
MOST_GROUP = 128  # query heads per KV head (csrc/cpu/attention_plan.h MOST_ROWS_OF_ITEM)
LANES = 16


def why_not(layers: Sequence[LayerSpec], page_size: int) -> str | None:
    """Why these layers can't be computed on pages of this size, or None when they can."""
    if page_size not in PAGE_SIZES:
        return f"`page_size` is {page_size}, the CPU kernels take {', '.join(map(str, PAGE_SIZES))}"
    for layer in layers:
        if layer.dim % 2 or layer.v_dim % LANES:
            return f"layer {layer.name} has heads of {layer.dim} and {layer.v_dim}"
        if layer.heads // layer.kv_heads > MOST_GROUP:
            return f"layer {layer.name} has {layer.heads // layer.kv_heads} query heads per KV head"
    return None
