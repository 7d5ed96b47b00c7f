"""docs/results/gpu.md: what was measured on a device, and what was rehearsed without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.state import Result
from benchmarks.marked import marks, replace_part

DEVICE, REHEARSAL = "device", "rehearsal"
NOT_RUN = "Not run: no device was within reach."

HEAD = f"""# On a GPU

`make gpu` (`python -m benchmarks.gpu --minutes M --wheels FOLDER`) checks and times everything that needs a device, and
continues where it stopped. Without a device it runs the same code on the CPU, at a small size, so that nothing but the
device is new.

Targets, for a GPU of the H200's class: selecting 1 % of 128 M elements (float32, steady state of error feedback, cold
L2 cache, CUDA graphs) at 83 % of the bandwidth of a copy, by 12 bytes an element; 16 M in 62 µs, 1 M in 12 µs; torch's
operations 8 times and MSTopK's 30 rounds 10 times as long; 161 segments as of ResNet-50 at most 1.3 times the merged
buffer; a step of an exact plan no longer than DDP's.

## Measured

{marks(DEVICE)[0]}

{NOT_RUN}

{marks(DEVICE)[1]}

## Rehearsed

{marks(REHEARSAL)[0]}

Nothing yet.

{marks(REHEARSAL)[1]}
"""


def page(text: str | None, environment: Mapping[str, Any], results: Mapping[str, Result], source: str) -> str:
    """Return the page, whose part for this environment is written anew; `text` is as it is now, None: there is none."""
    text = text if text is not None and marks(DEVICE)[0] in text else HEAD
    if environment["device"] is None:
        return replace_part(text, REHEARSAL, _rehearsed(environment, results))
    return replace_part(text, DEVICE, _measured(environment, results, source))


def _where(environment: Mapping[str, Any]) -> str:
    device = environment["device"]
    versions = f"torch {environment['torch']}, Python {environment['python']}, planner {environment['planner']}"
    if device is None:
        return f"a CPU ({environment['machine']}), {versions}"
    return (
        f"{device['name']} ({device['memory_gib']} GiB, compute capability {device['capability']}"
        f"{'' if device['count'] == 1 else ', one of ' + str(device['count'])}), driver {device['driver']}, "
        f"CUDA {device['cuda']}, {versions}"
    )


def _measured(environment: Mapping[str, Any], results: Mapping[str, Result], source: str) -> str:
    dates = sorted({result.date for result in results.values()})
    lines = [f"{' to '.join(dict.fromkeys((dates[0], dates[-1]))) if dates else 'No date'}: {_where(environment)}."]
    for part in PARTS.values():
        lines.append(f"### {part.title}")
        result = results.get(part.name)
        if result is None:
            lines.append("Not run: the time was up, or it was not asked for.")
            continue
        if result.source != source:
            lines.append("Run from an earlier source.")
        if result.failures:
            lines.append("**Failed**: " + "; ".join(result.failures))
        if result.left_out:
            lines.append(f"Left out: {'; '.join(result.left_out)}.")
        lines.append(result.text)
    return "\n\n".join(lines)


def _rehearsed(environment: Mapping[str, Any], results: Mapping[str, Result]) -> str:
    dates = sorted({result.date for result in results.values()})
    lines = [f"On {_where(environment)}{', ' + dates[-1] if dates else ''}. Sizes are small, and no time counts:", ""]
    for part in PARTS.values():
        result = results.get(part.name)
        said = "not run" if result is None else "runs"
        if result is not None and result.failures:
            said = "**fails**: " + "; ".join(result.failures)
        elif result is not None and result.left_out:
            said = f"runs, but for {'; '.join(result.left_out)}"
        lines.append(f"- {part.title}: {said}. On a device it would {part.does}.")
    return "\n".join(lines)
