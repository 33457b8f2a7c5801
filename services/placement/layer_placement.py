"""Where one request's layer groups belong: in the pool, or on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.placement.blocks import Residency


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where a request's layer groups belong."""

    offloaded: frozenset[int] = frozenset()  # layer groups in host memory
    num_staging: int = 1  # buffers that offloaded groups take turns in, >= 1


ALL_RESIDENT = LayerPlacement()


def widened(
    given: LayerPlacement, residency: Residency | None, spread: Sequence[int]
) -> LayerPlacement:
    """Return the placement with as many groups on the host as `residency` has.

    They are the given ones, then the first of `spread`, which orders all groups. `None`, a request
    that does not fit, has all of them there and one buffer: asking for the least lets others fit.
    """
    if residency is None:
        return LayerPlacement(offloaded=frozenset(spread))
    more = [group for group in spread if group not in given.offloaded]
    extra = more[: max(0, residency.num_offloaded - len(given.offloaded))]
    num_staging = residency.num_staging
    if given.offloaded and not extra:
        num_staging = min(num_staging, given.num_staging)
    return LayerPlacement(
        offloaded=given.offloaded | frozenset(extra), num_staging=max(1, num_staging)
    )
