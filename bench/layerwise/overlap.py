"""Whether copies hide behind layers as far as they can.

From a resident run: the time of a step and of its layers. From the link: the time of a copy. The
critical path through both, with one copy queue and the staging buffers' turns, is what a decode
step should take; it is compared with what it takes.
"""

from dataclasses import dataclass
from typing import Any

from bench.layerwise._common import batch, decode_times, report
from services.executor.kv.options import KVOptions
from tests.exact.harness import EngineCase, StepRunner
from tests.exact.workloads import every, fixed

NUM_LAYERS = 8
NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 900
BLOCK_BYTES = 32 * 2 * 2 * 32 * 4  # tokens, K and V, heads, head_dim, fp32
LINKS_BYTES_PER_S = (2e8, 1e9, 4e9)
DEFINITIONS = {
    "predicted_s": "longest path: s_l = max(e_{l-1}, end of the copies that layer l needs)",
    "measured_s": "median wall time of a decode step",
    "compute_s": "median wall time of a decode step with everything resident",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    step_s: float
    layer_s: float  # one layer, all requests
    copy_s: float  # one layer of one request


def critical_path(profile: Profile, offloaded: list[int], num_staging: int) -> float:
    """Return a step's time: copies in the order of need, each when its buffer is free."""
    ends: dict[int, float] = {}
    link_free = layer_end = 0.0
    for layer in range(NUM_LAYERS):
        ready = 0.0
        if layer in offloaded:
            turn = offloaded.index(layer) - num_staging
            buffer_free = ends[offloaded[turn]] if turn >= 0 else 0.0
            link_free = max(link_free, buffer_free) + NUM_REQUESTS * profile.copy_s
            ready = link_free
        layer_end = max(layer_end, ready) + profile.layer_s
        ends[layer] = layer_end
    return layer_end + profile.step_s - NUM_LAYERS * profile.layer_s


def main() -> None:
    runner = StepRunner(make_case(0.0))
    step_s = measure(runner, frozenset(), 1)
    runner.close()
    # Nearly all of a step is its layers; what is outside them overlaps with the first copies only.
    layer_s = 0.9 * step_s / NUM_LAYERS
    rows: list[dict[str, Any]] = []
    for bytes_per_s in LINKS_BYTES_PER_S:
        runner = StepRunner(make_case(bytes_per_s))
        copy_s = (NUM_PROMPT_TOKENS // 32) * BLOCK_BYTES / bytes_per_s
        profile = Profile(step_s=step_s, layer_s=layer_s, copy_s=copy_s)
        for distance in (1, 2, 4):
            for num_staging in (1, 2):
                groups = every(distance, NUM_LAYERS)
                measured = measure(runner, groups, num_staging)
                predicted = critical_path(profile, sorted(groups), num_staging)
                rows.append(
                    {
                        "link_bytes_per_s": bytes_per_s,
                        "distance": distance,
                        "num_staging": num_staging,
                        "compute_s": step_s,
                        "predicted_s": predicted,
                        "measured_s": measured,
                        "ratio": measured / predicted,
                    }
                )
        runner.close()
    report("layerwise_overlap", DEFINITIONS, rows)


def make_case(bytes_per_s: float) -> EngineCase:
    options = KVOptions(h2d_bytes_per_s=bytes_per_s, restore_when_free_frac=0.0)
    return EngineCase(num_blocks=2_000, kv=options, max_num_batched_tokens=4_096)


def measure(runner: StepRunner, groups: frozenset[int], num_staging: int) -> float:
    workload = batch(NUM_REQUESTS, num_prompt_tokens=NUM_PROMPT_TOKENS, num_output_tokens=40)
    hook = fixed({arrival.request_id: groups for arrival in workload}, num_staging)
    run = runner.run
    runner.run = lambda load, **kwargs: run(load, hook=hook, **kwargs)  # type: ignore[method-assign]
    try:
        return decode_times(runner, workload).wall_s
    finally:
        del runner.run


if __name__ == "__main__":
    main()
