"""What a local search over buckets in one of several forms looks at next."""

from __future__ import annotations

from collections.abc import Iterator

Choice = tuple[tuple[int, int], ...]
"""(stop, form) of each bucket; what a form is, the caller knows."""


def neighbours(choice: Choice, index: int, forms: int) -> Iterator[Choice]:
    """Bucket `index` in another form, merged with the next one, or ending elsewhere."""
    stop, form = choice[index]
    for other in range(forms):
        if other != form:
            yield (*choice[:index], (stop, other), *choice[index + 1 :])
    if index + 1 == len(choice):
        return
    following = choice[index + 1]
    for other in sorted({form, following[1]}):
        yield (*choice[:index], (following[0], other), *choice[index + 2 :])
    before = choice[index - 1][0] if index else 0
    for distance in (1, 2, 4, 8, 16):
        for place in (stop - distance, stop + distance):
            if before < place < following[0]:
                yield (*choice[:index], (place, form), *choice[index + 1 :])
