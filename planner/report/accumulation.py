"""A plan's predictions per step of the optimizer, where scripts accumulate gradients over micro-batches. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from runtime.plan import Plan


def per_optimizer_step(plan: Plan, micro_batches: int, exchanged: int) -> Plan:
    """Return the plan with the times of a step of some micro-batches in place of those of one, to compare with a
    measured step of a script that accumulates gradients; `exchanged` of them exchange gradients.
    """
    said = plan.predicted
    if micro_batches == 1 or said is None:
        return plan

    def whole_us(iteration_us: float) -> float:
        return said.accumulated_us(micro_batches, exchanged, iteration_us) or 0.0

    note = f"times are of a step of {micro_batches} micro-batches, each as large as the batch that was profiled"
    certificate, baselines = plan.certificate, (plan.baselines or {}).items()
    predicted = said.accumulated(micro_batches, exchanged)
    if predicted is None:
        note = f"nothing is predicted of a step of {micro_batches} micro-batches: the plan does not hold its parts"
        return replace(plan, predicted=None, baselines=None, certificate=None, scaling=None, notes=(*plan.notes, note))
    if certificate is not None:
        bound_us = whole_us(certificate.lower_bound_us)
        gap = max(0.0, predicted.iteration_us / bound_us - 1.0) if bound_us > 0.0 else 0.0
        certificate = replace(certificate, lower_bound_us=bound_us, gap=gap)
    return replace(
        plan,
        predicted=predicted,
        baselines={name: of for name, one in baselines if (of := one.accumulated(micro_batches, exchanged))} or None,
        certificate=certificate,
        scaling=plan.scaling and tuple(
            replace(point, iteration_us={name: whole_us(us) for name, us in point.iteration_us.items()})
            for point in plan.scaling
        ),
        frontier=plan.frontier and tuple(
            replace(point, iteration_us=whole_us(point.iteration_us)) for point in plan.frontier
        ),
        notes=(*plan.notes, note),
    )  # fmt: skip
