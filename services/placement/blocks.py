"""How many pool blocks a request's KV takes: the formula of planner, scheduler and simulator.

The solver's arrays and the compiled window compute it in forms of their own; tests hold them equal.

A block holds `block_size` tokens of one layer group. A request with n tokens, of whose L layer
groups L_off are offloaded, with m staging buffers, owns

    L_res * ceil(n / B)             resident groups: all their blocks, the last one partly filled
  + min(m, L_off) * floor(n / B)    staging: offloaded groups take turns in it, full blocks only
  + L_off * [n mod B > 0]           the open block of each offloaded group, which takes new tokens

A caller adds what is in transit: full blocks whose host copy is not yet complete, and the target
blocks of a group that is being restored.

With speculative decoding n counts tokens that cannot be rejected any more. Drafts have room behind
them, a tokens at most: ceil((n + a) / B) - floor(n / B) blocks are open in each group then.

Where a model has layers that keep less than all KV, their groups are *side groups*: always in the
pool, whatever the placement. A request owns in each of them at most what `side_blocks` says. One
that leaves the pool takes what `side_copy_blocks` says of the host, beside its full blocks.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

STATE = 0  # what a side group keeps that has one state, whatever the length


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGeometry:
    """What the formula takes from the engine."""

    num_groups: int  # layer groups of the model (of one pipeline stage), >= 1
    block_size: int  # tokens, >= 1
    # Of each side group: the newest tokens whose KV it keeps, or STATE.
    side_windows: tuple[int, ...] = ()
    # Tokens of a window's block, where its heads are unlike the others': blocks have as many bytes.
    side_block_size: int = 0  # 0: block_size
    max_in_flight_tokens: int = 0  # scheduled and not computed yet, of all requests together
    # Of a request: for which there is room behind those that cannot be rejected any more: drafts.
    max_ahead_tokens: int = 0

    @property
    def window_block_size(self) -> int:
        """Return the tokens of one block of a window group."""
        return self.side_block_size or self.block_size

    @property
    def max_open_blocks(self) -> int:
        """Return how many blocks of a group may be open at once, in one request."""
        return 1 + -(-self.max_ahead_tokens // self.block_size)

    @property
    def max_new_side_blocks(self) -> int:
        """Return how many blocks a step may add in all side groups to a request that decodes."""
        return len(self.side_windows) * (1 + -(-self.max_ahead_tokens // self.window_block_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """How much of a request's KV is in the pool; which groups they are changes nothing."""

    num_offloaded: int  # layer groups in host memory, [0, num_groups]
    num_staging: int  # staging buffers, >= 1 if anything is offloaded


RESIDENT = Residency(num_offloaded=0, num_staging=1)


def num_request_blocks(
    geometry: BlockGeometry, residency: Residency, *, num_tokens: int, num_ahead: int = 0
) -> int:
    """Return the blocks that a request with `num_tokens` tokens of KV owns.

    `num_ahead`: tokens behind them that have room and may never be the request's.
    """
    num_full = num_tokens // geometry.block_size
    num_open = -(-(num_tokens + num_ahead) // geometry.block_size) - num_full
    num_resident = geometry.num_groups - residency.num_offloaded
    num_buffers = min(residency.num_staging, residency.num_offloaded)
    return (
        num_resident * (num_full + num_open)
        + num_buffers * num_full
        + residency.num_offloaded * num_open
    )


def side_blocks(geometry: BlockGeometry, *, num_tokens: int, num_new_tokens: int) -> int:
    """Return the most blocks that a request with `num_tokens` tokens owns in its side groups.

    `num_new_tokens` of them are in flight, still to be scheduled, or drafts' room: until they are
    computed and cannot be rejected any more, the window before the first of them is read, too.
    """
    if not num_tokens or not geometry.side_windows:
        return 0
    size = geometry.window_block_size
    num_rows = -(-num_tokens // size)
    most_new = geometry.max_in_flight_tokens + geometry.max_ahead_tokens
    num_new = min(num_new_tokens, most_new)
    num_blocks = 0
    for window, num_groups in _alike(geometry.side_windows):
        most = 1 if window == STATE else min(num_rows, -(-(window - 1 + num_new) // size) + 1)
        num_blocks += num_groups * most
    return num_blocks


@cache
def _alike(windows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return each window, and how many groups keep it: models have one or two."""
    return tuple(Counter(windows).items())


def side_copy_positions(geometry: BlockGeometry, *, num_tokens: int) -> list[range]:
    """Return which blocks a request takes with it when it leaves, beside its full ones.

    By group, side groups last: the open block; what the next token attends to; a state.
    """
    size, side_size = geometry.block_size, geometry.window_block_size
    opened = [range(num_tokens // size, -(-num_tokens // size))] * geometry.num_groups
    return opened + [
        range(1)
        if window == STATE
        else range(max(0, num_tokens - window + 1) // side_size, -(-num_tokens // side_size))
        for window in geometry.side_windows
    ]


def side_copy_blocks(geometry: BlockGeometry, *, num_tokens: int) -> int:
    """Return the most slots of the host that a request of so many tokens takes for these."""
    num_side = side_blocks(geometry, num_tokens=num_tokens, num_new_tokens=0)
    return num_side + geometry.num_groups if num_side else 0


def min_request_blocks(geometry: BlockGeometry, *, num_tokens: int, num_ahead: int = 0) -> int:
    """Return the fewest blocks that a request can live in: everything offloaded, one buffer."""
    fewest = Residency(num_offloaded=geometry.num_groups, num_staging=1)
    return num_request_blocks(geometry, fewest, num_tokens=num_tokens, num_ahead=num_ahead)


def max_tokens_in(geometry: BlockGeometry, *, num_blocks: int) -> int:
    """Return the length up to which `num_blocks` blocks hold one growing request.

    The need peaks just before a block fills, with floor(n / B) staging and L open blocks, so that
    a request that reaches this length never needed more on its way.
    """
    num_full_at_peak = num_blocks - geometry.num_groups
    return max(0, num_full_at_peak + 1) * geometry.block_size
