"""What every rank of a rehearsal under FSDP2 does: wrappings of units that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from planner.comparison.measure import Measured
from planner.comparison.wrapped import WARM_UP_STEPS, WrappingRunner, wrap
from planner.comparison.wrappings import Wrapping, wrappings_of
from planner.cost.halves import LIBRARY_GATHER, LIBRARY_SCATTER
from planner.fsdp2.decide import plan_for
from planner.fsdp2.inputs import Setting
from planner.fsdp2.program import Shape, host_program
from planner.fsdp2.search import Ahead, groupable_units, with_ahead
from planner.fsdp2.simulator import simulate
from planner.profile.links import SMALLEST_BYTES, measure_links
from planner.profile.units import LiveBytes
from planner.rehearse import ranks
from planner.rehearse.asked import AskedWrappings
from planner.rehearse.ranks import Decided, Rehearser, Rounds
from planner.rehearse.units_model import UnitsModel
from runtime.errors import InputError
from runtime.plan import FullyShardPlan, ModelReference, Plan, PlanWorld

ROUNDS_SHARE = 0.6
"""Share of the time left that the fewest rounds may take where the dilation is chosen."""
HALVINGS = 30
FIRST_STEPS = 2
"""Steps of each variant before any counts: FSDP2 sets itself up in the first. In the last memory is counted."""


class WrappingRehearser(Rehearser[AskedWrappings, Wrapping]):
    """See `Rehearser`."""

    COPIES = 4.0
    """Before a reduce-scatter begins, hosts copy gradients twice, and whole parameters behind each gather."""

    @staticmethod
    def most_dilate(asked: AskedWrappings, left_s: float) -> float:
        """See `Rehearser`."""
        setting = asked.setting(asked.cluster)
        chosen = plan_for(setting, asked.max_memory_mib).fsdp2
        assert chosen is not None
        step_us = sum(_predicted(setting, wrappings_of(setting, chosen)).values())
        computed_us = sum(unit.forward_us + unit.backward_us for unit in asked.units.units)
        fewest_us = step_us * (FIRST_STEPS + ranks.LEAST_ROUNDS * (WARM_UP_STEPS + ranks.BLOCK_STEPS))
        fewest_us += (1 + ranks.OWN_STEPS) * computed_us
        return float(max(1.0, ROUNDS_SHARE * left_s * 1e6 / fewest_us))

    def decide(self) -> Decided[Wrapping]:
        """See `Rehearser`."""
        asked, world, scale = self.asked, self.world, self.scale
        own_us = self._own_us()
        numel = sum(weight.numel for weight in asked.units.weights)
        size_bytes = round(numel * asked.units.element_bytes / scale.shrink)
        names = (LIBRARY_GATHER, LIBRARY_SCATTER)
        each_s = ranks.LINK_SHARE * asked.minutes * 60.0 / len(names)
        smallest_bytes = max(ranks.LEAST_BYTES * world.ranks, round(SMALLEST_BYTES / scale.shrink))
        times = measure_links(world, ranks.CPU, size_bytes, self.progress, names, each_s, smallest_bytes)
        setting = asked.setting(asked.flat(samples=self.unscaled(times.samples)))
        # Each rank updates a part, and each has what is its own.
        units = replace(asked.units, update_us=asked.units.update_us + own_us * world.ranks)
        setting = replace(setting, units=units, host_us=self._host_us(setting))
        return self.first_decides(lambda: self._decided(setting), "deciding")

    def _own_us(self) -> float:
        """Return by how much a step of the plain model takes longer than its units and its update, undilated, on the
        last rank, for whom the others wait. What is compared is not looked at.
        """
        units, world = self.scale.units(self.asked.units), self.world
        model = UnitsModel(units, world.rank, world.ranks, self.scale.dilate)
        asked_us = sum(unit.forward_us + unit.backward_us for unit in units.units) + units.update_us / world.ranks
        both_us = self.bare_steps_us(model.step, 1, "steps without communication")
        return max(0.0, max(both_us) - asked_us) / self.scale.dilate

    def _host_us(self, setting: Setting) -> float:
        """Return what a host does itself before each message, undilated, as this machine's cores are shared.

        It is what the step of a model lasts longer than its messages that computes nothing, weighs next to nothing, and
        has a group for each of the units. What is compared is not looked at.
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
        _wrap(wrapped, plan, alone)
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
        wrappings = wrappings_of(setting, plan.fsdp2)
        return Decided(
            plan=replace(plan, model=ModelReference(name=plan.model.name), predicted=None, baselines=None),
            variants=wrappings,
            from_constants_us=_predicted(self.asked.setting(self.asked.cluster), wrappings),
            bounds={"limit_bytes": plan.fsdp2.memory_bytes},
        )

    def rounds(self, decided: Decided[Wrapping], left_s: float) -> Rounds:
        """See `Rehearser`."""
        minutes = self.asked.minutes
        step_s = self.scale.dilate * sum(one.predicted_us or 0.0 for one in decided.variants) / 1e6
        left_s -= FIRST_STEPS * step_s
        round_s = (WARM_UP_STEPS + ranks.BLOCK_STEPS) * step_s
        lacking_s = ranks.LEAST_ROUNDS * round_s - left_s
        if lacking_s > 0.0:
            raise InputError(
                f"--minutes {minutes:g}: a round of {len(decided.variants)} wrappings takes {round_s:.2g} s here, and "
                f"{max(0.0, left_s):.0f} s are left for {ranks.LEAST_ROUNDS} of them; expected --minutes "
                f"{minutes + lacking_s / 60.0 + 0.5:.0f} or more, or --dilate less"
            )
        return Rounds(count=min(ranks.MOST_ROUNDS, int(left_s / round_s)), steps=ranks.BLOCK_STEPS)

    def measure(self, decided: Decided[Wrapping], rounds: Rounds, started_s: float) -> tuple[Measured, dict[str, Any]]:
        """See `Rehearser`."""
        variants, dilate = decided.variants, self.scale.dilate
        self.say(f"{len(variants)} wrappings: {rounds.count} rounds of {rounds.steps} steps each")
        models = {one.name: self._model(decided.plan, one) for one in variants}
        counted_bytes = {name: self._peak_bytes(model) for name, model in models.items()}
        before_us = {name: model.device.late_us for name, model in models.items()}

        def prepare(name: str) -> Callable[[], None]:
            return models[name].step

        runner = WrappingRunner(self.world, models, prepare)
        end_s = started_s + 60.0 * self.asked.minutes
        measured = runner.measure(variants, rounds.count, rounds.steps, self.progress, end_s)
        steps = len(measured.records[0].step_us) * (WARM_UP_STEPS + rounds.steps)
        late_us = {name: (model.device.late_us - before_us[name]) / steps / dilate for name, model in models.items()}
        peak_bytes = {one.name: one.peak_bytes for one in variants}
        return measured, {"late_us": late_us, "peak_bytes": peak_bytes, "counted_bytes": counted_bytes}

    def _model(self, plan: Plan, wrapping: Wrapping) -> UnitsModel:
        """Return the scaled model, wrapped by stock FSDP2, after its first step."""
        model = UnitsModel(self.scale.units(self.asked.units), self.world.rank, self.world.ranks, self.scale.dilate)
        _wrap(model, plan, wrapping.spec)
        for _ in range(FIRST_STEPS - 1):
            model.step()
        return model

    def _peak_bytes(self, model: UnitsModel) -> int:
        """Count the peak of one step, unshrunk: all that is allocated, this rank's parts, and the optimizer's state."""
        with LiveBytes(model.local_pointers()) as live:
            model.step()
        held_bytes, shrink = model.local_bytes(), self.scale.shrink
        return round(shrink * (live.total_bytes + held_bytes) + shrink * self.asked.units.state_factor * held_bytes)


def _wrap(model: UnitsModel, plan: Plan, spec: FullyShardPlan) -> None:
    """Wrap a model whose accelerator is told of messages that have come."""
    overlap = wrap(model, plan, spec, ranks.TIMEOUT_S)
    assert overlap is not None
    overlap.arrived = model.device.arrived


def _predicted(setting: Setting, wrappings: Sequence[Wrapping]) -> dict[str, float]:
    """Return the steps of wrappings by what the setting's cluster says."""
    return {
        one.name: simulate(setting.shape, one.spec, setting.costs(None), setting.executor, bars=False).iteration_us
        for one in wrappings
    }
