"""Models of transformers that see and hear, built small from their configs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .registry import CLASSES, IMAGES, LENGTH, PIXELS, generator, job, member, own_loss, pictures, tokens

WIDTH, FEED = 16, 32
SIZE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": FEED,
}
PATCHES: dict[str, Any] = {"image_size": PIXELS, "patch_size": 4}


def labelled(step: int, rank: int) -> dict[str, Tensor]:
    """Images and labels by name."""
    images, labels = pictures(step, rank)
    return {"pixel_values": images, "labels": labels}


def image_job(model: nn.Module) -> TrainingJob:
    """Names images."""
    return job(model, own_loss, labelled)


@member("vision")
def vit() -> TrainingJob:
    """A class token and positions that are parameters of no layer."""
    return image_job(
        transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=CLASSES, **PATCHES, **SIZE))
    )


@member("vision")
def deit() -> TrainingJob:
    """One token more."""
    return image_job(
        transformers.DeiTForImageClassification(transformers.DeiTConfig(num_labels=CLASSES, **PATCHES, **SIZE))
    )


@member("vision")
def swin() -> TrainingJob:
    """Shifted windows, merged patches, stochastic depth."""
    sizes = {"embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 2}
    return image_job(
        transformers.SwinForImageClassification(
            transformers.SwinConfig(num_labels=CLASSES, drop_path_rate=0.1, image_size=PIXELS, patch_size=2, **sizes)
        )
    )


@member("vision")
def convnext() -> TrainingJob:
    """Depthwise convolutions, norms over channels."""
    sizes = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
    return image_job(
        transformers.ConvNextForImageClassification(
            transformers.ConvNextConfig(num_labels=CLASSES, drop_path_rate=0.1, **sizes)
        )
    )


@member("vision")
def resnet_of_transformers() -> TrainingJob:
    """Bottlenecks."""
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "bottleneck"}
    return image_job(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=CLASSES, **sizes)))


@member("vision")
def segformer() -> TrainingJob:
    """A class for each pixel."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        labels = torch.randint(CLASSES, (IMAGES, 32, 32), generator=generator(step, rank))
        images = torch.randn(IMAGES, 3, 32, 32, generator=generator(step, rank))
        return {"pixel_values": images, "labels": labels}

    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16, num_labels=CLASSES,
    )  # fmt: skip
    return job(transformers.SegformerForSemanticSegmentation(config), own_loss, batch)


@member("vision and text")
def clip() -> TrainingJob:
    """Two towers; the contrastive loss is computed inside the model."""
    text = {"vocab_size": 61, "max_position_embeddings": LENGTH, "eos_token_id": 2, "bos_token_id": 1, **SIZE}
    config = transformers.CLIPConfig(text_config=text, vision_config={**PATCHES, **SIZE}, projection_dim=8)

    def batch(step: int, rank: int) -> dict[str, Any]:
        return {"input_ids": tokens(step, rank), "pixel_values": pictures(step, rank)[0], "return_loss": True}

    return job(transformers.CLIPModel(config), own_loss, batch)


@member("sound")
def whisper() -> TrainingJob:
    """Spectra to text."""
    config = transformers.WhisperConfig(
        vocab_size=61, num_mel_bins=8, d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=FEED, decoder_ffn_dim=FEED, max_source_positions=12,
        max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        features = torch.randn(2, 8, 24, generator=generator(step, rank))
        return {"input_features": features, "labels": tokens(step, rank)[:, :6]}

    return job(transformers.WhisperForConditionalGeneration(config), own_loss, batch)


@member("sound", data_dependent=True)
def wav2vec2() -> TrainingJob:
    """Sound to letters; parts of the sound are masked at random with numpy, and layers dropped."""
    config = transformers.Wav2Vec2Config(
        vocab_size=20, conv_dim=[8, 8], conv_stride=[5, 2], conv_kernel=[10, 3], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_length=2, mask_time_prob=0.3, pad_token_id=0, **SIZE,
    )  # fmt: skip

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        source = generator(step, rank)
        sound = torch.randn(2, 400, generator=source)
        return {"input_values": sound, "labels": torch.randint(1, 20, (2, 5), generator=source)}

    return job(transformers.Wav2Vec2ForCTC(config), own_loss, batch)


@member("vision")
def masked_autoencoder() -> TrainingJob:
    """Sees a random quarter of the patches, paints the others."""
    sizes = {"decoder_hidden_size": 8, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    config = transformers.ViTMAEConfig(**PATCHES, **SIZE, **sizes, decoder_intermediate_size=16)
    return job(
        transformers.ViTMAEForPreTraining(config),
        own_loss,
        lambda step, rank: {"pixel_values": pictures(step, rank)[0]},
    )


@member("time series")
def patch_tst() -> TrainingJob:
    """Forecasts several series from patches of their past."""
    config = transformers.PatchTSTConfig(
        num_input_channels=2, context_length=16, prediction_length=4, patch_length=4, patch_stride=4, d_model=WIDTH,
        num_hidden_layers=1, num_attention_heads=2, ffn_dim=FEED,
    )  # fmt: skip

    def loss(model: nn.Module, series: Tensor) -> Tensor:
        predicted = model(past_values=series[:, :16]).prediction_outputs
        return functional.mse_loss(predicted, series[:, 16:])

    return job(
        transformers.PatchTSTForPrediction(config),
        loss,
        lambda step, rank: torch.randn(2, 20, 2, generator=generator(step, rank)),
    )
