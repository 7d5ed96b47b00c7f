"""Documents made up by hypothesis: sound ones at the edges of their ranges, and what becomes of them by accident.

A case is the bytes of a profile and perhaps of a cluster, or of a plan. Accidents happen to the structure (a field is
dropped, renamed, retyped, set to an extreme, taken from another document) and to the bytes (flipped, cut, repeated).
"""

from __future__ import annotations

import copy
import gzip
import json
import re
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "complex128")
FORMULAS = ("ring", "recursive_doubling", "halving_doubling", "binary_tree")

ODD_NAMES = ("", "a" * 4096, "a" * 5000, "\0", "\x1b[31mred", "a\nplanner: b", "möbius", "\u202e", "\ud800", "schema")
EXTREMES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, True, False, None),
    *(0.5, -0.0, -0.5, 1.0, 5e-324, 1e-320, 1e-160, 1e12, 1e15, 1.1e15, 1e16, 1e300, 1.7e308, -1e308),
    *(float("nan"), float("inf"), float("-inf"), *ODD_NAMES, [], {}, [[]], [0], {"a": 1}, [None], [[1.0, 2.0]]),
)

TITLES = ("made up", "\x1b[31mred", "a\nplanner: b", "\0", "möbius", "\u202e", "[/b] :key:", "a" * 5000)
"""Texts that a reader accepts and a terminal must not see as they are."""

times = st.sampled_from([0.0, 25.0, 100.0, 1000.0]) | st.floats(0.0, 1e6) | st.sampled_from([5e-324, 1e-9, 1e12, 1e15])
numels = st.sampled_from([0, 1, 64, 1000, 100_000]) | st.integers(0, 10**7) | st.sampled_from([2**31, 2**40])
rates = st.sampled_from([0.0, 1e-4, 0.01, 1.0]) | st.floats(0.0, 1.0) | st.sampled_from([5e-324, 1e12])
sizes = st.sampled_from([0, 1, 1024, 1 << 20]) | st.integers(0, 10**8) | st.sampled_from([0.5, 5e-324, 2.0**60])
factors = st.sampled_from([1.0, 1.07, 1.5, 3.0]) | st.floats(1.0, 10.0) | st.sampled_from([1e6])
counts = st.integers(1, 12) | st.integers(1, 60)


@dataclass(frozen=True)
class Case:
    """Files as a user might hand them over."""

    kind: str
    """`profile` or `plan`."""
    content: bytes
    cluster: bytes | None = None

    def __repr__(self) -> str:
        shown = ", ".join(repr(part[:3000]) for part in (self.content, self.cluster) if part is not None)
        return f"Case({self.kind}: {shown})"


lines = st.fixed_dictionaries({"alpha_us": times, "beta_us_per_byte": rates})
links = st.fixed_dictionaries({"alpha_us": times, "beta_us_per_byte": rates}, optional={"gamma_us_per_byte": rates})
samples = st.lists(st.tuples(sizes, times).map(list), min_size=1, max_size=8)
by_size = st.lists(st.tuples(sizes.filter(bool), factors, factors).map(list), min_size=1, max_size=4)
usual = {"compute": factors, "network": factors}
contention = st.fixed_dictionaries({}, optional=usual) | st.fixed_dictionaries(
    {"by_size": by_size}, optional={**usual, "gathers_by_size": by_size}
)
densities = st.sampled_from([0.001, 0.01, 0.1, 1.0, 5e-324]) | st.floats(1e-9, 1.0)
encodings = st.dictionaries(st.sampled_from(["int8", "bfloat16"]), lines)
selections = lines | st.fixed_dictionaries(
    {"alpha_us": times, "beta_us_per_byte": rates},
    optional={"by_density": st.lists(st.tuples(densities, times, rates).map(list), min_size=1, max_size=4)},
)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """A cluster that a reader accepts; a cost for its all-reduce may still be missing."""
    document: dict[str, Any] = {"schema": "planner.cluster/1", "nodes": draw(st.integers(1, 64))}
    optional = {
        "ranks_per_node": st.sampled_from([1, 2, 8]),
        "intra": links,
        "inter": links,
        "collectives": st.dictionaries(st.sampled_from(["all_reduce", "inter/all_reduce", "broadcast"]), lines),
        "samples": st.dictionaries(st.sampled_from(["all_reduce", "intra/all_reduce"]), samples),
        "sparsify": selections,
        "unpack": selections,
        "encode": encodings,
        "decode": encodings,
        "all_reduce_algorithm": st.sampled_from(FORMULAS),
        "contention": contention,
        "measured_for": st.sampled_from(["exact", "bounded", *["relaxed"] * 4]),
        "name": st.sampled_from(["net", "möbius"]),
    }
    for field, values in optional.items():
        if draw(st.booleans()):
            document[field] = draw(values)
    if draw(st.integers(0, 3)):
        document.setdefault("collectives", {})["all_reduce"] = draw(lines)
    return document


