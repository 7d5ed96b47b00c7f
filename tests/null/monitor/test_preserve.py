"""A model is left as it was found, whatever measuring ran on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from runtime.monitor.preserve import preserved


class Averaging(nn.Module):
    """Each forward puts new tensors in place of its buffers; one of them is there from the first forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("last", None)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3) → (batch, 2)."""
        hidden: Tensor = self.linear(x)
        self.mean = self.mean * 0.9 + hidden.detach().mean(0) * 0.1
        self.last = hidden.detach()
        self.register_buffer("count", torch.ones(1))
        return hidden


@pytest.mark.parametrize("raises", [False, True])
def test_buffers_that_a_forward_replaces_come_back(raises: bool) -> None:
    model = Averaging()
    mean = model.mean
    try:
        with preserved(model):
            model.mean.add_(1.0)
            model(torch.ones(4, 3)).sum().backward()
            assert model.mean is not mean
            if raises:
                raise ArithmeticError
    except ArithmeticError:
        assert raises
    assert model.mean is mean
    assert torch.equal(mean, torch.ones(2))
    assert model.last is None
    assert list(model.state_dict()) == ["mean", "linear.weight", "linear.bias"]
    assert model.linear.weight.grad is None


def test_a_scripted_part_is_left_as_it_was_found() -> None:
    inner: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model = nn.Sequential(inner, nn.Linear(2, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with preserved(model):
        model(torch.randn(4, 3)).sum().backward()
        assert int(model.state_dict()["0.1.num_batches_tracked"]) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
