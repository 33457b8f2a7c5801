"""What a stack's start says of its engine: four lines, and what makes layer-wise KV pointless."""

from cli.client.expectation import expectation
from evenflow.executor.v1 import executor_pb2 as pb


def info(**changes: object) -> pb.GetModelInfoResponse:
    """Describe an engine on which layer-wise KV can do something."""
    kv: dict[str, object] = {
        "num_pool_tokens": 8_192,
        "num_host_tokens": 16_384,
        "token_bytes": 1_000,
        "link_bytes_per_s": 25e9,
        "step_s": 0.01,
        "link_ratio": 0.02,
        "is_layerwise": True,
        "policy": "evenflow",
        "run_policy": "evenflow",
        "placement_policy": "optimiser",
    }
    return pb.GetModelInfoResponse(
        max_model_len=4_096,
        max_num_seqs=3,
        kv=pb.KVFacts(**{**kv, **changes}),  # type: ignore[arg-type]
    )


def test_four_lines_say_pool_host_link_and_policy() -> None:
    pool, host, link, policy = expectation(info())

    assert pool == "KV pool      8,192 tokens: 2.0 requests of the context's 4,096"
    assert host == "host room    16,384 tokens, 2.0 pools"
    assert "25.00 GB/s to the pool as measured; lambda 2 % of the pool" in link
    assert "run order evenflow, placement optimiser" in policy
    assert "layer-wise KV on" in policy


def test_the_first_line_says_what_layers_there_are_if_it_is_known() -> None:
    words = "61 of MLA: all may leave the pool"
    layers, *others = expectation(info(layers=words))

    assert layers == f"layers       {words}"
    assert others == expectation(info())


def test_a_line_says_how_many_readers_there_is_room_for() -> None:
    readers = pb.ReaderCapacity(
        num_tokens=4_096,
        rate_tps=5.0,
        num_held=12,
        num_kept=14,
        num_sustained=53,
        limit=pb.READER_LIMIT_LINK,
        host_bytes=64 * 10**9,
        wanted_host_bytes=256 * 10**9,
    )
    lines = expectation(info(readers=readers, num_host_tokens=8_191))

    assert lines[4].startswith("readers      14 requests of 4,096 tokens")
    assert lines[4].endswith("256 GB would keep 53")
    assert "holds less than the pool" in lines[5]


def test_a_pool_that_holds_every_request_leaves_nothing_to_do() -> None:
    assert "nothing to do here" in expectation(info(num_pool_tokens=3 * 4_096))[4]


def test_a_host_smaller_than_the_pool_is_said() -> None:
    assert "the host holds less than the pool" in expectation(info(num_host_tokens=8_191))[4]
    assert len(expectation(info(num_host_tokens=8_192))) == 4


def test_a_slow_link_leaves_only_who_runs() -> None:
    assert "little but the rules of who runs acts" in expectation(info(link_ratio=0.019))[4]


def test_without_layerwise_kv_nothing_is_pointless() -> None:
    lines = expectation(info(is_layerwise=False, num_host_tokens=0, link_bytes_per_s=0))

    assert len(lines) == 4
    assert "layer-wise KV off" in lines[3]
