"""`planner simulate`, `advise` and `sweep`: predictions without measurements."""

from __future__ import annotations

import typer

from planner.cli.commands import Advise, Simulate, Sweep
from planner.cli.options import printed_json, split_items
from planner.decide.advise import advise as decide
from planner.decide.at_scale import MTBF_HOURS, Scenario
from planner.decide.at_scale import sweep as predict_at_scale
from planner.decide.simulate import DEFAULT_STRATEGIES
from planner.decide.simulate import simulate as predict
from planner.model.what_if import WhatIf, parse_link
from planner.report.files import check_writable
from planner.report.listing import print_tables
from planner.report.scale_page import scale_page
from planner.report.tables import advice_lines, advice_table, computed_line, simulation_table, sweep_table
from runtime.errors import InputError
from runtime.plan.files import write_text


def simulate(asked: Simulate) -> None:
    """Predict strategies and print a table."""
    strategies = DEFAULT_STRATEGIES if asked.strategy is None else split_items("--strategy", asked.strategy)
    links = {name: getattr(asked.changes, name) for name in ("intra", "inter")}
    changed = {name: None if text is None else parse_link(f"--{name}", text) for name, text in links.items()}
    results = predict(
        asked.profile,
        asked.cluster,
        strategies=tuple(strategies),
        ranks=_counts(asked.ranks),
        what_if=WhatIf(**{**vars(asked.changes), **changed}),
        critical_path=asked.critical_path,
        **vars(asked.solving),
    )
    if not printed_json(lambda: [result.to_document() for result in results]):
        print_tables(simulation_table(results))


def _counts(text: str | None) -> list[int] | None:
    if text is None:
        return None
    found = split_items("--ranks", text)
    if not all(item.isdecimal() and len(item) < 10 and int(item) >= 1 for item in found):
        raise InputError(f"--ranks: found {text!r}, expected positive integers such as 4,8,16")
    return [int(item) for item in found]


def advise(asked: Advise) -> None:
    """Print the ways to train a model on a cluster, and which to use."""
    advice = decide(**vars(asked))
    if printed_json(advice.to_document):
        return
    typer.echo(computed_line(advice))
    print_tables(advice_table(advice))
    typer.echo("\n".join(advice_lines(advice)))


def sweep(asked: Sweep) -> None:
    """Predict models on clusters, and print a table or write a page."""
    if asked.html is not None:
        check_writable(asked.html)
    given = vars(asked.disturbances)
    scenario = Scenario(**{**given, "mtbf_hours": MTBF_HOURS if given["mtbf_hours"] is None else given["mtbf_hours"]})
    counts = _counts(asked.ranks)
    models, clusters = split_items("MODELS", asked.models), split_items("CLUSTERS", asked.clusters)
    points = predict_at_scale(models, clusters, counts, scenario, asked.accelerator)
    if asked.html is not None:
        write_text(asked.html, scale_page(points, scenario))
    if printed_json(lambda: [point.to_document() for point in points]):
        return
    typer.echo("\n".join(dict.fromkeys(map(computed_line, points))))
    print_tables(sweep_table(points))
    if counts is not None and (rounded := sorted({point.ranks for point in points} - set(counts))):
        typer.echo(f"rounded up to whole nodes: {', '.join(map(str, rounded))} ranks")
    if asked.html is not None:
        typer.echo(f"wrote {asked.html}")
