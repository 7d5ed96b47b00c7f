"""The updaters of one rank, as their parent sees them: started, watched, and ended whatever happens."""

from __future__ import annotations

import multiprocessing
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pickle import PicklingError
from typing import Any

import torch

from runtime.errors import EnvironmentFailure, InputError, LostUpdaterWarning, PlannerError
from runtime.local_async.processes import GUARD, on_signal
from runtime.local_async.report import Result
from runtime.local_async.updater import BEGUN, DONE, GO, READY, Failure, Task, main

START_METHODS = ("spawn", "forkserver")
"""Allowed start methods of updaters. Not fork: a forked process has none of its parent's threads, but the locks that
they held, and CUDA does not work in it."""
PRELOADED = ["runtime.local_async.updater", "torch._dynamo"]
"""Modules that a fork server imports once for all updaters; torch imports the second with the first optimizer."""
LONGEST_WATCH_S = 0.2
"""Seconds that a change without an event, an updater that hangs, may go unnoticed."""
LONGEST_AWAY_S = 1.0
"""A parent that has not looked after its updaters for so long cannot tell whether they hang."""
ENDING_S = 10.0


def check_start_method(method: str) -> str | None:
    here = [name for name in START_METHODS if name in multiprocessing.get_all_start_methods()]
    if method in here:
        return None
    why = ""
    if method == "fork":
        why = " (a forked process has none of its parent's threads, but the locks that they held"
        why += ", and CUDA, which is initialized here, does not work in it)" if torch.cuda.is_initialized() else ")"
    return f"start_method: found {method!r}{why}, expected {' or '.join(here)}; leave it out"


OWN_WORDS = f"; it said why on standard error; {GUARD}"
"""End of the message about an updater that could not begin and ended by itself."""


@dataclass(eq=False)
class _Updater:
    """The parent's view of one."""

    number: int
    process: Any
    connection: Connection
    row: Any
    ready: bool = False
    result: Result | None = None
    lost: str | None = None
    moved_s: float = 0.0
    last: tuple[int, int] = (0, 0)
    why: str = ""

    @property
    def over(self) -> bool:
        return self.result is not None or self.lost is not None


