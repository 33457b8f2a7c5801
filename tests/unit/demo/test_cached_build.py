"""A cached directory is complete, of the present recipe, or not there."""

from pathlib import Path

import pytest

import demo.cached_build
from demo.cached_build import build_once, is_built, recipe_fingerprint


def make_builder(content: str, calls: list[str]):
    def build(directory: Path) -> None:
        calls.append(content)
        (directory / "weights").write_text(content)

    return build


def test_the_same_recipe_builds_once(tmp_path: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        directory = build_once(tmp_path / "model", "recipe-1", make_builder("one", calls))

    assert calls == ["one"]
    assert (directory / "weights").read_text() == "one"


def test_another_recipe_replaces_everything(tmp_path: Path) -> None:
    calls: list[str] = []
    directory = build_once(tmp_path / "model", "recipe-1", make_builder("one", calls))
    (directory / "left-over").touch()

    build_once(tmp_path / "model", "recipe-2", make_builder("two", calls))

    assert (directory / "weights").read_text() == "two"
    assert not (directory / "left-over").exists()


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    directory = build_once(tmp_path / "model", "recipe-1", make_builder("one", []))

    def fail_half_way(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise ValueError("out of luck")

    with pytest.raises(ValueError, match="out of luck"):
        build_once(tmp_path / "model", "recipe-2", fail_half_way)

    assert (directory / "weights").read_text() == "one"
    assert is_built(directory, "recipe-1")
    assert not is_built(directory, "recipe-2")


def test_a_fingerprint_tells_texts_and_their_borders_apart() -> None:
    fingerprints = {
        recipe_fingerprint("ab", "c"),
        recipe_fingerprint("a", "bc"),
        recipe_fingerprint("abc"),
        recipe_fingerprint("abc", demo.cached_build),
    }

    assert len(fingerprints) == 4
