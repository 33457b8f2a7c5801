"""A Redis Cluster is recognised at the start, and refused by name."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from cli.local.preflight import is_free
from lab.stack.ports import free_port
from lab.stack.processes import EXIT_TIMEOUT_S, PYTHON_PATH
from lab.stack.redis_server import RedisServer
from services.kit.redis_url import refusal_of_cluster
from services.kit.settings import BAD_SETTINGS_EXIT_CODE

REPO = Path(__file__).parents[2]
NUM_SLOTS = 16_384
WAIT_S = 300.0
LATE_S = 60.0  # for an answer of a server on a busy machine
REFUSAL = "is a Redis Cluster of 2 masters: Evenflow takes one server"


BUS = 10_000  # above a node's port: that of its bus


def node_port() -> int:
    """Return a port with one below it, both free, like those of their buses; below those of tests,
    and none where a server of this machine's would be.
    """
    for _ in range(1_000):
        port = 6_500 + free_port() % 900
        if all(map(is_free, (port, port - 1, port + BUS, port - 1 + BUS))):
            return port
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The URL of one of two masters that have half of the slots each."""
    options = {"cluster-enabled": "yes"}
    first = node_port()
    with (
        RedisServer(first, options=options) as one,
        RedisServer(first - 1, options=options) as other,
    ):
        half = NUM_SLOTS // 2
        with redis.Redis.from_url(one.url) as first_admin, redis.Redis.from_url(other.url) as admin:
            first_admin.execute_command("CLUSTER", "ADDSLOTS", *range(half))
            admin.execute_command("CLUSTER", "ADDSLOTS", *range(half, NUM_SLOTS))
            admin.execute_command("CLUSTER", "MEET", "127.0.0.1", str(first))
            deadline_s = time.monotonic() + WAIT_S
            while b"cluster_size:2" not in first_admin.execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        yield one.url


def test_several_masters_are_refused(cluster: str) -> None:
    assert refusal_of_cluster(cluster, timeout_s=LATE_S).startswith(REFUSAL)


def test_one_server_will_do() -> None:
    with RedisServer() as server:
        assert refusal_of_cluster(server.url, timeout_s=LATE_S) == ""


def test_a_server_that_is_away_is_waited_for_as_ever() -> None:
    assert refusal_of_cluster(f"redis://127.0.0.1:{free_port()}/0", timeout_s=LATE_S) == ""


@pytest.mark.parametrize(
    ("service", "variable"),
    [
        ("tracker", "EVENFLOW_TRACKER_REDIS_URL"),
        ("gateway", "EVENFLOW_GATEWAY_API_KEYS_REDIS_URL"),
    ],
)
def test_processes_that_are_given_a_cluster_do_not_start(
    cluster: str, service: str, variable: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}"],
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": PYTHON_PATH, variable: cluster},
        capture_output=True,
        text=True,
        timeout=EXIT_TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == BAD_SETTINGS_EXIT_CODE
    assert f"{variable}: {REFUSAL}" in ended.stderr
