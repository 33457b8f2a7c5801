"""The link is measured on a device whose waits do not block the host."""

from collections.abc import Iterator

import pytest
import torch

from lab.fake_streams import FakeDevice
from services.executor.copies.device.stream_copy_engine import StreamCopyEngine
from services.executor.copies.pages import GroupPages
from services.executor.copies.timing.link_calibration import NUM_SMALL, calibrate

NUM_BLOCKS, PAGE_BYTES, BYTES_PER_S = 12, 1 << 20, 1e9


@pytest.fixture
def engine() -> Iterator[StreamCopyEngine]:
    pool, host = (torch.zeros((NUM_BLOCKS + 1, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
    device = FakeDevice(bytes_per_s=BYTES_PER_S)
    engine = StreamCopyEngine([GroupPages(pool=(pool,), host=(host,))], device)
    yield engine
    engine.close()


def test_every_copy_is_counted_with_its_time(engine: StreamCopyEngine) -> None:
    links = calibrate(engine, num_blocks=NUM_BLOCKS, chunk_blocks=4)

    assert links is not None
    for small, large in ((links.small_h2d, links.large_h2d), (links.small_d2h, links.large_d2h)):
        assert (small.num_bytes, small.num_copies) == (NUM_SMALL * PAGE_BYTES, NUM_SMALL)
        assert small.busy_s == pytest.approx(small.num_bytes / BYTES_PER_S)
        assert large.num_bytes == 4 * PAGE_BYTES
        assert large.busy_s == pytest.approx(large.num_bytes / BYTES_PER_S)
