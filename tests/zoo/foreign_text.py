"""Models of transformers that read text, built small from their configs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .registry import LENGTH, SEQUENCES, VOCABULARY, adamw, generator, job, member, own_loss, tokens

WIDTH, FEED = 16, 32
SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": FEED,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def masked(step: int, rank: int) -> dict[str, Tensor]:
    """Text of which some words are hidden, with a mask of padding, as collators make it."""
    ids = tokens(step, rank)
    hidden = torch.rand(ids.shape, generator=generator(step, rank)) < 0.3
    hidden[:, 0] = True
    attention = torch.ones_like(ids)
    attention[0, -3:] = 0
    return {
        "input_ids": ids.masked_fill(hidden, 3),
        "attention_mask": attention,
        "labels": ids.masked_fill(~hidden, -100),
    }


def causal(step: int, rank: int) -> dict[str, Tensor]:
    """Text and itself."""
    ids = tokens(step, rank)
    return {"input_ids": ids, "labels": ids}


def translation(step: int, rank: int) -> dict[str, Tensor]:
    """Text and its translation."""
    return {"input_ids": tokens(step, rank), "labels": tokens(step + 1000, rank)[:, :8].contiguous()}


def masked_job(model: nn.Module) -> TrainingJob:
    """Guesses hidden words."""
    return TrainingJob(model=model, loss=own_loss, batch=masked, optimizer=adamw)


def causal_job(config: transformers.PretrainedConfig) -> TrainingJob:
    """Guesses next words."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    return TrainingJob(model=model, loss=own_loss, batch=causal, optimizer=adamw)


def translation_job(config: transformers.PretrainedConfig) -> TrainingJob:
    """Translates."""
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    return TrainingJob(model=model, loss=own_loss, batch=translation, optimizer=adamw)


@member("encoder of text")
def bert() -> TrainingJob:
    """Tied embeddings, dropout, a mask of padding."""
    return masked_job(transformers.BertForMaskedLM(transformers.BertConfig(**SIZE)))


@member("encoder of text")
def distilbert() -> TrainingJob:
    """Two labels for a text; the loss is ours, the call is positional."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=FEED, max_position_embeddings=LENGTH
    )

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["input_ids"], batch["attention_mask"], return_dict=False)[0]
        return functional.cross_entropy(scores, batch["input_ids"][:, 1] % 2)

    return job(transformers.DistilBertForSequenceClassification(config), loss, masked)


@member("encoder of text")
def roberta() -> TrainingJob:
    """Positions counted from the padding on; hidden states are returned too."""
    return masked_job(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SIZE, output_hidden_states=True)))


@member("encoder of text")
def albert() -> TrainingJob:
    """One layer's weights used three times."""
    sizes = {**SIZE, "num_hidden_layers": 3}
    return masked_job(transformers.AlbertForMaskedLM(transformers.AlbertConfig(embedding_size=8, **sizes)))


@member("encoder of text")
def electra() -> TrainingJob:
    """Tells which words were replaced."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        ids = tokens(step, rank)
        return {"input_ids": ids, "labels": ids % 2}

    config = transformers.ElectraConfig(embedding_size=8, **SIZE)
    return job(transformers.ElectraForPreTraining(config), own_loss, batch)


@member("encoder of text")
def deberta_v2() -> TrainingJob:
    """Attention to contents and to distances apart."""
    config = transformers.DebertaV2Config(
        relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, **SIZE
    )
    return masked_job(transformers.DebertaV2ForMaskedLM(config))


@member("encoder of text")
def layoutlm() -> TrainingJob:
    """Words with the boxes in which they stand."""

    def batch(step: int, rank: int) -> dict[str, Tensor]:
        ids = tokens(step, rank)
        boxes = torch.randint(0, 16, (SEQUENCES, LENGTH, 4), generator=generator(step, rank)).cumsum(-1)
        return {"input_ids": ids, "bbox": boxes, "labels": ids % 3}

    config = transformers.LayoutLMConfig(max_2d_position_embeddings=64, num_labels=3, **SIZE)
    return job(transformers.LayoutLMForTokenClassification(config), own_loss, batch)


@member("decoder of text")
def gpt2() -> TrainingJob:
    """Weights stored transposed (Conv1D)."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return causal_job(transformers.GPT2Config(bos_token_id=1, eos_token_id=2, **sizes))


@member("decoder of text")
def gpt_neox() -> TrainingJob:
    """Attention and products side by side."""
    return causal_job(transformers.GPTNeoXConfig(**SIZE))


@member("decoder of text")
def opt() -> TrainingJob:
    """Learned positions with an offset."""
    sizes = {key: value for key, value in SIZE.items() if key != "intermediate_size"}
    return causal_job(transformers.OPTConfig(ffn_dim=FEED, word_embed_proj_dim=WIDTH, **sizes))


@member("decoder of text")
def bloom() -> TrainingJob:
    """Biases of attention instead of positions."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2}
    return causal_job(transformers.BloomConfig(**sizes))


@member("decoder of text")
def llama() -> TrainingJob:
    """Grouped queries, rotary positions, a gradient checkpoint for each layer."""
    made = causal_job(transformers.LlamaConfig(num_key_value_heads=1, use_cache=False, **SIZE))
    model: Any = made.model
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    return made


@member("decoder of text")
def mistral() -> TrainingJob:
    """A sliding window."""
    return causal_job(transformers.MistralConfig(num_key_value_heads=1, sliding_window=4, **SIZE))


@member("decoder of text")
def qwen2() -> TrainingJob:
    """Biases in attention; written-out attention."""
    return causal_job(transformers.Qwen2Config(num_key_value_heads=2, attn_implementation="eager", **SIZE))


@member("decoder of text")
def gemma() -> TrainingJob:
    """Heads wider than the model divided by them, scaled embeddings; only the last positions are scored."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores = model(batch["input_ids"][:, :-1], logits_to_keep=4, use_cache=False).logits
        return functional.cross_entropy(scores.flatten(0, 1), batch["input_ids"][:, -4:].flatten())

    config = transformers.GemmaConfig(num_key_value_heads=1, head_dim=16, **SIZE)
    return job(transformers.GemmaForCausalLM(config), loss, causal)


@member("decoder of text")
def phi() -> TrainingJob:
    """Rotary positions on a part of each head."""
    return causal_job(transformers.PhiConfig(**SIZE))


@member("mixture of experts")
def mixtral() -> TrainingJob:
    """Routed experts with the loss that balances them."""
    sizes = {"num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    return causal_job(transformers.MixtralConfig(output_router_logits=True, **sizes, **SIZE))


@member("state space")
def mamba() -> TrainingJob:
    """A selective scan, in plain operations where there is no kernel."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
    return causal_job(transformers.MambaConfig(**sizes))


@member("encoder and decoder of text")
def t5() -> TrainingJob:
    """Relative positions shared by all layers, embeddings shared by both halves."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": FEED, "num_layers": 2, "num_heads": 2}
    return translation_job(transformers.T5Config(decoder_start_token_id=0, **sizes))


BART_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": FEED,
    "decoder_ffn_dim": FEED,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}


@member("encoder and decoder of text")
def bart() -> TrainingJob:
    """Whole layers are dropped at random."""
    return translation_job(transformers.BartConfig(encoder_layerdrop=0.1, decoder_layerdrop=0.1, **BART_SIZE))


@member("encoder and decoder of text")
def pegasus() -> TrainingJob:
    """Sine positions that are parameters without gradients."""
    return translation_job(transformers.PegasusConfig(**BART_SIZE))
