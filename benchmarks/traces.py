"""Published traces and parameter lists → profiles. One function per kind of source, and the rules for what they lack.

A row is a gradient; rows are in readiness order, which for a parameter list is reversed layer order.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.documents.profile import ComputeProfile, Gradient, Profile, ProfileWorld
from runtime.plan import ModelReference

FORWARD_SHARE = 1 / 3
"""Rule for a step of which only the total is known: backward takes twice as long as forward."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One gradient: its size, and the backward time up to its readiness."""

    name: str
    layer: str
    numel: int
    backward_us: float = 0.0


def read_csv(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV file by column; lines that start with # are comments."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def gap_rows(path: Path) -> list[Row]:
    """A log of readiness gaps (ready_order, tensor, n_elements, gap_us)."""
    return [
        Row(
            name=line["tensor"],
            layer=line["tensor"].rpartition(".")[0],
            numel=int(line["n_elements"]),
            backward_us=float(line["gap_us"]),
        )
        for line in read_csv(path)
    ]


def layer_log_rows(path: Path, run: str) -> list[Row]:
    """One run of a log of layer times in forward order (layer_forward_index, n_elements, backward_us)."""
    lines = [line for line in read_csv(path) if line["run"] == run]
    lines.sort(key=lambda line: -int(line["layer_forward_index"]))
    return [
        Row(
            name=f"layer{line['layer_forward_index']}",
            layer=f"layer{line['layer_forward_index']}",
            numel=int(line["n_elements"]),
            backward_us=float(line["backward_us"]),
        )
        for line in lines
    ]


def graph_rows(path: Path) -> list[Row]:
    """A chain of modules timed one by one; a module without parameters adds its time to the next one with any.

    Only for chains: each module's one predecessor stands before it, so reversed order is backward's order.
    """
    rows, waiting_us = [], 0.0
    for line in reversed(read_csv(path)):
        waiting_us += float(line["backward_ms"]) * 1e3
        numel = int(float(line["parameter_bytes"] or 0)) // 4
        if numel:
            name = f"{line['node']}.{line['description'].partition('(')[0]}"
            rows.append(Row(name=name, layer=name, numel=numel, backward_us=waiting_us))
            waiting_us = 0.0
    return rows


def parameter_rows(path: Path, weight_of: Callable[[Mapping[str, str]], float], last: Sequence[str] = ()) -> list[Row]:
    """A parameter list in registration order, without times: backward is split by the weights of `weight_of`.

    Args:
        path: index, parameter, layer, layer_type, shape, n_elements.
        weight_of: the share of backward that a parameter's gradient takes, in any unit.
        last: parameters whose gradients are complete only at the end of backward (tied ones).
    """
    lines = list(reversed(read_csv(path)))
    lines.sort(key=lambda line: line["parameter"] in last)
    weights = [weight_of(line) for line in lines]
    return [
        Row(name=line["parameter"], layer=line["layer"], numel=int(line["n_elements"]), backward_us=weight)
        for line, weight in zip(lines, weights, strict=True)
    ]


def evenly_over_matrices(line: Mapping[str, str]) -> float:
    """Rule for convolutional networks: every convolution and linear layer takes the same time, the others none."""
    return float(line["layer_type"] in ("Conv2d", "Linear") and line["parameter"].endswith(".weight"))


def by_matrix_size(line: Mapping[str, str]) -> float:
    """Rule for transformers: a matrix takes time by its elements (equal tokens pass through each), others none."""
    if line["layer_type"] == "Embedding" or "x" not in line["shape"]:
        return 0.0
    return float(line["n_elements"])


def scaled(rows: Iterable[Row], backward_us: float) -> list[Row]:
    """The same shares of another total."""
    rows = list(rows)
    total_us = sum(row.backward_us for row in rows)
    return [replace(row, backward_us=row.backward_us * backward_us / total_us) for row in rows]


def split_step(rows: Iterable[Row], step_us: float) -> tuple[float, list[Row]]:
    """Forward and rows of a step of which only forward + backward is known."""
    return step_us * FORWARD_SHARE, scaled(rows, step_us * (1 - FORWARD_SHARE))


def make_profile(
    rows: Iterable[Row],
    *,
    name: str,
    forward_us: float,
    accelerator: str | None = None,
    batch: int | None = None,
    dtype: str = "float32",
    source: str | None = None,
    notes: Sequence[str] = (),
) -> Profile:
    """A profile of one rank; times rounded to nanoseconds, so that files do not change with the platform."""
    gradients = tuple(
        Gradient(name=row.name, layer=row.layer, numel=row.numel, dtype=dtype, backward_us=round(row.backward_us, 3))
        for row in rows
    )
    return Profile(
        model=ModelReference(name=name),
        world=ProfileWorld(ranks=1, device="cuda", accelerator=accelerator, batch_per_rank=batch),
        compute=ComputeProfile(forward_us=round(forward_us, 3), update_us=0.0, gradients=gradients),
        source=source,
        notes=tuple(notes) or None,
    )


def with_step(profile: Profile, step_us: float, accelerator: str | None = None) -> Profile:
    """The same model, its forward and backward scaled so that together they take `step_us`: on which accelerator, if
    it is not the profile's.
    """
    compute = profile.compute
    factor = step_us / (compute.forward_us + sum(gradient.backward_us for gradient in compute.gradients))
    gradients = tuple(replace(gradient, backward_us=gradient.backward_us * factor) for gradient in compute.gradients)
    world = replace(profile.world, accelerator=accelerator or profile.world.accelerator)
    compute = replace(compute, forward_us=compute.forward_us * factor, gradients=gradients)
    return replace(profile, world=world, compute=compute)


def in_dtype(profile: Profile, dtype: str) -> Profile:
    """The same model with gradients of another type."""
    gradients = tuple(replace(gradient, dtype=dtype) for gradient in profile.compute.gradients)
    return replace(profile, compute=replace(profile.compute, gradients=gradients))


def by_tensor(profile: Profile) -> Profile:
    """The same model with every gradient a layer of its own, as for code that knows tensors only."""
    gradients = tuple(replace(gradient, layer=gradient.name) for gradient in profile.compute.gradients)
    return replace(profile, compute=replace(profile.compute, gradients=gradients))
