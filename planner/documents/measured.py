"""Which classes of plans a cluster was measured for, and the command that measures what is missing."""

from __future__ import annotations

from planner.documents.profile import Cluster
from runtime.errors import InputError
from runtime.plan import Accuracy

LACKS: dict[Accuracy, str] = {
    "bounded": "gathers, and what selecting elements costs",
    "relaxed": "what delayed updates cost",
}


def unmeasured(cluster: Cluster, where: str) -> dict[str, str]:
    """By class that the cluster was not measured for, what is missing and the command that adds it; nothing of one that
    does not say what it was measured for, and of a single rank.

    Args:
        cluster: the cluster.
        where: the path of the profile that holds it, for the command.
    """
    order: list[Accuracy] = ["exact", *LACKS]
    if cluster.measured_for is None or cluster.ranks == 1:
        return {}
    return {
        accuracy: f"not measured: {LACKS[accuracy]}; `planner profile JOB --for {accuracy} --add-to {where}` adds it"
        for accuracy in order[order.index(cluster.measured_for) + 1 :]
    }


def refuse_unmeasured(cluster: Cluster, accuracy: Accuracy, where: str) -> None:
    """Raises InputError where plans of this class cannot be decided, since what they cost was not measured."""
    missing = unmeasured(cluster, where)
    if accuracy in missing:
        raise InputError(
            f"--accuracy {accuracy}: found {where}, which was measured for {cluster.measured_for} plans, expected one "
            f"for {accuracy} plans: {missing[accuracy]}"
        )
