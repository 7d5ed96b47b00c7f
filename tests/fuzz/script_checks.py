"""What the ranks of the script fuzzer do: run each script with DDP and with a plan, and judge what came out."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import importlib
import json
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from late_links import slow
from model_checks import bits
from script_runs import Misfit, Run
from script_sides import WAIT_S, AcceleratorSide, DDPSide, PlannerAcceleratorSide, PlanSide
from scripts import OWN_WEIGHTS, Script, from_line
from torch import Tensor, nn

from runtime.errors import InputError

SCRIPT_S = 90
"""Wall clock that a script may take before its ranks are given up."""

SLOW_S = 0.01
"""How late weights are, after they have come."""

TOLD = "an exception ended the backward of"
"""What a rank says where another one's backward has raised."""

Log = list[tuple[str, Tensor | None]]


@dataclass
class Outcome:
    """Of one script on one side, on this rank."""

    log: Log
    errors: list[str | None] = field(default_factory=list)
    """By rank, where a rank raised: what, with `refused: ` before what the package says of a user's input."""
    at: str = ""
    """The action that raised."""
    agree: bool = True
    """Whether all ranks ended with the same parameters."""

    @property
    def raised(self) -> bool:
        """Whether any rank did."""
        return any(self.errors)

    @property
    def refused(self) -> bool:
        """Whether some ranks did in words, and others at most because those were gone."""
        return any(one and one.startswith("refused: ") for one in self.errors)


def run_side(script: Script, side: DDPSide | PlanSide) -> Outcome:
    """All actions, up to the first that raises on any rank."""
    torch.manual_seed(0)
    run = Run(script, side, side.group)
    outcome = Outcome(run.log)
    for index in range(len(script.actions) + 1):
        told: str | None = None
        try:
            if index < len(script.actions):
                run.perform(index, script.actions[index])
            else:
                run.finish()
        except InputError as error:
            told = f"refused: {error}"
        except Misfit as error:
            told = f"wrong: {error}"
        except Exception as error:
            told = f"{type(error).__name__}: {error}\n{_place(error)}"
        outcome.errors, outcome.at = gather(told), run.label
        if outcome.raised:
            _leave_behind(side, outcome)
            return outcome
    shared = [p for p in run.model.parameters() if not hasattr(p, "_ddp_ignored")]
    mine = "" if run.retired else hashlib.sha256(b"".join(bits(p).numpy().tobytes() for p in shared))
    digests = gather(mine if isinstance(mine, str) else mine.hexdigest())
    outcome.agree = run.delayed or len({one for one in digests if one}) == 1
    return outcome


def _place(error: BaseException) -> str:
    """Where it was raised."""
    lines = traceback.format_exception(error)
    return "".join(lines[-4:])


def _leave_behind(side: DDPSide | PlanSide, outcome: Outcome) -> None:
    """A session whose script raised; ranks that all raised alike can still leave together."""
    if all(one and one.startswith("refused: ") for one in outcome.errors):
        with contextlib.suppress(Exception):
            side.leave()


