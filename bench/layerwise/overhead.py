"""What layer-wise block tables cost while nothing is offloaded, against stock vLLM.

CPU time of the engine's thread per decode step outside the model's own work, which is the same on
both sides: scheduling, input preparation, metadata, sampling, output, and our hooks between
layers. Weights are not loaded: time does not depend on them.
"""

from typing import Any

from bench.layerwise._common import batch, decode_times, report
from services.executor.kv.options import KVOptions
from tests.exact.harness import EngineCase, StepRunner

LAYERS = (8, 32)
BATCHES = (1, 8, 32)
LAYERS_PER_GROUP = (1, 4, 8)
STEP_S = 10e-3  # what the bar is a share of
DEFINITIONS = {
    "cpu_s": "CPU time of the engine's thread per decode step, model excluded; first quartile",
    "cost_frac": "(cpu_s - cpu_s of stock vLLM) / 10 ms; bar 0.05 at up to 8 groups",
}


def main() -> None:
    rows: list[dict[str, Any]] = []
    for num_layers in LAYERS:
        stock = measure(num_layers, None)
        for layers_per_group in LAYERS_PER_GROUP:
            ours = measure(num_layers, KVOptions(layers_per_group=layers_per_group))
            for num_requests in BATCHES:
                cost_s = ours[num_requests] - stock[num_requests]
                rows.append(
                    {
                        "num_layers": num_layers,
                        "num_groups": num_layers // layers_per_group,
                        "layers_per_group": layers_per_group,
                        "batch": num_requests,
                        "stock_cpu_s": stock[num_requests],
                        "cpu_s": ours[num_requests],
                        "cost_frac": cost_s / STEP_S,
                    }
                )
    report("layerwise_overhead", DEFINITIONS, rows)


def measure(num_layers: int, kv: KVOptions | None) -> dict[int, float]:
    """Return the CPU seconds per decode step, by batch size."""
    case = EngineCase(
        num_blocks=1_000 * (num_layers // kv.layers_per_group if kv else 1),
        kv=kv,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=8_192,
        num_layers=num_layers,
    )
    runner = StepRunner(case)
    try:
        return {
            num_requests: decode_times(
                runner, batch(num_requests, num_prompt_tokens=200, num_output_tokens=80)
            ).engine_cpu_s
            for num_requests in BATCHES
        }
    finally:
        runner.close()


if __name__ == "__main__":
    main()
