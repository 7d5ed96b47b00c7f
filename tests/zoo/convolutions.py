"""Networks of convolutions: classifiers, U-Nets, a variational autoencoder, a generator with its critic."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .registry import CLASSES, IMAGES, PIXELS, generator, image_job, job, member, pictures


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm, ReLU."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """A basic block of ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = conv(inputs, outputs, 3, stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Adds in place."""
        y = self.second(self.first(x))
        y += x if self.shortcut is None else self.shortcut(x)
        return y.relu_()


@member("CNN")
def resnet() -> TrainingJob:
    """Residual blocks, additions in place."""
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)]
    return image_job(nn.Sequential(conv(3, 8), *blocks, *head))


class Dense(nn.Module):
    """A dense block: each layer sees all layers before it."""

    def __init__(self, inputs: int, growth: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(conv(inputs + i * growth, growth) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Concatenates."""
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


@member("CNN")
def densenet() -> TrainingJob:
    """Dense blocks with a transition between."""
    layers = [conv(3, 8), Dense(8, 4, 3), conv(20, 10, 1), nn.AvgPool2d(2), Dense(10, 4, 3)]
    return image_job(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(22, CLASSES)))


class Inverted(nn.Module):
    """MobileNetV3's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        inner = width * expansion
        self.expand, self.depthwise = conv(width, inner, 1), conv(inner, inner, 3, groups=inner)
        self.squeeze, self.excite = nn.Conv2d(inner, inner // 4, 1), nn.Conv2d(inner // 4, inner, 1)
        self.project = nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scales channels by what their means say."""
        y = self.depthwise(self.expand(x))
        gate = self.excite(functional.relu(self.squeeze(y.mean((2, 3), keepdim=True))))
        return x + self.project(functional.hardswish(y * functional.hardsigmoid(gate)))


@member("CNN")
def mobilenet() -> TrainingJob:
    """Depthwise convolutions, squeeze-and-excitation, dropout."""
    blocks = [Inverted(8, 4), Inverted(8, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return image_job(nn.Sequential(conv(3, 8, 3, 2), *blocks, nn.Linear(8, CLASSES)))


class ConvNextBlock(nn.Module):
    """Depthwise 7 by 7, norm over channels last, a scale for each channel, stochastic depth."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-2))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        """Whole samples are dropped in training."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = (self.scale * self.down(functional.gelu(self.up(y)))).permute(0, 3, 1, 2)
        if self.training:
            y = y * (torch.rand(x.shape[0], 1, 1, 1) >= self.drop) / (1 - self.drop)
        return x + y


@member("CNN")
def convnext_like() -> TrainingJob:
    """ConvNeXt's blocks written out, with stochastic depth."""
    body = [nn.Conv2d(3, 12, 4, 4), ConvNextBlock(12, 0.1), ConvNextBlock(12, 0.1)]
    return image_job(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, CLASSES)))


class UNet(nn.Module):
    """Down, up, and skips between; with a time it is a denoiser."""

    def __init__(self, outputs: int, timed: bool = False) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv(3, 8), conv(8, 16), conv(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1 = conv(32, 16), conv(16, 8)
        self.out = nn.Conv2d(8, outputs, 1)
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16)) if timed else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """(batch, 3, height, width) → (batch, outputs, height, width)."""
        first = self.down1(x)
        second = self.down2(functional.max_pool2d(first, 2))
        y = self.middle(functional.max_pool2d(second, 2))
        if self.time is not None and time is not None:
            frequency = torch.exp(torch.arange(4) * (-math.log(1000.0) / 4))
            angle = time[:, None] * frequency
            y = y + self.time(torch.cat([angle.sin(), angle.cos()], -1))[:, :, None, None]
        y = self.join2(torch.cat([self.up2(y), second], 1))
        y = self.join1(torch.cat([self.up1(y), first], 1))
        result: Tensor = self.out(y)
        return result


