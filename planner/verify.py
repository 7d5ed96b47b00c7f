"""Invariants of every schedule, checked before the first pass and after each one."""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir import ACCURACIES, Schedule, format_indices
from planner.model.codecs import Elements, codec_of
from planner.model.modes import model_of
from planner.model.operator_costs import defect as operators_defect
from planner.model.operator_costs import operator_sizes
from planner.model.problem import Problem
from runtime.plan.combinations import SHARED_NORMS, SHARED_OPERATOR, reason_against


class VerifyError(AssertionError):
    """A schedule breaks an invariant: a defect of the pass or strategy that made it, not of the user's input."""


def verify(
    schedule: Schedule,
    dtype_ids: Sequence[int],
    *,
    accuracy: str = "exact",
    elements: Elements | None = None,
    norms: tuple[int, int] = (0, 1),
    matrices: tuple[int, int] = (0, 0),
) -> None:
    """Check the invariants of a schedule.

    Args:
        schedule: the schedule.
        dtype_ids: for each gradient in readiness order, an integer that is equal for equal dtypes.
        accuracy: `exact` allows only forms that leave the averaged gradient as it is, and only `relaxed` modes in which
            weights of ranks differ.
        elements: where given, what buckets select is checked against what their layers have.
        norms: the number of layers whose norms the optimizer needs, and of ranks.
        matrices: the number of matrices with an operator, and of ranks of a node that can share them among themselves.

    Raises:
        VerifyError: the mode is riskier than allowed, has a defect, or does not go with a bucket or with shared norms
            (`runtime.plan.combinations`); norms of other layers, or of ranks that do not exist, are shared; a gradient
            is missing, unknown or in two buckets; a bucket is empty or leaves out, between its own, a gradient of a
            dtype that it carries; its form is not exact but has to be, or lacks its k; it selects nothing of a layer,
            or more than there is; launch order is not the order of readiness.
    """
    mode, count = schedule.mode, len(dtype_ids)
    if (defect := model_of(schedule).defect(schedule, count)) is not None:
        raise VerifyError(f"{mode}: {defect}")
    if ACCURACIES.index(mode.accuracy) > ACCURACIES.index(accuracy):
        raise VerifyError(f"{mode}: that is {mode.accuracy}, but the plan has to be {accuracy}")
    _check_update(schedule, norms, matrices)
    owner: dict[int, int] = {}
    for position, bucket in enumerate(schedule.buckets):
        if not bucket.gradients:
            raise VerifyError(f"bucket {position} is empty")
        for gradient in bucket.gradients:
            if not 0 <= gradient < count:
                raise VerifyError(
                    f"bucket {position} ({bucket}): gradient {gradient} does not exist, there are {count}"
                )
            if gradient in owner:
                raise VerifyError(f"gradient {gradient} is in bucket {owner[gradient]} and in bucket {position}")
            owner[gradient] = position
        _check_contiguous(position, bucket.gradients, dtype_ids)
        reasons = (reason_against(mode.name, feature) for feature in bucket.features)
        if (reason := next(filter(None, reasons), None)) is not None:
            raise VerifyError(f"bucket {position} ({bucket}): {reason}")
        if accuracy == "exact" and not (bucket.whole and bucket.transport.exact):
            raise VerifyError(f"bucket {position} ({bucket}) is not exact, but the plan has to be")
        if (defect := codec_of(bucket).defect(bucket, elements)) is not None:
            raise VerifyError(f"bucket {position} ({bucket}): {defect}")
    missing = [gradient for gradient in range(count) if gradient not in owner]
    if missing:
        raise VerifyError(f"no bucket holds the gradients {format_indices(missing)}")
    firsts = [min(bucket.gradients) for bucket in schedule.buckets]
    if firsts != sorted(firsts):
        raise VerifyError(f"launch order is not readiness order: the buckets begin with gradients {firsts}")


def verify_on(problem: Problem, schedule: Schedule, accuracy: str) -> None:
    """Check the invariants of a problem's schedule; see `verify`."""
    verify(
        schedule, problem.dtype_ids.tolist(), accuracy=accuracy, elements=problem.layer_elements,
        norms=(len(problem.norm_layers), problem.ranks), matrices=operator_sizes(problem),
    )  # fmt: skip


def _check_update(schedule: Schedule, norms: tuple[int, int], matrices: tuple[int, int]) -> None:
    mode = schedule.mode.name
    if schedule.norms is not None:
        _check_norms(mode, schedule.norms, *norms)
    if schedule.operators is None:
        return
    if (reason := reason_against(mode, SHARED_OPERATOR)) is not None:
        raise VerifyError(f"operators are shared, but {reason}")
    if (wrong := operators_defect(schedule.operators, matrices, norms[1])) is not None:
        raise VerifyError(wrong)


def _check_norms(mode: str, owners: Sequence[int], layers: int, ranks: int) -> None:
    if (reason := reason_against(mode, SHARED_NORMS)) is not None:
        raise VerifyError(f"norms are shared, but {reason}")
    if len(owners) != layers:
        raise VerifyError(f"norms of {len(owners)} layers are shared, but there are {layers} that need them")
    odd = next((rank for rank in owners if not 0 <= rank < ranks), None)
    if odd is not None:
        raise VerifyError(f"norms are computed by rank {odd}, but there are {ranks} ranks")


def _check_contiguous(position: int, gradients: Sequence[int], dtype_ids: Sequence[int]) -> None:
    if list(gradients) != sorted(gradients):
        raise VerifyError(f"bucket {position}: gradients {format_indices(gradients)} are not in readiness order")
    if gradients[-1] - gradients[0] + 1 == len(gradients):
        return
    members, carried = set(gradients), {dtype_ids[gradient] for gradient in gradients}
    for between in range(gradients[0], gradients[-1]):
        if between not in members and dtype_ids[between] in carried:
            raise VerifyError(f"bucket {position} ({format_indices(gradients)}) leaves out gradient {between}")