@st.composite
def profiles(draw: st.DrawFn) -> dict[str, Any]:
    """A profile that a reader accepts."""
    mixed = draw(st.booleans())
    rows = draw(st.lists(st.tuples(numels, times, st.sampled_from(DTYPES)), min_size=1, max_size=draw(counts)))
    gradients = [
        {
            "name": f"layer{index // 2}.{index}",
            "layer": f"layer{index // 2}",
            "numel": numel,
            "dtype": dtype if mixed else "float32",
            "backward_us": time_us,
        }
        for index, (numel, time_us, dtype) in enumerate(rows)
    ]
    document: dict[str, Any] = {
        "schema": "planner.profile/1",
        "model": {"name": draw(st.sampled_from(TITLES))},
        "world": {"ranks": draw(st.integers(1, 16))},
        "compute": {"forward_us": draw(times), "update_us": draw(times), "gradients": gradients},
    }
    if draw(st.booleans()):
        document["cluster"] = draw(clusters())
    return document


predictions = st.fixed_dictionaries(
    {"iteration_us": times}, optional={"exposed_us": times, "compute_spread_us": times, "buckets": counts}
)
compressors = st.sampled_from([{"name": "none"}, {"name": "topk", "density": 0.01}, {"name": "topk", "k": {"a": 3}}])


@st.composite
def plans(draw: st.DrawFn, depth: int = 1) -> dict[str, Any]:
    """A plan that a reader accepts."""
    names = [f"g{index}" for index in range(draw(counts))]
    buckets = []
    while names:
        size = draw(st.integers(1, len(names)))
        buckets.append({"gradients": names[:size], "compressor": draw(compressors)})
        names = names[size:]
    if draw(st.booleans()):
        buckets[0]["gradients"][0] = draw(st.sampled_from(ODD_NAMES[3:8]))
    document: dict[str, Any] = {
        "schema": "planner.plan/1",
        "model": {"name": draw(st.sampled_from(TITLES)), "fingerprint": "sha256:00"},
        "world": {"ranks": draw(st.integers(1, 16))},
        "accuracy": draw(st.sampled_from(["exact", "bounded", "relaxed"])),
        "buckets": buckets,
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "predicted": predictions,
        "baselines": st.dictionaries(st.sampled_from(["ddp", "wfbp"]), predictions),
        "certificate": st.just({"method": "by \a hand", "lower_bound_us": 1.0, "gap": 0.5}),
        "delay": st.just({"steps": 4}),
        "frontier": st.just(
            [{"max_ratio": 4.0, "iteration_us": 9.0, "buckets": 2, "sparse_buckets": 1, "sent_share": 0.5}]
        ),
        "notes": st.lists(st.sampled_from(TITLES), max_size=2),
        "updates": st.just({"norms": {"shares": [["a"], []], "replicated_us": 2.5}}),
    }
    if depth:
        optional["fallback"] = plans(depth - 1)
        optional["alternatives"] = st.dictionaries(st.sampled_from(["exact", "bounded"]), plans(depth - 1), max_size=1)
    for field, values in optional.items():
        if draw(st.integers(0, 2)) == 0:
            document[field] = draw(values)
    return document


def places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    found: list[tuple[Any, Any]] = []
    todo = [document]
    while todo:
        value = todo.pop()
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
        todo += [value[key] for key in keys]
    return found


