"""How long a step computes: by a roofline, or by a measured linear profile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.device.hardware import BYTES_PER_ELEMENT, Assumptions, Device, Model


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What one step computes."""

    num_decodes: int = 0  # requests that compute one token, >= 0
    num_context_tokens: int = 0  # KV tokens that these read, over all of them, >= 0
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
        return self.num_decodes + self.num_prefill_tokens


class Costs(Protocol):
    """Times without noise, and without copies."""

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
    of its FLOPs and of reading K and V, each at a fixed share of the device's peak. Two all-reduces
    per layer follow each other and the compute: nothing of them overlaps.
    """

    model: Model
    device: Device
    assumptions: Assumptions
    num_devices: int = 1  # >= 1

    def layer_s(self, load: StepLoad) -> float:
        model = self.model
        products_s = self._products_s(model.num_layer_parameters, load.num_tokens)
        pairs = load.num_context_tokens + load.num_prefill_pairs
        read_tokens = load.num_context_tokens + sum(map(sum, load.prefixes))
        flops = 4 * pairs * model.num_attention_heads * model.head_dim
        attention_s = self._longer_s(flops, read_tokens * model.kv_bytes_per_token)
        reduce_s = 2 * self._all_reduce_s(load.num_tokens)
        return products_s + attention_s + reduce_s + self.assumptions.layer_overhead_s

    def outside_s(self, load: StepLoad) -> float:
        """Return the head, for one token per request and per prefix, and the fixed part."""
        num_rows = load.num_decodes + len(load.prefixes)
        head_s = self._products_s(self.model.num_head_parameters, num_rows)
        return self.assumptions.outside_s + head_s

    def reduce_bytes(self, load: StepLoad) -> int:
        """Return the bytes of all devices together; none where they have links of their own."""
        if self.device.peer_bytes_per_s != self.device.link_bytes_per_s:
            return 0
        return int(self.num_devices * self._sent_bytes(load.num_tokens))

    def _products_s(self, num_parameters: int, num_rows: int) -> float:
        return self._longer_s(2 * num_parameters * num_rows, num_parameters * BYTES_PER_ELEMENT)

    def _longer_s(self, flops: float, num_bytes: float) -> float:
        given, device = self.assumptions, self.device
        flops_s = flops / (device.flops_per_s * given.flops_efficiency)
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
