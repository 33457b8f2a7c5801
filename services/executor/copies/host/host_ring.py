"""A ring of pinned buffers that copies pass through, with a pageable pool behind it.

For machines where locking the whole pool is out of the question (LayerKV, section 4): only the
ring is pinned, and the processor moves bytes between pool and ring. A buffer holds one chunk of a
copy. It is free, held by whoever fills or empties it, or in flight until an event has passed.
"""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.executor.copies.host.host_memory import Registrar, allocate_rows


class Passed(Protocol):
    """What a buffer in flight waits for."""

    def synchronize(self) -> None:
        """Return when it has happened."""


@dataclass(frozen=True, slots=True, eq=False)
class RingBuffer:
    rows: tuple[torch.Tensor, ...]  # per layer of a group: [num_rows, page_bytes] uint8


class HostRing:
    """The buffers of one direction. One thread takes them; any thread may give them back."""

    def __init__(
        self,
        page_bytes: Sequence[int],
        *,
        rows_per_buffer: int,
        num_buffers: int,
        registrar: Registrar | None = None,
        node: int | None = None,
    ) -> None:
        assert num_buffers >= 1
        self._registrar = registrar
        memory = [allocate_rows(num_buffers * rows_per_buffer, size, node) for size in page_bytes]
        self._addresses = [rows.data_ptr() for rows in memory]
        if registrar is not None:
            for rows in memory:
                registrar.register(rows.data_ptr(), rows.numel())
        self.num_buffers = num_buffers
        self._free = [
            RingBuffer(
                tuple(rows[n * rows_per_buffer : (n + 1) * rows_per_buffer] for rows in memory)
            )
            for n in range(num_buffers)
        ]
        self._in_flight: deque[tuple[RingBuffer, Passed]] = deque()
        self._changed = threading.Condition()

    def try_take(self) -> RingBuffer | None:
        """Return a buffer that is free now; None if there is none."""
        with self._changed:
            return self._free.pop() if self._free else None

    def take(self) -> RingBuffer:
        """Return a free buffer, after the oldest copy in flight if there is none."""
        with self._changed:
            while not self._free and not self._in_flight:
                self._changed.wait()
            if self._free:
                return self._free.pop()
            buffer, passed = self._in_flight.popleft()
        passed.synchronize()
        return buffer

    def give_back(self, buffer: RingBuffer, *, after: Passed | None = None) -> None:
        """Let a buffer be taken again, at once or once `after` has happened."""
        with self._changed:
            if after is None:
                self._free.append(buffer)
            else:
                self._in_flight.append((buffer, after))
            self._changed.notify()

    def close(self) -> None:
        """Unpin the buffers, which nothing may use any more. Idempotent."""
        while self._registrar is not None and self._addresses:
            self._registrar.unregister(self._addresses.pop())
