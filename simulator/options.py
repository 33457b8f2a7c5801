"""The options of `evenflow simulate|size`, by their types."""

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from services.placement.presets import PRESETS
from simulator.device.hardware import (
    Device,
    assumptions,
    data_file,
    device,
    device_from,
    device_names,
    link_rates,
    model_names,
)
from simulator.finding import find_model
from simulator.models.types import Model

LengthsName = Enum(  # type: ignore[misc]
    "LengthsName", {name: name for name in data_file("lengths.toml")["lengths"]}, type=str
)
LinkName = Enum("LinkName", {name: name for name in link_rates()}, type=str)  # type: ignore[misc]
DRAFT_FRAC = assumptions().draft_frac
MODEL_HELP = (
    "a checkpoint's directory, a config.json, a hub id (its config is read from the cache, else "
    f"downloaded unless HF_HUB_OFFLINE is set), or {', '.join(model_names())}"
)
DEVICE_HELP = f"one of {', '.join(device_names())}"
MEASURED_HELP = "a planner's decision log, instead of model and device: the engine that made it"
TRACE_HELP = (
    "JSONL (ours, Mooncake, InferenceX), CSV (Azure, BurstGPT, TraceLab) or JSON (OrbitFlow)"
)
POLICY_HELP = f"{', '.join(PRESETS)}, or a preset of your own as module:attribute; repeatable"
DEFAULT_POLICIES = ["vllm", "evenflow", "orbitflow"]


def _found_model(given: str) -> Model:
    try:
        return find_model(given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _found_device(given: str) -> Device:
    try:
        return device(given)
    except KeyError as error:
        known = ", ".join(device_names())
        raise typer.BadParameter(
            f"{given!r} is none of {known}; --device-file takes another"
        ) from error


def _read_device(given: str) -> Device:
    try:
        return device_from(Path(given))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


ModelOption = Annotated[
    Any, typer.Option("--model", parser=_found_model, metavar="MODEL", help=MODEL_HELP)
]
DeviceOption = Annotated[
    Any, typer.Option("--device", parser=_found_device, metavar="DEVICE", help=DEVICE_HELP)
]
DeviceFileOption = Annotated[
    Any,
    typer.Option(
        parser=_read_device,
        metavar="FILE",
        help="TOML or JSON of another device, with the fields of simulator/data/devices.toml",
    ),
]
DraftsOption = Annotated[
    int, typer.Option(min=0, help="speculative decoding: tokens drafted per request and step")
]
AcceptanceOption = Annotated[
    float | None, typer.Option(min=0, max=1, help="share of tokens that are drafted right")
]
DraftFracOption = Annotated[
    float, typer.Option(min=0, help="of what a step's layers take, to draft; n-gram: 0")
]
PoliciesOption = Annotated[list[str], typer.Option("--policy", help=POLICY_HELP)]
GpusOption = Annotated[int, typer.Option(min=1, help="tensor-parallel GPUs")]
PoolOption = Annotated[int, typer.Option(min=0, help="KV pool in tokens; 0: what memory holds")]
HostOption = Annotated[float, typer.Option(min=0, help="host memory for KV, GB")]
SeqsOption = Annotated[int, typer.Option(min=1, help="requests in one step")]
BatchedOption = Annotated[int, typer.Option(min=1, help="tokens in one step")]
LinkOption = Annotated[LinkName | None, typer.Option("--link", help="instead of the device's")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="write everything here")]
RatesOption = Annotated[
    list[float] | None,
    typer.Option(min=1e-6, help="requests per second, repeatable; a trace has its own"),
]
RequestsOption = Annotated[int, typer.Option(min=0, help="0: 60 drawn ones, or the whole trace")]
CacheOption = Annotated[
    Path | None, typer.Option(help="folder that keeps finished runs; they are not repeated")
]
