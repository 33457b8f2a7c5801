"""Build a directory once, and again only when its recipe has changed."""

import fcntl
import hashlib
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

MODELS_ROOT = Path(__file__).resolve().parents[1] / ".cache" / "models"
FINGERPRINT_FILE = "recipe.sha256"


def recipe_fingerprint(*parts: str | ModuleType) -> str:
    """Hash what a build depends on: texts as they are, modules by their source."""
    digest = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, str) else inspect.getsource(part)
        digest.update(len(content).to_bytes(8, "big") + content.encode())
    return digest.hexdigest()


def is_built(directory: Path, fingerprint: str) -> bool:
    """Say whether `directory` holds a complete result of this recipe."""
    stamp = directory / FINGERPRINT_FILE
    return stamp.is_file() and stamp.read_text() == fingerprint


def build_once(directory: Path, fingerprint: str, build: Callable[[Path], None]) -> Path:
    """Return `directory`, filled by `build(empty_directory)` unless this recipe's result is there.

    Atomic: `directory` never holds a part of a result, and a build that raises leaves it as it
    was. Processes that ask at the same time wait for one build.
    """
    if is_built(directory, fingerprint):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _lock(directory.with_name(f"{directory.name}.lock")):
        if not is_built(directory, fingerprint):
            _build_and_swap(directory, fingerprint, build)
    return directory


def _build_and_swap(directory: Path, fingerprint: str, build: Callable[[Path], None]) -> None:
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        (partial / FINGERPRINT_FILE).write_text(fingerprint)
        shutil.rmtree(directory, ignore_errors=True)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
