"""What an upgrade of vLLM costs: `python -m lab.vllm_drift [--wheel FILE | --version 0.33.0]`.

Takes the newest wheel of the package index (no network: says so, and ends well), and runs the
contracts on its Python. Prints the packages that it needs otherwise; for each name that the
executor states whether it is the same, has changed and ours fits, or does not (its signature then
and now), or is gone, with the files that use it; then the contracts that fail. Ends with status 1
if any does.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

import vllm

from lab.vllm_drift.findings import Finding, findings
from lab.vllm_drift.overlay import (
    NoWheelError,
    download,
    installed_version,
    requirements,
    unpack,
)
from lab.vllm_drift.usage import where_used
from services.executor.vllm_seam.seam import SEAM

ROOT = Path(__file__).resolve().parents[2]
CONTRACTS = sorted(str(path) for path in (ROOT / "tests/integration").glob("test_vllm*.py"))
# Imported by vLLM's Python where nothing of a GPU is: installed into the folder if they lack here.
NEEDED_TO_IMPORT = ("orjson",)


def main() -> int:
    options = _parser().parse_args()
    if options.tell:
        print(json.dumps([asdict(found) for found in findings(SEAM)]))
        return 0
    sys.stdout.reconfigure(line_buffering=True)  # pytest writes beside it
    with tempfile.TemporaryDirectory(prefix="vllm-drift-") as folder:
        directory = Path(folder) / "overlay"
        directory.mkdir()
        wanted = "vllm" if options.version is None else f"vllm=={options.version}"
        try:
            wheel = options.wheel or download(Path(folder), wanted)
        except NoWheelError as error:
            print(f"drift skipped: the package index gives no wheel of {wanted}: {error}")
            return 0
        version = unpack(wheel, directory)
        print(f"vLLM {vllm.__version__} is installed, {version} is the other\n")
        return _compare(directory)


def _compare(directory: Path) -> int:
    _tell_packages(directory)
    environment = {**os.environ, "PYTHONPATH": _path_with(directory)}
    now = _findings(environment)
    _tell_names(now)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", *CONTRACTS]
    failed = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return int(bool(failed) or any(found.fault for found in now.values()))


def _path_with(directory: Path) -> str:
    return os.pathsep.join([str(directory), str(ROOT), str(ROOT / "protos")])


def _findings(environment: Mapping[str, str]) -> dict[str, Finding]:
    """Return what a process finds that imports the other vLLM."""
    command = [sys.executable, "-W", "ignore", "-m", "lab.vllm_drift", "--tell"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return {one["name"]: Finding(**one) for one in json.loads(done.stdout.splitlines()[-1])}


class Verdict(StrEnum):
    """What has become of a name."""

    SAME = "same"
    CHANGED = "changed"  # and ours fits
    AMISS = "amiss"  # changed, and ours does not fit
    GONE = "gone"


def verdict(then: Finding, now: Finding | None) -> Verdict:
    if now is None or now.fault.startswith("gone"):
        return Verdict.GONE
    if now.fault:
        return Verdict.AMISS
    return Verdict.SAME if then.signature == now.signature else Verdict.CHANGED


def _tell_names(now: Mapping[str, Finding]) -> None:
    counts: Counter[Verdict] = Counter()
    for stated in SEAM:
        pairs = [(then, now.get(then.name)) for then in findings([stated])]
        told = {pair: verdict(*pair) for pair in pairs}
        counts.update(told.values())
        files = ", ".join(where_used(stated))
        if set(told.values()) == {Verdict.SAME}:
            print(f"same     {stated.name}: {len(pairs)} names, in {files}")
            continue
        for (then, new), how in told.items():
            print(f"{how:8} {then.name}, in {files}")
            if how in (Verdict.CHANGED, Verdict.AMISS) and new is not None:
                print(f"         then {then.signature}\n         now  {new.signature}")
            if new is not None and new.fault:
                print(f"         {new.fault}")
    print("\n" + ", ".join(f"{counts[how]} {how}" for how in Verdict) + f", of {counts.total()}\n")


def _tell_packages(directory: Path) -> None:
    missing = []
    for requirement in requirements(directory):
        have = installed_version(requirement)
        if have is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(have, prereleases=True):
            print(f"package {requirement}: {have} is installed")
    print(f"packages that are not installed here: {', '.join(sorted(missing)) or 'none'}\n")
    for name in NEEDED_TO_IMPORT:
        if name in missing:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--target", str(directory), name]
            subprocess.run(command, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab.vllm_drift", description=__doc__)
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already")
    parser.add_argument("--version", help="this one, not the newest")
    parser.add_argument("--tell", action="store_true", help="print findings as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
