"""How long a step computes: by a roofline, or by a measured linear profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.device.hardware import BYTES_PER_ELEMENT, Assumptions, Device
from simulator.models.types import Attention, Layers, Model, Weights, num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one step computes."""

    num_decodes: int = 0  # requests that compute one token, and drafts behind it, >= 0
    num_drafts: int = 0  # of all of them, >= 0; each attends to its request's KV
    num_context_tokens: int = 0  # KV tokens that these read, over all of them, >= 0
    contexts: Sequence[int] = ()  # the same, of each; (): alike
    chunks: Sequence[tuple[int, int]] = ()  # of prompts: (tokens computed, tokens before them)
    recomputed: Sequence[int] = ()  # tokens at the start of requests that decode, computed anew

    @property
    def prefixes(self) -> Sequence[tuple[int, int]]:
        """All that is computed beside decodes, as chunks."""
        return [*self.chunks, *((number, 0) for number in self.recomputed)]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts, and those computed anew."""
        return sum(chunk for chunk, _ in self.prefixes)

    @property
    def num_prefill_pairs(self) -> int:
        """What these attend to, all together."""
        return sum(chunk * before + chunk * (chunk + 1) // 2 for chunk, before in self.prefixes)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_drafts + self.num_prefill_tokens

    def num_decode_pairs(self, window: int) -> int:
        """Return what tokens that decode attend to in layers of a window; 0: all."""
        num_pairs = self._num_read_by_decodes(window)
        if not self.num_drafts:
            return num_pairs
        return num_pairs * (self.num_decodes + self.num_drafts) // self.num_decodes

    def _num_read_by_decodes(self, window: int) -> int:
        """Return the tokens whose KV is read for these: once for all drafts of a request."""
        if not window:
            return self.num_context_tokens
        if not self.contexts and self.num_decodes:
            return self.num_decodes * min(self.num_context_tokens // self.num_decodes, window)
        return sum(min(context, window) for context in self.contexts)

    def num_prompt_pairs(self, window: int) -> int:
        """Return the same of the other tokens."""
        if not window:
            return self.num_prefill_pairs
        return sum(_windowed_pairs(chunk, before, window) for chunk, before in self.prefixes)

    def num_read_tokens(self, window: int) -> int:
        """Return the tokens whose KV is read in layers of a window; 0: of all."""
        if not window:
            return self.num_context_tokens + sum(map(sum, self.prefixes))
        of_prefixes = sum(chunk + min(before, window - 1) for chunk, before in self.prefixes)
        return self._num_read_by_decodes(window) + of_prefixes


def _windowed_pairs(chunk: int, before: int, window: int) -> int:
    """Return what the tokens of a chunk attend to: each itself and those before, up to a window."""
    num_growing = min(chunk, max(0, window - before))
    growing = num_growing * before + num_growing * (num_growing + 1) // 2
    return growing + (chunk - num_growing) * window


class Costs(Protocol):
    """Times without noise, and without copies.

    A layer is one whose KV may leave the pool, with its share of the others: of gpt-oss one with
    full attention and one with a window.
    """

    def layer_s(self, load: StepLoad) -> float:
        """Return the compute time of one layer, > 0."""

    def outside_s(self, load: StepLoad) -> float:
        """Return the time outside the layers, >= 0."""

    def reduce_bytes(self, load: StepLoad) -> int:
        """Return what each of a layer's two all-reduces sends over the link of the copies, >= 0."""


def resident_step_s(costs: Costs, load: StepLoad, *, num_layers: int) -> float:
    """Return the length of a step that waits for no copy."""
    return num_layers * costs.layer_s(load) + costs.outside_s(load)


