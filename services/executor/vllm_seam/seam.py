"""All that is stated."""

from services.executor.vllm_seam.front import CONFIGURATION, FRONT, PROMPTS
from services.executor.vllm_seam.scheduling import BLOCKS, SCHEDULER
from services.executor.vllm_seam.workers import ATTENTION_BACKENDS, PLUGIN

SEAM = (
    *SCHEDULER,
    *BLOCKS,
    *PLUGIN,
    *ATTENTION_BACKENDS,
    *CONFIGURATION,
    *FRONT,
    *PROMPTS,
)
