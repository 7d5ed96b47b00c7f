"""What must hold of every schedule, whoever made it. Runs before the first pass and after each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.ir import ACCURACIES, Bucket, Schedule, format_indices
from planner.model.modes import model_of
from runtime.plan.combinations import SHARED_NORMS, reason_against

EXACT_FORMS = frozenset(("all_reduce", algorithm, "none") for algorithm in ("library", "torus_2d", "tree"))
"""(collective, algorithm, compressor) that leave the averaged gradient as it is, up to summation order."""

Elements = Callable[[Bucket], Sequence[int]]
"""The elements of each run of gradients of one layer in a bucket."""


class VerifyError(AssertionError):
    """A schedule breaks an invariant: a defect of the pass or strategy that made it, not of the user's input."""


def verify(
    schedule: Schedule,
    dtype_ids: Sequence[int],
    *,
    accuracy: str = "exact",
    elements: Elements | None = None,
    norms: tuple[int, int] = (0, 1),
) -> None:
    """Check the invariants of a schedule.

    Args:
        schedule: the schedule.
        dtype_ids: for each gradient in readiness order, an integer that is equal for equal dtypes.
        accuracy: `exact` allows only forms that leave the averaged gradient as it is, and only `relaxed` modes in which
            weights of ranks differ.
        elements: where given, what buckets select is checked against what their layers have.
        norms: the number of layers whose norms the optimizer needs, and of ranks.

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
    if schedule.norms is not None:
        _check_norms(mode.name, schedule.norms, *norms)
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
        if accuracy == "exact" and bucket.form not in EXACT_FORMS:
            raise VerifyError(f"bucket {position} ({bucket}) is not exact, but the plan has to be")
        _check_selected(position, bucket, elements)
    missing = [gradient for gradient in range(count) if gradient not in owner]
    if missing:
        raise VerifyError(f"no bucket holds the gradients {format_indices(missing)}")
    firsts = [min(bucket.gradients) for bucket in schedule.buckets]
    if firsts != sorted(firsts):
        raise VerifyError(f"launch order is not readiness order: the buckets begin with gradients {firsts}")


def _check_norms(mode: str, owners: Sequence[int], layers: int, ranks: int) -> None:
    if (reason := reason_against(mode, SHARED_NORMS)) is not None:
        raise VerifyError(f"norms are shared, but {reason}")
    if len(owners) != layers:
        raise VerifyError(f"norms of {len(owners)} layers are shared, but there are {layers} that need them")
    odd = next((rank for rank in owners if not 0 <= rank < ranks), None)
    if odd is not None:
        raise VerifyError(f"norms are computed by rank {odd}, but there are {ranks} ranks")


def _check_selected(position: int, bucket: Bucket, elements: Elements | None) -> None:
    selects = bucket.compressor == "topk"
    if (bucket.k is not None and (bucket.k < 1 or not selects)) or (
        bucket.k is None and selects and bucket.collective == "sparse"
    ):
        raise VerifyError(f"bucket {position} ({bucket}): k ≥ 1 belongs to topk, and a sparse topk needs it")
    if bucket.ks is not None and (bucket.k is None or sum(bucket.ks) != bucket.k or min(bucket.ks, default=0) < 1):
        raise VerifyError(f"bucket {position} ({bucket}): ks has to hold numbers of at least 1 whose sum is k")
    if bucket.ks is None or elements is None:
        return
    present = elements(bucket)
    if len(present) != len(bucket.ks):
        raise VerifyError(f"bucket {position} ({bucket}): found {len(bucket.ks)} ks for {len(present)} runs of layers")
    for run, (k, numel) in enumerate(zip(bucket.ks, present, strict=True)):
        if k > numel:
            raise VerifyError(f"bucket {position} ({bucket}): selects {k} of the {numel} elements of run {run}")


def _check_contiguous(position: int, gradients: Sequence[int], dtype_ids: Sequence[int]) -> None:
    if list(gradients) != sorted(gradients):
        raise VerifyError(f"bucket {position}: gradients {format_indices(gradients)} are not in readiness order")
    if gradients[-1] - gradients[0] + 1 == len(gradients):
        return
    members, carried = set(gradients), {dtype_ids[gradient] for gradient in gradients}
    for between in range(gradients[0], gradients[-1]):
        if between not in members and dtype_ids[between] in carried:
            raise VerifyError(f"bucket {position} ({format_indices(gradients)}) leaves out gradient {between}")
