"""One stack for all end-to-end tests; each but the last leaves every process running."""

from collections.abc import Iterator

import pytest

from lab.stack.processes import Stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("logs"))
    try:
        stack.start_all()
        yield stack
    finally:
        stack.stop()
