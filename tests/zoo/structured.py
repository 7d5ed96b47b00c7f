"""Graphs, sets, tables, pairs: models whose inputs are not images or text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import TrainingJob

from .registry import generator, job, member, pictures

NODES, EDGES, FEATURES = 10, 24, 6


class Graph(NamedTuple):
    """Nodes' features, (2, edges) node numbers, nodes' labels."""

    x: Tensor
    edges: Tensor
    y: Tensor


def graph(step: int, rank: int) -> Graph:
    """A random graph."""
    source = generator(step, rank)
    return Graph(
        torch.randn(NODES, FEATURES, generator=source),
        torch.randint(NODES, (2, EDGES), generator=source),
        torch.randint(3, (NODES,), generator=source),
    )


class Convolution(nn.Module):
    """Each node gets the mean of its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Messages along edges, added up."""
        source, target = edges
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        degree = torch.zeros(len(x)).scatter_add_(0, target, torch.ones(edges.shape[1])).clamp(min=1)
        return self.own(x) + self.others(total / degree[:, None])


class GraphNetwork(nn.Module):
    """Two of them."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = layer(FEATURES, 12), layer(12, 3)

    def forward(self, graph: Graph) -> Tensor:
        """Scores of every node."""
        scores: Tensor = self.second(self.first(graph.x, graph.edges).relu(), graph.edges)
        return scores


def label_nodes(model: nn.Module, graph: Graph) -> Tensor:
    """Cross-entropy over nodes."""
    return functional.cross_entropy(model(graph), graph.y)


@member("graph")
def graph_convolution() -> TrainingJob:
    """Messages added with index_add; called with a named tuple."""
    return job(GraphNetwork(Convolution), label_nodes, graph)


class GraphAttention(nn.Module):
    """Each node weighs its neighbours."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.value = nn.Linear(inputs, outputs, bias=False)
        self.weigh = nn.Parameter(torch.randn(2, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Softmax over the edges into each node."""
        source, target = edges
        value = self.value(x)
        score = functional.leaky_relu(value[source] @ self.weigh[0] + value[target] @ self.weigh[1])
        high = torch.full((len(x),), -1e9).scatter_reduce(0, target, score, "amax")
        weight = (score - high[target].detach()).exp()
        total = torch.zeros(len(x)).index_add(0, target, weight)
        mixed = torch.zeros_like(value).index_add(0, target, value[source] * (weight / total[target])[:, None])
        return mixed + self.bias


@member("graph")
def graph_attention() -> TrainingJob:
    """Softmax over edges by scatter_reduce; parameters that are used without a layer."""
    return job(GraphNetwork(GraphAttention), label_nodes, graph)


class PointNet(nn.Module):
    """A set of points: one network for all, a maximum over them, a learned rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = nn.Sequential(nn.Conv1d(3, 16, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten())
        self.to_matrix, self.point = nn.Linear(16, 9), nn.Sequential(nn.Conv1d(3, 16, 1), nn.GroupNorm(4, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, points: list[Tensor]) -> list[Tensor]:
        """A list of clouds of different sizes."""
        results = []
        for cloud in points:
            x = cloud.T[None]
            turned = (self.to_matrix(self.rotate(x)).view(3, 3) + torch.eye(3)) @ x
            results.append(self.head(self.point(turned).amax(-1)))
        return results


@member("set")
def point_clouds() -> TrainingJob:
    """A list of tensors of different sizes goes in, a list comes out."""

    def batch(step: int, rank: int) -> list[Tensor]:
        return [torch.randn(count, 3, generator=generator(step, rank)) for count in (9, 14)]

    return job(PointNet(), lambda model, clouds: torch.cat(model(clouds)).logsumexp(-1).mean(), batch)


class Recommender(nn.Module):
    """Bags of categories, dense features, products between all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(30, 8, mode=mode) for mode in ("sum", "mean"))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(8 + 3, 1)

    def forward(self, dense: Tensor, categories: list[tuple[Tensor, Tensor]]) -> Tensor:
        """(batch, 5) and (indices, offsets) of each table → (batch,)."""
        bags = zip(self.bags, categories, strict=True)
        rows = torch.stack([self.dense(dense), *(bag(ids, offsets) for bag, (ids, offsets) in bags)], 1)
        products = (rows @ rows.mT)[:, [0, 0, 1], [1, 2, 2]]
        score: Tensor = self.top(torch.cat([rows[:, 0], products], -1))
        return score[:, 0]


@member("recommender")
def embedding_bags() -> TrainingJob:
    """EmbeddingBag with offsets; nested lists and tuples go in."""

    def batch(step: int, rank: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        source = generator(step, rank)
        bags = [(torch.randint(30, (12,), generator=source), torch.tensor([0, 3, 3, 8])) for _ in range(2)]
        return torch.randn(4, 5, generator=source), bags, torch.randint(2, (4,), generator=source).float()

    def loss(model: nn.Module, batch: tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    return job(Recommender(), loss, batch)


@dataclass
class Pair:
    """Two views of the same things."""

    left: Tensor
    right: Tensor


@dataclass
class Codes:
    """What a siamese network makes of a pair."""

    codes: Pair
    distance: Tensor
    note: str = "cosine"


class Siamese(nn.Module):
    """One tower for both sides, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.InstanceNorm2d(6, affine=True), nn.ReLU(), nn.Flatten())
        self.right = self.left
        self.project = nn.Linear(294, 8)

    def forward(self, pair: Pair) -> Codes:
        """A dataclass in, nested dataclasses out."""
        codes = Pair(self.project(self.left(pair.left)), self.project(self.right(pair.right)))
        return Codes(codes, 1 - functional.cosine_similarity(codes.left, codes.right))


@member("siamese")
def siamese() -> TrainingJob:
    """A tower registered twice; dataclasses in and out."""

    def batch(step: int, rank: int) -> Pair:
        left, right = pictures(step, rank)[0], pictures(step + 1000, rank)[0]
        return Pair(left, right)

    def loss(model: nn.Module, pair: Pair) -> Tensor:
        out = model(pair)
        return out.distance.mean() + 0.01 * out.codes.left.square().mean()

    return job(Siamese(), loss, batch)
