"""A model as layers that are alike: what a step reads of each, and what a request keeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Matrices, as they lie in the GPUs' memory."""

    num: int  # parameters, >= 0
    num_bytes: int  # scales of quantised ones included, >= 0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(num=self.num + other.num, num_bytes=self.num_bytes + other.num_bytes)

    def times(self, number: int) -> "Weights":
        return Weights(num=self.num * number, num_bytes=self.num_bytes * number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts of one layer that a router chooses from."""

    num: int  # >= num_active
    num_active: int  # of each token, >= 1
    weights: Weights  # of one

    def num_read(self, num_tokens: int) -> float:
        """Return how many experts so many tokens choose, were each choice even and its own."""
        return self.num * (1.0 - (1.0 - self.num_active / self.num) ** num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Attention of one layer."""

    bytes_per_token: int  # KV
    flops_per_pair: int  # of a token that decodes and one that it attends to
    prompt_flops_per_pair: int  # of tokens of prompts; latents are expanded for these
    num_shards: int  # ranks of a tensor-parallel group that its KV is divided among; others copy it
    window: int = 0  # tokens that each attends to, itself included; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Layers that are alike."""

    num: int  # >= 1
    weights: Weights  # of one layer: what every token is multiplied with
    experts: Experts | None = None
    attention: Attention | None = None  # None: no KV that grows
    state_bytes: int = 0  # of one request and layer, read and written by every step

    @property
    def may_leave(self) -> bool:
        """Whether KV of these may leave the pool: that of all tokens, so no window."""
        return self.attention is not None and not self.attention.window

    @property
    def all_weights(self) -> Weights:
        """Of one layer, with all experts."""
        if self.experts is None:
            return self.weights
        return self.weights + self.experts.weights.times(self.experts.num)

    @property
    def active_weights(self) -> Weights:
        """Of one layer, that one token is multiplied with."""
        if self.experts is None:
            return self.weights
        return self.weights + self.experts.weights.times(self.experts.num_active)


class Model(Protocol):
    """What the simulator takes from a model."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[Layers]:
        """Layers by kind, those that may leave first; there are some."""

    @property
    def head(self) -> Weights: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def computes_in_fp8(self) -> bool: ...
    @property
    def guesses(self) -> Sequence[str]:
        """What of it was not read but assumed, each a sentence without its full stop."""


def num_layers(model: Model) -> int:
    return sum(alike.num for alike in model.layers)


def is_dense(model: Model) -> bool:
    """Whether all layers are alike, attend to all tokens, and have one MLP."""
    return len(model.layers) == 1 and model.layers[0].may_leave and not model.layers[0].experts


def num_active_parameters(model: Model) -> int:
    """Return the weights that one token is multiplied with: the embedding is looked up."""
    return model.head.num + sum(one.num * one.active_weights.num for one in model.layers)


def step_weight_bytes(model: Model, num_tokens: int) -> float:
    """Return the weights that a step of so many tokens reads."""
    num_bytes = float(model.head.num_bytes)
    for alike in model.layers:
        num_bytes += alike.num * alike.weights.num_bytes
        if alike.experts is not None:
            one = alike.experts
            num_bytes += alike.num * one.num_read(num_tokens) * one.weights.num_bytes
    return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """A model as its config.json describes it."""

    name: str
    source: str
    hidden_size: int
    layers: tuple[Layers, ...]
    embedding: Weights
    head: Weights  # those of the embedding where the two are one
    is_tied: bool  # whether they are
    computes_in_fp8: bool
    max_model_len: int  # tokens; 0: not stated
    precision: str  # of its weights, in words
    guesses: tuple[str, ...] = ()

    @property
    def _all(self) -> Weights:
        weights = self.embedding if self.is_tied else self.embedding + self.head
        for alike in self.layers:
            weights += alike.all_weights.times(alike.num)
        return weights

    @property
    def num_parameters(self) -> int:
        return self._all.num

    @property
    def weight_bytes(self) -> int:
        return self._all.num_bytes
