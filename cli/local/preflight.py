"""What has to be there before a stack starts, each want in a sentence that says what to do."""

import json
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
import redis

from cli.local.settings import StackSettings
from services.executor.model_kinds import refusal_of_files
from services.kit.redis_url import open_redis_blocking
from services.kit.settings import BAD_SETTINGS_EXIT_CODE

GIB = 1 << 30
NEEDED_DISK_BYTES = 256 << 20  # logs and sockets
OVERHEAD_BYTES = 2 * GIB  # five Python processes, vLLM and PyTorch in two of them
BYTES_PER_WEIGHT = {"float32": 4, "float": 4}  # all others have two
REDIS_TIMEOUT_S = 5.0


class PreflightError(Exception):
    """Something is missing; the message is for the user."""

    exit_code = 1


class UnsuitedModelError(PreflightError):
    """The model cannot have what is asked for."""

    exit_code = BAD_SETTINGS_EXIT_CODE


def require(settings: StackSettings, *, dtype: str, is_cpu: bool, num_engines: int = 1) -> None:
    """Check model, disk, memory and Redis before any process starts. Raises PreflightError."""
    require_model(settings.model)
    require_kind(settings)
    require_disk(settings.run_dir)
    if is_cpu:
        require_memory(settings, dtype, num_engines)
    if settings.redis_url:
        require_redis(settings.redis_url)


def require_free_ports(ports: Mapping[str, int]) -> None:
    """Check that no process listens on any of `ports`, which are by the setting that moves each."""
    for variable, port in ports.items():
        if not is_free(port):
            raise PreflightError(
                f"port {port} is taken by another program: stop it, or set {variable} to a "
                f"free port{_option(variable)}"
            )


def is_free(port: int) -> bool:
    """Return whether a process could listen on a port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _option(variable: str) -> str:
    options = {"EVENFLOW_GATEWAY_HTTP_PORT": "--port", "EVENFLOW_GATEWAY_GRPC_PORT": "--grpc-port"}
    return f" (or {options[variable]})" if variable in options else ""


def require_model(model: str) -> None:
    """Check that a directory holds a checkpoint, or that a hub id can be had."""
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PreflightError(f"{model} holds no checkpoint: there is no config.json in it")
        return
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise PreflightError(f"there is no directory {model}")
    _require_hub(model)


def require_kind(settings: StackSettings) -> None:
    """Check that layer-wise KV, if it is asked for, works with the model."""
    if not settings.asks_planner:
        return
    read = settings.variables.get
    length = read("EVENFLOW_EXECUTOR_MAX_MODEL_LEN", "")
    refusal = refusal_of_files(
        settings.model,
        read("EVENFLOW_EXECUTOR_REVISION"),
        max_model_len=int(length) if length.isdecimal() else None,
        engine_args=_engine_args(read("EVENFLOW_EXECUTOR_ENGINE_ARGS", "[]")),
    )
    if refusal is not None:
        raise UnsuitedModelError(refusal)


def _engine_args(text: str) -> list[str]:
    """Return what a variable lists; nothing where it is no list, of which the executor tells."""
    try:
        listed = json.loads(text)
    except ValueError:
        return []
    return [str(one) for one in listed] if isinstance(listed, list) else []


def _require_hub(model: str) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        hf_hub_download(model, "config.json")
    except HFValidationError as error:
        raise PreflightError(f'"{model}" is neither a directory nor the id of a model') from error
    except HfHubHTTPError as error:
        raise PreflightError(
            f'the hub does not give "{model}": {_first_line(error)} There is no directory of that '
            "name here either; HF_TOKEN may be needed"
        ) from error
    except OSError as error:
        raise PreflightError(
            f'"{model}" is no directory here, and the hub cannot be reached to download it: is '
            "there a network? A checkpoint's directory can be named instead"
        ) from error


def require_disk(run_dir: Path) -> None:
    """Check that logs can be written."""
    place = next(path for path in (run_dir, *run_dir.parents) if path.is_dir())
    if shutil.disk_usage(place).free < NEEDED_DISK_BYTES:
        raise PreflightError(
            f"the disk that holds {place} is full: make room there ({NEEDED_DISK_BYTES >> 20} MB), "
            "or set EVENFLOW_STATE_DIR to another disk"
        )


def require_memory(settings: StackSettings, dtype: str, num_engines: int = 1) -> None:
    """Check that CPU engines of a local checkpoint fit what memory is left."""
    weights = sum(file.stat().st_size for file in Path(settings.model).glob("*.safetensors"))
    if not weights:
        return
    pool = int(settings.variables.get("EVENFLOW_EXECUTOR_KV_CACHE_MEMORY_BYTES", GIB))
    host = 0  # unless it is told, the engine takes of what is left
    if settings.asks_planner:
        asked = settings.variables.get("EVENFLOW_EXECUTOR_KV_HOST_MEMORY_BYTES", "auto")
        host = 0 if asked == "auto" else int(asked)
    weights = weights * BYTES_PER_WEIGHT.get(dtype, 2) // 2
    needed = host + num_engines * (weights + pool + OVERHEAD_BYTES)
    available = psutil.virtual_memory().available
    if needed > available:
        raise PreflightError(
            f"{settings.model_id} needs some {needed / GIB:.1f} GiB of memory ({num_engines} x "
            f"weights in {dtype}, KV pool {pool / GIB:.1f}, host memory {host / GIB:.1f}), and "
            f"{available / GIB:.1f} GiB are free: close other programs, or give "
            "--kv-cache-memory-bytes and --kv-host-memory less"
        )


def require_redis(url: str) -> None:
    """Check that Redis answers."""
    try:
        open_redis_blocking(url, timeout_s=REDIS_TIMEOUT_S).ping()
    except (redis.RedisError, ValueError, OSError) as error:
        raise PreflightError(
            f"--redis-url (EVENFLOW_REDIS_URL): Redis does not answer: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
