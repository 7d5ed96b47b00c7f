"""Which figure shows, while training, what compression does to the loss: candidates against the measured gap.

    python -m benchmarks.harm --results benchmarks/results/harm.jsonl --write     # resumes where it was stopped

Four ranks of one process train small models with all matrices in one format, early (from the first step) or late (from
the middle of an exact run), with SGD and AdamW. The gap is the loss over the last 30 % of the steps against that of an
exact run over the same batches.
"""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.harm_figures import FIGURES, Candidates, Moments, threshold
from benchmarks.learning import Task, tasks
from benchmarks.marked import parser_of, tabulate
from benchmarks.virtual_ranks import VirtualRanks
from runtime.plan import CompressorSpec

DOCUMENT = Path("docs/results/harm.md")
RANKS = 4
STEPS = {"digits, ResNet-20": 320, "digits, ViT": 240, "characters, GPT": 200, "characters, LSTM": 160}
"""Of an exact run; early and late runs have half of them."""
SAMPLES = {"digits, ResNet-20": 4, "digits, ViT": 8, "characters, GPT": 2, "characters, LSTM": 2}
"""Of a batch, on each rank."""
COUNTED = 0.3
"""Part of the steps, the last ones, whose loss counts."""
RATES = {
    ("digits, ResNet-20", "AdamW"): 2e-3, ("digits, ViT", "SGD"): 0.03,
    ("characters, GPT", "SGD"): 0.1, ("characters, LSTM", "AdamW"): 4e-3,
}  # fmt: skip
"""Learning rates where the task has the other optimizer."""
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}
EXACT, REVERSED = "float32", "float32, other order"
FORMATS: Mapping[str, tuple[CompressorSpec | None, float]] = {
    REVERSED: (None, 32.0),
    "bfloat16": (CompressorSpec(name="wire", dtype="bfloat16"), 16.0),
    "int8": (CompressorSpec(name="wire", dtype="int8"), 8.125),
    "float8_e4m3fn": (CompressorSpec(name="wire", dtype="float8_e4m3fn"), 8.125),
    **{f"rank {rank}": (CompressorSpec(name="powersgd", rank=rank), 0.0) for rank in (4, 2, 1)},
    **{
        f"top-k {density:.1%}": (CompressorSpec(name="topk", density=density, scope="layer"), 64.0 * density)
        for density in (0.1, 0.01, 0.001)
    },
}
"""Format → compressor and bits for each element; 0: by the number of elements sent."""
WHEN = ("early", "late")
PASSES, PASSES_SMALL = 0.8, 0.5
"""Rank correlations that a figure needs on tasks that it was not chosen on: of all runs, of those with small gaps."""
SMALL, HARMLESS, CERTAIN = 0.05, 0.01, 0.95
"""Small gaps; gaps of harmless runs; the share of runs called harmless that have to be."""