class Updaters:
    """All of one rank's. `end` has to be called, whatever happens."""

    def __init__(self, task: Task) -> None:
        self.task, self.shared = task, task.shared
        self.error: PlannerError | None = None
        self.stall_limit_s = float("inf")
        """An updater that makes no update for so long is taken for hung, and killed."""
        self._looked_s = 0.0
        """Time of the last check for updaters that hang."""
        self._all: list[_Updater] = []

    def start(self) -> None:
        """Start the processes. Raises InputError where the job's function cannot be sent to another process."""
        context: Any = multiprocessing.get_context(self.task.request.start_method)
        if self.task.request.start_method == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        # Inherited: Ctrl-C is for the parent, also before the updaters can say so themselves.
        with on_signal(signal.SIGINT, signal.SIG_IGN):
            for number in range(self.task.spec.updaters):
                self._all.append(self._start(context, number))

    def _start(self, context: Any, number: int) -> _Updater:
        mine, theirs = context.Pipe()
        process = context.Process(
            target=main, args=(replace(self.task, updater=number), theirs), name=f"updater {number}"
        )
        try:
            process.start()
        except (PicklingError, AttributeError, TypeError, ImportError) as error:
            raise InputError(
                f"the job cannot be sent to updaters, which are processes of their own ({type(error).__name__}: {error}"
                f"); expected a function of a module, or functools.partial of one with arguments that can be pickled"
            ) from error
        except BrokenPipeError as error:
            mine.close()
            process.join(ENDING_S)
            raise InputError(f"updater {number} ended before it was told what to do{OWN_WORDS}") from error
        finally:
            theirs.close()
        return _Updater(number, process, mine, self.shared.row(number))

    def await_ready(self, timeout_s: float) -> str | None:
        """Return when all updaters have made their job: what went wrong, or None."""
        until = time.monotonic() + timeout_s
        while waiting := [one for one in self._all if not one.ready and not one.over]:
            self._hear(waiting, until - time.monotonic())
            if time.monotonic() > until:
                return f"updater {waiting[0].number} was not ready within {timeout_s:g} s"
            if self.error is not None:
                return str(self.error)
        dead = next((one for one in self._all if one.lost is not None), None)
        if dead is None:
            return None
        words = OWN_WORDS if (dead.process.exitcode or 0) > 0 else ""
        return f"updater {dead.number} {dead.lost} before it had begun{words}"

    def go(self, stall_limit_s: float) -> None:
        self.stall_limit_s = stall_limit_s
        self._looked_s = time.monotonic()
        for one in self._all:
            one.moved_s = time.monotonic()
            with suppress(OSError):  # it has died since; `watch` finds out
                one.connection.send(GO)

    def watch(self, timeout_s: float, *, bell: bool = True) -> None:
        """Return when something has happened, or after `timeout_s`; what has happened is in the properties."""
        running = [one for one in self._all if not one.over]
        self._hear(running, min(timeout_s, LONGEST_WATCH_S), bell=bell)
        now = time.monotonic()
        away_s, self._looked_s = now - self._looked_s, now
        for one in running:
            if away_s > LONGEST_AWAY_S:
                one.moved_s += away_s  # this process was stopped (Ctrl-Z, a machine asleep), and they may have been too
            counts = (int(one.row[BEGUN]), int(one.row[DONE]))
            if counts != one.last:
                one.last, one.moved_s = counts, now
            elif now > one.moved_s + self.stall_limit_s and not one.over and not one.why:
                one.why = f"hung (no update within {self.stall_limit_s:g} s) and was killed"
                one.process.kill()

    def _hear(self, running: Sequence[_Updater], timeout_s: float, *, bell: bool = False) -> None:
        waited: list[Any] = [self.shared.doorbell] if bell else []
        for one in running:
            waited += [one.connection, one.process.sentinel]
        happened = wait_for_any(waited, max(0.0, timeout_s))
        if bell:
            self.shared.doorbell.silence()
        for one in running:
            if one.connection in happened or one.process.sentinel in happened:
                self._listen(one)

    def _listen(self, one: _Updater) -> None:
        """Take what an updater says; without a word it is dead."""
        gone = not one.process.is_alive()  # before looking for words: what was said before is there then
        try:
            word = one.connection.recv() if one.connection.poll() else None
        except (EOFError, OSError):
            word, gone = None, True
            one.process.join()
        if word == READY:
            one.ready = True
        elif isinstance(word, Result):
            one.result = word
        elif isinstance(word, Failure):
            one.lost = "raised"
            error = word.error or EnvironmentFailure(f"rank {self.task.rank}, updater {one.number} raised {word.text}")
            error.add_note(word.trace)
            self.error = self.error or error
        elif gone:
            code = one.process.exitcode
            if one.why:
                one.lost = one.why
            elif code is not None and code < 0:
                name = signal.Signals(-code).name
                short = " (as the kernel does where memory is short)" if name == "SIGKILL" else ""
                one.lost = f"was killed by {name}{short}"
            else:
                one.lost = f"ended without a word (exit code {code})"
            if one.ready:  # else the run has not begun, and will not
                self._warn_lost(one)

    def _warn_lost(self, one: _Updater) -> None:
        others = sum(not other.over for other in self._all)
        rest = f"the other {others} go on" if others > 1 else "the other one goes on" if others else "no other is left"
        warnings.warn(
            f"rank {self.task.rank}: updater {one.number} {one.lost} after {int(one.row[DONE])} updates; its "
            f"momentum and the minibatch that it had begun are lost, {rest}",
            LostUpdaterWarning,
            stacklevel=2,
        )

    def stop(self) -> None:
        """Let updaters end after the minibatch that they have begun."""
        self.shared.begun.exhaust()

    @property
    def begun(self) -> int:
        return min(self.shared.begun.value, self.task.request.steps)

    @property
    def done(self) -> int:
        return self.shared.done.value

    @property
    def over(self) -> bool:
        return all(one.over for one in self._all)

    @property
    def results(self) -> list[Result]:
        """Records of updaters that ended in order."""
        return [one.result for one in self._all if one.result is not None]

    @property
    def lost(self) -> dict[int, str]:
        """Reasons of updaters that ended early, by number."""
        return {one.number: one.lost for one in self._all if one.lost is not None}

    def counts(self, number: int) -> list[int]:
        """Return an updater's counts, also of one that was lost."""
        return [int(value) for value in self._all[number].row]

    def end(self) -> None:
        """Kill what is still running, and release everything."""
        for one in self._all:
            one.connection.close()
            if one.result is None:
                one.process.kill()
        for one in self._all:
            one.process.join(ENDING_S)
            one.process.kill()
            one.process.join()
            one.process.close()
