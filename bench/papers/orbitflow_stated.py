"""OrbitFlow's Fig. 2, 7 and 15 as tables: arithmetic, lengths as drawn, the solver by itself."""

import random
import time
from dataclasses import replace

import numpy as np

from bench.papers.orbitflow import deployment
from bench.papers.sections import Stated
from lab.planning.instances import HARDWARE, realistic_instance
from services.placement.step_time.patterns import PatternSpace
from services.planner.solver.budget import NodeBudget
from services.planner.solver.instance import Instance
from services.planner.solver.solver import Solver, warm_solver
from simulator.deployment import Deployment
from simulator.device.costs import StepLoad
from simulator.device.hardware import assumptions, device, link_rates, model
from simulator.workload import published_lengths

CONTEXTS = (1_024, 4_096, 16_384, 32_768, 131_072, 1_048_576)
SLO_TOKENS = (1, 16, 64, 256)  # of Fig. 2c
LENGTHS = ("orbitflow-a", "orbitflow-b", "orbitflow-c")
NUM_DRAWN = 10_000
NUM_INSTANCES = 200  # of Fig. 15, where the paper has 2,000
MAX_NODES = 200_000
SAME = 1e-6  # relative difference of two decode steps of one latency


def figure_2() -> Stated:
    """Return KV by context, and a layer's compute beside the copy of its KV."""
    a5000, a6000 = deployment(), _a6000()
    rows = []
    for context in CONTEXTS:
        load = StepLoad(num_decodes=1, num_context_tokens=context)
        cells = []
        for on in (a5000, a6000):
            machine = on.machine()
            copy_s = context * on.model.kv_bytes_per_token / machine.link_bytes_per_s
            layer_s = machine.costs.layer_s(load)
            cells += [f"{1e3 * layer_s:.2f}", f"{1e3 * copy_s:.2f}", f"{copy_s / layer_s:.1f}"]
        large = model("llama-3-70b")
        kv_bytes = context * large.num_hidden_layers * large.kv_bytes_per_token
        rows.append([f"{context:,}", f"{kv_bytes / 1e9:.1f}", *cells])
    heads = ["context", "KV of 70B, GB"]
    for name in ("A5000", "A6000"):
        heads += [f"8B, {name}: layer ms", "copy ms", "copy / layer"]
    return Stated(title="Fig. 2a and b: KV, compute and copies", heads=heads, rows=rows)


def _a6000() -> Deployment:
    on = replace(deployment(), device=device("a6000"), assumptions=assumptions(), pool_tokens=None)
    return on.with_link(link_rates()["pcie4x16"])


def figure_2c() -> Stated:
    """Return how long a reader is served from what the first tokens have left in hand."""
    on = deployment()
    base_s = on.base_tbt_s()
    costs, layers = on.machine().costs, on.model.num_hidden_layers
    rows = []
    for scale in (1.0, 1.5, 2.5):
        margins = []
        for number in SLO_TOKENS:
            loads = (StepLoad(num_decodes=1, num_context_tokens=1_661 + k) for k in range(number))
            made_s = sum(layers * costs.layer_s(load) + costs.outside_s(load) for load in loads)
            margins.append(f"{1e3 * (number * scale * base_s - made_s):.0f}")
        rows.append([f"{scale:g}", *margins])
    heads = ["SLO x", *(f"{number} tokens" for number in SLO_TOKENS)]
    title = "Fig. 2c: margin in ms after so many tokens of one request, prompt of 1,661"
    return Stated(title=title, heads=heads, rows=rows)


def figure_7() -> Stated:
    """Return the lengths that Fig. 8 to 14 draw from."""
    rows = []
    for name in LENGTHS:
        for kind, lengths in zip(("prompt", "answer"), published_lengths(name), strict=True):
            rng = random.Random(f"{name}-{kind}")
            drawn = sorted(lengths.draw(rng) for _ in range(NUM_DRAWN))
            shown = [drawn[int(share * (NUM_DRAWN - 1))] for share in (0.1, 0.5, 0.9, 0.99, 1.0)]
            mean = sum(drawn) / NUM_DRAWN
            rows.append([name, kind, f"{mean:,.0f}", *(f"{value:,}" for value in shown)])
    heads = ["lengths", "of", "mean", "P10", "P50", "P90", "P99", "largest"]
    return Stated(title="Fig. 7: lengths, as drawn", heads=heads, rows=rows)


def figure_15(num_instances: int = NUM_INSTANCES) -> Stated:
    """Return what searching even patterns only costs in steps and saves in time."""
    given = np.random.default_rng(15)
    hardware = HARDWARE["8b-a5000"]
    solvers = {
        space: warm_solver(hardware.num_layers, space)
        for space in (PatternSpace.EVEN, PatternSpace.FULL)
    }
    gains, times_s = [], {space: 0.0 for space in solvers}
    for _ in range(num_instances):
        state = given.bit_generator.state
        found = {}
        for space, solver in solvers.items():
            given.bit_generator.state = state  # the same batch for both
            instance = realistic_instance(given, solver.library, hardware, 4)
            found[space], seconds = _solved(solver, instance)
            times_s[space] += seconds
        even_s, full_s = found[PatternSpace.EVEN], found[PatternSpace.FULL]
        gains.append(even_s / full_s - 1.0 if np.isfinite(full_s) else 0.0)
    better = [gain for gain in gains if gain > SAME]
    times = times_s[PatternSpace.FULL] / times_s[PatternSpace.EVEN]
    median = f"{100 * float(np.median(better)):.2f}" if better else "-"
    row = [f"{num_instances}", f"{100 * (1 - len(better) / num_instances):.1f}", median]
    heads = ["batches of 4", "same latency %", "median gain of the others %", "time x"]
    return Stated(
        title="Fig. 15: even distances, and every balanced count with one or two buffers",
        heads=[*heads, "the paper's same / gain / time"],
        rows=[[*row, f"{times:.1f}", "80.9 / 2.29 / 7.74"]],
    )


def _solved(solver: Solver, instance: Instance) -> tuple[float, float]:
    began_s = time.process_time()
    found = solver.solve(instance, NodeBudget(MAX_NODES), starts=[])
    return found.objective_s, time.process_time() - began_s


def stated() -> list[Stated]:
    return [figure_2(), figure_2c(), figure_7(), figure_15()]
