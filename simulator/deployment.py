"""A model on GPUs, and how the engine on them is set."""

from dataclasses import dataclass, replace

from services.placement.types import EngineShape
from simulator.device.costs import Roofline, StepLoad, resident_step_s
from simulator.device.hardware import BYTES_PER_ELEMENT, Assumptions, Device, Model
from simulator.device.step import CopyCosts
from simulator.engine.engine import Machine

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

    @property
    def title(self) -> str:
        return f"{self.model.name} on {self.num_devices} x {self.device.title}"

    def with_link(self, bytes_per_s: float) -> "Deployment":
        """Return the same on another link to the host, of this payload rate in one direction."""
        return replace(self, device=replace(self.device, link_bytes_per_s=bytes_per_s))

    def shape(self) -> EngineShape:
        """Return the engine's shape. Raises ValueError if the weights leave no room for KV."""
        model = self.model
        groups = -(-model.num_hidden_layers // self.layers_per_group)
        token_bytes = model.kv_bytes_per_token * self.layers_per_group
        block_bytes = self.block_size * token_bytes
        per_position = groups * block_bytes
        if self.pool_tokens is not None:
            num_blocks = self.pool_tokens // self.block_size * groups
        else:
            num_blocks = int(self._kv_bytes() / per_position) * groups
        if num_blocks < groups:
            raise ValueError(
                f"{self.num_devices} x {self.device.title}: no room for KV beside "
                f"{model.num_parameters * BYTES_PER_ELEMENT / 1e9:.0f} GB of weights"
            )
        return EngineShape(
            num_layers=model.num_hidden_layers,
            layers_per_group=self.layers_per_group,
            block_size=self.block_size,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_host_blocks=int(self.host_memory_bytes / per_position) * groups,
            max_model_len=self.max_model_len,
        )

    def _kv_bytes(self) -> float:
        usable = self.device.memory_bytes * (1.0 - self.assumptions.reserved_memory_frac)
        return self.num_devices * usable - self.model.num_parameters * BYTES_PER_ELEMENT

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
        )

    def base_tbt_s(self) -> float:
        """Return OrbitFlow's base SLO (section 5.1), without noise.

        The decode latency of the longest request that fits the pool with nothing offloaded.
        """
        shape, costs = self.shape(), self.machine().costs
        longest = shape.num_blocks // shape.num_groups * shape.block_size
        load = StepLoad(num_decodes=1, num_context_tokens=min(longest, self.max_model_len))
        return resident_step_s(costs, load, num_layers=shape.num_layers)
