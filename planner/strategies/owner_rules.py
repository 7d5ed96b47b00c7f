"""Rules that others use for the operators of matrix optimizers, as baselines.

Every rank repeats: PyTorch's DDP with `torch.optim.Muon`. The longest first: Megatron-LM's layer-wise optimizer. Round
robin: Keller Jordan's Muon.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.ir import OperatorShares
from planner.model.operator_costs import operator_costs
from planner.model.problem import Problem
from planner.search.owners import in_messages, longest_first_owners


def every_rank(problem: Problem) -> None:
    """Return no owners."""


def longest_first(problem: Problem) -> OperatorShares | None:
    """Return owners by Graham's rule, and one message of all results behind the computation."""
    costs = operator_costs(problem)
    if costs is None:
        return None
    order = sorted(range(costs.count), key=lambda i: (-costs.operator_us[i], i))
    return in_messages(costs, longest_first_owners(costs, order), 1)


def round_robin(problem: Problem) -> OperatorShares | None:
    """Return owners in turn, in the order of the step's calls, and one message."""
    costs = operator_costs(problem)
    return None if costs is None else in_messages(costs, [i % costs.ranks for i in range(costs.count)], 1)


OPERATOR_RULES: Mapping[str, Callable[[Problem], OperatorShares | None]] = {
    "every_rank": every_rank, "longest_first": longest_first, "round_robin": round_robin
}  # fmt: skip
"""Registry: name → owners and messages of a problem; None: every rank computes all."""
