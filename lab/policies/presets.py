"""The laboratory's policies: `--policy lab.policies.presets:SGLANG`.

Docs and tables call them by short names, as `sglang`.
"""

from dataclasses import replace

from lab.policies import andes, fcfs, joint, layerkv_park, uniform
from lab.policies.dynamic_heuristic import dynamic_heuristic
from services.placement.admit.layerkv import with_slo_aware_admission
from services.placement.presets import OPTIMISER, PRESETS, Placing, Preset
from services.placement.types import Replan

PREDICTS = ("profile", "h2d")

# OrbitFlow's baselines (section 5.1).
DEEPSPEED = Preset(
    placing=Placing(rule=uniform.deepspeed, replan=Replan.BATCH_CHANGE), is_slo_blind=True
)
FLEXGEN = Preset(
    placing=Placing(rule=uniform.flexgen, replan=Replan.BATCH_CHANGE, needs=PREDICTS),
    is_slo_blind=True,
)
FLEXGEN_PLUS = Preset(
    placing=Placing(rule=uniform.flexgen_plus, replan=Replan.BATCH_CHANGE, needs=PREDICTS),
    is_slo_blind=True,
)
SLO_AWARE = Preset(
    placing=Placing(rule=uniform.slo_aware, replan=Replan.BATCH_CHANGE, needs=PREDICTS)
)
DYNAMIC_HEURISTIC = Preset(
    placing=Placing(rule=dynamic_heuristic, replan=Replan.EVERY_STEP), is_slo_blind=True
)

# OrbitFlow's ablations (Fig. 14a): each adds one component to the one before, `orbitflow` the last.
BATCH_UNIFORM = Preset(
    placing=Placing(rule=uniform.batch_uniform, replan=Replan.ADAPTIVE, needs=PREDICTS)
)
REQUEST_WISE = Preset(placing=OPTIMISER)
REQUEST_WISE_PAUSE = Preset(placing=OPTIMISER, pause=True)
ORBITFLOW_SRTF = replace(PRESETS["orbitflow"], run=fcfs.shortest_first)  # Fig. 13

# LayerKV for prompts only, and both without Algorithm 1.
LAYERKV_PARK = Preset(run=with_slo_aware_admission(layerkv_park.decide))
LAYERKV_PARK_FCFS = Preset(run=layerkv_park.decide)
LAYERKV_FCFS = replace(PRESETS["layerkv"], run=None)

# Baselines of TokenFlow and eLLM.
ANDES = Preset(run=andes.decide)
SGLANG = Preset(run=fcfs.sglang)
VLLM_RECOMPUTE = Preset(run=fcfs.recompute)
VLLM_SWAP = Preset(run=fcfs.swap)
HCACHE = VLLM_SWAP  # in the simulator, where a request that gave way has hidden states on the host
# In the simulator: vLLM with its OffloadingConnector, a host tier that loads whole hits, of answers
# too (`offload_prompt_only` false, which is not its default).
VLLM_OFFLOADING = PRESETS["vllm"]

# Ours: sets that could run are compared, the optimiser places the one that does, and pauses none.
JOINT = Preset(placing=OPTIMISER, run=joint.decide, deposit=True)


def full_name(name: str) -> str:
    """Return what `--policy` takes for a short name; a preset's own name is full."""
    if name in PRESETS or ":" in name:
        return name
    return f"{__name__}:{name.upper().replace('-', '_')}"


def short_name(policy: str) -> str:
    """Return the name in docs and tables."""
    return policy.rpartition(":")[2].lower().replace("_", "-")
