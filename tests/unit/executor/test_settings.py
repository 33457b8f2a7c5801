"""What the executor can be told."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from services.executor.settings import (
    NODE_KEEPALIVE_S,
    ExecutorSettings,
    prepare_engine_environment,
    set_rank_address,
)


@pytest.mark.parametrize(
    ("model", "served_model_name", "expected"),
    [
        ("/models/tiny-llama", "", "tiny-llama"),
        ("meta-llama/Llama-3.1-8B", "", "Llama-3.1-8B"),
        ("/models/tiny-llama", "demo", "demo"),
    ],
)
def test_the_model_is_served_under_its_own_or_a_given_name(
    model: str, served_model_name: str, expected: str
) -> None:
    assert ExecutorSettings(model=model, served_model_name=served_model_name).model_id == expected


def test_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVENFLOW_EXECUTOR_MODEL", raising=False)
    with pytest.raises(ValidationError):
        ExecutorSettings()  # type: ignore[call-arg]


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXECUTOR_MODEL", "/models/m")
    monkeypatch.setenv("EVENFLOW_EXECUTOR_KV_CACHE_MEMORY_BYTES", str(1 << 30))
    monkeypatch.setenv("EVENFLOW_EXECUTOR_TRACKER", "")
    settings = ExecutorSettings()  # type: ignore[call-arg]

    assert settings.kv_cache_memory_bytes == 1 << 30
    assert settings.tracker == ""
    assert settings.max_num_seqs is None  # left to vLLM


def test_adapters_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_EXECUTOR_LORA_MODULES", '{"tuned": "/adapters/tuned"}')

    assert ExecutorSettings(model="m").lora_modules == {"tuned": "/adapters/tuned"}


@pytest.mark.parametrize("modules", [{"served": "/a"}, {"": "/a"}, {"tuned": ""}])
def test_an_adapter_has_an_id_of_its_own_and_a_place(modules: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        ExecutorSettings(model="m", served_model_name="served", lora_modules=modules)


def test_evenflow_is_the_policy_of_layerwise_kv_unless_another_is_named() -> None:
    plain = ExecutorSettings(model="m")
    layerwise = ExecutorSettings(model="m", layerwise_kv=True)
    other = ExecutorSettings(model="m", layerwise_kv=True, policy="layerkv")

    assert [s.acting_policy for s in (plain, layerwise, other)] == [
        "vllm",
        "evenflow",
        "layerkv",
    ]


def test_one_setting_switches_to_stock_vllm() -> None:
    settings = ExecutorSettings(model="m", layerwise_kv=True, policy="vllm")

    assert not settings.uses_layerwise_kv


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"policy": "orbitflow"}, "policy"),  # without layer-wise KV
        ({"layerwise_kv": True, "policy": "clairvoyant"}, "policy"),
        ({"layerwise_kv": True, "policy": "lab.policies.presets:NOBODY"}, "policy"),
        ({"layerwise_kv": True, "policy": "ellm", "ellm_uncached_frac": 1.1}, "ellm_uncached_frac"),
        ({"shadow_policy": "clairvoyant"}, "shadow_policy"),
        ({"fairness": True}, "fairness"),  # vLLM's own order
        ({"fairness": True, "policy": "fcfs-chunked"}, "fairness"),
        ({"fairness": True, "layerwise_kv": True, "policy": "vllm"}, "fairness"),
        ({"fairness_half_life_s": 0}, "fairness_half_life_s"),
        ({"plan_min_window": 9, "plan_max_window": 8}, "plan_max_window"),
        ({"plan_min_pause_s": 9.0, "plan_max_pause_s": 8.0}, "plan_max_pause_s"),
    ],
)
def test_a_bad_choice_of_policy_names_its_setting(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ExecutorSettings(model="m", **wrong)  # type: ignore[arg-type]

    assert [error["loc"] for error in caught.value.errors()] == [(named,)]


@pytest.mark.parametrize("choice", [{"layerwise_kv": True}, {"policy": "evenflow"}])
def test_fairness_ids_have_shares_under_evenflow_if_asked_for(choice: dict[str, Any]) -> None:
    assert not ExecutorSettings(model="m", **choice).fairness
    assert ExecutorSettings(model="m", fairness=True, **choice).fairness_half_life_s == 300.0


def test_an_executor_is_named_after_its_host() -> None:
    assert ExecutorSettings(model="m").id == socket.gethostname()


def test_a_backend_that_no_image_has_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match='"ray" is in no image'):
        ExecutorSettings(model="m", distributed_executor_backend="ray")


def test_processes_of_the_engine_give_each_other_the_time_to_unpin_their_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ExecutorSettings(
        model="m", layerwise_kv=True, kv_host_memory_bytes=60 * 10**9, tensor_parallel_size=2
    )
    monkeypatch.setattr(os, "environ", {})
    prepare_engine_environment(settings)
    assert os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == str(5 + 2 * 12)

    prepare_engine_environment(settings.model_copy(update={"layerwise_kv": False}))
    assert os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == "29"  # as it was set
    assert settings.model_copy(update={"layerwise_kv": False}).unpin_s == 0.0


def test_host_memory_that_is_the_engines_choice_is_half_of_the_machines_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10**12))
    unset = ExecutorSettings(model="m", layerwise_kv=True, tensor_parallel_size=2)
    told = unset.model_copy(update={"kv_host_memory_bytes": 10**10})

    assert unset.kv_host_memory_bytes == "auto"
    assert (unset.unpin_s, told.unpin_s) == (100.0, 4.0)
    with pytest.raises(ValidationError):
        ExecutorSettings(model="m", kv_host_memory_bytes="some")  # type: ignore[arg-type]


NODES = {"nodes": 2, "tensor_parallel_size": 2, "leader_address": "10.0.0.1:50051"}


def test_an_engine_over_two_nodes_takes_two_ranks_and_the_leaders_address() -> None:
    settings = ExecutorSettings(model="m", node_rank=1, **NODES)  # type: ignore[arg-type]

    assert (settings.nodes, settings.node_rank) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "named", "sentence"),
    [
        ({"tensor_parallel_size": 3}, "nodes", r"3 ranks \(tensor x pipeline\) do not divide by 2"),
        ({"lora_modules": {"a": "/a"}}, "nodes", "adapters over several nodes"),
        ({"node_rank": 2}, "node_rank", "not below the number of nodes, 2"),
        ({"leader_address": ""}, "leader_address", "the leader's host:port"),
        ({"leader_address": "10.0.0.1"}, "leader_address", "the leader's host:port"),
        ({"leader_address": ":50051"}, "leader_address", "the leader's host:port"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend", "_NODES"),
    ],
)
def test_nodes_that_cannot_be_one_engine_are_refused_by_name(
    wrong: dict[str, object], named: str, sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence) as caught:
        ExecutorSettings(model="m", **NODES | wrong)  # type: ignore[arg-type]

    assert [error["loc"] for error in caught.value.errors()] == [(named,)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--nnodes", "2"),
        ("--nnodes=2",),
        ("-n", "2"),
        ("--node-rank", "1"),
        ("--node_rank=1",),
        ("--master-addr", "10.0.0.1"),
        ("--master-port=29500",),
        ("--headless",),
    ],
)
def test_vllms_options_of_nodes_name_the_settings_that_there_are(
    arguments: tuple[str, ...],
) -> None:
    with pytest.raises(ValidationError, match="_NODE_RANK, EVENFLOW_EXECUTOR_LEADER_ADDRESS"):
        ExecutorSettings(model="m", engine_args=arguments)


def test_nodes_of_one_engine_notice_each_others_end_within_seconds() -> None:
    alone = ExecutorSettings(model="m", grpc_keepalive_s=10)
    several = ExecutorSettings(model="m", grpc_keepalive_s=10, **NODES)  # type: ignore[arg-type]
    sooner = ExecutorSettings(model="m", grpc_keepalive_s=1, **NODES)  # type: ignore[arg-type]

    keepalives = [one.transport.keepalive_s for one in (alone, several, sooner)]
    assert keepalives == [10.0, NODE_KEEPALIVE_S, 1.0]


def test_a_node_unpins_the_host_memory_of_its_own_ranks() -> None:
    one = ExecutorSettings(
        model="m", layerwise_kv=True, kv_host_memory_bytes=10**10, tensor_parallel_size=2
    )

    assert (one.unpin_s, one.model_copy(update={"nodes": 2}).unpin_s) == (4.0, 2.0)


def test_ranks_of_several_nodes_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare_engine_environment(ExecutorSettings(model="m", **NODES))  # type: ignore[arg-type]

    assert os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] == "1"


def test_ranks_are_reached_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_HOST_IP": "192.0.2.9"})

    set_rank_address("10.0.0.2", "eth1")

    assert os.environ == {"VLLM_HOST_IP": "192.0.2.9", "GLOO_SOCKET_IFNAME": "eth1"}
