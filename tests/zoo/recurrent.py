"""Recurrent networks, unrolled by torch or by hand."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from planner import TrainingJob

from .registry import LENGTH, SEQUENCES, VOCABULARY, generator, job, member, text_job, tokens

WIDTH = 16


class LstmLM(nn.Module):
    """Two LSTM layers; the output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next token."""
        scores: Tensor = self.output(self.lstm(self.embedding(x))[0])
        return scores


@member("RNN")
def lstm_lm() -> TrainingJob:
    """An LSTM language model with tied weights."""
    return text_job(LstmLM())


class Seq2Seq(nn.Module):
    """GRU encoder, attending GRU decoder; at random the decoder is fed what it said itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor, teacher: float = 1.0) -> Tensor:
        """Scores of every token of the target after the first."""
        states, last = self.encoder(self.embedding(source))
        state, word, scores = last[0], target[:, 0], []
        for position in range(1, target.shape[1]):
            weights = torch.softmax(states @ state[:, :, None], 1)
            context = (weights * states).sum(1)
            state = self.cell(torch.cat([self.embedding(word), context], -1), state)
            scores.append(self.output(state))
            word = target[:, position] if random.random() < teacher else scores[-1].argmax(-1)
        return torch.stack(scores, 1)


@member("RNN")
def gru_seq2seq() -> TrainingJob:
    """Encoder and decoder with attention, unrolled by hand, fed by chance with its own words."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = model(*batch, teacher=0.7)
        return functional.cross_entropy(scores.flatten(0, 1), batch[1][:, 1:].flatten())

    return job(Seq2Seq(), loss, lambda step, rank: (tokens(step, rank), tokens(step + 1000, rank)[:, :6]))


class Tagger(nn.Module):
    """A bidirectional LSTM with a layer on both its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.lstm = nn.LSTM(WIDTH, WIDTH, bidirectional=True)
        self.output = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length) → (batch, length, 4)."""
        scores: Tensor = self.output(self.lstm(self.embedding(x).transpose(0, 1))[0].transpose(0, 1))
        return scores


@member("RNN")
def bidirectional_lstm() -> TrainingJob:
    """Tags every word."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten() % 4)

    return job(Tagger(), loss, tokens)


class Packed(nn.Module):
    """Sequences of different lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.output = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(batch, length) → (batch, 2)."""
        packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        scores: Tensor = self.output(states.sum(1))
        return scores


@member("RNN", data_dependent=True)
def packed_gru() -> TrainingJob:
    """Packed sequences: how many rows each step of the recurrence has depends on the lengths in the batch."""

    def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(2, LENGTH + 1, (SEQUENCES,), generator=generator(step, rank))
        return tokens(step, rank), lengths

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(*batch), batch[0][:, 0] % 2)

    return job(Packed(), loss, batch)


class Carried(nn.Module):
    """Keeps its hidden state from one step of training to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.output = nn.RNN(4, WIDTH, batch_first=True), nn.Linear(WIDTH, 4)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, 4) → the same."""
        states, last = self.cell(x, None if self.state is None else self.state.detach())
        self.state = last
        result: Tensor = self.output(states)
        return result


@member("RNN")
def stateful_rnn() -> TrainingJob:
    """Truncated backpropagation: the state is an attribute that the first step creates."""

    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(2, 9, 4, generator=generator(step, rank))

    return job(Carried(), lambda m, x: functional.mse_loss(m(x[:, :-1]), x[:, 1:]), batch)
