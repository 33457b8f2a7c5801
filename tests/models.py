"""The exactness model: untrained, and sensitive to every KV block.

`python -m tests.models` builds it; `exactness_model()` returns its directory.

A trained or plainly initialised model gives the same answer from half of all wrong KV blocks, so
that a test on its tokens proves little. Here every weight matrix is drawn so that

- attention is peaked: logits q.k / sqrt(head_dim) have a standard deviation near 3,
- what attention reads dominates what a layer adds to the residual stream,
- the newest token's own embedding stays visible, so that answers keep varying,

and a wrong block changes the greedy tokens that follow. The output rows of special tokens are
zero, so that greedy answers never end before `max_tokens`.
"""

import pydoc_data.topics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import demo.chat_tokenizer
from demo.cached_build import MODELS_ROOT, build_once, recipe_fingerprint
from demo.chat_tokenizer import (
    BEGIN_ID,
    END_ID,
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NUM_LAYERS = 8
NUM_KV_HEADS = 2
HEAD_DIM = 32
VOCAB_SIZE = 2_048
MAX_MODEL_LEN = 8_192
SEED = 20_26

# Gain of a matrix: RMS of its output for an input of RMS 1, as the RMSNorm before it gives.
QUERY_KEY_GAIN = 1.75  # logits q.k / sqrt(head_dim) then have a deviation of 1.75^2 = 3.1
VALUE_GAIN = 1.0
OUTPUT_GAIN = 1.0
MLP_GAIN = 0.3  # silu(gate) * up of 0.3 each: small beside attention
EMBEDDING_RMS = 1.0  # as large as one layer's addition: smaller, and answers fall into loops

# Plain to read in a test, and with an effort.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|system|>' }}"
    "{% for tool in tools %}{{ 'Function ' + (tool.function | tojson) + '. ' }}{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|user|>Result of ' + message.tool_call_id + ': ' + message.content + eos_token }}"
    "{% else %}"
    "{{ '<|' + message.role.replace('developer', 'system') + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ ' Call ' + call.id + ': ' + call.function.name + (call.function.arguments | tojson) }}"
    "{% endfor %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if reasoning_effort %}{{ 'Effort: ' + reasoning_effort + '. ' }}{% endif %}{% endif %}"
)

TEXTS = tuple(text for _, text in sorted(pydoc_data.topics.topics.items()))


def exactness_model() -> Path:
    """Return the model's directory, building it first if it is not there (seconds)."""
    fingerprint = recipe_fingerprint(sys.modules[__name__], demo.chat_tokenizer, *TEXTS)
    return build_once(MODELS_ROOT / "exactness", fingerprint, _build)


def _build(directory: Path) -> None:
    save_tokenizer(
        train_tokenizer(TEXTS, vocab_size=VOCAB_SIZE),
        directory,
        max_model_len=MAX_MODEL_LEN,
        chat_template=CHAT_TEMPLATE,
    )
    _untrained_model().save_pretrained(directory)


def _untrained_model() -> "LlamaForCausalLM":
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=6,
            num_key_value_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=MAX_MODEL_LEN,
            bos_token_id=BEGIN_ID,
            eos_token_id=END_ID,
            tie_word_embeddings=False,
            dtype="float32",
        )
    ).float()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 2:
                weight.normal_(std=_std(name, weight.shape[1]), generator=generator)
        model.lm_head.weight[: len(SPECIAL_TOKENS)] = 0
    return model


def _std(name: str, num_inputs: int) -> float:
    """Return the deviation of one matrix's entries: gain / sqrt(number of inputs)."""
    if "embed_tokens" in name:
        return EMBEDDING_RMS
    if "q_proj" in name or "k_proj" in name:
        gain = QUERY_KEY_GAIN
    elif "v_proj" in name:
        gain = VALUE_GAIN
    elif "o_proj" in name:
        gain = OUTPUT_GAIN
    elif "mlp" in name:
        gain = MLP_GAIN
    else:
        gain = 1.0
    return gain / float(num_inputs) ** 0.5


if __name__ == "__main__":
    print(f"exactness model: {exactness_model()}")
