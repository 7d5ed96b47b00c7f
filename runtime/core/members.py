"""The parameters and buffers of a model that ranks exchange: all but those that the model has DDP ignore.

`DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` says so, of experts of a rank's own, for example:
they are neither broadcast nor averaged, may differ between ranks in shape and dtype, and each rank updates its own.
"""

from __future__ import annotations

from torch import Tensor, nn

from runtime.plan.names import canonical_name
from runtime.torch_compat import names_ignored_by_ddp


def ignored_ids(model: nn.Module) -> set[int]:
    """Return the ids of the parameters and buffers that the model has DDP ignore.

    A tied parameter is ignored where all its names are listed, a buffer where the first of its names is, as by DDP. A
    name of the root module's own may begin with a dot, as in the loop of DDP's docstring.
    """
    names = {canonical_name(name.removeprefix(".")) for name in names_ignored_by_ddp(model)}
    if not names:
        return set()
    taken: set[int] = set()
    ignored: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        (ignored if canonical_name(name) in names else taken).add(id(parameter))
    return ignored - taken | {id(buffer) for name, buffer in model.named_buffers() if canonical_name(name) in names}


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that follow rank 0 at attach, trainable or not, with their names in the model."""
    ignored = ignored_ids(model)
    return [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in ignored]


def named_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that follow rank 0, with their names in the model."""
    ignored = ignored_ids(model)
    return [(name, buffer) for name, buffer in model.named_buffers() if id(buffer) not in ignored]


def exchanged_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in named_parameters(model)]


def exchanged_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for _, buffer in named_buffers(model)]
