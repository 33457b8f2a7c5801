"""The exactness model as one that marks its thoughts."""

import json
import shutil
from pathlib import Path

from lab.models import VOCAB_SIZE, exactness_model

THINK, END_OF_THOUGHT = VOCAB_SIZE - 2, VOCAB_SIZE - 1  # marks, for parsers as DeepSeek-R1's


def save_thinking_model(directory: Path) -> Path:
    """Copy the exactness model; the last two entries of its vocabulary become marks."""
    shutil.copytree(exactness_model(), directory)
    file = directory / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    for id, mark in ((THINK, "<think>"), (END_OF_THOUGHT, "</think>")):
        (old,) = (entry for entry, number in vocabulary.items() if number == id)
        del vocabulary[old]
        vocabulary[mark] = id
        added = dict(tokenizer["added_tokens"][0], id=id, content=mark, special=False)
        tokenizer["added_tokens"].append(added)
    del tokenizer["model"]["merges"][-2:]  # those that made the old entries
    file.write_text(json.dumps(tokenizer))
    return directory
