"""`python -m bench.papers.ellm_contradictions`: eLLM's formulas, and what follows from them.

Rows are named by their place in the paper. Figures are of section 6.1's machine: see `settings`.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product

from bench.papers.ellm_equations import (
    STARTS,
    Answer,
    Consistent,
    Printed,
    Setting,
    chosen,
    grid,
    largest_batch,
    settings,
    slsqp,
)
from bench.papers.sections import Stated
from simulator.comparison.link_ratio import workload_link_ratio
from simulator.device.hardware import Model, model
from simulator.workload import ArrivingRequest, RequestId

Row = tuple[str, str, str]  # as printed; what follows from it; the consistent form
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1)
OFFERED_PER_S = {"ShareGPT": 50.0, "L-Eval": 12.5}  # requests, section 6.1


def _optimum() -> Row:
    found = [(setting, slsqp(setting, Printed(setting=setting))) for setting in settings().values()]
    r = max(answer.r for _, answers in found for answer in answers)
    sizes = [answer.b for answer in found[0][1]]
    return (
        "Eq. 5 is minimised over b and r",
        "no term of it is independent of b, and all grow with r: r = 0 is the best for every b, "
        f"and b is arbitrary. SLSQP answers r <= {r:.3f} in all settings of Table 1, and for 13B "
        f"on ShareGPT b = {min(sizes):.0f} to {max(sizes):.0f}, where it began",
        "a step reads the weights once, so that T has a part without b",
    )


def _decode_head() -> Row:
    setting = settings()["13B, ShareGPT"]
    form, s = Printed(setting=setting), setting.num_tokens
    share = form.head_flops(s - 1) / form.decode_flops()
    room = largest_batch(setting, Consistent(setting=setting), 0.0)
    return (
        "the head of a decode costs 2 s h V",
        f"{share:.0%} of a decode's FLOPs are the head of tokens that ask for no logits (13B, "
        f"{s} tokens); the SLO is used up at {largest_batch(setting, form, 0.0)} requests, of "
        f"{room} that the memory holds",
        "2 h V",
    )


def _recompute_head() -> Row:
    setting = settings()["13B, ShareGPT"]
    form = Printed(setting=setting)
    num_tokens = setting.num_tokens * setting.paper_frac
    share = form.head_flops(num_tokens) / form.recompute_flops(setting.paper_frac)
    return (
        "recomputed tokens cost 2 h V s r in the head",
        f"{share:.1%} of Eq. 2 are logits that are thrown away",
        "none, or one row of a prefix",
    )


def _kv_heads() -> Row:
    shape = model("llama-2-70b")
    printed = 4 * shape.num_hidden_layers * shape.hidden_size
    return (
        "a token of KV has 4 L h bytes",
        f"{printed / 1e6:.2f} MB for Llama-2-70B, which has {_kv_bytes(shape) / 1e6:.2f} MB: "
        f"{printed / _kv_bytes(shape):.0f} x",
        "4 L h_kv",
    )


def _layer_products() -> Row:
    said = ", ".join(
        f"{name} {2 * shape.num_layer_parameters / (24 * shape.hidden_size**2) - 1:+.0%}"
        for name in ("llama-2-13b", "llama-2-70b", "llama-3-8b")
        for shape in [model(name)]
    )
    return (
        "a layer's products cost 24 h^2 per token",
        f"an MLP of two matrices, K and V for every head: {said}",
        "2 h (2 h + 2 h_kv + 3 h_mlp)",
    )


def _causal() -> Row:
    return (
        "attention over s r tokens costs 4 h s^2 r^2",
        "every token attends to those behind it, too: twice what is needed",
        "2 h s r (s r + 1)",
    )


def _waiting_time() -> Row:
    setting = settings()["13B, ShareGPT"]
    best = chosen(setting, Consistent(setting=setting))
    assert best is not None
    served = best.tokens_per_s / setting.answer
    offered = OFFERED_PER_S["ShareGPT"]
    wait_s = 60.0 * (offered / served - 1.0)
    return (
        "T + WT_max <= SLO, the TPOT SLO",
        f"{offered:g} requests/s are offered and {served:.1f} served (13B): after a minute the "
        f"queue is {wait_s:.0f} s long, and no batch keeps a bound of {setting.slo_s * 1e3:.0f} ms",
        "T <= SLO; the time in the queue belongs to TTFT",
    )


def _layers_of_layer_costs() -> Row:
    layers = [model(name).num_hidden_layers for name in ("llama-2-13b", "llama-2-70b")]
    return (
        "Eq. 7 weighs the costs of one layer with l2 / L, Eq. 8 with l2",
        f"they differ by L: {layers[0]} x and {layers[1]} x",
        "l2",
    )


def _fused_head() -> Row:
    layers = model("llama-2-13b").num_hidden_layers
    return (
        "Eq. 8 and 9 have the head in every fused kernel",
        f"once per pair of layers: {layers // 2} x in a step of 13B",
        "once per step",
    )


def _overlap() -> Row:
    said = " and ".join(f"{_kv_share(model(name)):.0%} ({name})" for name in _LLAMA_2)
    return (
        "layers i, i + 1 are recomputed while the KV of layer i + 2 is loaded",
        "K and V of layer i + 3 are made from the states behind layer i + 2, which has to run for "
        f"these tokens: the load saves its K and V projections only, {said} of its products",
        "leading layers are recomputed, trailing ones loaded",
    )


def _scratch() -> Row:
    said = " and ".join(
        f"{1 - 10 / model(name).num_hidden_layers:.0%} ({name})" for name in _LLAMA_2
    )
    return (
        "uncached KV has room for 8 h b s r (l1 + l2), at most 40 h b s r",
        f"10 layers of it: of r, {said} are saved",
        "room for one layer: (L - 1) / L",
    )


def _loads() -> Row:
    setting = settings()["13B, ShareGPT"]
    shape, requests = setting.deployment.model, 98  # the KV that the memory holds / (1 - r)
    num_bytes = requests * setting.num_tokens * setting.paper_frac * _kv_bytes(shape) * 3 / 5
    seconds = num_bytes / setting.deployment.machine().link_bytes_per_s
    return (
        "3 of 5 layers of uncached tokens are loaded in every step",
        f"{num_bytes / 1e9:.1f} GB for {requests} requests at r = {setting.paper_frac}: "
        f"{seconds:.2f} s of the link, in a step of {setting.slo_s * 1e3:.0f} ms",
        "r is bounded by the link",
    )


def _latency_model() -> Row:
    setting = settings()["13B, ShareGPT"]
    printed, step_s = Printed(setting=setting).step_s(1, 0.0), setting.weight_bytes / 2_039e9
    return (
        "Eq. 4 is 13 % off (MAPE, V100)",
        f"one request of 13B decodes in {printed * 1e3:.1f} ms by it, on an A100 whose memory "
        f"needs {step_s * 1e3:.1f} ms for the weights",
        "the longer of FLOPs and bytes",
    )


def _reported_steps() -> Row:
    setting = settings()["70B, ShareGPT"]
    printed = Printed(setting=setting)
    num_requests = 254.64
    flops = num_requests * printed.recompute_flops(setting.paper_frac)
    flops -= num_requests * printed.head_flops(setting.num_tokens * setting.paper_frac)
    on = setting.deployment
    peak_s = flops / (on.num_devices * on.device.flops_per_s)
    kv_bytes = num_requests * setting.num_tokens * _kv_bytes(on.model)
    room = setting.room_bytes - setting.weight_bytes
    return (
        "70B: 254.64 requests at r = 0.36, mean TPOT 501.74 ms",
        f"{flops / 1e15:.1f} PFLOP per step, {peak_s:.1f} s at the peak of 4 A100; with r = 0 "
        f"their KV is {kv_bytes / 1e9:.0f} of {room / 1e9:.0f} GB",
        "r = 0",
    )


def _offered() -> Row:
    said = []
    for name, setting in settings().items():
        best = chosen(setting, Consistent(setting=setting))
        assert best is not None
        offered = OFFERED_PER_S[name.split(", ")[1]] * setting.answer
        said.append(f"{name} {offered / best.tokens_per_s:.0f} x")
    return (
        "50 requests/s of ShareGPT, 12.5 of L-Eval",
        f"answers alone exceed the best decode rate: {', '.join(said)}; TTFT is the length of the "
        "experiment",
        "-",
    )


def _context() -> Row:
    setting = settings()["13B, L-Eval"]
    return (
        "Llama 2 on L-Eval's prompts",
        f"{setting.prompt:,} tokens on average; the model's positions end at 4,096",
        "-",
    )


def _sensitivity() -> Row:
    return (
        "F = 4: 1.14 x of F = 2, 1.38 % fragmentation; 31 thread counts in [32, 1024]",
        f"Table 2 has {1.31 / 1.13:.2f} x and 1.28 %; {len(range(32, 1025, 32))} counts",
        "-",
    )


def _half_cached() -> Row:
    setting = settings()["13B, ShareGPT"]
    form = Consistent(setting=setting)
    said = []
    for r in (0.5, 0.0):
        b, step_s = _unbounded(setting, form, r)
        said.append(f"{b} requests, a step of {step_s * 1e3:,.0f} ms, {b / step_s:,.0f} tokens/s")
    return (
        "with less KV cached TTFT and throughput gain up to 57 %, TPOT hardly changes",
        f"13B, without an SLO, with half of it: {said[0]}; with all: {said[1]}",
        "-",
    )


def _fusion() -> Row:
    setting = settings()["13B, ShareGPT"]
    form, r = Consistent(setting=setting), setting.paper_frac
    b, step_s = _unbounded(setting, form, r)
    decode_s = form.step_s(b, 0.0)
    return (
        "decode fused with recompute: TPOT -25 %",
        f"running both at once saves the shorter one at most: at r = {r} with {b} requests (13B) "
        f"{decode_s * 1e3:.0f} ms of a step of {step_s:.1f} s, {decode_s / step_s:.1%}",
        "one batch of both: each product once for all rows",
    )


def _estimates() -> Row:
    ratios, lost, late = [], {"flops_per_s": 0.0, "memory_bytes_per_s": 0.0}, 0.0
    for setting, name, error in product(settings().values(), lost, (0.8, 1.2)):
        true, on = Consistent(setting=setting), setting.deployment
        off = replace(on.device, **{name: error * getattr(on.device, name)})
        wrong = replace(setting, deployment=replace(on, device=off))
        best, found = chosen(setting, true), chosen(wrong, Consistent(setting=wrong))
        assert best is not None
        assert found is not None
        step_s = true.step_s(found.b, found.r)
        ratios.append(found.r)
        lost[name] = max(lost[name], 1.0 - found.b / step_s / best.tokens_per_s)
        late = max(late, step_s / setting.slo_s - 1.0)
    flops, bandwidth = lost.values()
    return (
        "FLOPs and bandwidth 20 % off cost 1.6 to 1.9 % of throughput",
        f"r = {max(ratios):g} with each. What they change is how many fit the SLO: {flops:.1%} and "
        f"{bandwidth:.1%} of tokens/s are lost at most, and steps are {late:.1%} too long at most",
        "-",
    )


def _solver() -> Row:
    spent_ms = []
    for setting in settings().values():
        for form in (Printed(setting=setting), Consistent(setting=setting)):
            began_s = time.process_time()
            slsqp(setting, form)
            spent_ms.append(1e3 * (time.process_time() - began_s) / len(STARTS))
    return (
        "a solution takes 21 ms at most",
        f"SLSQP {min(spent_ms):.0f} to {max(spent_ms):.0f} ms of CPU per start and setting",
        "-",
    )


def _baseline() -> Row:
    return (
        "2.63 x lower latency than state-of-the-art systems",
        "that is TTFT beside vLLM-Recompute (13B); beside HCache, the best of the others, 1.7 x",
        "-",
    )


def _unbounded(setting: Setting, form: Consistent, r: float) -> tuple[int, float]:
    """Return how many requests fit the memory at a ratio, and their step in seconds."""
    b = largest_batch(replace(setting, slo_s=math.inf), form, r)
    return b, form.step_s(b, r)


_LLAMA_2 = ("llama-2-13b", "llama-2-70b")
ROWS: Mapping[str, Callable[[], Row]] = {
    "Eq. 4, 5": _optimum,
    "Eq. 3": _decode_head,
    "Eq. 2": _recompute_head,
    "Eq. 1, KV": _kv_heads,
    "Eq. 2, products": _layer_products,
    "Eq. 2, attention": _causal,
    "Eq. 1, SLO": _waiting_time,
    "Eq. 7, 8": _layers_of_layer_costs,
    "Eq. 8, 9": _fused_head,
    "4.3.1": _overlap,
    "4.3.2": _scratch,
    "4.3, loads": _loads,
    "6.6": _latency_model,
    "6.6, FLOPs": _estimates,
    "Fig. 3, 4": _half_cached,
    "Fig. 5, 13": _fusion,
    "Fig. 16": _solver,
    "Abstract": _baseline,
    "6.2": _reported_steps,
    "6.1, load": _offered,
    "6.1, L-Eval": _context,
    "6.5": _sensitivity,
}


def _kv_bytes(shape: Model) -> int:
    return shape.num_hidden_layers * shape.kv_bytes_per_token


def _kv_share(shape: Model) -> float:
    """Return the K and V projections' share of a layer's products."""
    num_kv = 2 * shape.hidden_size * shape.num_key_value_heads * shape.head_dim
    return num_kv / shape.num_layer_parameters


def contradictions(places: list[str]) -> Stated:
    """Return the rows of these places."""
    return Stated(
        title="eLLM's formulas, and what follows from them",
        heads=["place", "printed", "what follows", "consistent"],
        rows=[[place, *ROWS[place]()] for place in places],
        is_prose=True,
    )


def optima() -> Stated:
    """Return the answers of all solvers to Eq. 5 under Eq. 1, no request waiting."""
    rows = []
    for name, setting in settings().items():
        for said, form in (
            ("printed", Printed(setting=setting)),
            ("consistent", Consistent(setting=setting)),
        ):
            answers = sorted(slsqp(setting, form), key=lambda answer: answer.b)
            rows.append(
                [
                    name,
                    _lambda(setting),
                    said,
                    f"{_said(answers[0])} to {_said(answers[-1])}",
                    _said(grid(setting, form)),
                    _said(chosen(setting, form)),
                ]
            )
    heads = ["setting", "lambda %", "form", "SLSQP, all starts", "grid", "search of `ellm`"]
    return Stated(title="Eq. 5 under Eq. 1: b, r, tokens/s", heads=heads, rows=rows)


def ratios() -> Stated:
    """Return what a given ratio makes of the consistent form: the largest batch in the SLO."""
    rows = []
    for name, setting in settings().items():
        form = Consistent(setting=setting)
        cells = []
        for r in (*RATIOS, setting.paper_frac):
            b = largest_batch(setting, form, r)
            cells.append(f"{b}: {b / form.step_s(b, r):,.0f}" if b else "0")
        alone_s = form.step_s(1, setting.paper_frac)
        rows.append([name, _lambda(setting), *cells, f"{alone_s * 1e3:,.0f}"])
    heads = ["setting", "lambda %", *(f"r = {r:g}" for r in RATIOS), "the paper's r", "T(1, it) ms"]
    return Stated(title="What a ratio costs: requests in the SLO, tokens/s", heads=heads, rows=rows)


def _lambda(setting: Setting) -> str:
    on = setting.deployment
    one = ArrivingRequest(
        request_id=RequestId("mean"),
        arrival_s=0.0,
        num_prompt_tokens=setting.prompt,
        num_output_tokens=setting.answer,
    )
    return f"{100 * workload_link_ratio(on.shape(), on.machine(), [one]):.2g}"


def _said(answer: Answer | None) -> str:
    if answer is None:
        return "-"
    return f"{answer.b:.4g}, {answer.r:.3f}, {answer.tokens_per_s:,.0f}"


def stated() -> list[Stated]:
    return [contradictions(list(ROWS)), optima(), ratios()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="*", metavar="PLACE", help=", ".join(map(repr, ROWS)))
    places = parser.parse_args().places
    if unknown := set(places) - ROWS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: one of {', '.join(map(repr, ROWS))}")
    print("\n\n".join(one.markdown() for one in ([contradictions(places)] if places else stated())))


if __name__ == "__main__":
    main()
