"""What helm renders, run: each container starts its process, whose probes say what is so."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.failover.asked import NUM_TOKENS as NUM_READ_TOKENS
from bench.failover.doors import Doors
from bench.failover.rolling import NUM_SHORT_TOKENS, Readers
from bench.failover.whole_stack import undisturbed
from bench.gateway.heavy_requests import Edge
from lab.chart_tools import has_helm
from lab.models import exactness_model
from lab.stack.processes import (
    MODEL,
    assert_gone,
    engine_processes_of,
    stopped,
    wait_until,
)
from tests.certificates import Authority
from tests.charts import EXAMPLES, objects, render
from tests.clients import Received, http_chat
from tests.endpoint_picker import read_pod
from tests.rendered_pods import Cluster, Pod

pytestmark = [
    pytest.mark.timeout(3_600),
    pytest.mark.skipif(not has_helm(), reason="the pinned helm is for Linux on x86-64"),
]

NUM_TOKENS = 40
HTTP_TIMEOUT_S = 60.0  # of an answer on a busy machine
# Of this machine, and of one on which everything takes ten times as long.
HERE = {
    "grpcKeepaliveSeconds": 30,
    "gateway.lameDuckSeconds": 1,
    "gateway.settings.ENGINE_STALL_S": 1200,
    "gateway.settings.LINK_STALL_S": 60,
    "gateway.settings.SUBMIT_TIMEOUT_S": 300,
    "gateway.settings.READER_TIMEOUT_S": 1800,
    "pools[0].servedModelName": MODEL,
    "pools[0].kvHostMemoryBytes": 64 << 20,
    "pools[0].drainSeconds": 600,
    "pools[0].settings.MAX_NUM_SEQS": 8,
    "pools[0].settings.KV_CACHE_MEMORY_BYTES": 256 << 20,
    "pools[0].settings.MAX_MODEL_LEN": 2048,
}


def rendered(folder: Path, *, example: str = "cpu", **further: object) -> Cluster:
    values = HERE | {"pools[0].model": exactness_model()} | further
    told = ",".join(f"{name}={value}" for name, value in values.items())
    return Cluster(objects(render("--set", told, values=EXAMPLES[example])), folder)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = rendered(tmp_path, **{"pools[0].replicas": 1})
    try:
        yield cluster
    finally:
        cluster.stop()


async def is_served(pod: Pod, num_requests: int) -> None:
    def live() -> bool:
        told = httpx.get(f"{pod.url()}/load", timeout=HTTP_TIMEOUT_S).json()
        return bool(told == {"server_load": num_requests})

    await asyncio.to_thread(wait_until, live, f"{num_requests} are live")


async def read_while_leaving(gateway: Pod, executor: Pod, leaving: Pod) -> Received:
    """Ask a pod to end while it has a live answer; return the answer, read by then."""
    engine = engine_processes_of(next(iter(executor.processes.values())).pid)
    with stopped(engine):  # so that the answer does not end before the pod was asked
        reading = asyncio.create_task(
            http_chat(
                gateway.url(), "Slowly.", max_tokens=NUM_TOKENS, request_id="live", rate_tps=40.0
            )
        )
        await is_served(gateway, 1)
        leaving.terminate()
        await asyncio.to_thread(leaving.wait_for, "readiness", says=False)
        if leaving is gateway:
            assert gateway.probe("liveness")
    return await reading


async def test_pods_start_answer_and_leave_as_rendered(cluster: Cluster) -> None:
    pods = cluster.pods
    redis, tracker, planner = (
        pods[f"evenflow-{name}-0"] for name in ("redis", "tracker", "planner")
    )
    gateway, executor = pods["evenflow-gateway-0"], pods["evenflow-executor-demo-0"]
    others = (redis, tracker, planner)
    for pod in (*others, gateway):
        pod.start()
    for pod in (tracker, planner, gateway):
        await asyncio.to_thread(pod.wait_for, "startup")
    for pod in others:
        await asyncio.to_thread(pod.wait_for, "liveness")
    assert gateway.probe("liveness")
    assert not gateway.probe("readiness")  # an executor is not there yet
    executor.start()
    assert not executor.probe("startup")
    assert not executor.probe("readiness")
    for kind in ("startup", "liveness", "readiness"):
        await asyncio.to_thread(executor.wait_for, kind)
    await asyncio.to_thread(gateway.wait_for, "readiness")

    tested = await asyncio.to_thread(cluster.test)
    assert tested.returncode == 0, tested.stderr
    assert f"{MODEL}: " in tested.stdout

    for leaving in (gateway, executor):
        engine = engine_processes_of(executor.processes["executor"].pid)
        got = await read_while_leaving(gateway, executor, leaving)
        assert (got.errors, got.done, got.num_output_tokens) == ([], True, NUM_TOKENS)
        assert await asyncio.to_thread(leaving.wait_exit) == 0, leaving.log_tail()
        if leaving is gateway:
            gateway.start()
            await asyncio.to_thread(gateway.wait_for, "readiness")
    await asyncio.to_thread(assert_gone, engine)
    await asyncio.to_thread(gateway.wait_for, "readiness", says=False)
    assert gateway.probe("liveness")
    for pod in (gateway, planner, tracker, redis):
        pod.terminate()
        assert await asyncio.to_thread(pod.wait_exit) == 0, pod.log_tail()


@pytest.mark.nightly
async def test_a_side_car_serves_its_executor_and_leaves_before_it(tmp_path: Path) -> None:
    """And tells an endpoint picker of it. Planner, tracker and Redis are away."""
    here = {
        "certificates.mode": "off",
        "pools[0].device": "cpu",
        "pools[0].gpus": 0,
        "pools[0].replicas": 1,
        "pools[0].autoscaling.kind": "off",
        "pools[0].settings.DTYPE": "float32",
        "pools[0].settings.ENFORCE_EAGER": "true",
    }
    cluster = rendered(tmp_path, example="sidecar", **here)
    pod = cluster.pods["evenflow-executor-qwen-0"]
    try:
        pod.start()
        await asyncio.to_thread(pod.wait_for, "liveness", "gateway")
        assert not pod.probe("readiness", "gateway")
        for part in ("executor", "gateway"):
            await asyncio.to_thread(pod.wait_for, "readiness", part)
        got = await http_chat(pod.url(), "Hello.", max_tokens=NUM_TOKENS, request_id="one")
        page = await asyncio.to_thread(httpx.get, f"{pod.url()}/metrics", timeout=HTTP_TIMEOUT_S)
        told = read_pod(page.text)
        pod.terminate("gateway")
        assert await asyncio.to_thread(pod.wait_exit, "gateway") == 0, pod.log_tail("gateway")
        assert pod.probe("readiness", "executor")
        pod.terminate("executor")
        assert await asyncio.to_thread(pod.wait_exit, "executor") == 0, pod.log_tail("executor")
    finally:
        cluster.stop()

    assert (got.errors, got.done, got.num_output_tokens) == ([], True, NUM_TOKENS)
    assert told.block_size * told.num_blocks > 2048  # a context's KV
    assert told.max_adapters == 0


@pytest.mark.nightly
async def test_an_update_of_all_pods_costs_no_token_and_no_request(tmp_path: Path) -> None:
    """Executors go one by one, from the last; a new gateway is ready before an old one is asked to
    end. Each is gone within its pod's grace.
    """
    cluster = rendered(tmp_path, **{"gateway.replicas": 2})
    old = [pod for pod in cluster.pods.values() if pod.workload == "evenflow-gateway"]
    new = [cluster.add(cluster.workloads["evenflow-gateway"]) for _ in old]
    executors = [pod for pod in cluster.pods.values() if "executor" in pod.workload]
    edges = [Edge(pod.url(), f"127.0.0.1:{pod.port('grpc')}", MODEL) for pod in (*old, *new)]
    try:
        for pod in cluster.pods.values():
            if pod not in new:
                pod.start()
        for pod in (*executors, *old):
            await asyncio.to_thread(pod.wait_for, "readiness")
        lengths = (NUM_READ_TOKENS, NUM_SHORT_TOKENS)
        expected, short = [await undisturbed(edges[0], length) for length in lengths]
        readers = Readers(Doors(edges), expected, short)
        reading = asyncio.create_task(readers.run())
        for pod in reversed(executors):
            await asyncio.to_thread(updated, pod, pod)
        for before, after in zip(old, new, strict=True):
            await asyncio.to_thread(updated, before, after)
        readers.stop()
        await reading
    finally:
        cluster.stop()

    assert len(readers.answers) > 22
    assert [one.got.error for one in readers.answers if one.got.error] == []
    assert [one.asked.name for one in readers.answers if not one.is_identical] == []
    assert sum(one.num_times_by_all for one in readers.answers) == 0


def updated(before: Pod, after: Pod) -> None:
    """Put a pod into the place of another one, or start it again if it is the same."""
    if before is not after:
        after.start()
        after.wait_for("readiness")
    before.terminate()
    assert before.wait_exit(timeout_s=before.grace_s) == 0, before.log_tail()
    if before is after:
        after.start()
        after.wait_for("readiness")


def test_probes_of_pods_with_certificates_show_the_pods_own(tmp_path: Path) -> None:
    cluster = rendered(tmp_path, **{"certificates.mode": "existing"})
    planner = cluster.pods["evenflow-planner-0"]
    issued = Authority(tmp_path / "ca").issue("planner", "planner")
    (tmp_path / "tls").mkdir()
    for file, name in (
        (issued.cert_file, "tls.crt"),
        (issued.key_file, "tls.key"),
        (issued.ca_file, "ca.crt"),
    ):
        (tmp_path / "tls" / name).write_bytes(Path(file).read_bytes())
    try:
        planner.start()
        planner.wait_for("readiness")
        strange = Authority(tmp_path / "strange").issue("planner", "planner")
        for file, name in ((strange.cert_file, "tls.crt"), (strange.key_file, "tls.key")):
            (tmp_path / "tls" / name).write_bytes(Path(file).read_bytes())
        assert not planner.probe("readiness")
    finally:
        cluster.stop()
