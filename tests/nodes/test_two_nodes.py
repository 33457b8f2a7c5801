"""Engines over two nodes: tokens are those of one process, and nodes end with each other."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from evenflow.gateway.v1 import generation_pb2 as gen
from lab.engine.conversations import conversations
from lab.engine.workloads import mixed
from lab.executor_client import GatewayStream
from lab.stack.executor_process import ExecutorProcess
from lab.stack.processes import EXIT_TIMEOUT_S, assert_gone
from services.executor.nodes.types import LOST_EXIT_CODE
from services.kit.settings import BAD_SETTINGS_EXIT_CODE
from tests.exact.cases import make_case
from tests.exact.reference import reference
from tests.nodes import network
from tests.nodes.asking import ask, moved_bytes
from tests.nodes.group import WITH_STAGES, Group, HealthWatch

WHY_NOT = network.why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are two nodes"),
    pytest.mark.timeout(3_600),
]

# From a fault to the last process of the group, where nothing else is on the machine (a night: 10).
END_S = float(os.environ.get("EVENFLOW_TEST_END_S", EXIT_TIMEOUT_S))
TENSOR: dict[str, Any] = {"TENSOR_PARALLEL_SIZE": 2}
PIPELINE: dict[str, Any] = {"PIPELINE_PARALLEL_SIZE": 2, **WITH_STAGES}
LAYERS: dict[str, Any] = {"LAYERWISE_KV": True, "KV_HOST_MEMORY_BYTES": 256 << 20}


def engine(parallel: dict[str, Any], *, layerwise: bool) -> dict[str, Any]:
    """Return an executor's settings; with layer-wise KV of a pool that is too small."""
    settings = {
        **parallel,
        "BLOCK_SIZE": 32,
        "MAX_MODEL_LEN": 1024,
        "MAX_NUM_SEQS": 16,
        "ENABLE_PREFIX_CACHING": True,
        "PLANNER_ADDRESS": "",
        "POLICY": "evenflow",
    }
    if layerwise:
        case = make_case(pipeline_parallel_size=parallel.get("PIPELINE_PARALLEL_SIZE", 1))
        settings |= {**LAYERS, "NUM_GPU_BLOCKS_OVERRIDE": case.num_blocks}
    return settings


