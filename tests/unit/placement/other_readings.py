"""Other readings of OrbitFlow's latency model, for comparison only.

No plan is made with them: equal sharing is slower than the ordered queue for every placement, and
Algorithm 1 as printed credits a copy with one layer's compute only, counts sizes twice, and never
starts the copy of a first or an adjacent offloaded layer (it then costs nothing).
"""

from collections.abc import Sequence

from services.placement.step_time.latency import Fetch

EPSILON_S = 1e-12


def equal_sharing_s(compute_s: Sequence[float], fetches: Sequence[Fetch]) -> float:
    """Return the step's length if copies in flight share the link equally (section 3.3.1).

    One copy in flight per request, each starting when the previous one's layer has ended.
    """
    streams = [_Stream(fetch) for fetch in fetches]
    total_s = 0.0
    for layer, layer_s in enumerate(compute_s):
        while any(stream.layer == layer and stream.left_s > EPSILON_S for stream in streams):
            total_s += _share(streams, float("inf"))
        left_s = layer_s
        while left_s > EPSILON_S and any(stream.left_s > EPSILON_S for stream in streams):
            left_s -= _share(streams, left_s)
        total_s += layer_s
        for stream in streams:
            if stream.layer == layer:
                stream.advance()
    return total_s


class _Stream:
    """The copies of one request, one at a time."""

    def __init__(self, fetch: Fetch) -> None:
        self._layers = iter(fetch.pattern.offloaded)
        self._layer_s = fetch.layer_s
        self.layer = -1
        self.left_s = 0.0
        self.advance()

    def advance(self) -> None:
        self.layer = next(self._layers, -1)
        self.left_s = self._layer_s if self.layer >= 0 else 0.0


def _share(streams: Sequence[_Stream], limit_s: float) -> float:
    """Run the link until its smallest copy ends, at most `limit_s`. Returns the time used."""
    active = [stream for stream in streams if stream.left_s > EPSILON_S]
    step_s = min(limit_s, min(stream.left_s for stream in active) * len(active))
    for stream in active:
        stream.left_s -= step_s / len(active)
    return step_s


def algorithm_1_s(compute_s: Sequence[float], fetches: Sequence[Fetch]) -> float:
    """Return T_batch of Algorithm 1 line by line (one buffer per request)."""
    pending = [list(fetch.pattern.offloaded) for fetch in fetches]
    current: dict[int, int] = {}  # request -> layer of its copy in flight
    previous_s = stall_s = 0.0
    for layer, layer_s in enumerate(compute_s):
        for r, fetch in enumerate(fetches):
            later = [candidate for candidate in pending[r] if candidate > layer]
            if r not in current and layer not in fetch.pattern.offloaded and later:
                pending[r].remove(later[0])
                current[r] = later[0]
        stall_s += _printed_stall_s(current, layer, fetches, previous_s)
        previous_s = layer_s
    return sum(compute_s) + stall_s


def _printed_stall_s(
    current: dict[int, int], layer: int, fetches: Sequence[Fetch], previous_s: float
) -> float:
    """Lines 9-23: end copies, smallest first, until none that this layer needs is left."""
    blocking = {r for r, needed in current.items() if needed == layer}
    elapsed_s = stall_s = 0.0
    for r in sorted(current, key=lambda r: fetches[r].layer_s):
        if not blocking:
            break
        elapsed_s += fetches[r].layer_s * len(current)
        stall_s = max(0.0, elapsed_s - previous_s)
        blocking.discard(r)
        del current[r]
    return stall_s
