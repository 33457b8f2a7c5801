"""What stock vLLM and the executors are asked alike.

A request has `prompt` (text) or `messages`, and `sampling` with vLLM's own names.
"""

from typing import Any

Requests = dict[str, dict[str, Any]]

PROMPT = "The import statement finds a module, loads it, and binds its name."
GREEDY = {"temperature": 0, "max_tokens": 48}

STREAM: Requests = {
    "greedy": {"prompt": PROMPT, "sampling": GREEDY},
    "greedy-long": {"prompt": PROMPT * 16, "sampling": GREEDY},
    "seeded": {"prompt": PROMPT, "sampling": {"temperature": 1, "seed": 7, "max_tokens": 64}},
    "seeded-hot": {
        "prompt": PROMPT,
        "sampling": {"temperature": 1.5, "top_p": 0.9, "seed": 11, "max_tokens": 64},
    },
    "chat": {
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "What is a lambda?"},
        ],
        "sampling": GREEDY,
    },
    "likely": {
        "prompt": PROMPT,
        "sampling": {"temperature": 1, "seed": 5, "max_tokens": 24, "logprobs": 3},
    },
    "every-parameter": {
        "prompt": PROMPT,
        "sampling": {
            "temperature": 1.2,
            "seed": 9,
            "max_tokens": 64,
            "top_k": 50,
            "top_p": 0.95,
            "min_p": 0.02,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.3,
            "logit_bias": {300: 5.0, 301: -100.0},
            "min_tokens": 20,
            "stop_token_ids": list(range(310, 420)),
            "ignore_eos": True,
        },
    },
    "echo": {
        "prompt": PROMPT,
        "sampling": {"temperature": 0, "max_tokens": 4, "logprobs": 2, "prompt_logprobs": 2},
    },
}

# With a pool that does not hold them.
TOO_LONG: Requests = {
    "long": {"prompt": PROMPT * 28, "sampling": {"temperature": 0, "max_tokens": 96}},
    "short": {"prompt": PROMPT, "sampling": {"temperature": 0, "max_tokens": 160}},
    "other": {"prompt": PROMPT[4:] * 4, "sampling": {"temperature": 0, "max_tokens": 96}},
}
SCORED: Requests = {
    "likely": {
        "prompt": PROMPT * 24,
        "sampling": {"temperature": 0, "max_tokens": 48, "logprobs": 3},
    },
    "echo": {
        "prompt": PROMPT[4:] * 24,
        "sampling": {"temperature": 0, "max_tokens": 8, "logprobs": 2, "prompt_logprobs": 2},
    },
}

WORKLOADS = {"stream": STREAM, "layerwise": TOO_LONG | SCORED}
