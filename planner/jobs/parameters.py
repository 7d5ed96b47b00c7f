"""The trainable parameters of a job, for what was measured elsewhere."""

from __future__ import annotations

from planner.jobs.job import load_job
from planner.profile.compute import matrix_of
from planner.traces.gradients import Parameter
from runtime.checks.plan import parameters_fingerprint, trainable_parameters


def parameters_of(job: str) -> tuple[list[Parameter], str]:
    """Return the trainable parameters of a job, in the order in which its model has them, and their fingerprint.

    Raises InputError as `load_job` does.
    """
    found = trainable_parameters(load_job(job).model)
    parameters = [Parameter(name, tuple(tensor.shape), matrix_of(tensor)) for name, tensor in found.items()]
    return parameters, parameters_fingerprint(found)