def prompt_alone_s(costs: Costs, num_tokens: int, *, num_layers: int, max_tokens: int) -> float:
    """Return how long a prompt takes, alone in its steps of at most `max_tokens`."""
    chunks = [(min(max_tokens, num_tokens - at), at) for at in range(0, num_tokens, max_tokens)]
    loads = [StepLoad(chunks=(chunk,)) for chunk in chunks]
    return sum([resident_step_s(costs, load, num_layers=num_layers) for load in loads])


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCosts:
    """What the emulated device of the lab takes, and what a `Profile` says.

    The tokens that a step computes are among those that it reads.
    """

    layer_base_s: float  # > 0
    per_token_s: float = 0.0  # per token of the step and layer, >= 0
    per_context_token_s: float = 0.0  # per KV token read and layer, >= 0
    outside_step_s: float = 0.0  # >= 0

    def layer_s(self, load: StepLoad) -> float:
        read = load.num_context_tokens + sum(chunk + before for chunk, before in load.prefixes)
        tokens_s = self.per_token_s * load.num_tokens
        return self.layer_base_s + tokens_s + self.per_context_token_s * read

    def outside_s(self, load: StepLoad) -> float:
        return self.outside_step_s

    def reduce_bytes(self, load: StepLoad) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A model on `num_devices` GPUs by tensor parallelism.

    Matrix products take the longer of their FLOPs and of reading the weights, attention the longer
    of its FLOPs and of reading KV, each at a fixed share of the device's peak. Of experts a step
    reads those that its tokens choose, each evenly and for itself. States are read and written once
    per request. Two all-reduces per layer follow each other and the compute: nothing of them
    overlaps. KV of fewer heads than devices, and latents, are on several devices.
    """

    model: Model
    device: Device
    assumptions: Assumptions
    num_devices: int = 1  # >= 1

    def layer_s(self, load: StepLoad) -> float:
        layers = self.model.layers
        num_moving = sum(alike.num for alike in layers if alike.may_leave)
        computed_s = sum(alike.num / num_moving * self._alike_s(alike, load) for alike in layers)
        each = num_layers(self.model) / num_moving
        reduce_s = 2 * self._all_reduce_s(load.num_tokens)
        return computed_s + each * reduce_s + each * self.assumptions.layer_overhead_s

    def _alike_s(self, alike: Layers, load: StepLoad) -> float:
        """Return what one of these layers computes."""
        seconds = self._products_s(alike.weights, load.num_tokens)
        if alike.attention is not None:
            seconds += self._attention_s(alike.attention, load)
        if alike.experts is not None:
            one, num_tokens = alike.experts, load.num_tokens
            flops = 2 * one.weights.num * one.num_active * num_tokens
            num_bytes = one.num_read(num_tokens) * one.weights.num_bytes
            seconds += self._longer_s(flops, num_bytes, self._products_per_s)
        if alike.state_bytes:
            num_states = load.num_decodes + len(load.prefixes)
            seconds += self._longer_s(0.0, 2 * num_states * alike.state_bytes)
        return seconds

    def _attention_s(self, attention: Attention, load: StepLoad) -> float:
        window = attention.window
        flops = load.num_decode_pairs(window) * attention.flops_per_pair
        flops += load.num_prompt_pairs(window) * attention.prompt_flops_per_pair
        num_bytes = load.num_read_tokens(window) * attention.bytes_per_token
        return self._longer_s(flops, num_bytes * num_copies(attention, self.num_devices))

    def outside_s(self, load: StepLoad) -> float:
        """Return the head, for each token that decodes, one per prefix, and the fixed part."""
        num_rows = load.num_decodes + load.num_drafts + len(load.prefixes)
        head = self.model.head
        head_s = self._longer_s(2 * head.num * num_rows, head.num_bytes)
        return self.assumptions.outside_s + head_s

    def reduce_bytes(self, load: StepLoad) -> int:
        """Return the bytes of all devices together; none where they have links of their own."""
        if self.device.peer_bytes_per_s != self.device.link_bytes_per_s:
            return 0
        return int(self.num_devices * self._sent_bytes(load.num_tokens))

    @property
    def _products_per_s(self) -> float:
        """FLOP/s of products with the model's weights."""
        in_fp8 = self.device.fp8_flops_per_s if self.model.computes_in_fp8 else None
        return in_fp8 or self.device.flops_per_s

    def _products_s(self, weights: Weights, num_rows: int) -> float:
        return self._longer_s(2 * weights.num * num_rows, weights.num_bytes, self._products_per_s)

    def _longer_s(self, flops: float, num_bytes: float, flops_per_s: float | None = None) -> float:
        given, device = self.assumptions, self.device
        flops_s = flops / ((flops_per_s or device.flops_per_s) * given.flops_efficiency)
        bytes_s = num_bytes / (device.memory_bytes_per_s * given.memory_efficiency)
        return max(flops_s, bytes_s) / self.num_devices

    def _all_reduce_s(self, num_tokens: int) -> float:
        if self.num_devices == 1:
            return 0.0
        rate = self.device.peer_bytes_per_s * self.assumptions.link_efficiency
        return self.assumptions.all_reduce_latency_s + self._sent_bytes(num_tokens) / rate

    def _sent_bytes(self, num_tokens: int) -> float:
        """Return what each device sends in an all-reduce."""
        num_bytes = num_tokens * self.model.hidden_size * BYTES_PER_ELEMENT
        return 2 * (self.num_devices - 1) / self.num_devices * num_bytes


def num_copies(attention: Attention, num_devices: int) -> int:
    """Return how many devices of a tensor-parallel group have the same KV."""
    return max(1, num_devices // attention.num_shards)
