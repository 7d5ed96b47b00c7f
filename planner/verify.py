"""What must hold of every schedule, whoever made it. Runs before the first pass and after each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.ir import Bucket, Schedule, format_indices

EXACT_FORMS = frozenset(("all_reduce", algorithm, "none") for algorithm in ("library", "torus_2d", "tree"))
"""(collective, algorithm, compressor) that leave the averaged gradient as it is, up to summation order."""

PUSHED_FORM = ("all_reduce", "library", "none")
"""What buckets say that are pushed, or averaged, whole: those of schedules whose ranks share the step, or have local
updaters."""

PUSHED_FORMS = frozenset({PUSHED_FORM, ("sparse", "flat", "topk")})
"""What buckets of schedules with delay say: the halves of an all-reduce travel apart, and of selected elements the push
is sparse."""

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
    """Checks the invariants of a schedule.

    Args:
        schedule: the schedule.
        dtype_ids: for each gradient in readiness order, an integer that is equal for equal dtypes.
        accuracy: `exact` allows only forms that leave the averaged gradient as it is; delay and local updaters are for
            `relaxed` alone.
        elements: where given, what buckets select is checked against what their layers have.
        norms: the number of layers whose norms the optimizer needs, and of ranks.

    Raises:
        VerifyError: a gradient is missing, unknown or in two buckets; a bucket is empty or leaves out, between its
            own, a gradient of a dtype that it carries; its form is not exact but has to be, or lacks its k; it selects
            nothing of a layer, or more than there is; launch order is not the order of readiness; delay is less than
            one step, not allowed, or together with buckets that cannot be pushed; local updaters are together with
            buckets that are not whole and dense, or their blocks are no partition, more than they are, or empty; norms
            of other layers, or of ranks that do not exist, are shared, or together with delay or local updaters; the
            step is shared together with delay, local updaters, norms or buckets that are not whole and dense.
    """
    _check_delay(schedule, accuracy)
    _check_updaters(schedule, accuracy, len(dtype_ids))
    _check_norms(schedule, *norms)
    _check_sharded(schedule)
    count = len(dtype_ids)
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
        _check_form(position, bucket, accuracy)
        _check_selected(position, bucket, elements)
    missing = [gradient for gradient in range(count) if gradient not in owner]
    if missing:
        raise VerifyError(f"no bucket holds the gradients {format_indices(missing)}")
    firsts = [min(bucket.gradients) for bucket in schedule.buckets]
    if firsts != sorted(firsts):
        raise VerifyError(f"launch order is not readiness order: the buckets begin with gradients {firsts}")


def _check_delay(schedule: Schedule, accuracy: str) -> None:
    if schedule.delay is None:
        return
    if schedule.delay < 1:
        raise VerifyError(f"a delay of {schedule.delay} steps is none: k has to be at least 1")
    if accuracy != "relaxed":
        raise VerifyError(f"a delay of k = {schedule.delay} is not {accuracy}, but the plan has to be")
    for position, bucket in enumerate(schedule.buckets):
        if (bucket.collective, bucket.algorithm, bucket.compressor) not in PUSHED_FORMS:
            raise VerifyError(f"bucket {position} ({bucket}): with delay, buckets are pushed whole or selected from")
        if bucket.ks is not None:
            raise VerifyError(f"bucket {position} ({bucket}): with delay, nothing is selected by layer")


def _check_updaters(schedule: Schedule, accuracy: str, count: int) -> None:
    updaters = schedule.updaters
    if updaters is None:
        return
    if min(updaters.count, updaters.average_every, updaters.then_every) < 1:
        raise VerifyError(f"{updaters}: there has to be an updater, and an update between averagings")
    if accuracy != "relaxed":
        raise VerifyError(f"{updaters}: local updaters are not {accuracy}, but the plan has to be")
    if schedule.delay is not None:
        raise VerifyError(f"{updaters}: local updaters exchange no gradients that could be delayed")
    if updaters.stops is not None:
        if not all(updaters.blocks) or updaters.stops[-1:] != (count,):
            raise VerifyError(f"{updaters}: blocks have to hold each of {count} gradients once, and none may be empty")
        if len(updaters.blocks) > updaters.count:
            raise VerifyError(f"{updaters}: there are more blocks than updaters")
    _check_dense(schedule, "models are averaged dense, by the library")


def _check_dense(schedule: Schedule, why: str) -> None:
    for position, bucket in enumerate(schedule.buckets):
        if (bucket.collective, bucket.algorithm, bucket.compressor) != PUSHED_FORM:
            raise VerifyError(f"bucket {position} ({bucket}): {why}")


def _check_norms(schedule: Schedule, layers: int, ranks: int) -> None:
    if schedule.norms is None:
        return
    if schedule.delay is not None:
        raise VerifyError("norms are shared in a schedule with delay, whose optimizer needs none")
    if schedule.updaters is not None:
        raise VerifyError("norms are shared in a schedule with local updaters, each of which updates by itself")
    if len(schedule.norms) != layers:
        raise VerifyError(f"norms of {len(schedule.norms)} layers are shared, but there are {layers} that need them")
    odd = next((rank for rank in schedule.norms if not 0 <= rank < ranks), None)
    if odd is not None:
        raise VerifyError(f"norms are computed by rank {odd}, but there are {ranks} ranks")


def _check_sharded(schedule: Schedule) -> None:
    if not schedule.sharded:
        return
    if schedule.delay is not None or schedule.updaters is not None or schedule.norms is not None:
        raise VerifyError("ranks share the optimizer's step in a schedule with delay, local updaters or shared norms")
    _check_dense(schedule, "ranks that share the step push dense, by the library")


def _check_form(position: int, bucket: Bucket, accuracy: str) -> None:
    form = (bucket.collective, bucket.algorithm, bucket.compressor)
    if accuracy == "exact" and form not in EXACT_FORMS:
        raise VerifyError(f"bucket {position} ({bucket}) is not exact, but the plan has to be")
    selects = bucket.compressor == "topk"
    if (bucket.k is not None and (bucket.k < 1 or not selects)) or (
        bucket.k is None and selects and bucket.collective == "sparse"
    ):
        raise VerifyError(f"bucket {position} ({bucket}): k ≥ 1 belongs to topk, and a sparse topk needs it")


def _check_selected(position: int, bucket: Bucket, elements: Elements | None) -> None:
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
