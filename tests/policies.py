"""All policies by their full names: the stack's, and the laboratory's."""

from lab.policies import presets as lab
from services.placement.presets import PRESETS, Preset

EVERY = {
    **PRESETS,
    **{f"{lab.__name__}:{n}": one for n, one in vars(lab).items() if isinstance(one, Preset)},
}
RULES = {p.placing.rule.__name__: p.placing for p in EVERY.values() if p.placing.rule is not None}
DECIDING = {name: preset.run for name, preset in EVERY.items() if preset.run is not None}