def gather(value: str | None) -> list[str | None]:
    """Every rank's."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def tolerance_of(script: Script) -> float:
    """How far two numbers may be apart, of the largest of their tensor or 1; 0: bit for bit."""
    one_order = script.ranks == 2 and script.kind in ("exact", "sparse") and script.weights != "unequal"
    if script.kind == "late" or one_order:
        return 0.0
    if any(action.arguments[:2] == ("autocast", "on") for action in script.actions):
        return 0.05  # what differs in the last bit may be rounded to another bfloat16
    return 1e-12 if script.kind == "exact" and script.optimizer in ("sgd", "momentum") else 1e-8


def first_difference(expected: Log, found: Log, tolerance: float) -> str | None:
    """What differs first, in words; the shorter log ends the comparison."""
    for (label, a), (other, b) in zip(expected, found, strict=False):
        if label != other:
            return f"expected {label!r}, found {other!r}"
        if a is None or b is None:
            if a is not b:
                return f"{label}: expected {'None' if a is None else 'a tensor'}, found {'None' if b is None else b}"
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{label}: expected {a.dtype} {tuple(a.shape)}, found {b.dtype} {tuple(b.shape)}"
        elif not _near(a, b, tolerance):
            return f"{label}: off by up to {float((a.double() - b.double()).abs().max()):.3g}"
    return None


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.numel() == 0 or torch.equal(bits(a), bits(b)):
        return True
    if tolerance == 0.0 or not a.is_floating_point():
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=0.0, atol=tolerance * max(1.0, float(a.nan_to_num().abs().max())), equal_nan=True)


def has_reference(script: Script) -> bool:
    """Whether DDP with a hook does what a sparse plan does; else ranks only have to agree."""
    if script.kind != "sparse":
        return True
    names = {action.name for action in script.actions}
    if {"unused", "apart"} & set(script.model) or any("overflow" in action.arguments for action in script.actions):
        return False
    without = {"freeze", "thaw", "switch", "switch_within", "resize"}
    return not names & without and not {"drop", "checkpoint"} <= names


def judge(script: Script, ddp: Outcome, plan: Outcome) -> str | None:
    """What is wrong on this rank, or None."""
    told = [f"rank {rank}: {one}" for rank, one in enumerate(plan.errors) if one]
    if script.kind == "late" and (plan.raised, plan.raised and plan.at) != (ddp.raised, ddp.raised and ddp.at):
        return f"sharded: {ddp.at}: {ddp.errors}; late: {plan.at}: {plan.errors}"
    if plan.raised:
        what = "; ".join(told)
        if "wrong: " in what:
            return f"{plan.at}: {what}"
        if any("CommunicationError" in (one or "") and TOLD not in (one or "") for one in plan.errors) and not (
            _one_rank_only(script, plan)
        ):
            return f"{plan.at}: a rank waited in vain: {what}"
        if not plan.refused and not (ddp.raised and ddp.at == plan.at):
            return f"{plan.at}: raised, not refused: {what}"
    if not plan.agree and (ddp.agree or ddp.raised):
        return "ranks end with different parameters"
    if ddp.raised or not ddp.agree or not has_reference(script):
        return None
    if not plan.raised and script.kind not in OWN_WEIGHTS and len(ddp.log) != len(plan.log):
        return f"DDP logged {len(ddp.log)}, the plan {len(plan.log)}"
    return first_difference(ddp.log, plan.log, tolerance_of(script))


def _one_rank_only(script: Script, plan: Outcome) -> bool:
    """Whether what a rank refused was this rank's alone: an action, or a look at what it alone has kept."""
    alone = [action for action in script.actions if action.rank is not None]
    kept = plan.refused and any(action.name == "keep" for action in alone)
    return kept or any(str(action) == plan.at.partition(" ")[2] for action in alone)


@dataclass
class Group:
    """DDP's, renewed when a script has spoiled it."""

    members: dist.ProcessGroup | None = None

    def whole(self) -> dist.ProcessGroup:
        """One on which nothing is under way; all ranks call this."""
        self.members = self.members or dist.new_group(timeout=timedelta(seconds=WAIT_S))
        return self.members


def run_script(script: Script, group: Group, refused: list[str] | None = None) -> str | None:
    """What is wrong with a script on this rank, or None; `refused` gets its kind where it was not run to its end."""
    faulthandler.dump_traceback_later(SCRIPT_S, exit=True)
    try:
        # Gathers beside the next forward change nothing: not a bit, nor what is refused.
        late = script.kind == "late"
        ddp_side, plan_side = (AcceleratorSide, PlannerAcceleratorSide) if script.framework else (DDPSide, PlanSide)
        other = PlanSide(script, group.whole(), "sharded") if late else ddp_side(script, group.whole())
        ddp = run_side(script, other)
        if ddp.raised:
            group.members = None
        gc.collect()
        _forget_programs(script)  # their guards leave hooks out: the other side would run this one's
        with slow(SLOW_S) if late else contextlib.nullcontext():
            plan = run_side(script, plan_side(script, group.whole()))
        if plan.raised:
            group.members = None
        verdict = judge(script, ddp, plan)
        if refused is not None and plan.raised:
            refused.append(script.kind)
    finally:
        faulthandler.cancel_dump_traceback_later()
        _forget_programs(script)
    gc.collect()
    return verdict


def _forget_programs(script: Script) -> None:
    if any(action.name == "compile" for action in script.actions):
        torch._dynamo.reset()


def prepare(lines: list[str]) -> None:
    """Imports what torch imports when it is first used, so that no collection between scripts looks at it again."""
    warnings.simplefilter("ignore")  # DDP's advice
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    if any(action.name == "compile" for line in lines for action in from_line(line).actions):
        torch.compile(nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum().backward()
        torch._dynamo.reset()
    gc.collect()
    gc.freeze()


def check_scripts(kinds_refused: Path, lines: list[str], folder: str) -> None:
    """Runs the scripts one after the other until one fails on any rank; writes each verdict as it comes.

    Rank 0 adds the kinds of those that were refused to `kinds_refused`, a line each.
    """
    prepare(lines)
    group, verdicts, refused = Group(), Path(folder, f"rank-{dist.get_rank()}"), list[str]()
    for line in lines:
        verdict = run_script(from_line(line), group, refused)
        told = gather(verdict)
        with verdicts.open("a") as file:
            file.write(json.dumps(verdict) + "\n")
        if any(told):
            break
    if dist.get_rank() == 0:
        with kinds_refused.open("a") as file:
            file.writelines(f"{kind}\n" for kind in refused)
