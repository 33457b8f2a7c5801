"""HCache (EuroSys '25): what gave way has hidden states on the host, and K and V are made of them.

Of L layers n come back as hidden states, which a projection turns into K and V while the next ones
are on the link, and L - n as KV; n is the one of the shortest way (its StatePartitionAlgorithm). A
hidden state is as large as K and V of one token only where every head has its own KV: with grouped
queries n is 0, and what remains is `vllm-swap`. The policy is the laboratory's.
"""

from simulator.deployment import Deployment
from simulator.device.hardware import BYTES_PER_ELEMENT, Model
from simulator.memory.moves import WayBack

PRESET = "lab.policies.presets:HCACHE"


def way_back(deployment: Deployment) -> WayBack:
    """Return the quickest split of layers between hidden states and KV."""
    model, machine, given = deployment.model, deployment.machine(), deployment.assumptions
    assert isinstance(model, Model), "of other models nothing is projected here"
    degree, num_layers = deployment.num_devices, model.num_hidden_layers
    kv_bytes = model.kv_bytes_per_token
    state_bytes = degree * model.hidden_size * BYTES_PER_ELEMENT  # every device needs all of it
    flops = model.hidden_size * kv_bytes  # 2 per weight of both projections, 2 bytes per element
    flops_per_s = degree * deployment.device.flops_per_s * given.flops_efficiency

    def seconds(num_states: int) -> tuple[float, float]:
        num_bytes = num_states * state_bytes + (num_layers - num_states) * kv_bytes
        return num_bytes / machine.link_bytes_per_s, num_states * flops / flops_per_s

    num_states = min(range(num_layers + 1), key=lambda number: max(seconds(number)))
    return WayBack(
        link_frac=max(seconds(num_states)) / seconds(0)[0], compute_s=seconds(num_states)[1]
    )
