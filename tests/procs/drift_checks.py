"""A link that becomes slow in the middle of a run, and a rank that comes late: noticed, explained, adapted to."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from interplay_harness import SGD, Side, batch, compare, loss_of, outcome, ranks_agree, steps, told, with_ddp
from step_checks import raised
from torch import nn

import planner
import runtime
from planner.decide.strategies import make_schedule
from planner.documents.profile import Profile, parse_profile
from planner.emit.lower import lower
from planner.model.problem import make_problem
from runtime.checks.plan import dtype_name, trainable_parameters
from runtime.comm.collectives import COLLECTIVES, Collective
from runtime.comm.collectives.direct import Narrowed
from runtime.plan import Plan
from runtime.plan.transports import LIBRARY, NATIVE, TWO_SHOT

FAST_STEPS, SLOW_STEPS, LAST_STEPS = 15, 70, 10
DELAY_S = 0.008
LATE_S = 0.06


class LateWork:
    """A collective whose result comes some time after it is there; `wire` is held as long as bytes are sent."""

    def __init__(self, work: dist.Work, delay_s: float, sending_s: float, wire: threading.Lock) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()
        threading.Thread(target=self._deliver, args=(work, delay_s, sending_s, wire), daemon=True).start()

    def _deliver(self, work: dist.Work, delay_s: float, sending_s: float, wire: threading.Lock) -> None:
        work.wait()
        with wire:
            time.sleep(sending_s)
        time.sleep(delay_s)
        self._future.set_result(None)

    def wait(self, _timeout: timedelta) -> bool:
        """As `Work.wait`."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[None]:
        """As `Work.get_future`."""
        return self._future


class Link:
    """The all-reduces of two ranks over a link whose start-up time, and time of a byte, can be raised in a run."""

    def __init__(self) -> None:
        self.delay_s = self.s_per_byte = 0.0
        self._wire = threading.Lock()

    def carry(self, collective: Collective) -> Collective:
        """Return the collective over this link; each of the two shots carries half of its bytes."""

        def carried(message: Any, group: dist.ProcessGroup) -> Iterator[Any]:
            sent_bytes = message.rows.nbytes / 2 if isinstance(message, Narrowed) else message.flat.nbytes
            for work in collective(message, group):
                sending_s = sent_bytes * self.s_per_byte
                late = self.delay_s or sending_s
                yield LateWork(work, self.delay_s, sending_s, self._wire) if late else work

        return carried


@contextmanager
def linked() -> Iterator[Link]:
    """All collectives of sessions travel by the link inside."""
    link, before = Link(), dict(COLLECTIVES)
    COLLECTIVES.update({one: link.carry(before[one]) for one in (LIBRARY, TWO_SHOT, NATIVE)})  # type: ignore[attr-defined]
    try:
        yield link
    finally:
        COLLECTIVES.update(before)  # type: ignore[attr-defined]


def model() -> nn.Sequential:
    """Eight gradients, 50 KiB; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 3))
    )


def profile_of(net: nn.Module, contention: dict[str, float] | None = None) -> Profile:
    """A step of 32 ms on a link where a message takes half a millisecond: far more than this model needs, so that a
    busy machine is not taken for drift.
    """
    parameters = list(reversed(trainable_parameters(net).items()))
    gradients = [
        {"name": n, "layer": n, "numel": p.numel(), "dtype": dtype_name(p.dtype), "backward_us": 20e3 / len(parameters)}
        for n, p in parameters
    ]
    cluster: dict[str, Any] = {
        "schema": "planner.cluster/1",
        "nodes": dist.get_world_size(),
        "collectives": {"all_reduce": {"alpha_us": 500.0, "beta_us_per_byte": 0.0}},
    }
    if contention is not None:
        cluster["contention"] = contention
    return parse_profile(
        {
            "schema": "planner.profile/1",
            "model": {"name": "test"},
            "world": {"ranks": dist.get_world_size()},
            "compute": {"forward_us": 10e3, "update_us": 2e3, "gradients": gradients},
            "cluster": cluster,
        }
    )


def planned(profile: Profile) -> Plan:
    """One message per gradient."""
    problem = make_problem(profile)
    return lower(problem, make_schedule(problem, "wfbp"))


def attached(plan: Plan, net: nn.Module, **options: Any) -> Side:
    """A side that trains by a plan."""
    optimizer = SGD(net.parameters())
    return Side(net, net, optimizer, runtime.attach(net, optimizer, plan, timeout_s=60, **options))


def warned(action: Callable[[], Any]) -> list[str]:
    """Texts of the drift warnings that an action gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", runtime.DriftWarning)
        action()
    return [str(warning.message) for warning in caught if issubclass(warning.category, runtime.DriftWarning)]


