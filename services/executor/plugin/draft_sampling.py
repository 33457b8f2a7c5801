"""What vLLM 0.32 gets wrong where requests with drafts are sampled on a CPU, put right.

Its C++ stand-in for the kernel that repeats each request's temperature, `top_k` and `top_p` for its
drafts writes into a copy: what the sampler divides logits by is whatever the memory held, for all
requests of a step with a sampled one, greedy ones included.
"""

import torch
from vllm.v1.sample import rejection_sampler


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return each request's value once per token, as vLLM's function of the same name.

    `x`: `[num_requests]`; `cu_num_tokens`: `[num_requests]`, tokens up to each request's last.
    """
    replaced = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    num_each = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return replaced.repeat_interleave(num_each, output_size=num_tokens)


def repair() -> None:
    """Let vLLM's sampler of this process have it. Once more changes nothing."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
