"""What a deployment is taken to be, in sentences: what was read, what follows, what is a guess."""

from collections.abc import Sequence

from services.placement.link_ratio import link_ratio
from services.placement.types import EngineShape
from simulator.deployment import Deployment
from simulator.device.costs import StepLoad, num_copies
from simulator.memory.room import pool_tokens, stock_shape
from simulator.models.types import Layers, num_active_parameters, step_weight_bytes

GB, MIB = 1e9, 1 << 20
MANY = 64  # tokens of a step


def describe(deployment: Deployment, *, request_tokens: int) -> list[tuple[str, str]]:
    """Return lines of a word and a sentence, of requests of so many tokens each."""
    return [
        ("model", _model(deployment)),
        ("KV", _kv(deployment, request_tokens)),
        ("pool", _pool(deployment, request_tokens)),
        *(("guess", guess) for guess in guesses(deployment)),
    ]


def guesses(deployment: Deployment) -> Sequence[str]:
    """Return what was not read but assumed."""
    given, model, device = deployment.assumptions, deployment.model, deployment.device
    found = list(model.guesses)
    found.append(
        f"of the makers' figures {given.flops_efficiency:.0%} of FLOP/s, "
        f"{given.memory_efficiency:.0%} of memory's and {given.link_efficiency:.0%} of the link's "
        f"bytes/s are reached, and {given.reserved_memory_frac:.0%} of memory is not for KV"
    )
    if model.computes_in_fp8 and device.fp8_flops_per_s is None:
        found.append("the device has no FP8: its products run at the rate of 16 bits")
    if (drafts := deployment.drafts) is not None:
        found.append(
            f"of {drafts.num_drafts} drafts per request and step each is right in "
            f"{drafts.acceptance:.0%}, whatever the text: {drafts.tokens_per_step:.2f} tokens per "
            f"step; drafting takes {drafts.cost_frac:.0%} of what a step's layers take"
        )
    return found


def _model(deployment: Deployment) -> str:
    model = deployment.model
    num, num_active = model.num_parameters, num_active_parameters(model)
    active = (
        ""
        if not any(alike.experts for alike in model.layers)
        else (f", {num_active / GB:.1f} G of them for a token")
    )
    few, many = (step_weight_bytes(model, number) / GB for number in (1, MANY))
    reads = f"{few:.1f} GB" if few == many else f"{few:.1f} GB for 1 token, {many:.1f} for {MANY}"
    return (
        f"{model.name}: {num / GB:.2f} G parameters{active}, {model.weight_bytes / GB:.1f} GB of "
        f"weights ({8 * model.weight_bytes / num:.3g} bits each); a step reads {reads}"
    )


def _kv(deployment: Deployment, request_tokens: int) -> str:
    shape, layers = deployment.shape(), deployment.model.layers
    token_bytes = shape.num_groups * shape.block_bytes / shape.block_size
    num_moving = sum(alike.num for alike in layers if alike.may_leave)
    parts = [f"{token_bytes:,.0f} bytes per token in {num_moving} layers, which may leave the pool"]
    parts += [words for alike in layers if (words := _that_stay(alike))]
    side_bytes = deployment.side_bytes(request_tokens)
    if side_bytes:
        parts.append(
            f"what stays of a request of {request_tokens:,} is {side_bytes / MIB:,.1f} MiB"
        )
    copies = max(
        num_copies(one.attention, deployment.num_devices) for one in layers if one.attention
    )
    if copies > 1:
        parts.append(f"the same on {copies} GPUs each, counted {copies} times")
    return "; ".join(parts)


def _that_stay(alike: Layers) -> str:
    if alike.state_bytes:
        return f"{alike.num} layers with a state of {alike.state_bytes / MIB:,.2f} MiB"
    if alike.attention is not None and alike.attention.window:
        return f"{alike.num} with a window of {alike.attention.window:,} tokens"
    return ""


def _pool(deployment: Deployment, request_tokens: int) -> str:
    shape = deployment.shape()
    num_bytes = shape.num_blocks * shape.block_bytes
    held = pool_tokens(shape, request_tokens=request_tokens)
    moved_frac = full_link_ratio(deployment, request_tokens)
    in_stock = _less_in_stock(shape, request_tokens)
    return (
        f"{num_bytes / GB:.1f} GB on {deployment.num_devices} x {deployment.device.title}, "
        f"{held:,} tokens in requests of {request_tokens:,}{in_stock}; lambda {moved_frac:.1%}"
    )


def _less_in_stock(shape: EngineShape, request_tokens: int) -> str:
    stock = stock_shape(shape)
    if stock is None or stock == shape:
        return ""
    less = pool_tokens(stock, request_tokens=request_tokens)
    return f" ({less:,} in stock vLLM, which pads groups of layers to one size)"


def full_link_ratio(deployment: Deployment, request_tokens: int) -> float:
    """Return lambda of a step of all the requests that the pool holds, of so many tokens each."""
    shape, machine = deployment.shape(), deployment.machine()
    held = pool_tokens(shape, request_tokens=request_tokens)
    number = max(1, min(shape.max_num_seqs, held // request_tokens))
    load = StepLoad(num_decodes=number, num_context_tokens=number * request_tokens)
    return link_ratio(
        link_bytes_per_s=machine.link_bytes_per_s,
        step_s=machine.resident_step_s(load, num_layers=shape.num_layers),
        pool_bytes=shape.num_blocks * shape.block_bytes,
    )
