"""Another vLLM's Python in a folder of its own, over the compiled parts of the one installed here.

Wheels of vLLM are for GPUs, and their extensions do not load on a CPU. Put first on PYTHONPATH, the
folder gives a process the other version: imports, signatures and schedulers are its own, and what
models compute is done by the kernels that are here.
"""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import vllm
from packaging.requirements import Requirement

PACKAGE = "vllm"


class NoWheelError(Exception):
    """The index gave no wheel."""


def download(directory: Path, requirement: str = PACKAGE) -> Path:
    """Return the newest wheel that the package index has for a requirement; 300 MB, a minute.

    Raises NoWheelError where there is no network, or no such version.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoWheelError(done.stderr.strip().rpartition("\n")[2])
    return max(directory.glob("vllm-*.whl"), key=lambda path: path.stat().st_mtime)


def unpack(wheel: Path, directory: Path) -> str:
    """Make the folder of a wheel's Python, and return its version."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
        archive.extractall(directory, names)
    installed = Path(vllm.__file__).parent
    for library in installed.rglob("*.so"):
        link = directory / PACKAGE / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    (info,) = directory.glob("vllm-*.dist-info")
    version = info.name.removeprefix("vllm-").removesuffix(".dist-info")
    # vLLM asks its own version whether it is built for a CPU.
    of_cpu = directory / f"vllm-{version}+cpu.dist-info"
    shutil.move(info, of_cpu)
    metadata = of_cpu / "METADATA"
    metadata.write_text(
        metadata.read_text().replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    )
    return version


def requirements(directory: Path) -> Iterator[Requirement]:
    """Yield what the unpacked vLLM needs on this platform, but for its extras."""
    (metadata,) = directory.glob("vllm-*+cpu.dist-info/METADATA")
    for line in metadata.read_text().splitlines():
        if line.startswith("Requires-Dist: "):
            requirement = Requirement(line.removeprefix("Requires-Dist: "))
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield requirement


def installed_version(requirement: Requirement) -> str | None:
    """Return what is installed here of a package; None for nothing."""
    try:
        return distribution(requirement.name).version
    except PackageNotFoundError:
        return None
