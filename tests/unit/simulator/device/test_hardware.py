"""Devices by name, and from a file."""

import json

import pytest

from simulator.device.hardware import device, device_from, device_names, link_rates

STATED = {"memory_bytes": 16e9, "memory_bytes_per_s": 320e9, "flops_per_s": 65e12}


@pytest.mark.parametrize("spaced", ["rtx-4090", "RTX 4090", "rtx4090", "RTX_4090"])
def test_a_name_may_be_spaced_as_one_likes(spaced) -> None:
    assert device(spaced) == device("rtx-4090")


def test_names_are_apart_however_they_are_spaced() -> None:
    assert len({device(name).title for name in device_names()}) == len(device_names())


def test_an_unknown_name_is_no_device() -> None:
    with pytest.raises(KeyError):
        device("h1000")


def test_fp8_is_at_most_twice_as_fast_as_16_bits() -> None:
    for one in map(device, device_names()):
        if one.fp8_flops_per_s is not None:
            assert one.fp8_flops_per_s == pytest.approx(2 * one.flops_per_s, rel=0.02)


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_describes_a_device_by_the_same_fields(tmp_path, kind) -> None:
    stated = STATED | {"link": "pcie3x16"}
    path = tmp_path / f"t4.{kind}"
    lines = [f"{name} = {json.dumps(value)}" for name, value in stated.items()]
    path.write_text(json.dumps(stated) if kind == "json" else "\n".join(lines))
    read = device_from(path)

    assert (read.title, read.source) == ("t4", str(path))
    assert read.link_bytes_per_s == read.peer_bytes_per_s == link_rates()["pcie3x16"]
    assert read.flops_per_s == 65e12


WRONG = [
    STATED | {"link": "carrier-pigeon"},
    STATED,
    STATED | {"link": "pcie3x16", "colour": "green"},
    STATED | {"link": "pcie3x16", "flops_per_s": 0},
    STATED | {"link": "pcie3x16", "flops_per_s": "fast"},
]


@pytest.mark.parametrize("stated", WRONG)
def test_a_file_that_describes_none_is_refused_in_a_sentence(tmp_path, stated) -> None:
    path = tmp_path / "t4.json"
    path.write_text(json.dumps(stated))

    with pytest.raises(ValueError, match=r"t4\.json describes no device"):
        device_from(path)
