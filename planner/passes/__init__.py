"""Passes: small pure functions from schedule to schedule, one file each. `PASSES` is the only list of them."""

from __future__ import annotations

from collections.abc import Mapping

from planner.passes.base import Pass
from planner.passes.delay import Delay
from planner.passes.joint import Joint
from planner.passes.late_gather import LateGathers
from planner.passes.local_async import LocalAsync
from planner.passes.merge import Merge
from planner.passes.outer import Outer
from planner.passes.shard_updates import ShardUpdates
from planner.passes.sparsify import Sparsify
from planner.passes.topology import Topology

PASSES: Mapping[str, type[Pass]] = {
    made.name: made for made in (Delay, Joint, LateGathers, LocalAsync, Merge, Outer, ShardUpdates, Sparsify, Topology)
}
"""Registry: name → pass. Add a pass here and the contract test covers it."""
