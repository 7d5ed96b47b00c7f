"""What a check has found on a rank: True, or a difference with its values, for the message of a test that fails."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class Difference(str):
    """Counts as False."""

    def __bool__(self) -> bool:
        return False


def alike(found: Iterable[Tensor], expected: Iterable[Tensor], *, rtol: float = 0.0, atol: float = 0.0) -> bool | str:
    """Return True where tensors agree, bit for bit by default; else a `Difference` that names the first element."""
    pairs = list(zip(found, expected, strict=True))
    for index, (one, other) in enumerate(pairs):
        if one.shape != other.shape or one.dtype != other.dtype:
            return Difference(f"tensor {index} of {len(pairs)}: {_form(one)}, expected {_form(other)}")
        unlike = ~torch.isclose(one, other, rtol=rtol, atol=atol) if rtol or atol else one != other
        if unlike.any():
            place = tuple(unlike.nonzero()[0].tolist())
            return Difference(
                f"tensor {index} of {len(pairs)}: {int(unlike.sum())} of {one.numel()} elements differ, first "
                f"{list(place)}: {one[place].item()!r}, expected {other[place].item()!r}"
            )
    return True


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def wrong(findings: Mapping[str, Any], leave_out: Container[str] = ()) -> dict[str, Any]:
    """Return, by name, the findings that are not True."""
    return {what: found for what, found in findings.items() if found is not True and what not in leave_out}


def hold(ranks: Sequence[Mapping[str, Mapping[str, Any]]], check: str, leave_out: Container[str] = ()) -> None:
    """Fail unless all that every rank has found in a check is True, and it has found something."""
    for rank, results in enumerate(ranks):
        assert results[check], f"rank {rank} found nothing"
        found = wrong(results[check], leave_out)
        assert found == {}, f"rank {rank}: {found}"
