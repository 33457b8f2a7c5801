"""What is measured: cells by part, on a GPU or in tiny shapes in memory."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

MIB = 1 << 20
PAGES = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, MIB)
# Parts that need only torch, and those of an engine.
DEVICE_PARTS = ("link", "order", "overlap", "loads", "marks", "small", "pinning")
ENGINE_PARTS = ("exactness", "cost", "engine-overlap")
PARTS = (*DEVICE_PARTS, *ENGINE_PARTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One process: what it runs, and with what. Travels as JSON."""

    part: str
    name: str  # of its part
    device: str  # "cuda" or "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.part}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def device_cells(device: str) -> list[Cell]:
    """Return the cells that need only torch, those first that decide most."""
    is_real = device == "cuda"
    loop = (
        {"num_layers": 16, "num_requests": 4, "num_blocks": 16, "page_bytes": 128 << 10}
        if is_real
        else {"num_layers": 4, "num_requests": 2, "num_blocks": 2, "page_bytes": 64}
    )
    num_steps = 300 if is_real else 40
    pages = {"page_bytes": PAGES if is_real else (64, 256), "copy_bytes": 256 * MIB}
    pages |= {} if is_real else {"copy_bytes": 4096}
    large = {"page_bytes": 128 << 10 if is_real else 64}
    found = {
        "order": {
            f"{how or 'whole'},{buffers}": {
                **loop, "num_steps": num_steps, "broken": how, "num_staging": buffers
            }
            for how, buffers in (("", 2), ("", 1), ("waits", 2), ("slots", 2))
        } | {
            f"{how or 'whole'},guarded": {
                **loop, "num_steps": num_steps, "broken": how, "guarded": True
            }
            for how in ("", "waits", "slots")
        },
        "link": {
            "scattered": {**pages},
            "runs": {**pages, "run_blocks": 8},
        },
        "overlap": {
            f"every{every},{buffers}": {
                **loop, "every": every, "num_staging": buffers, "num_steps": num_steps // 10
            }
            for every in (1, 2, 4)
            for buffers in (1, 2)
        },
        "loads": {"": {**large, "num_blocks": (64, 512, 4096), "num_runs": 200}},
        "marks": {"": {**loop, "num_marks": 10_000 if is_real else 50}},
        "small": {"": {**large, "num_blocks": 4096 if is_real else 8,
                       "num_runs": 200 if is_real else 3}},
        "pinning": {
            **{when: {"when": when, "num_bytes": (4096 if is_real else 4) * MIB}
               for when in ("before", "during")},
            "memlock": {"num_bytes": 64 * MIB if is_real else MIB},
        },
    }  # fmt: skip
    return [
        Cell(part=part, name=name, device=device, options=options)
        for part, cells in found.items()
        for name, options in cells.items()
    ]


def engine_cells(device: str, model: str) -> list[Cell]:
    """Return the cells of an engine; `model` empty: the exactness model, for "exactness"."""
    is_real = device == "cuda"
    cells = [_exactness(device, "stock", kv=None, breakable=b) for b in _breakables(device)]
    for breakable in _breakables(device):
        for name, kv in (("layerwise", {}), ("groups4", {"layers_per_group": 4})):
            cells.append(_exactness(device, name, kv=kv, breakable=breakable))
    for how in ("waits", "slots"):
        cells.append(_exactness(device, "layerwise", kv={}, breakable="0", broken=how))
    if not is_real:
        return cells + _tiny_decode_cells(device)
    cells += _unusual_cells(device)
    shape = {"model": model}
    for graphs in ("full", "piecewise"):
        options = {**shape, "kind": "decode", "graphs": graphs, "batches": [1, 8, 32]}
        cells.append(Cell(part="cost", name=f"stock,{graphs}", device=device, options=options))
        for number in (1, 4, 8):
            kv = {"layers_per_group": number}
            cells.append(
                Cell(part="cost", name=f"groups of {number},{graphs}", device=device,
                     options={**options, "kv": kv})
            )  # fmt: skip
    options = {**shape, "kind": "decode", "kv": {}, "batches": [4]}
    options |= {"num_prompt_tokens": 4_000, "graphs": "full"}
    for placement in ("none", "every:1", "every:2", "every:4", "every:8"):
        for buffers in (1, 2) if placement != "none" else (2,):
            cells.append(
                Cell(part="engine-overlap", name=f"{placement},{buffers}", device=device,
                     options={**options, "placements": [placement], "num_staging": buffers})
            )  # fmt: skip
    return cells


def _unusual_cells(device: str) -> list[Cell]:
    """Return exactness cells with KV of eight bits, and with vLLM's first model runner."""
    cells = []
    for name, kv in (("stock", None), ("layerwise", {})):
        usual = _exactness(device, name, kv=kv, breakable="0")
        eight_bits = {**usual.options, "kv_cache_dtype": "fp8"}
        first_runner = {**usual.environment, "VLLM_USE_V2_MODEL_RUNNER": "0"}
        cells.append(replace(usual, name=f"{usual.name},fp8", options=eight_bits))
        cells.append(replace(usual, name=f"{usual.name},first", environment=first_runner))
    return cells


def _tiny_decode_cells(device: str) -> list[Cell]:
    """Return cells that say no more than that decode steps are measured."""
    options = {"kind": "decode", "batches": [2], "num_prompt_tokens": 40, "num_output_tokens": 20}
    options |= {"pool_tokens": 1_280, "max_model_len": 1_024}
    loading = {"kv": {}, "placements": ["none", "every:1"]}
    return [
        Cell(part="cost", name="stock,full", device=device, options=options),
        Cell(part="cost", name="groups of 1,full", device=device, options={**options, "kv": {}}),
        Cell(part="engine-overlap", name="tiny", device=device, options={**options, **loading}),
    ]


def _breakables(device: str) -> tuple[str, ...]:
    return ("0", "1") if device == "cuda" else ("0",)


def _exactness(
    device: str, name: str, *, kv: dict[str, Any] | None, breakable: str, broken: str = ""
) -> Cell:
    placements = ["none"] if kv is None else ["every:1", "every:2", "churn:1", "churn:2"]
    if broken or (kv is not None and device == "cpu"):
        placements = ["churn:1"]
    return Cell(
        part="exactness",
        name=",".join(part for part in (name, f"breakable={breakable}", broken) if part),
        device=device,
        options={"kind": "tokens", "kv": kv, "placements": placements, "broken": broken,
                 "graphs": "full", "pool_tokens": 1_280 if kv is not None else 65_536,
                 "max_model_len": 1_024},
        environment={
            "VLLM_BATCH_INVARIANT": str(int(device == "cuda")),
            "VLLM_USE_BREAKABLE_CUDAGRAPH": breakable,
        },
    )  # fmt: skip
