"""What an engine may be expected to do, from what it tells of itself at its start."""

from collections.abc import Iterator

import grpc

from evenflow.executor.v1 import executor_pb2 as pb
from evenflow.executor.v1 import executor_pb2_grpc as pb_grpc
from services.kit import wire
from services.placement.run.reader_capacity import ReaderCapacity

TIMEOUT_S = 10.0
MIN_LINK_RATIO = 0.02  # below, layers that leave cost more time than their room is worth
GB = 1e9


def read_model_info(address: str) -> pb.GetModelInfoResponse | None:
    """Return what an executor tells of itself; None if it does not answer."""
    with grpc.insecure_channel(address) as channel:
        stub: pb_grpc.ExecutorServiceStub = pb_grpc.ExecutorServiceStub(channel)
        try:
            return stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError:
            return None


def expectation(info: pb.GetModelInfoResponse) -> list[str]:
    """Return four lines, one before them where the model's layers are known, one after them where
    readers may take turns, and a sentence where layer-wise KV is on and can do nothing or little.
    """
    kv, is_on = info.kv, info.kv.is_layerwise
    placing = f"placement {kv.placement_policy}" if is_on else "no layer leaves the pool"
    deposit = "deposits back plans" if kv.plans_with_deposit else "deposits back no plan"
    lines = [
        f"KV pool      {kv.num_pool_tokens:,} tokens: {_num_longest(info):.1f} requests of the "
        f"context's {info.max_model_len:,}",
        f"host room    {_host(kv)}",
        f"link         {_link(kv)}",
        f"policy       {kv.policy}: run order {kv.run_policy}, {placing}, {deposit}; "
        f"layer-wise KV {'on' if is_on else 'off'}",
    ]
    if kv.HasField("readers"):
        lines.append(f"readers      {wire.read(ReaderCapacity, kv.readers).in_words()}")
    kinds = [f"layers       {kv.layers}"] if kv.layers else []
    return [*kinds, *lines, *list(_pointless(info))[:1]]


def _pointless(info: pb.GetModelInfoResponse) -> Iterator[str]:
    """Yield why layer-wise KV can do little here, the weightiest first."""
    kv = info.kv
    if not kv.is_layerwise:
        return
    if _num_longest(info) >= info.max_num_seqs:
        yield (
            f"Layer-wise KV has nothing to do here: the pool holds all "
            f"{info.max_num_seqs} requests of a step (--max-num-seqs) at their longest."
        )
    if kv.num_host_tokens < kv.num_pool_tokens:
        yield (
            "Layer-wise KV has little room here: the host holds less than the pool "
            "(--kv-host-memory gives it more)."
        )
    if 0 < kv.link_ratio < MIN_LINK_RATIO:
        yield (
            f"Layer-wise KV hardly moves layers here: lambda of a short step is below "
            f"{MIN_LINK_RATIO:.0%}, so that little but the rules of who runs acts."
        )


def _num_longest(info: pb.GetModelInfoResponse) -> float:
    return info.kv.num_pool_tokens / info.max_model_len


def _host(kv: pb.KVFacts) -> str:
    if not kv.is_layerwise:
        return "none"
    share = kv.num_host_tokens / kv.num_pool_tokens
    return f"{kv.num_host_tokens:,} tokens, {share:.1f} pools"


def _link(kv: pb.KVFacts) -> str:
    if not kv.link_bytes_per_s:
        return "not measured" if kv.is_layerwise else "not used"
    return (
        f"{kv.link_bytes_per_s / GB:.2f} GB/s to the pool as measured; "
        f"lambda {100 * kv.link_ratio:.2g} % of the pool or more (a step of one token: "
        f"{kv.step_s * 1e3:.1f} ms)"
    )