async def assert_tokens_of_one_process(gateway: GatewayStream) -> None:
    """Ask all of `mixed` at once, and `conversations` turn by turn."""
    stock = reference("float32")
    answers = await ask(gateway, mixed())
    assert {name: answer.ids for name, answer in answers.items()} == stock["mixed"].tokens
    known = stock["conversations"].tokens
    turns = groupby(
        sorted(conversations(known), key=lambda arrival: arrival.step // 60),
        key=lambda arrival: arrival.step // 60,
    )
    num_cached = 0
    for _, turn in turns:
        answers = await ask(gateway, list(turn))
        assert {n: answer.ids for n, answer in answers.items()} == {n: known[n] for n in answers}
        num_cached += sum(answer.ending.num_cached_tokens for answer in answers.values())
    assert num_cached > 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What becomes of a node's front, or of the link where none is named."""

    node: str = ""
    signum: int = 0
    codes: tuple[int, int] = (LOST_EXIT_CODE, LOST_EXIT_CODE)  # of leader and follower
    statuses: tuple[str, ...] = ("SERVING", "NOT_SERVING")  # that the leader tells


FAULTS = {
    "follower-killed": Fault(
        node="follower", signum=signal.SIGKILL, codes=(LOST_EXIT_CODE, -signal.SIGKILL)
    ),
    "follower-stopped": Fault(node="follower", signum=signal.SIGSTOP),
    "leader-killed": Fault(
        node="leader",
        signum=signal.SIGKILL,
        codes=(-signal.SIGKILL, LOST_EXIT_CODE),
        statuses=("SERVING",),
    ),
    "leader-stopped": Fault(node="leader", signum=signal.SIGSTOP),
    "link-cut": Fault(),
}
CASES = (
    ("tensor-parallel", TENSOR, False, "follower-killed"),
    ("tensor-parallel-layerwise", TENSOR, True, "follower-stopped"),
    ("pipeline-parallel", PIPELINE, False, "leader-killed"),
    ("pipeline-parallel-layerwise", PIPELINE, True, "link-cut"),
    ("pipeline-parallel-layerwise", PIPELINE, True, "leader-stopped"),
)


@pytest.mark.parametrize(
    ("parallel", "layerwise", "fault"),
    [case[1:] for case in CASES],
    ids=[f"{name}-{fault}" for name, _, _, fault in CASES],
)
async def test_tokens_are_those_of_one_process_and_nodes_end_with_each_other(
    parallel: dict[str, Any], layerwise: bool, fault: str, tmp_path: Path
) -> None:
    group = Group(tmp_path, **engine(parallel, layerwise=layerwise))
    with group.running():
        await asyncio.to_thread(group.leader.wait_serving)
        async with GatewayStream(group.leader.address) as gateway:
            await assert_tokens_of_one_process(gateway)
        assert (moved_bytes(group) > 0) == layerwise
        took_s = await assert_end_together(group, FAULTS[fault])
    print(f"the rest has ended within {took_s:.1f} s")
    assert took_s < END_S


async def assert_end_together(group: Group, fault: Fault) -> float:
    """Return the seconds from a fault, while a request runs, to the end of all that can run."""
    nodes = {"leader": group.leader, "follower": group.follower}
    ranks = {name: node.engine_processes() for name, node in nodes.items()}
    assert [len(processes) for processes in ranks.values()] == [2, 1]  # EngineCore leads
    health = await asyncio.to_thread(HealthWatch, group.leader.address)
    async with GatewayStream(group.leader.address) as gateway:
        await start_endless(gateway)
        began_s = time.monotonic()
        if fault.node:
            nodes[fault.node].process.send_signal(fault.signum)
        else:
            network.cut_link()
        standing = fault.node if fault.signum == signal.SIGSTOP else ""
        for name in nodes.keys() - {standing}:
            await asyncio.to_thread(nodes[name].process.wait, EXIT_TIMEOUT_S)
            await asyncio.to_thread(assert_gone, ranks[name])
        took_s = time.monotonic() - began_s
        if standing:  # finds the other gone, once it goes on
            nodes[standing].process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(nodes[standing].process.wait, EXIT_TIMEOUT_S)
            await asyncio.to_thread(assert_gone, ranks[standing])
    assert tuple(node.process.wait() for node in nodes.values()) == fault.codes
    assert tuple(await asyncio.to_thread(health.close)) == fault.statuses
    return took_s


async def start_endless(gateway: GatewayStream) -> None:
    """Have a request run that has far more tokens to come."""
    answer = await gateway.submit(
        "endless",
        token_ids=gen.TokenIds(ids=[11] * 40),
        sampling={"temperature": 0, "max_tokens": 900, "ignore_eos": True},
    )
    await gateway.wait(answer.started)


async def test_a_group_is_back_after_either_node_has_died_and_drains_when_asked(
    tmp_path: Path,
) -> None:
    group = Group(tmp_path, **engine(PIPELINE, layerwise=True))
    with group.running():
        load_s = await seconds_of(asyncio.to_thread(group.leader.wait_serving))
        for name in ("follower", "leader"):
            back_s = await seconds_of(die_and_be_back(group, name))
            print(
                f"the {name} killed: back after {back_s:.1f} s, "
                f"the load time of {load_s:.1f} s and {back_s - load_s:.1f} s"
            )
        async with GatewayStream(group.leader.address) as gateway:
            few = mixed()[:4]
            answers = await ask(gateway, few)
            for node in (group.follower, group.leader):
                node.process.terminate()
            codes = [
                await asyncio.to_thread(node.process.wait, EXIT_TIMEOUT_S)
                for node in (group.leader, group.follower)
            ]
    tokens = reference("float32")["mixed"].tokens
    assert {n: answer.ids for n, answer in answers.items()} == {n: tokens[n] for n in answers}
    assert codes == [0, 0]


async def die_and_be_back(group: Group, name: str) -> None:
    """Kill a node, start each again once it has ended, as supervisors do; wait until all serve."""

    async def supervised(node: ExecutorProcess) -> None:
        await asyncio.to_thread(node.process.wait, EXIT_TIMEOUT_S)
        node.start()

    nodes = {"leader": group.leader, "follower": group.follower}
    nodes[name].process.kill()
    await asyncio.gather(*map(supervised, nodes.values()))
    await asyncio.to_thread(group.leader.wait_serving)


async def seconds_of(work: Awaitable[object]) -> float:
    """Return what something took; never compared with anything, for machines are busy."""
    began_s = time.monotonic()
    await work
    return time.monotonic() - began_s


async def test_a_leader_names_the_node_that_does_not_come_and_gives_up(tmp_path: Path) -> None:
    group = Group(tmp_path, NODES_TIMEOUT_S=1, **engine(TENSOR, layerwise=False))
    group.leader.start()
    try:
        code = await asyncio.to_thread(group.leader.process.wait, EXIT_TIMEOUT_S)
    finally:
        group.leader.kill()
    assert code == LOST_EXIT_CODE
    assert '"missing": [1]' in group.leader.log_tail()
    assert "no word of nodes [1] within 1 s" in group.leader.log_tail()


async def test_nodes_that_differ_both_say_in_what_and_end(tmp_path: Path) -> None:
    group = Group(
        tmp_path,
        of_follower={"DTYPE": "bfloat16", "SERVED_MODEL_NAME": "another"},
        **engine(TENSOR, layerwise=False),
    )
    with group.running():
        codes = [
            await asyncio.to_thread(node.process.wait, EXIT_TIMEOUT_S)
            for node in (group.leader, group.follower)
        ]
    assert codes == [BAD_SETTINGS_EXIT_CODE] * 2
    for node in (group.leader, group.follower):
        log = node.log_tail()
        assert (
            'EVENFLOW_EXECUTOR_DTYPE is \\"float32\\" on node 0 and \\"bfloat16\\" on node 1' in log
        )
        assert "EVENFLOW_EXECUTOR_SERVED_MODEL_NAME" in log
