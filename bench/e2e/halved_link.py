"""What the mismatch trigger is worth: `python -m bench.e2e.halved_link`.

Runs `lab.engine.halved_link` with and without the trigger, in turns, on one engine in this
process: an emulated device, three readers, a link that loses half its speed.
"""

import argparse
import os
from dataclasses import asdict
from pathlib import Path

from bench.document import save
from bench.e2e.systems import NUM_LAYERS
from lab.engine.halved_link import HALVED_AT, SLO_SCALE, Arm, measured_slo_s, run_arm
from lab.engine.step_runner import Arrival, EngineCase, StepRunner, make_prompt
from lab.slow_device.emulated_device import LayerTime
from lab.stack.planner_process import warm_planner
from services.control.options import ControllerOptions
from services.executor.kv_options import KVOptions
from services.pacing.attainment import DELIVERY_TOLERANCE_S

ARMS = {"with the trigger": 0.15, "without": 0.0}  # `mismatch_frac`, of the predicted step
DEFINITIONS = {
    "slo_s": f"S of every reader: {SLO_SCALE:g} x the median decode step at full speed, measured "
    "in a run before",
    "in_time_frac": "share of tokens generated no later than d_{k-1} + S + "
    f"{DELIVERY_TOLERANCE_S * 1e3:g} ms, d_k = max(g_k, d_{{k-1}} + S); before: tokens up to the "
    f"{HALVED_AT}th, after: the rest",
    "gap_s": "median time between two tokens of a request, as generated",
    "plans": "engine steps from the change to each plan that was carried out",
}
KV = KVOptions(
    host_bytes=256 << 20,
    h2d_bytes_per_s=5e7,
    copy_latency_s=0.1e-3,
    restore_when_free_frac=0.02,
)


def main() -> None:
    options = _options()
    case = EngineCase(
        num_blocks=168,
        kv=KV,
        controller=ControllerOptions(plan_timeout_s=30.0),
        layer_time=LayerTime(base_s=options.layer_s),
    )
    rows = []
    runner = StepRunner(case)
    try:
        with warm_planner(num_groups=NUM_LAYERS) as address:
            first = Arrival(request_id="first", prompt=make_prompt(300, 1), num_output_tokens=2)
            runner.run([first], check=False)  # the first step brings the calibration
            slo_s = measured_slo_s(runner, address)
            print(f"S {slo_s * 1e3:.0f} ms", flush=True)
            for _ in range(options.turns):
                for name, mismatch_frac in ARMS.items():
                    arm = run_arm(runner, address, slo_s=slo_s, mismatch_frac=mismatch_frac)
                    rows.append({"arm": name, **asdict(arm)})
                    print(_line(name, arm), flush=True)
    finally:
        runner.close()
    document = {
        "definitions": DEFINITIONS,
        "slo_s": slo_s,
        "layer_s": options.layer_s,
        "load": os.getloadavg()[0],
        "rows": rows,
    }
    save(document, options.out)


def _line(name: str, arm: Arm) -> str:
    before, after = arm.before, arm.after
    return (
        f"{name:>16}: in time {before.in_time_frac:.1%} before, {after.in_time_frac:.1%} after; "
        f"gap {before.gap_s * 1e3:.0f} ms, {after.gap_s * 1e3:.0f} ms; first plan after "
        f"{min(arm.plans, default='-')} steps, {len(arm.plans)} in all; {arm.triggers}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/halved_link.json"))
    parser.add_argument("--turns", type=int, default=3, help="how often each arm runs")
    parser.add_argument("--layer-s", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
