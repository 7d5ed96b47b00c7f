"""Partial backward: the gradients are those of a whole one, and nothing below the block, or beside it, is computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.errors import InputError
from runtime.local_async.partial import partial_backward

LAYERS = 4


def network() -> nn.Sequential:
    """conv, norm and activation, `LAYERS` times; a head."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(LAYERS):
        layers += [nn.Conv2d(3 if index == 0 else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def loss_of(model: nn.Module) -> Tensor:
    inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    return nn.functional.cross_entropy(model(inputs), torch.arange(4))


def graph_of(loss: Tensor) -> list[torch.autograd.graph.Node]:
    """Every node of the graph, the loss's first."""
    found: dict[torch.autograd.graph.Node, None] = {}
    left = [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = None
            left += [following for following, _ in node.next_functions]
    return list(found)


def nodes_that_run(loss: Tensor, backward: Callable[[Tensor], object]) -> list[str]:
    """Names of the nodes that a backward runs, and of what they give to parameters: convolutions' outputs that are not
    computed are left out.
    """
    ran: list[str] = []
    for node in graph_of(loss):

        def note(given: tuple[Tensor | None, ...], _: object, name: str = node.name()) -> None:
            computed = "".join("x" if tensor is not None else "-" for tensor in given)
            ran.append(f"{name}:{computed}" if name.startswith("Convolution") else name)

        node.register_hook(note)
    backward(loss)
    return ran


def blocks_of(model: nn.Sequential) -> list[list[Tensor]]:
    """The parameters of each convolution with its norm; those of the head."""
    blocks = [[*model[3 * i].parameters(), *model[3 * i + 1].parameters()] for i in range(LAYERS)]
    return [*blocks, list(model[-1].parameters())]


@pytest.mark.parametrize("index", range(LAYERS + 1))
def test_gradients_are_those_of_a_whole_backward(index: int) -> None:
    model = network()
    found = partial_backward(loss_of(model), blocks_of(model)[index])
    assert all(parameter.grad is None for parameter in model.parameters())
    loss_of(model).backward()
    for parameter, gradient in zip(blocks_of(model)[index], found, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize("index", range(LAYERS))
def test_only_nodes_down_to_the_block_run(index: int) -> None:
    """Of convolutions above the block gradients of inputs alone are computed, in the block those of weights alone."""
    model = network()
    ran = nodes_that_run(loss_of(model), lambda loss: partial_backward(loss, blocks_of(model)[index]))
    convolutions = [name for name in ran if name.startswith("Convolution")]
    assert convolutions == ["ConvolutionBackward0:x--"] * (LAYERS - 1 - index) + ["ConvolutionBackward0:-xx"]
    assert sum("BatchNorm" in name for name in ran) == LAYERS - index
    assert not any("AccumulateGrad" in name for name in ran)


def test_the_count_sees_a_whole_backward() -> None:
    """The other way round, so that the test above can fail."""
    ran = nodes_that_run(loss_of(network()), lambda loss: loss.backward())
    convolutions = [name for name in ran if name.startswith("Convolution")]
    assert convolutions == ["ConvolutionBackward0:xxx"] * (LAYERS - 1) + ["ConvolutionBackward0:-xx"]
    assert sum("AccumulateGrad" in name for name in ran) == 4 * LAYERS + 2


def test_unused_parameters_and_empty_blocks() -> None:
    model, unused = network(), nn.Parameter(torch.ones(2))
    gradient, nothing = partial_backward(loss_of(model), [model[-1].bias, unused])
    assert gradient is not None
    assert nothing is None
    assert partial_backward(loss_of(model), []) == ()


@pytest.mark.parametrize("block", ["below", "inside"])
def test_checkpoints_that_know_whole_backwards_only_are_refused(block: str) -> None:
    layers = nn.ModuleDict({"below": nn.Linear(3, 3), "inside": nn.Linear(3, 3), "above": nn.Linear(3, 1)})

    def gradient(reentrant: bool) -> Tensor | None:
        hidden = checkpoint(layers["inside"], layers["below"](torch.ones(2, 3)), use_reentrant=reentrant)
        return partial_backward(layers["above"](hidden).sum(), [layers[block].weight])[0]

    assert gradient(reentrant=False) is not None
    with pytest.raises(InputError, match="use_reentrant=False"):
        gradient(reentrant=True)