@st.composite
def accidents(draw: st.DrawFn, document: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The document after one thing has gone wrong with its structure."""
    document = copy.deepcopy(document)
    found = places(document)
    if not found:
        return document
    owner, key = found[draw(st.integers(0, len(found) - 1))]
    accident = draw(st.sampled_from(["drop", "rename", "add", "extreme", "extreme", "retype", "splice", "repeat"]))
    if accident == "drop":
        del owner[key]
    elif accident == "rename" and isinstance(owner, dict):
        owner[draw(st.sampled_from([*ODD_NAMES, f"{key}_", str(key)[1:], str(key).upper()]))] = owner.pop(key)
    elif accident == "add" and isinstance(owner, dict):
        owner[draw(st.sampled_from([*ODD_NAMES, "nodes", "ranks", "samples"]))] = draw(st.sampled_from(EXTREMES))
    elif accident == "retype":
        forms = [str(owner[key]), [owner[key]], {"value": owner[key]}, repr(owner[key])[:1]]
        owner[key] = draw(st.sampled_from(forms))
    elif accident == "splice":
        donor, taken = draw(st.sampled_from(places(other) or [({0: None}, 0)]))
        owner[key] = copy.deepcopy(donor[taken])
    elif accident == "repeat" and isinstance(owner, list):
        owner[key:key] = [copy.deepcopy(owner[key])] * draw(st.integers(1, 3))
    else:
        owner[key] = copy.deepcopy(draw(st.sampled_from(EXTREMES)))
    return document


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """The bytes after one thing has gone wrong with them."""
    at = draw(st.integers(0, len(content)))
    end = min(len(content), at + draw(st.integers(0, 40)))
    damage = draw(st.sampled_from(["flip", "insert", "cut", "truncate", "repeat", "encode", "twice", "digits", "deep"]))
    if damage == "flip" and at < len(content):
        return content[:at] + bytes([content[at] ^ (1 << draw(st.integers(0, 7)))]) + content[at + 1 :]
    if damage == "insert":
        return content[:at] + draw(st.binary(max_size=8)) + content[at:]
    if damage == "cut":
        return content[:at] + content[end:]
    if damage == "repeat":
        return content[:end] + content[at:end] * draw(st.integers(1, 50)) + content[end:]
    if damage == "encode":
        text = content.decode("utf-8", "replace")
        return draw(
            st.sampled_from([text.encode("utf-16"), b"\xef\xbb\xbf" + content, gzip.compress(content, mtime=0)])
        )
    if damage == "twice" and (field := re.search(rb'"[^"]*": ', content)):
        return content[: field.start()] + field[0] + b"0, " + content[field.start() :]
    if damage == "digits":
        return content[:at] + b"9" * draw(st.sampled_from([20, 400, 5000])) + content[at:]
    if damage == "deep":
        depth = draw(st.sampled_from([50, 99, 101, 500, 100_000]))
        return content[:at] + b"[" * depth + b"]" * draw(st.sampled_from([0, depth])) + content[at:]
    return content[:at]


@st.composite
def written(draw: st.DrawFn, document: dict[str, Any], other: dict[str, Any]) -> bytes:
    """The bytes of a document: as it is, after accidents, or damaged."""
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 1, 2, 4]))):
        document = draw(accidents(document, other))
    content = json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        content = draw(damaged(content))
    return content


anything = st.recursive(
    st.sampled_from(EXTREMES) | st.text(max_size=8) | st.floats() | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Files of every kind, most of them nearly right."""
    kind = draw(st.sampled_from(["profile", "profile", "profile", "plan", "plan", "noise"]))
    if kind == "noise":
        noise = st.binary(max_size=200) | anything.map(lambda value: json.dumps(value).encode())
        return Case(draw(st.sampled_from(["profile", "plan"])), draw(noise), draw(st.none() | noise))
    if kind == "plan":
        return Case("plan", draw(written(draw(plans()), draw(profiles()))))
    profile, cluster = draw(profiles()), draw(clusters())
    content = draw(written(profile, cluster))
    return Case("profile", content, draw(st.none() | written(cluster, profile)))
