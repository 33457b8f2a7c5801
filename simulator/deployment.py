"""A model on GPUs, and how the engine on them is set."""

from dataclasses import dataclass, replace

from services.placement.blocks import STATE, side_blocks
from services.placement.types import EngineShape
from simulator.device.costs import Roofline, StepLoad, num_copies
from simulator.device.drafts import Drafts
from simulator.device.hardware import Assumptions, Device
from simulator.device.step import CopyCosts
from simulator.engine.machine import Machine
from simulator.memory.room import pool_tokens
from simulator.models.types import Attention, Model

CHUNK_BYTES = 4 << 20  # of one copy of one GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One engine of one model."""

    model: Model
    device: Device
    assumptions: Assumptions
    num_devices: int = 1  # tensor parallel, >= 1
    block_size: int = 16  # tokens
    layers_per_group: int = 1
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2_048
    max_model_len: int = 32_768
    host_memory_bytes: int = 256_000_000_000
    pool_tokens: int | None = None  # with every layer resident; None: what the GPUs' memory holds
    drafts: Drafts | None = None  # speculative decoding

    @property
    def title(self) -> str:
        return f"{self.model.name} on {self.num_devices} x {self.device.title}"

    def with_link(self, bytes_per_s: float) -> "Deployment":
        """Return the same on another link to the host, of this payload rate in one direction."""
        return replace(self, device=replace(self.device, link_bytes_per_s=bytes_per_s))

    @property
    def _attention(self) -> Attention:
        """Of the layers whose KV may leave the pool, which are alike in it."""
        found = [alike.attention for alike in self.model.layers if alike.may_leave]
        assert found[0] is not None
        return found[0]

    def _token_bytes(self, attention: Attention) -> int:
        """Return what a token takes in one layer; ranks that have the same KV count each."""
        return attention.bytes_per_token * num_copies(attention, self.num_devices)

    def _tokens_per_block(self) -> tuple[int, int]:
        """Return the tokens of a block, and of one of a window: blocks have as many bytes.

        `block_size` where a token takes most, and more where a state would not fit: vLLM has one
        pool. Ranks divide states.
        """
        layers = self.model.layers
        token_bytes = self._token_bytes(self._attention)
        windows = [one.attention for one in layers if one.attention and not one.may_leave]
        window_bytes = self._token_bytes(windows[0]) if windows else token_bytes
        page_bytes = self.block_size * max(token_bytes, window_bytes)
        num_pages = -(-max(alike.state_bytes for alike in layers) // page_bytes)
        page_bytes *= max(1, num_pages)
        return page_bytes // token_bytes, page_bytes // window_bytes

    def _side_windows(self) -> tuple[int, ...]:
        """Return what each group of layers keeps that never leaves."""
        found: list[int] = []
        for alike in self.model.layers:
            if not alike.may_leave and (alike.attention or alike.state_bytes):
                window = alike.attention.window if alike.attention else STATE
                found += [window] * -(-alike.num // self.layers_per_group)
        return tuple(found)

    def shape(self) -> EngineShape:
        """Return the engine's shape. Raises ValueError if the weights leave no room for KV."""
        block_size, window_block_size = self._tokens_per_block()
        num_moving = sum(alike.num for alike in self.model.layers if alike.may_leave)
        groups = -(-num_moving // self.layers_per_group)
        block_bytes = block_size * self._token_bytes(self._attention) * self.layers_per_group
        per_position = groups * block_bytes
        if self.pool_tokens is not None:
            num_blocks = self.pool_tokens // block_size * groups
        else:
            num_blocks = int(self.kv_bytes / per_position) * groups
        if num_blocks < groups:
            raise ValueError(
                f"{self.num_devices} x {self.device.title}: no room for KV beside "
                f"{self.model.weight_bytes / 1e9:.0f} GB of weights"
            )
        return EngineShape(
            num_layers=num_moving,
            layers_per_group=self.layers_per_group,
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_host_blocks=int(self.host_memory_bytes / per_position) * groups,
            max_model_len=self.max_model_len,
            side_windows=self._side_windows(),
            side_block_size=window_block_size if window_block_size != block_size else 0,
            max_in_flight_tokens=2 * self.max_num_batched_tokens,  # it schedules ahead
            max_ahead_tokens=self.drafts.max_ahead_tokens if self.drafts else 0,
        )

    @property
    def kv_bytes(self) -> float:
        """What all devices together have for KV."""
        usable = self.device.memory_bytes * (1.0 - self.assumptions.reserved_memory_frac)
        return self.num_devices * usable - self.model.weight_bytes

    def side_bytes(self, num_tokens: int) -> int:
        """Return what of a request of so many tokens never leaves, over all devices."""
        shape = self.shape()
        num_blocks = side_blocks(shape.geometry, num_tokens=num_tokens, num_new_tokens=1)
        return num_blocks * shape.block_bytes

    def machine(self) -> Machine:
        given = self.assumptions
        return Machine(
            costs=Roofline(
                model=self.model,
                device=self.device,
                assumptions=given,
                num_devices=self.num_devices,
            ),
            link_bytes_per_s=self.num_devices
            * self.device.link_bytes_per_s
            * given.link_efficiency,
            copy_overhead_s=given.copy_overhead_s,
            chunk_bytes=self.num_devices * CHUNK_BYTES,
            copies=CopyCosts(slowdown_frac=given.copy_slowdown_frac),
            compute_noise_frac=given.compute_noise_frac,
            link_noise_frac=given.link_noise_frac,
            schedules_ahead=True,
            drafts=self.drafts,
        )

    def base_tbt_s(self) -> float:
        """Return OrbitFlow's base SLO (section 5.1), without noise.

        The decode latency per token of the longest request that fits the pool with nothing
        offloaded.
        """
        shape, machine = self.shape(), self.machine()
        longest = pool_tokens(shape)
        load = StepLoad(num_decodes=1, num_context_tokens=min(longest, self.max_model_len))
        step_s = machine.resident_step_s(load, num_layers=shape.num_layers)
        return step_s / machine.tokens_per_step
