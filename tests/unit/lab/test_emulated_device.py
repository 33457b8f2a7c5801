"""Padding of layers, on a clock that the test moves."""

import pytest

from lab.slow_device.emulated_device import EmulatedDevice, LayerTime


class Machine:
    """A device on a clock of its own; sleeping takes `overshoot_s` longer than asked for."""

    def __init__(self, overshoot_s: float = 0.0, **layer_time: float) -> None:
        self.now_s = 100.0
        self._overshoot_s = overshoot_s
        self.device = EmulatedDevice(
            LayerTime(**layer_time), clock=lambda: self.now_s, sleep=self._sleep
        )

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds + self._overshoot_s

    def begin_step(self, num_tokens: int = 1, num_context_tokens: int = 1) -> None:
        self.device.begin_step(num_tokens=num_tokens, num_context_tokens=num_context_tokens)

    def run_layer(
        self, compute_s: float = 0.0, stall_s: float = 0.0, stall_after_s: float = 0.0
    ) -> float:
        """Return how long a layer took that computes, waits for KV, and computes again."""
        began_s = self.now_s
        self.now_s += compute_s / 2
        self.device.pause()
        self.now_s += stall_s
        self.device.resume()
        self.now_s += compute_s / 2
        self.device.end_layer()
        self.now_s += stall_after_s
        self.device.resume()
        return self.now_s - began_s


def test_every_layer_takes_its_time_whatever_it_computes() -> None:
    machine = Machine(base_s=0.004)
    machine.begin_step()

    taken_s = [machine.run_layer(compute_s) for compute_s in (0.0, 0.001, 0.0039)]

    assert taken_s == pytest.approx([0.004] * 3)


def test_a_stall_is_never_absorbed_by_the_padding() -> None:
    machine = Machine(base_s=0.004)
    machine.begin_step()

    assert machine.run_layer(0.001, stall_s=0.003) == pytest.approx(0.007)
    assert machine.run_layer(0.001, stall_after_s=0.002) == pytest.approx(0.006)
    assert machine.run_layer(0.001) == pytest.approx(0.004)


def test_lateness_is_made_up_for_in_the_same_step_and_forgotten_in_the_next() -> None:
    machine = Machine(base_s=0.004)
    machine.begin_step()
    assert machine.run_layer(0.006) == pytest.approx(0.006)
    assert machine.run_layer(0.001) == pytest.approx(0.002)
    machine.run_layer(0.009)

    machine.begin_step()
    assert machine.run_layer(0.001) == pytest.approx(0.004)


def test_sleeps_that_last_too_long_do_not_add_up() -> None:
    machine = Machine(overshoot_s=0.0005, base_s=0.004)
    machine.begin_step()

    taken_s = sum(machine.run_layer() for _ in range(32))

    assert taken_s == pytest.approx(32 * 0.004 + 0.0005)


def test_the_time_grows_with_the_tokens_of_the_step_and_what_they_attend_to() -> None:
    machine = Machine(base_s=0.001, per_token_s=0.0001, per_context_token_s=0.00001)
    machine.begin_step(num_tokens=10, num_context_tokens=300)

    assert machine.run_layer() == pytest.approx(0.001 + 0.001 + 0.003)


def test_layers_outside_a_step_are_not_padded() -> None:
    assert Machine(base_s=0.004).run_layer() == 0.0
