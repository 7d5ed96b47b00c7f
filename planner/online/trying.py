"""Whether another plan really is faster: judged round by round, each with a block of steps of both; and which ones to
try where no prediction tells. Torch-free.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Mapping, Sequence

from runtime.monitor.verdict import BLOCK_STEPS, Verdict, half_interval

FEWEST_ROUNDS, MOST_ROUNDS = 4, 8
MOST_SIZES = 4
"""Trials of other numbers of buckets."""
MIN_BUCKET_RATIO = 1.25
"""Minimum ratio of bucket counts between two trials."""


def judge(
    rounds: Sequence[tuple[float, float]], names: tuple[str, str], may_lose_us: float = math.inf, exchanges: int = 1,
    must_win: float = 0.0, block_steps: int = BLOCK_STEPS,
) -> Verdict | None:  # fmt: skip
    """Return the verdict of rounds of (step of the new plan, step of the old one) in microseconds on the slowest rank;
    None where another round is needed. `names` are those of the plans; the text has times of a step of the optimizer,
    which is a number of `exchanges`. `must_win`: share of the old plan's step that the new one has to win; above 0
    also the noise. `block_steps`: steps of a block of the new plan.

    A trial ends early where it has lost more than it may, unless rounds differ by more than the plans do: something
    else on the machine or the network interrupts one plan's block as likely as the other's, and outweighs all other
    rounds. At last means decide, to stay has no merit of its own; there those of the middle half of the rounds.
    """
    gains_us = [old - new for new, old in rounds]
    count = len(rounds)
    noise_us = half_interval(gains_us)
    gain_us = statistics.fmean(gains_us)
    alike = count > 1 and abs(gain_us) <= noise_us
    lost = -block_steps * sum(gains_us) > may_lose_us and not alike
    if not lost and (count < FEWEST_ROUNDS or (alike and count < MOST_ROUNDS)):
        return None
    cut = count // 4 if alike else 0
    kept = sorted(rounds, key=lambda one: one[1] - one[0])[cut : count - cut]
    new_us, old_us = (statistics.fmean(column) for column in zip(*kept, strict=True))
    good = new_us < old_us * (1.0 - must_win) and not (must_win and alike)
    new_ms, old_ms, noise_ms = (time_us * exchanges / 1e3 for time_us in (new_us, old_us, noise_us))
    text = (
        f"steps with {names[0]} take {new_ms:.2f} ms, with {names[1]} {old_ms:.2f} ms "
        f"({f'noise ± {noise_ms:.2f} ms, ' if count > 1 else ''}{count * (BLOCK_STEPS + block_steps)} steps): "
        f"the run goes on with {names[0] if good else names[1]}"
    )
    return Verdict(good=good, step_us=new_us, other_us=old_us, noise_us=noise_us, text=text)


def climb(predicted: Mapping[int, float], present: int, off: float) -> Generator[int, bool, None]:
    """Give numbers of buckets to try: the fewest, with which little is sent during compute; then fewer ones than the
    best so far while that is faster, then more, then those that the way to more has left out.

    Is sent whether the one that it gave was faster.

    Args:
        predicted: those that can be had, and the predicted step of each over that of `present`.
        present: what training has now.
        off: what is predicted to be slower by more than this is not tried.
    """
    counts = sorted(count for count, ratio in predicted.items() if ratio <= 1.0 + off)
    best, tried = present, {present}
    fewest = min(counts, default=present)
    if fewest != present and present >= MIN_BUCKET_RATIO * fewest:
        tried.add(fewest)
        if (yield fewest):
            best = fewest
    for fewer in (True, False, True):
        while len(tried) <= MOST_SIZES:
            slower = max((one for one in tried if one < best), default=0)
            further = [one for one in counts if one > slower and one not in tried]
            least = MIN_BUCKET_RATIO
            further = [one for one in further if (best >= least * one if fewer else one >= least * best)]
            if not further:
                break
            following = max(further) if fewer else min(further)
            tried.add(following)
            if not (yield following):
                break
            best = following