def slow_link() -> dict[str, bool]:
    """Training over a link that becomes slow: the warning, the new plan, and what DDP has after as many steps."""
    total = FAST_STEPS + SLOW_STEPS + LAST_STEPS
    reference = with_ddp(model())
    steps(reference, range(total))
    expected = outcome(reference)
    reference.close()
    with linked() as link:
        net = model()
        side = attached(planned(profile_of(net)), net)
        session = side.session
        assert session is not None
        before = session.plan
        quiet = warned(lambda: steps(side, range(FAST_STEPS)))
        link.delay_s = DELAY_S
        said = warned(lambda: steps(side, range(FAST_STEPS, total - LAST_STEPS)))
        after = planner.replan(session)
        results = {
            "not before": not quiet,
            f"once, on rank 0: {said}": len(said) == (dist.get_rank() == 0),
            "switched": session.plan is after and session.step == total - LAST_STEPS,
            "ranks have one plan": ranks_agree(after.digest()),
            f"merged: {len(before.buckets)} to {len(after.buckets)}": len(after.buckets) < len(before.buckets) // 2,
            f"notes: {after.notes}": any("messages took" in note for note in after.notes),
            "no late rank": not any("comes to the first message" in note for note in after.notes),
        }
        for text in said:
            results |= {
                "which rank": "rank 0, last 50 steps: steps take " in text,
                "why": "likely cause: the network is slower than it was" in text and "predicted 32.50 ms" in text,
                "what to do": "planner.replan(session)" in text and "`planner optimize`" in text,
            }
        steps(side, range(total - LAST_STEPS, total))
        results["its report"] = session.report().steps == LAST_STEPS and session.report().predicted_us is not None
        results |= compare(expected, outcome(side))
        side.close()
    return results


def late_rank() -> dict[str, bool]:
    """Rank 1 does something for a while before each step: rank 0 waits for it at the first message."""
    net = model()
    profile = profile_of(net, {"compute": 1.2, "network": 1.1})
    side = attached(planned(profile_of(net)), net)
    session = side.session
    assert session is not None

    def train() -> None:
        for step in range(62):
            side.optimizer.zero_grad()
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            loss_of(side, step).backward()
            side.optimizer.step()

    said = warned(train)
    before = session.plan
    plan = planner.replan(session, profile, switch=False)
    notes = [note for note in plan.notes if note.startswith("rank 1 comes to the first message")]
    results = {
        f"its own steps are as predicted: {said}": dist.get_rank() == 0 or said == [],
        f"the others wait: {said}": dist.get_rank() == 1
        or (len(said) == 1 and "another rank is a straggler: the first message waits" in said[0]),
        f"replan knows which rank: {plan.notes}": len(notes) == 1,
        "not switched": session.plan is before,
        "same parameters": set(plan.gradients) == set(before.gradients),
    }
    side.close()
    return results


def off() -> dict[str, bool]:
    """`drift=False` says nothing."""
    net = model()
    plan = planned(profile_of(net))
    side = attached(plan, net, drift=False)
    assert side.session is not None

    def train() -> None:
        for step in range(62):
            side.optimizer.zero_grad()
            y = side.forward(batch(step)[0])
            if step < 60:
                time.sleep(0.045)
            y.sum().backward()

    said = warned(train)
    report = side.session.report()
    side.close()
    return {"nothing said": said == [], "though slow": report.iteration_us > 40e3}


def replan_refusals() -> dict[str, bool]:
    """Said alike on both ranks; the session goes on."""
    net = model()
    side = attached(planned(profile_of(net)), net)
    session = side.session
    assert session is not None
    steps(side, range(2))
    messages = {"few": (raised(lambda: planner.replan(session)), ["InputError", "found 2 steps", "at least 5"])}
    steps(side, range(2, 8))
    other = profile_of(nn.Linear(2, 2)) if dist.get_rank() else profile_of(net)
    said = raised(lambda: planner.replan(session, other))
    messages["profile"] = said, ["InputError", "rank 1: profile: $.compute.gradients: found a profile of another model"]
    said = raised(lambda: planner.replan(session, passes="shuffle"))
    messages["passes"] = said, ["InputError", "planner.replan: --passes: found 'shuffle'"]
    loss = loss_of(side, 8)
    inside: list[str] = []
    loss.register_hook(lambda _: inside.append(raised(lambda: planner.replan(session))))
    loss.backward()
    messages["inside"] = inside[0], ["InputError", "while a backward runs"]
    steps(side, range(9, 11))
    side.close()
    results = {"ranks agree": ranks_agree([p.detach() for p in net.parameters()])}
    for name, (message, words) in messages.items():
        results |= {f"{name}: {what}": good for what, good in told(message, words).items()}
    return results


CHECKS: dict[str, Callable[[], dict[str, bool]]] = {
    check.__name__: check for check in (slow_link, late_rank, off, replan_refusals)
}
