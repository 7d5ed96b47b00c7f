"""Forms of buckets for tests of searches."""

from planner.model.codecs import Form, TopK
from runtime.plan.transports import FLAT


def at_ratios(*ratios: float) -> list[Form]:
    """Return forms on one network that send the largest elements at these ratios."""
    return [Form(FLAT, TopK(), ratio) for ratio in ratios]
