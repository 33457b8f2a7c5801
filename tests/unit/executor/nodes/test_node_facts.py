"""What nodes of one engine must have in common."""

import pytest

from services.executor.nodes import node_facts
from services.executor.nodes.node_facts import OF_THE_NODE, PLACES, differences
from services.executor.settings import ExecutorSettings


def test_nodes_of_equal_facts_do_not_differ() -> None:
    assert differences({"a": "1"}, {"a": "1"}, rank=1) == []


def test_each_difference_names_what_each_node_has() -> None:
    leader, follower = {"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "7", "d": "4"}

    assert differences(leader, follower, rank=2) == [
        "b is 2 on node 0 and 7 on node 2",
        "c is 3 on node 0 and absent on node 2",
        "d is absent on node 0 and 4 on node 2",
    ]


def test_what_is_left_out_of_the_comparison_is_a_setting() -> None:
    assert ExecutorSettings.model_fields.keys() >= OF_THE_NODE | PLACES


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what imports vLLM, or reads files."""
    monkeypatch.setattr(node_facts, "_digest_at", lambda name, revision: f"files of {name}")
    monkeypatch.setattr(node_facts, "_speculative_config", lambda settings: {})
    monkeypatch.setattr(node_facts, "_vllm_version", lambda: "0")
    monkeypatch.setattr(node_facts, "_code_digest", lambda: "code")


def facts_of(**settings: object) -> dict[str, str]:
    return node_facts.facts_of(ExecutorSettings(model="m", **settings))  # type: ignore[arg-type]


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    ("of_leader", "of_follower", "name"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}, "DTYPE"),
        ({}, {"block_size": 16}, "BLOCK_SIZE"),
        ({}, {"kv_link_bytes_per_s": 1e9}, "KV_LINK_BYTES_PER_S"),
        ({}, {"engine_args": ("--hf-token", "secret")}, "ENGINE_ARGS"),
    ],
)
def test_nodes_of_other_settings_differ_in_them(
    of_leader: dict[str, object], of_follower: dict[str, object], name: str
) -> None:
    (different,) = differences(facts_of(**of_leader), facts_of(**of_follower), rank=1)

    assert different.startswith(f"EVENFLOW_EXECUTOR_{name} is ")
    assert "secret" not in different


@pytest.mark.usefixtures("light")
def test_nodes_may_have_their_own_addresses_and_names() -> None:
    of_leader = facts_of(id="a", host="10.0.0.1", grpc_port=1, run_log="/tmp/a", log_level="debug")

    assert differences(of_leader, facts_of(id="b"), rank=1) == []


@pytest.mark.usefixtures("light")
def test_nodes_of_other_drafts_differ_in_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    of_leader = facts_of()
    monkeypatch.setattr(node_facts, "_speculative_config", lambda settings: {"model": "head"})

    (different,) = differences(of_leader, facts_of(), rank=1)

    assert different.startswith("files of what makes drafts is ")
