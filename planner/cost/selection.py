"""What selecting elements of a bucket, or adding up what was selected, costs on the compute resource."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.documents.profile import SelectionLine
from runtime.errors import InputError

Floats = NDArray[np.float64]

FREE = SelectionLine(alpha_us=0.0, beta_us_per_byte=0.0)


def selector_line(given: SelectionLine | dict[str, SelectionLine] | None, selector: str, where: str) -> SelectionLine:
    """Return what selecting (or unpacking) by a selector costs: the document's one line, or that of this one; else 0.

    Raises:
        InputError: the document has lines by selector, and none for this one.
    """
    if given is None:
        return FREE
    if isinstance(given, SelectionLine):
        return given
    if selector not in given:
        raise InputError(
            f"{where}: no cost for the selector {selector!r}; found {', '.join(given) or 'none'}; expected "
            f'"{selector}": {{"alpha_us": …, "beta_us_per_byte": …}} there: time its selection over a few sizes'
        )
    return given[selector]


@dataclass(frozen=True, eq=False)
class SelectionCost:
    """Lines over a bucket's dense bytes, one for each density that was timed, and between them for those between.

    Below the least and above the largest density the lines stay.
    """

    density: Floats
    """Ascending. Shape (densities,)."""
    alpha_us: Floats
    beta_us_per_byte: Floats

    @classmethod
    def of(cls, line: SelectionLine, shards: int = 1) -> SelectionCost:
        """`shards`: over how many ranks a bucket is shared out before each selects from its own."""
        rows = line.by_density or ((1.0, line.alpha_us, line.beta_us_per_byte),)
        density, alpha_us, beta = np.array(sorted(rows), dtype=np.float64).T
        return cls(density, alpha_us, beta / shards)

    def line(self, density: ArrayLike) -> tuple[Floats, Floats]:
        """(alpha_us, beta_us_per_byte) where this share of all elements is selected; elementwise."""
        at = np.asarray(density, dtype=np.float64)
        return np.interp(at, self.density, self.alpha_us), np.interp(at, self.density, self.beta_us_per_byte)

    def __call__(self, dense_bytes: ArrayLike, density: ArrayLike) -> Floats:
        """Microseconds for buckets of so many dense bytes in all; elementwise."""
        alpha_us, beta = self.line(density)
        return np.asarray(alpha_us + beta * np.asarray(dense_bytes, dtype=np.float64))
