"""Why steps are not what was predicted, in words that name the cause before any number is read. Torch-free."""

from __future__ import annotations

OFF = 0.2
"""A step further than this from its prediction is explained."""


def cause_of_error(
    *, computed_us: float, predicted_computed_us: float, step_us: float, predicted_step_us: float
) -> str | None:
    """What most of the difference between a step and its prediction comes from; None where that is small.

    Args:
        computed_us: forward, backward and update, as measured.
        predicted_computed_us: the same, as predicted.
        step_us: the whole step, as measured.
        predicted_step_us: the same, as predicted.
    """
    away_us = step_us - predicted_step_us
    if min(computed_us, predicted_computed_us, step_us, predicted_step_us) <= 0.0 or (
        abs(away_us) <= OFF * min(step_us, predicted_step_us)
    ):
        return None
    computed_away_us = computed_us - predicted_computed_us
    if computed_away_us * away_us > 0.0 and 2.0 * abs(computed_away_us) >= abs(away_us):
        seen = f"{_ms(computed_us)} a step, predicted {_ms(predicted_computed_us)}"
        ratio = predicted_computed_us / computed_us
        if ratio > 1.0:
            return f"compute is {_times(ratio)} as fast as in the profile ({seen}): profile again"
        return f"compute takes {_times(1.0 / ratio)} as long as in the profile ({seen}): profile again"
    waited_us, predicted_us = max(0.0, step_us - computed_us), max(0.0, predicted_step_us - predicted_computed_us)
    more = "more" if away_us > 0.0 else "less"
    return (
        f"communication holds steps up {more} than predicted ({_ms(waited_us)} a step, predicted {_ms(predicted_us)}), "
        f"while compute is as profiled: the network is not what it was, or a rank comes late; profile again"
    )


def _times(ratio: float) -> str:
    return "twice" if 1.95 <= ratio < 2.05 else f"{ratio:.1f} times"


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms"
