"""What the gateway serves at `/ui` was built from the sources in `ui/`."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILT = ROOT / "services/gateway/http/built"


def test_the_page_was_built_from_its_sources() -> None:
    """`make ui` builds it."""
    ui, digest = ROOT / "ui", hashlib.sha256()
    sources = sorted(f"src/{path.name}" for path in (ui / "src").iterdir())
    for name in ("build.mjs", "package-lock.json", *sources):
        digest.update(f"{name}\n".encode() + (ui / name).read_bytes())

    assert (BUILT / "sources.sha256").read_text().strip() == digest.hexdigest()


def test_the_licences_of_what_is_bundled_are_served_with_it() -> None:
    assert "Leon Sorokin" in (BUILT / "licences.txt").read_text()
