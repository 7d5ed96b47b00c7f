"""Whether another plan really is faster: judged round by round, each with a block of steps of both. Torch-free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from runtime.monitor.verdict import Z_SCORE, Verdict

BLOCK_STEPS = 5
"""The first one of each, which has come from another plan, is not counted."""
FEWEST_ROUNDS, MOST_ROUNDS = 4, 10
MUCH_SLOWER, SLOWER = 0.25, 0.04
"""A plan that is slower by so much ends its trial after one round, or after two that agree."""


def judge(rounds: Sequence[tuple[float, float]], names: tuple[str, str]) -> Verdict | None:
    """Return the verdict of rounds of (step of the new plan, step of the old one) in microseconds on the slowest rank;
    None where another round is needed. `names` are those of the plans. At last the mean decides: to stay has no merit
    of its own.
    """
    new_us, old_us = (statistics.fmean(column) for column in zip(*rounds, strict=True))
    gains = [(old - new) / old for new, old in rounds]
    count = len(rounds)
    noise = Z_SCORE * statistics.stdev(gains) / count**0.5 if count > 1 else 0.0
    gain = statistics.fmean(gains)
    hopeless = gains[-1] < -MUCH_SLOWER or (count > 1 and max(gains) < -SLOWER)
    if not hopeless and (count < FEWEST_ROUNDS or (abs(gain) <= noise and count < MOST_ROUNDS)):
        return None
    good = gain > 0.0
    text = (
        f"steps with {names[0]} take {new_us / 1e3:.2f} ms, with {names[1]} {old_us / 1e3:.2f} ms "
        f"(noise ± {noise * old_us / 1e3:.2f} ms, {count * 2 * BLOCK_STEPS} steps): "
        f"the run goes on with {names[0] if good else names[1]}"
    )
    return Verdict(good=good, step_us=new_us, other_us=old_us, noise_us=noise * old_us, text=text)
