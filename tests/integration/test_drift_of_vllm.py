"""What another vLLM is told to have become, and how its Python is made importable here."""

import zipfile
from pathlib import Path

import pytest

from lab.vllm_drift import overlay
from lab.vllm_drift.__main__ import Verdict, verdict
from lab.vllm_drift.findings import Finding

NAME = "vllm.module:Member.call"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (Finding(NAME, "(a, b=None)"), Verdict.SAME),
        (Finding(NAME, "(a, b=None, c=None)"), Verdict.CHANGED),
        (Finding(NAME, "(a, b, c)", "needs c"), Verdict.AMISS),
        (Finding(NAME, fault="gone"), Verdict.GONE),
        (None, Verdict.GONE),  # of a member that is gone itself
    ],
)
def test_a_name_is_the_same_or_has_changed_or_is_gone(
    now: Finding | None, expected: Verdict
) -> None:
    assert verdict(Finding(NAME, "(a, b=None)"), now) is expected


def make_wheel(folder: Path) -> Path:
    path = folder / "vllm-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "of a GPU")
        archive.writestr(
            "vllm-9.9.0.dist-info/METADATA",
            "Metadata-Version: 2.4\nName: vllm\nVersion: 9.9.0\n"
            "Requires-Dist: torch>=99\nRequires-Dist: no-such-package\n"
            'Requires-Dist: scipy; extra == "bench"\n'
            'Requires-Dist: pywin32; sys_platform == "win32"\n',
        )
    return path


def test_a_wheels_python_stands_over_the_compiled_parts_that_are_here(tmp_path: Path) -> None:
    made = tmp_path / "overlay"
    made.mkdir()

    assert overlay.unpack(make_wheel(tmp_path), made) == "9.9.0"

    library = made / "vllm" / "_C.abi3.so"
    assert library.is_symlink()
    assert library.resolve().read_bytes()[:4] == b"\x7fELF"
    # By its version vLLM knows that it is on a CPU.
    assert "Version: 9.9.0+cpu\n" in (made / "vllm-9.9.0+cpu.dist-info/METADATA").read_text()


def test_packages_of_other_platforms_and_extras_are_not_needed(tmp_path: Path) -> None:
    overlay.unpack(make_wheel(tmp_path), tmp_path)
    needed = list(overlay.requirements(tmp_path))

    assert [one.name for one in needed] == ["torch", "no-such-package"]
    assert [overlay.installed_version(one) is None for one in needed] == [False, True]


def test_without_a_network_there_is_no_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9/simple")  # where none listens
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")

    with pytest.raises(overlay.NoWheelError, match="vllm"):
        overlay.download(tmp_path)
