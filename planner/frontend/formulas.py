"""FLOPs of the operations that torch's own registry lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a nest of lists, tuples and dicts, each once."""
    return list({id(leaf): leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}.values())


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Queries times keys, then weights times values; a causal mask saves nothing here."""
    return 2 * query.numel() * key.shape[-2] + 2 * query.numel() // query.shape[-1] * key.shape[-2] * value.shape[-1]


def _recurrent_flops(x: Tensor, *args: Any, **_: Any) -> int:
    """Every weight matrix meets every element of every sequence once."""
    return 2 * x.numel() // x.shape[-1] * sum(w.numel() for w in tensors_in(args[:2]) if w.dim() == 2)


def _grouped_flops(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * weight.shape[-1]


FORMULAS: dict[str, Callable[..., int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "aten._scaled_dot_product_fused_attention_overrideable": _attention_flops,
    "aten.mkldnn_rnn_layer": _recurrent_flops,
    "aten._cudnn_rnn": _recurrent_flops,
    "aten.miopen_rnn": _recurrent_flops,
    "aten._grouped_mm": _grouped_flops,
}
"""By name of the operation."""


def multiplied(op: str, args: tuple[Any, ...]) -> list[Tensor]:
    """The operands of a matrix product, without the bias."""
    if op in ("aten.addmm", "aten.baddbmm"):
        return tensors_in(args[1:3])
    if "_rnn" in op or "attention" in op:
        return tensors_in(args[:3])
    return tensors_in(args[:2])