@dataclass
class State:
    """A model in training, between two steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int


def _start(task: Task, optimizer: str) -> State:
    torch.manual_seed(0)
    model = task.model()
    default = task.optimizer(model.parameters())
    rate = RATES.get((task.name, optimizer), default.defaults["lr"])
    return State(model, OPTIMIZERS[optimizer](model.parameters(), lr=rate), 0)


def _taken(batch: Any, count: int) -> Any:
    return batch[:count] if isinstance(batch, Tensor) else tuple(part[:count] for part in batch)


class Trainer:
    """Continues a copy of a state in one format."""

    def __init__(self, task: Task, state: State, form: str) -> None:
        copied = copy.deepcopy((state.model, state.optimizer.state_dict()))
        self.task, self.model, self.form, self.at = task, copied[0], form, state.step
        self.optimizer = type(state.optimizer)(self.model.parameters(), **_options(state.optimizer))
        self.optimizer.load_state_dict(copied[1])
        self.rate = self.optimizer.defaults["lr"]
        named = dict(self.model.named_parameters())
        self.matrices = {name: p for name, p in named.items() if p.dim() > 1}
        self.members = [*self.matrices.values(), *(p for p in named.values() if p.dim() < 2)]
        self.elements = sum(p.numel() for p in self.matrices.values())
        spec, bits = FORMATS.get(form, (None, 32.0))
        self.ranks = None if spec is None else VirtualRanks(self.matrices, spec, RANKS)
        k = self.elements if self.ranks is None else self.ranks.k
        bits = bits or 32.0 * k / self.elements
        self.candidates = Candidates(self._moments(), bits / 32.0 if k >= self.elements else k / self.elements, bits)

    def _moments(self) -> Moments:
        """Return the optimizer's moments of the matrices, as vectors."""
        group = self.optimizer.param_groups[0]
        states = [self.optimizer.state.get(p, {}) for p in self.matrices.values()]
        first, second = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer", "")

        def flat(name: str) -> Tensor:
            return torch.cat(
                [
                    (state[name] if state.get(name) is not None else torch.zeros_like(p)).flatten()
                    for state, p in zip(states, self.matrices.values(), strict=True)
                ]
            )

        decay = group["betas"] if second else (group["momentum"], 0.0)
        steps = int(states[0].get("step", 0)) if second else 0
        return Moments(flat(first), flat(second) if second else None, steps, decay)

    def gradients(self) -> tuple[Tensor, float]:
        """Return each rank's gradient over the number of ranks, shape (ranks, elements), and the mean loss."""
        rows, losses = [], []
        for rank in range(RANKS):
            batch = _taken(self.task.batch(self.at * RANKS + rank, 0), SAMPLES[self.task.name])
            self.optimizer.zero_grad()
            loss = self.task.loss(self.model, batch)
            loss.backward()
            losses.append(float(loss.detach()))
            rows.append(torch.cat([p.grad.flatten() for p in self.members if p.grad is not None]) / RANKS)
        return torch.stack(rows), statistics.fmean(losses)

    def step(self) -> float:
        """Train one step; return its loss."""
        rows, loss = self.gradients()
        order = range(RANKS)
        mean = sum((rows[rank] for rank in (reversed(order) if self.form == REVERSED else order)), torch.tensor(0.0))
        before = sent = None
        if self.ranks is not None:
            before = self.ranks.residual()
            sent = self.ranks.exchange(rows[:, : self.elements].contiguous(), self.at).clone()
            mean[: self.elements] = sent
        for p, part in zip(self.members, mean.split([p.numel() for p in self.members]), strict=True):
            p.grad = part.view_as(p).clone()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * 0.5 * (1.0 + math.cos(math.pi * self.at / STEPS[self.task.name]))
        self.optimizer.step()
        self.at += 1
        if self.ranks is not None and before is not None and sent is not None:
            part = rows[:, : self.elements].contiguous()
            self.candidates.step(part, sent, before, self.ranks.residual(), self._moments())
        return loss

    def train(self, steps: int) -> list[float]:
        """Return the losses of the next steps."""
        return [self.step() for _ in range(steps)]

    def state(self) -> State:
        """Return where training is."""
        return State(self.model, self.optimizer, self.at)


def _options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {name: optimizer.defaults[name] for name in ("lr", "momentum", "betas") if name in optimizer.defaults}


