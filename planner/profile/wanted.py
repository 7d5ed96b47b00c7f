"""What is to be measured for a class of plans, beyond what a profile has already, and the phases in which it is.

Exact plans ask for the step, for all-reduces (with several ranks on several nodes for their phases, too), for both
halves of one where ranks could share the optimizer's step, and for how messages and backward slow each other down.
Bounded plans also ask for gathers, and for what selecting elements costs; relaxed ones for both halves, and for what
delayed updates cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.documents.profile import Cluster
from planner.profile.budget import Phase
from runtime.plan import Accuracy

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all_reduce", "reduce_scatter", "all_gather"

REPEATS = "steps again, where they differ much"
LAYERS = "layers of the model"
NORMS = "norms of layers"
FLAT = "collectives over all ranks"
APART = "collectives inside nodes and between them"
CONTENTION = "steps beside messages"
SELECTION = "selecting elements"
DELAY = "delayed updates"

CURVE_S = 4.0
"""What one collective may take."""
CONTENTION_S = {1: 20.0, 2: 30.0}
"""By kinds of messages."""


def curves(flat: Sequence[str]) -> int:
    """Count the curves that are measured over all ranks: the all-reduce is also timed back to back."""
    return len(flat) + (ALL_REDUCE in flat)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a profile measures; each rank has rank 0's."""

    step: bool = True
    """The step itself and its layers."""
    norms: bool = False
    flat: tuple[str, ...] = ()
    """Collectives over all ranks."""
    inside: tuple[str, ...] = ()
    """Likewise over the ranks of a node, and between nodes."""
    between: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    """Kinds of messages beside backward."""
    selection: bool = False
    delay: bool = False

    @classmethod
    def of(
        cls, accuracy: Accuracy, ranks: int, *, two_links: bool, halves: bool, norms: bool, known: Cluster | None = None
    ) -> Wanted:
        """What plans of a class need.

        Args:
            accuracy: the riskiest class of plans.
            ranks: their number; one alone sends nothing.
            two_links: whether links inside nodes are measured apart from those between them.
            halves: whether ranks could share the optimizer's step.
            norms: whether the optimizer needs norms of layers.
            known: of a profile that is added to.
        """
        first = known is None
        if ranks == 1:
            return cls(step=first, norms=first and norms)
        bounded, relaxed = accuracy != "exact", accuracy == "relaxed"
        have = set((known.samples if known else None) or {})
        flat = [ALL_REDUCE] + [REDUCE_SCATTER] * (halves or relaxed) + [ALL_GATHER] * (halves or bounded)
        inside = [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER] if two_links else []
        between = ([ALL_REDUCE] + [ALL_GATHER] * bounded + [REDUCE_SCATTER] * relaxed) if two_links else []
        contention = known.contention if known else None
        beside = [ALL_REDUCE] * first
        if bounded and (first or (contention is not None and contention.by_size and not contention.gathers_by_size)):
            beside.append(ALL_GATHER)
        return cls(
            step=first,
            norms=first and norms,
            flat=tuple(name for name in flat if name not in have),
            inside=tuple(name for name in inside if f"intra/{name}" not in have),
            between=tuple(name for name in between if f"inter/{name}" not in have),
            beside=tuple(beside),
            selection=bounded and (known is None or known.sparsify is None),
            delay=relaxed and (known is None or known.local_update is None),
        )

    @property
    def phases(self) -> tuple[Phase, ...]:
        """In their order."""
        flat, apart = curves(self.flat), len(self.inside) + len(self.between)
        phases = [
            (self.step, REPEATS, 15.0),
            (self.norms, NORMS, 3.0),
            (flat, FLAT, CURVE_S * flat),
            (apart, APART, CURVE_S * apart),
            (self.step, LAYERS, 8.0),
            (self.beside, CONTENTION, CONTENTION_S.get(len(self.beside), 0.0)),
            (self.selection, SELECTION, 20.0),
            (self.delay, DELAY, 6.0),
        ]
        return tuple(Phase(name, most_s) for wanted, name, most_s in phases if wanted)
