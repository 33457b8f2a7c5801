"""A byte-level BPE tokenizer with marks for turns and roles, trained on the spot."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BEGIN = "<|begin|>"  # opens every prompt, id 0
END = "<|end|>"  # ends every turn, and so an answer, id 1
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BEGIN, END, *ROLES)  # ids 0 .. 4
BEGIN_ID, END_ID = 0, 1


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Return a tokenizer that encodes any text; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, directory: Path, *, max_model_len: int, chat_template: str
) -> None:
    """Write the files from which transformers and vLLM load the tokenizer and its template."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_model_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