@cache
def exact_run(name: str, optimizer: str) -> tuple[list[float], dict[str, State]]:
    """Return the losses of the exact run, and the states from which others begin, early and late."""
    task = next(task for task in tasks() if task.name == name)
    trainer = Trainer(task, _start(task, optimizer), EXACT)
    states, losses = {}, []
    for when in WHEN:
        state = trainer.state()
        states[when] = copy.deepcopy(state)
        losses += trainer.train(STEPS[name] // len(WHEN))
    return losses, states


def measure(name: str, optimizer: str, when: str, form: str) -> dict[str, Any]:
    """Train one run."""
    losses, states = exact_run(name, optimizer)
    task = next(task for task in tasks() if task.name == name)
    trainer = Trainer(task, states[when], form)
    steps = STEPS[name] // len(WHEN)
    found, start = trainer.train(steps), trainer.at - steps
    counted = round(COUNTED * steps)
    exact = statistics.fmean(losses[start + steps - counted : start + steps])
    loss = statistics.fmean(found[-counted:])
    return {
        "task": name, "optimizer": optimizer, "when": when, "form": form, "loss": loss, "exact": exact,
        "gap": loss / exact - 1.0 if math.isfinite(loss) else math.inf, "figures": trainer.candidates.medians(),
    }  # fmt: skip


Record = Mapping[str, Any]


def _correlation(runs: Sequence[Record], figure: str) -> float:
    if len(runs) < 3:
        return math.nan
    return float(spearmanr([run["figures"][figure] for run in runs], [run["gap"] for run in runs]).statistic)


def _certain(runs: Sequence[Record]) -> list[Record]:
    """Return the runs of which small gaps are known: another order of sums alone makes no larger ones."""
    return [run for run in runs if run["spread"] <= HARMLESS]


def _small(runs: Sequence[Record]) -> list[Record]:
    return [run for run in _certain(runs) if abs(run["gap"]) < SMALL]


@dataclass(frozen=True)
class Score:
    """One figure on tasks whose threshold comes from others."""

    correlation: float
    small: float
    called: int
    right: int
    """Runs called harmless whose gap is at most `HARMLESS`."""

    @property
    def passes(self) -> bool:
        """Whether it is good enough."""
        certain = self.called > 0 and self.right >= CERTAIN * self.called
        return self.correlation >= PASSES and self.small >= PASSES_SMALL and certain

    def __str__(self) -> str:
        return f"{self.correlation:.2f}; {self.small:.2f}; {self.right} of {self.called}"


def score(chosen_on: Sequence[Record], others: Sequence[Record], figure: str) -> Score:
    """Take the threshold from the first runs, and judge the figure by the others."""
    known, judged = _certain(chosen_on), _certain(others)
    limit = threshold([run["figures"][figure] for run in known], [run["gap"] for run in known], HARMLESS, CERTAIN)
    called = [run for run in judged if run["figures"][figure] <= limit]
    right = sum(abs(run["gap"]) <= HARMLESS for run in called)
    return Score(_correlation(others, figure), _correlation(_small(others), figure), len(called), right)


def with_spread(records: Sequence[Record]) -> list[Record]:
    """Return the runs but those in another order of sums, with the gap of the latter: |gap| of the same cell."""
    cell = itemgetter("task", "optimizer", "when")
    spreads = {cell(run): abs(run["gap"]) for run in records if run["form"] == REVERSED}
    return [{**run, "spread": spreads.get(cell(run), math.inf)} for run in records if run["form"] != REVERSED]


def lines(records: Sequence[Record]) -> Iterator[str]:
    """Yield gaps, then figures on tasks that they were not chosen on."""
    runs = with_spread(records)
    names = list(dict.fromkeys(run["task"] for run in runs))
    columns = [(optimizer, when) for optimizer in OPTIMIZERS for when in WHEN]
    yield (
        f"{len(runs)} runs. Small gaps are known of {len(_certain(runs))}: of those cells where another order of sums "
        f"alone moves the loss by at most {HARMLESS:.0%}. {len(_small(runs))} of these have a gap below {SMALL:.0%}."
    )
    yield ""
    yield "| task | format | " + " | ".join(f"{optimizer}, {when}" for optimizer, when in columns) + " |"
    yield "| --- " * (2 + len(columns)) + "|"
    for name in names:
        for form in FORMATS:
            gaps = {(r["optimizer"], r["when"]): r["gap"] for r in records if r["task"] == name and r["form"] == form}
            cells = (f"{gaps[column]:+.2%}" if column in gaps else "" for column in columns)
            yield f"| {name} | {form} | " + " | ".join(cells) + " |"
    pairs = {
        pair: ([r for r in runs if r["task"] in pair], [r for r in runs if r["task"] not in pair])
        for pair in combinations(names, 2)
    }
    scores = {figure: {pair: score(*parts, figure) for pair, parts in pairs.items()} for figure in FIGURES}
    yield ""
    yield (
        "| figure | Spearman: least | mean | small gaps: least | mean | called harmless | within 1 %: least | passes |"
    )
    yield "| --- " * 8 + "|"
    for figure, of_pairs in scores.items():
        each = list(of_pairs.values())
        shares = [one.right / one.called for one in each if one.called]
        least = f"{min(shares):.0%}" if shares else ""
        yield (
            f"| {figure} | {_spans(one.correlation for one in each)} | {_spans(one.small for one in each)} | "
            f"{sum(one.called for one in each)} | {least} | {sum(one.passes for one in each)} of {len(each)} |"
        )
    yield ""
    for pair, (chosen_on, others) in pairs.items():
        best = max(FIGURES, key=partial(_rank, chosen_on))
        rest = " and ".join(dict.fromkeys(run["task"] for run in others))
        found = scores[best][pair]
        verdict = "passes" if found.passes else "does not pass"
        yield f"- chosen on {' and '.join(pair)}: {best}; on {rest} {found}: it {verdict}"
    yield ""
    yield from (f"- *{figure}*: {text}" for figure, text in FIGURES.items())
    passed = [figure for figure, of_pairs in scores.items() if all(one.passes for one in of_pairs.values())]
    yield ""
    yield f"Good enough on all tasks that it was not chosen on: {', '.join(passed) or 'no figure'}."


def _spans(values: Iterable[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    return f"{min(known):.2f} | {statistics.fmean(known):.2f}" if known else " | "


def _rank(runs: Sequence[Record], figure: str) -> float:
    found = _correlation(runs, figure) + _correlation(_small(runs), figure)
    return found if math.isfinite(found) else -math.inf


def main() -> int:
    """Train what is missing, print, and write where asked to."""
    options = parser_of(__doc__, DOCUMENT).parse_args()
    torch.set_num_threads(1)
    wanted: dict[str, Callable[[], dict[str, Any]]] = {
        "; ".join(run): partial(measure, *run)
        for run in (
            (task.name, optimizer, when, form)
            for task in tasks() for optimizer in OPTIMIZERS for when in WHEN for form in FORMATS
        )
    }  # fmt: skip
    return tabulate(DOCUMENT, {"figures": (wanted, lines)}, options)


if __name__ == "__main__":
    sys.exit(main())
