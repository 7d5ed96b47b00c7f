"""The kernels as operators: bad input is refused by name, `torch.compile` leaves them whole, no device is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_cases import same
from kernel_host import HostBackend, needs_compiler, usual_library

from runtime.errors import EnvironmentFailure
from runtime.kernels import (
    WireLayout,
    ef_topk_,
    ef_topk_torch,
    make_state,
    ms_topk_,
    unpack_,
    wire_combine_,
    wire_decode_,
    wire_encode_,
)
from runtime.kernels.backend import installed
from runtime.kernels.operators import ef_topk_operator, unpack_operator
from runtime.kernels.state import MAX_ELEMENTS
from runtime.kernels.wire import wire_combine_operator, wire_decode_operator, wire_encode_operator

N, K = 100, 5


def arguments(**changed: Any) -> dict[str, Any]:
    """Sound ones, but for those that are given."""
    sound = {
        "gradient": torch.randn(N),
        "residual": torch.zeros(N),
        "new_residual": torch.zeros(N),
        "values": torch.zeros(K),
        "indices": torch.zeros(K, dtype=torch.int32),
        "state": make_state([N], [K], "cpu"),
    }
    return sound | changed


def called(select: Callable[..., None], given: dict[str, Any], **options: Any) -> None:
    """Call a selection with such arguments."""
    residuals, out = (given["residual"], given["new_residual"]), (given["values"], given["indices"])
    select(given["gradient"], residuals, out, given["state"], swapped=given.get("swapped"), **options)


SHARED = torch.zeros(2 * N)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a strided gradient": ({"gradient": torch.zeros(2 * N)[::2]}, r"^gradient: found the stride \(2,\)"),
    "a gradient of two dimensions": ({"gradient": torch.zeros(10, 10)}, r"^gradient: found the shape \(10, 10\)"),
    "a gradient in float16": ({"gradient": torch.zeros(N).half()}, r"^gradient: found torch.float16"),
    "a residual in float64": ({"residual": torch.zeros(N).double()}, r"^residual: found torch.float64"),
    "a residual too short": (
        {"residual": torch.zeros(N - 1)},
        r"^residual: found the shape \(99,\); expected \(100,\)",
    ),
    "residuals of two dtypes": ({"new_residual": torch.zeros(N).bfloat16()}, r"^new_residual: found torch.bfloat16"),
    "values of another dtype": ({"values": torch.zeros(K).bfloat16()}, r"^values: found torch.bfloat16"),
    "values for another k": ({"values": torch.zeros(K + 1)}, r"^values: found the shape \(6,\); expected \(5,\)"),
    "indices in int64": ({"indices": torch.zeros(K).long()}, r"^indices: found torch.int64; expected torch.int32"),
    "a gradient on another device": ({"gradient": torch.zeros(N, device="meta")}, r"^gradient: found .* meta; .* cpu"),
    "swapped in bool": ({"swapped": torch.zeros(1, dtype=torch.bool)}, r"^swapped: found torch.bool"),
    "residual and new residual the same": (
        {"residual": SHARED[:N], "new_residual": SHARED[:N]},
        r"^(new_)?residual: found memory that (new_)?residual uses, too",
    ),
    "residual and new residual overlapping": (
        {"residual": SHARED[:N], "new_residual": SHARED[N - 1 : 2 * N - 1]},
        r"^new_residual: found memory that residual uses, too",
    ),
    "values inside the gradient": (
        {"gradient": SHARED[:N], "values": SHARED[3 : 3 + K]},
        r"^values: found memory that gradient uses, too",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_bad_arguments_are_named(what: str) -> None:
    changed, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        called(ef_topk_, arguments(**changed))
    with pytest.raises(ValueError, match=message):
        called(ms_topk_, arguments(**changed), seed=0)


@pytest.mark.parametrize(
    ("elements", "k", "message"),
    [
        ([10], [0], "^k: found 0 for segment 0 of 10 elements"),
        ([10, 7], [1, 8], "^k: found 8 for segment 1 of 7 elements"),
        ([10], [-1], "^k: found -1"),
        ([0], [1], "^k: found 1 for segment 0 of 0 elements"),
        ([], [], "^k: found 0 numbers for 0 segments"),
        ([10, 10], [1], "^k: found 1 numbers for 2 segments"),
        ([MAX_ELEMENTS + 1], [1], f"^elements: found {MAX_ELEMENTS + 1} in all"),
        ([2**30, 2**30], [1, 1], f"^elements: found {2**31} in all; expected at most {MAX_ELEMENTS}"),
    ],
)
def test_bad_segments_are_named(elements: list[int], k: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_state(elements, k, "cpu")


def test_a_state_of_other_segments_is_refused() -> None:
    state, other = make_state([N], [K], "cpu"), make_state([2 * N], [K], "cpu")
    state.memory = other.memory
    with pytest.raises(ValueError, match=r"^state: found a memory of"):
        called(ef_topk_, arguments(state=state))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": torch.zeros(2, 3, dtype=torch.float16)}, "^values: found torch.float16"),
        ({"indices": torch.zeros(2, 3)}, "^indices: found torch.float32; expected torch.int32"),
        ({"indices": torch.zeros(2, 4, dtype=torch.int32)}, r"^indices: found the shape \(2, 4\)"),
        ({"values": torch.zeros(3, 2).T}, r"^values: found the strides \(1, 2\)"),
        ({"values": torch.zeros(513, 3)}, "^values: found 513 ranks; expected at most 512|^indices"),
        ({"sums": torch.zeros(4, 2)}, r"^sums: found the shape \(4, 2\)"),
        ({"sums": SHARED[:9], "values": SHARED[8:14].view(2, 3)}, "^sums: found memory that values uses, too"),
    ],
)
def test_bad_arguments_of_unpack_are_named(changed: dict[str, Any], message: str) -> None:
    sound = {"sums": torch.zeros(9), "values": torch.zeros(2, 3), "indices": torch.zeros(2, 3, dtype=torch.int32)}
    with pytest.raises(ValueError, match=message):
        unpack_(**(sound | changed))


LAYOUT = WireLayout(torch.int8, 50, 50, 56, 64, 127.0)
ROWS = torch.zeros(2, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gradient": torch.zeros(N).half()}, "^gradient: found torch.float16"),
        ({"gradient": torch.zeros(N + 1)}, "^rows: found 2 rows of 50 elements; expected room for 101"),
        ({"rows": torch.zeros(2, 56, dtype=torch.uint8)}, r"^rows: found torch.uint8 of the shape \(2, 56\)"),
        ({"rows": torch.zeros(2, 66, dtype=torch.uint8)}, "^rows: found a row at an address that is no multiple of 4"),
        ({"residual": torch.zeros(N).double()}, "^residual: found torch.float64"),
        ({"new_residual": SHARED[1:101], "residual": SHARED[:100]}, "^new_residual: found memory that residual uses"),
        ({"swapped": torch.zeros(1, dtype=torch.bool)}, "^swapped: found torch.bool"),
    ],
)
def test_bad_arguments_of_narrow_codes_are_named(changed: dict[str, Any], message: str) -> None:
    sound: dict[str, Any] = {
        "gradient": torch.zeros(N), "residual": torch.zeros(N), "new_residual": torch.zeros(N), "rows": ROWS,
    }  # fmt: skip
    given = sound | changed
    residuals = (given["residual"], given["new_residual"])
    with pytest.raises(ValueError, match=message):
        wire_encode_(given["gradient"], residuals, given["rows"], LAYOUT, swapped=given.get("swapped"))


def test_narrow_codes_of_one_part_and_no_more() -> None:
    with pytest.raises(ValueError, match=r"^elements: found 51; expected at most 50"):
        wire_decode_(ROWS, torch.zeros(51), LAYOUT, add_up=True)
    with pytest.raises(ValueError, match=r"^elements: found 51; expected at most 50"):
        wire_combine_(ROWS, None, torch.zeros(2, 64, dtype=torch.uint8), 51, LAYOUT)
    with pytest.raises(EnvironmentFailure, match=r"found the device cpu, expected cuda: WireCompressor does it"):
        wire_decode_(ROWS, torch.zeros(N), LAYOUT, add_up=False)


def test_on_a_cpu_the_reference_runs() -> None:
    given = arguments(gradient=torch.randn(N).bfloat16())
    called(ef_topk_, given)
    expected = ef_topk_torch(given["gradient"], given["residual"], K)
    assert same((given["values"], given["indices"], given["new_residual"]), expected)
    assert int(given["state"].nonfinite) == 0
    given["gradient"][7] = float("nan")
    called(ef_topk_, given)
    assert int(given["state"].nonfinite) == 1


def checked(operator: Any, *values: Any) -> None:
    torch.library.opcheck(operator, values)


def test_operators_are_what_torch_expects() -> None:
    a = arguments()
    state, lists = a["state"], ([a["residual"], a["new_residual"]], [a["values"], a["indices"]])
    checked(ef_topk_operator, a["gradient"], *lists, state.memory, None, [0, 0, 0, *state.layout.numbers])
    checked(unpack_operator, torch.zeros(9), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int32), 0.5)


@needs_compiler
def test_operators_of_narrow_codes_are_what_torch_expects() -> None:
    code, numbers = LAYOUT.name, LAYOUT.numbers()
    gradient, one, other = torch.randn(N), torch.zeros(N), torch.zeros(N)
    rows, own = (torch.zeros(count, 64, dtype=torch.uint8) for count in (2, 1))
    with installed("cpu", HostBackend(usual_library())):
        swapped = torch.zeros(1, dtype=torch.int32)
        checked(wire_encode_operator, gradient, [one, other], swapped, rows, code, numbers)
        checked(wire_combine_operator, rows, [], None, own, code, [50, *numbers])
        checked(wire_decode_operator, rows, torch.zeros(50), True, code, numbers)


def test_compiled_programs_call_them_whole() -> None:
    """One graph, without a break, with the operator in it as it is; the same result as without."""
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def step(a: dict[str, Any]) -> torch.Tensor:
        called(ef_topk_, a)
        return a["values"] * 2

    given = arguments()
    expected = ef_topk_torch(given["gradient"], given["residual"], K)
    doubled = torch.compile(step, backend=backend, fullgraph=True)(given)
    assert same((given["values"], given["indices"], given["new_residual"]), expected)
    assert torch.equal(doubled, 2 * expected[0])
    assert sum("ef_topk_" in target for target in graphs[0]) == 1