@member("U-Net")
def unet() -> TrainingJob:
    """Segmentation: a class for each pixel."""

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (IMAGES, PIXELS, PIXELS), generator=generator(step, rank))
        return pictures(step, rank)[0], labels

    return job(UNet(CLASSES), lambda model, pair: functional.cross_entropy(model(pair[0]), pair[1]), batch)


@member("U-Net")
def diffusion_unet() -> TrainingJob:
    """Predicts the noise that was added at a random time; called with keywords."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        source = generator(step, rank)
        return {
            "clean": torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=source),
            "noise": torch.randn(IMAGES, 3, PIXELS, PIXELS, generator=source),
            "time": torch.rand(IMAGES, generator=source),
        }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        keep = torch.cos(batch["time"] * math.pi / 2)[:, None, None, None]
        noisy = keep * batch["clean"] + (1 - keep**2).sqrt() * batch["noise"]
        return functional.mse_loss(model(x=noisy, time=1000 * batch["time"]), batch["noise"])

    return job(UNet(3, timed=True), loss, batch)


class Vae(nn.Module):
    """Encoder, a sample, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(512, 2 * 6))
        self.decoder = nn.Sequential(
            nn.Linear(6, 512), nn.Unflatten(1, (8, 8, 8)), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, torch.distributions.Normal]:
        """The image again, and the distribution of its code."""
        mean, log_scale = self.encoder(x).chunk(2, -1)
        code = torch.distributions.Normal(mean, log_scale.exp())
        return self.decoder(code.rsample()), code


@member("generative")
def vae() -> TrainingJob:
    """Samples inside its forward, returns a distribution."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        again, code = model(batch)
        prior = torch.distributions.Normal(torch.zeros(()), torch.ones(()))
        return functional.mse_loss(again, batch) + torch.distributions.kl_divergence(code, prior).mean()

    return job(Vae(), loss, lambda step, rank: pictures(step, rank)[0])


class Gan(nn.Module):
    """A generator that trains against a critic that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 4), nn.Tanh()
        )
        norm = nn.utils.parametrizations.spectral_norm
        layers = [norm(nn.Conv2d(3, 8, 4, 4)), nn.LeakyReLU(0.2), nn.Flatten(), norm(nn.Linear(128, 1))]
        self.critic = nn.Sequential(*layers).requires_grad_(False)

    def forward(self, noise: Tensor) -> dict[str, Tensor]:
        """Images and what the critic says to them."""
        images = self.generator(noise)
        return {"images": images, "scores": self.critic(images)}


@member("generative")
def gan() -> TrainingJob:
    """A generator behind a frozen critic with spectral norm; a dict comes out."""

    def loss(model: nn.Module, noise: Tensor) -> Tensor:
        return functional.softplus(-model(noise)["scores"]).mean()

    return job(Gan(), loss, lambda step, rank: torch.randn(IMAGES, 8, 1, 1, generator=generator(step, rank)))


class WaveBlock(nn.Module):
    """A dilated causal convolution with a gate."""

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.both = nn.utils.parametrizations.weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=dilation))
        self.mix = nn.Conv1d(width, 2 * width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(what goes on, what is skipped to the end)."""
        tanh, gate = self.both(functional.pad(x, (self.dilation, 0))).chunk(2, 1)
        onward, skip = self.mix(tanh.tanh() * gate.sigmoid()).chunk(2, 1)
        return x + onward, skip


class WaveNet(nn.Module):
    """Sound to sound."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.blocks = nn.ModuleList(WaveBlock(8, 2**i) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, samples) → the same."""
        x, total = self.first(x), torch.zeros(())
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        result: Tensor = self.out(total.relu())
        return result


@member("CNN")
def wavenet() -> TrainingJob:
    """Dilated convolutions with weight norm over sound."""

    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(2, 1, 48, generator=generator(step, rank))

    return job(WaveNet(), lambda m, x: functional.mse_loss(m(x[..., :-1]), x[..., 1:]), batch)
