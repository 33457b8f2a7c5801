"""The link is measured on a device whose waits do not block the host."""

from collections.abc import Iterator

import pytest
import torch

from lab.fake_streams import FakeDevice
from services.executor.copies.copy_engine import Direction
from services.executor.copies.device.cuda_copy_engine import CudaCopyEngine
from services.executor.copies.host.host_ring import HostRing
from services.executor.copies.pages import GroupPages
from services.executor.copies.timing.link_calibration import NUM_SMALL, calibrate

NUM_BLOCKS, PAGE_BYTES, BYTES_PER_S = 12, 1 << 20, 1e9


@pytest.fixture(params=["pinned", "ring"])
def engine(request: pytest.FixtureRequest) -> Iterator[CudaCopyEngine]:
    pool, host = (torch.zeros((NUM_BLOCKS + 1, PAGE_BYTES), dtype=torch.uint8) for _ in range(2))
    rings = {}
    if request.param == "ring":
        rings = {d: HostRing([PAGE_BYTES], rows_per_buffer=4, num_buffers=2) for d in Direction}
    device = FakeDevice(bytes_per_s=BYTES_PER_S)
    engine = CudaCopyEngine([GroupPages(pool=(pool,), host=(host,))], device, rings=rings)
    yield engine
    engine.close()


def test_every_copy_is_counted_with_its_time(engine: CudaCopyEngine) -> None:
    links = calibrate(engine, num_blocks=NUM_BLOCKS, chunk_blocks=4)

    assert links is not None
    for small, large in ((links.small_h2d, links.large_h2d), (links.small_d2h, links.large_d2h)):
        assert (small.num_bytes, small.num_copies) == (NUM_SMALL * PAGE_BYTES, NUM_SMALL)
        assert small.busy_s == pytest.approx(small.num_bytes / BYTES_PER_S)
        assert large.num_bytes == 4 * PAGE_BYTES
        assert large.busy_s == pytest.approx(large.num_bytes / BYTES_PER_S)
