"""Tables of who waits for whom: of many ranks those that others wait for."""

from __future__ import annotations

import math

from planner.report.who_waits import MAX_RANKS, arrival_section, arrival_tables
from runtime.plan.last_ranks import COMPUTE, rank_arrivals

RANKS = 40


def test_of_many_ranks_those_that_others_wait_for_are_shown() -> None:
    early, late = [500.0, 300.0, math.nan, 10.0, 5.0], [100.0, 200.0, math.nan, 410.0, 5.0]
    ranks, arrivals = arrival_tables(*rank_arrivals([early] * (RANKS - 1) + [late]), "plan")
    assert ranks.rows == [("39", "2", "2", "19.5", COMPUTE)]
    shown = (*range(MAX_RANKS - 1), 39)
    assert arrivals.columns[1:] == (*(f"rank {at} (ms)" for at in shown), "last rank", "waiting (ms)")
    assert arrivals.rows == [
        (str(bucket), *["0"] * (MAX_RANKS - 1), late_ms, "39", late_ms) for bucket, late_ms in enumerate(("0.4", "0.1"))
    ]
    (text,) = arrival_section([ranks, arrivals]).values()
    assert text.count("<table>") == 2


def test_where_ranks_have_not_compared_there_is_no_table() -> None:
    assert arrival_tables((), (), "plan") == []
    assert arrival_section([]) == {}
