"""What a fixture has ranks run: no more than the tests show that were asked for."""

from __future__ import annotations

import pytest


def asked_for(request: pytest.FixtureRequest, argument: str) -> list[str]:
    """Return the values of an argument of this file's tests with the fixture's own parameter if it has one."""
    found: dict[str, None] = {}
    for item in request.session.items:
        spec = getattr(item, "callspec", None)
        if item.path == request.path and spec is not None and argument in spec.params:
            own = spec.params.get(request.fixturename) if request.fixturename else None
            if own == getattr(request, "param", None):
                found[spec.params[argument]] = None
    return list(found)
