"""The errors a user can meet. The command line maps each class to one exit code."""

from __future__ import annotations


class PlannerError(Exception):
    """Base of every error raised on purpose; `str(error)` is a complete message."""

    exit_code = 1


class CheckFailed(PlannerError):
    """A check that the user asked for did not hold (exit code 1)."""

    exit_code = 1


class InputError(PlannerError, ValueError):
    """The user's input is wrong (exit code 2): says what was found, what was expected, where, and the cure."""

    exit_code = 2


class PlanMismatch(InputError):
    """The plan does not fit this model, this number of ranks, or the other ranks' plans."""


class EnvironmentFailure(PlannerError, RuntimeError):
    """The environment failed (exit code 3): a worker died, a deadline passed, a backend is missing."""

    exit_code = 3


class DriftWarning(UserWarning):
    """Steps take longer than the plan predicts, and have for a while; or may, profiled with another torch.
    The text says since when, why and what to do."""


class FallbackWarning(UserWarning):
    """A lossy plan is not faster than its exact fallback, with which training continues; the text has the times."""


class AdaptedWarning(UserWarning):
    """A plan is executed in another form than it says, for the ranks lie on other nodes; the text says how."""


class AccuracyWarning(UserWarning):
    """A lossy bucket had too large a residual for too long and is sent wider or whole for a while, as the text says."""


class AccuracyCostWarning(UserWarning):
    """A plan with low rank, selected elements or a relaxed mode costs accuracy that was not measured on a job, or was
    measured to be worse than DDP's or not known; the text says which."""


class CacheWarning(UserWarning):
    """A data cache works less well than asked for: a full disk, a corrupted entry; the text says which and the cure."""


class LostUpdaterWarning(UserWarning):
    """An updater of a run with local updaters was killed or hung; the text says which, and how training continues."""


class LongWaitWarning(UserWarning):
    """A rank waits for another one for long, which may be busy outside of a step; the text says where, and until
    when."""


class StragglerWarning(UserWarning):
    """A rank arrives last in nine of ten steps, by more than 5 % of a step; the text names it and what takes longer."""


class CommunicationError(EnvironmentFailure):
    """A collective failed or missed its deadline; names rank, bucket and collective."""
