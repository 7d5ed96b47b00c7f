"""A rank of a rehearsal under FSDP2: wrappings of units that are timed waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planner.comparison.measure import Measured
from planner.comparison.variants import Rounds
from planner.comparison.wrapped import WARM_UP_STEPS, WrappingRunner, wrap
from planner.comparison.wrappings import Wrapping, wrappings_of
from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.fsdp2.decide import plan_for
from planner.fsdp2.inputs import Setting
from planner.fsdp2.program import Shape, host_program
from planner.fsdp2.search import Ahead, groupable_units, with_ahead
from planner.fsdp2.simulator import simulate
from planner.profile.links import measure_links
from planner.profile.step import decided_by_first
from planner.profile.units import LiveBytes
from planner.rehearse import ranks
from planner.rehearse.asked import AskedWrappings
from planner.rehearse.ranks import Blocks, Decided, Rehearser
from planner.rehearse.units_model import UnitsModel
from runtime.plan import FullyShardPlan, ModelReference, Plan, PlanWorld

ROUNDS_SHARE = 0.6
"""Share of the time left that the fewest rounds may take by the dilation that is chosen."""
HALVINGS = 30
FIRST_STEPS = 2
"""Number of steps of each variant before any counts: FSDP2 sets itself up in the first; the last counts memory."""


class WrappingRehearser(Rehearser[AskedWrappings, Wrapping]):
    """A rehearsal of wrappings, on this rank."""

    WHAT = "{variants} wrappings"
    COPIES = 4.0
    """Before a reduce-scatter begins, hosts copy gradients twice, and whole parameters after each gather."""

    @staticmethod
    def most_dilate(asked: AskedWrappings, left_s: float) -> float:
        """Return the dilation at which the fewest rounds take most of what is left, by the cluster's constants."""
        setting = asked.setting(asked.cluster)
        predicted_us = _predicted(setting, wrappings_of(setting, plan_for(setting, asked.max_memory_mib)))
        computed_us = sum(unit.forward_us + unit.backward_us for unit in asked.units.units)
        fewest_s = sum(each.least_s for each in _blocks(predicted_us, ranks.BLOCK_STEPS))
        return float(max(1.0, ROUNDS_SHARE * left_s / (fewest_s + (1 + ranks.OWN_STEPS) * computed_us / 1e6)))

    def decide(self) -> Decided[Wrapping]:
        """Time messages and what hosts do alone, and decide by that; every rank calls it."""
        asked, world = self.asked, self.world
        own_us = self._own_us()
        numel = sum(weight.numel for weight in asked.units.weights)
        size_bytes = round(numel * asked.units.element_bytes / self.scale.shrink)
        names = (LIBRARY_GATHER, LIBRARY_SCATTER)
        times = measure_links(self.bench, size_bytes, names, self.limits(len(names), world.ranks))
        setting = asked.setting(asked.flat(samples=self.unscaled(times.samples)))
        # Each rank updates a part, and each has what is its own.
        units = replace(asked.units, update_us=asked.units.update_us + own_us * world.ranks)
        setting = replace(setting, units=units, host_us=self._host_us(setting))
        return decided_by_first(world, lambda: self._decided(setting), "deciding")

    def _own_us(self) -> float:
        """Return the time of a step of the plain model beyond its units and its update, undilated.

        It is that of the last rank, for which the others wait. What is compared is not looked at.
        """
        units, world = self.scale.units(self.asked.units), self.world
        model = UnitsModel(units, world.rank, world.ranks, self.scale.dilate)
        asked_us = sum(unit.forward_us + unit.backward_us for unit in units.units) + units.update_us / world.ranks
        both_us = self.bare_steps_us(model.step, 1, "steps without communication")
        return max(0.0, max(both_us) - asked_us) / self.scale.dilate

    def _host_us(self, setting: Setting) -> float:
        """Return the time of a host before each message, undilated, as this machine's cores are shared.

        It is the time beyond its messages of the step of a model that computes nothing, weighs next to nothing, and has
        a group for each of the units. What is compared is not looked at.
        """
        world, scale = self.world, self.scale
        light = replace(
            self.asked.units, update_us=0.0, loss_working_bytes=0,
            units=tuple(
                replace(unit, forward_us=0.0, backward_us=0.0, activation_bytes=0, forward_working_bytes=0,
                        backward_working_bytes=0)
                for unit in self.asked.units.units
            ),
            weights=tuple(replace(weight, shape=(world.ranks,)) for weight in self.asked.units.weights),
        )  # fmt: skip
        groups = tuple((unit,) for unit in groupable_units(Shape.of(light, world.ranks)))
        alone = with_ahead(FullyShardPlan(groups=groups), Ahead(1))
        plain, wrapped = (UnitsModel(light, world.rank, world.ranks, scale.dilate) for _ in range(2))
        plan = Plan(
            model=ModelReference(name=self.asked.name), world=PlanWorld(ranks=world.ranks), accuracy="exact",
            buckets=(), fsdp2=alone,
        )  # fmt: skip
        _wrap(wrapped, Wrapping(name="a group for each unit", plan=plan))
        lasting_us = [
            self.bare_steps_us(model.step, FIRST_STEPS, "steps that compute nothing")[1] for model in (wrapped, plain)
        ]
        longer_us = (lasting_us[0] - lasting_us[1]) / scale.dilate
        weightless = replace(setting, units=light)

        def predicted_us(host_us: float) -> float:
            costs = replace(weightless.costs(None), update_us=0.0, host_us=host_us)
            return simulate(weightless.shape, alone, costs, setting.executor, bars=False).iteration_us

        messages = sum(1 for _ in host_program(weightless.shape, alone, waits=True).messages())
        low, high = 0.0, max(0.0, longer_us)
        for _ in range(HALVINGS if messages else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if predicted_us(middle) < longer_us else (low, middle)
        return low

    def _decided(self, setting: Setting) -> Decided[Wrapping]:
        plan = plan_for(setting, self.asked.max_memory_mib)
        assert plan.fsdp2 is not None
        bare = replace(plan, model=ModelReference(name=plan.model.name), predicted=None, baselines=None)
        wrappings = wrappings_of(setting, bare)
        return Decided(
            variants=wrappings,
            from_constants_us=_predicted(self.asked.setting(self.asked.cluster), wrappings),
            bounds={"limit_bytes": plan.fsdp2.memory_bytes},
        )

    def blocks(self, decided: Decided[Wrapping], steps: int) -> list[Blocks]:
        """Return each wrapping's blocks of `steps` measured steps."""
        dilate = self.scale.dilate
        return _blocks({one.name: dilate * (one.predicted_us or 0.0) for one in decided.variants}, steps)

    def measure(self, decided: Decided[Wrapping], rounds: Rounds) -> tuple[Measured, dict[str, Any]]:
        """Measure all wrappings; return that, dilated, and figures by name and wrapping, undilated."""
        variants, dilate = decided.variants, self.scale.dilate
        models = {one.name: self._model(one) for one in variants}
        counted_bytes = {name: self._peak_bytes(model) for name, model in models.items()}
        before_us = {name: model.device.late_us for name, model in models.items()}

        def prepare(name: str) -> Callable[[], None]:
            return models[name].step

        measured = WrappingRunner(self.bench, models, prepare).measure(variants, rounds)
        steps = len(measured.records[0].step_us) * (WARM_UP_STEPS + rounds.steps)
        late_us = {name: (model.device.late_us - before_us[name]) / steps / dilate for name, model in models.items()}
        peak_bytes = {one.name: one.peak_bytes for one in variants}
        return measured, {"late_us": late_us, "peak_bytes": peak_bytes, "counted_bytes": counted_bytes}

    def _model(self, wrapping: Wrapping) -> UnitsModel:
        """Return the scaled model, wrapped by stock FSDP2, after its first step."""
        model = UnitsModel(self.scale.units(self.asked.units), self.world.rank, self.world.ranks, self.scale.dilate)
        _wrap(model, wrapping)
        for _ in range(FIRST_STEPS - 1):
            model.step()
        return model

    def _peak_bytes(self, model: UnitsModel) -> int:
        """Count the peak of one step, unshrunk: all that is allocated, this rank's parts, and the optimizer's state."""
        with LiveBytes(model.local_pointers()) as live:
            model.step()
        held_bytes, shrink = model.local_bytes(), self.scale.shrink
        return round(shrink * (live.total_bytes + held_bytes) + shrink * self.asked.units.state_factor * held_bytes)


def _wrap(model: UnitsModel, wrapping: Wrapping) -> None:
    """Wrap a model, and have its accelerator notified of messages that have come."""
    overlap = wrap(model, wrapping, ranks.TIMEOUT_S)
    assert overlap is not None
    overlap.arrived = model.device.arrived


def _predicted(setting: Setting, wrappings: Sequence[Wrapping]) -> dict[str, float]:
    """Return the steps of wrappings, in microseconds, by the setting's cluster."""
    return {
        one.name: simulate(setting.shape, one.spec, setting.costs(None), setting.executor, bars=False).iteration_us
        for one in wrappings
    }


def _blocks(steps_us: dict[str, float], steps: int) -> list[Blocks]:
    return [
        Blocks(name=name, step_s=step_us / 1e6, steps=WARM_UP_STEPS + steps, before=FIRST_STEPS)
        for name, step_us in steps_us.items()
    ]
