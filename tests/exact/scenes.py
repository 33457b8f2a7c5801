"""Scenes of one engine, and what its metrics read after each step.

They are read from the registry that an executor's endpoint serves.

A reading has every sample by its name without prefix and `_total`; a labelled one also by its own
label, as `controller_triggers{held}`. Buckets are left out: they move with their histogram's count.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from lab.engine.step_runner import Arrival, Hook, StepRunner, make_prompt

PREFIX = "vllm:evenflow_"
PARTS = {"histogram": ("_sum", "_count")}
SETTLING = Arrival(request_id="settling", prompt=make_prompt(5, seed=1), num_output_tokens=2)

Reading = Mapping[str, float]
Act = Callable[[StepRunner, pytest.MonkeyPatch], None]

SEEN: set[str] = set()  # what some scene sees move, by the names of readings


def sees(*names: str) -> Callable[[Act], Act]:
    """Make a test of a scene: these move in it, and what is of the moment goes back."""
    SEEN.update(names)

    def scene(act: Act) -> Act:
        def test(runner: StepRunner, monkeypatch: pytest.MonkeyPatch) -> None:
            with readings(runner) as taken:
                act(runner, monkeypatch)
                runner.run([SETTLING])
            for name in names:
                assert_moved(name, [reading.get(name, 0.0) for reading in taken])

        return test

    return scene


def assert_moved(name: str, values: list[float]) -> None:
    """Assert that a counter rose, or that a gauge left its first value and came back to it.

    A gauge of the controller keeps the newest value that there was.
    """
    assert set(values) != {values[0]}, f"{name} stays at {values[0]}"
    if name.startswith("kv_") and name in registered("gauge"):
        assert values[-1] == values[0], f"{name} does not come back: {values}"


@contextmanager
def readings(runner: StepRunner) -> Iterator[list[Reading]]:
    """Yield the readings from an idle engine on; one is added after each step."""
    runner.run([SETTLING])
    names, step = sample_names(), runner.engine.step
    taken = [read(names)]

    def step_and_read() -> Any:
        outputs = step()
        taken.append(read(names))
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.engine, "step", step_and_read)
        yield taken


def read(names: Iterable[str]) -> Reading:
    """Return what these samples read now."""
    values: defaultdict[str, float] = defaultdict(float)
    for family in REGISTRY.restricted_registry(names).collect():
        for sample in family.samples:
            name = sample.name.removeprefix(PREFIX).removesuffix("_total")
            values[name] += sample.value
            for label in sample.labels.keys() - {"model_name", "engine"}:
                values[f"{name}{{{sample.labels[label]}}}"] += sample.value
    return values


def sample_names() -> list[str]:
    """Return the samples of all metrics of ours, as they are scraped."""
    total = {"counter": ("_total",), **PARTS}
    return [f.name + part for f in families() for part in total.get(f.type, ("",))]


def registered(*types: str) -> set[str]:
    """Return the name of every sample there is or will be, as readings have it; of all types, or
    of these.
    """
    return {
        family.name.removeprefix(PREFIX) + part
        for family in families()
        if not types or family.type in types
        for part in PARTS.get(family.type, ("",))
    }


def families() -> list[Any]:
    return [family for family in REGISTRY.collect() if family.name.startswith(PREFIX)]


def at(step: int, act: Callable[[Any], None]) -> Hook:
    """Return a hook that acts once, before a step."""

    def hook(scheduler: Any, number: int) -> None:
        if number == step:
            act(scheduler)

    return hook


def copies_complete(scheduler: Any, step: int) -> None:
    """Wait before each step for the copies that were ordered, however slow the machine is."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    runner: Any = get_kv_transfer_group().runner
    saves, restores = runner._running_saves, runner._restores
    while not all(map(runner.watch.poll, [*(save.copy for save in saves), *restores.values()])):
        time.sleep(1e-3)
