"""What must be equal for an answer to go on elsewhere, and what tells whether it is rounded alike.

A file that is long is known by its size, its beginning, which says where each weight is, and pages
spread over it: another model's, another revision's, or a quantised one's differ in many of them.
"""

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform

from services.executor.kv_options import computes_prompts_whole
from services.executor.prompts.chat_template import templates_of
from services.executor.settings import ExecutorSettings

RESUME_VERSION = 1  # grows with each change after which the parts of an answer do not fit
WHOLE_BYTES = 32 << 20  # a file of no more is read whole: 20 ms
HEAD_BYTES = 4 << 20
PAGE_BYTES = 4 << 10
NUM_PAGES = 64
# What makes a model beside its weights, and the weights that vLLM takes first.
PARTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt")
LIBRARIES = ("xgrammar", "tokenizers", "transformers")
OF_THE_PLACE = ("_name_or_path", "transformers_version")  # in a model's configuration


class Fingerprints:
    """Of one engine's model, and of its adapters."""

    def __init__(self, config: Any, settings: ExecutorSettings, tokenizer: Any) -> None:
        """`config` of vLLM's."""
        self._config, self._settings, self._tokenizer = config, settings, tokenizer

    @cached_property
    def of_model(self) -> str:
        """Return the model's; empty if its files are not found. Reads them: tens of milliseconds,
        where they are in no cache a second.
        """
        model = self._config.model_config
        places = {
            find(name, revision, self._config.load_config.download_dir)
            for name, revision in (
                (model.model, model.revision),
                (model.tokenizer, model.tokenizer_revision),
            )
        }
        if None in places:
            return ""
        digests = sorted(digest_of_files(place) for place in places if place is not None)
        return digest_of(self._facts(), *digests)

    def of_adapter(self, directory: str) -> str:
        """Return that of an adapter of the model; empty as for the model."""
        place = find(directory, None, None)
        if place is None or not self.of_model:
            return ""
        return digest_of(self.of_model, digest_of_files(place))

    def _facts(self) -> str:
        """Return what the files do not say."""
        config, settings = self._config, self._settings
        model, forms = config.model_config, config.structured_outputs_config
        read = model.hf_config.to_dict()
        facts = {
            "configuration": {name: read[name] for name in read if name not in OF_THE_PLACE},
            "templates": templates_of(model, self._tokenizer),
            "dtype": str(model.dtype),
            "quantization": model.quantization,
            "kv": config.cache_config.cache_dtype,
            "tokenizer": model.tokenizer_mode,
            "load": str(config.load_config.load_format),
            "generation": [model.generation_config, model.override_generation_config],
            "processors": model.logits_processors,
            "logprobs": str(model.logprobs_mode),
            "parsers": [settings.tool_call_parser, settings.reasoning_parser],
            "forms": [forms.backend, forms.disable_any_whitespace, forms.enable_in_reasoning],
            "versions": [RESUME_VERSION, vllm.__version__, *map(version, LIBRARIES)],
        }
        return json.dumps(facts, sort_keys=True, default=str)


def numerics_of(config: Any) -> str:
    """Return what rounds, in words: device, parallelism, attention, runner."""
    parallel = config.parallel_config
    if current_platform.is_cpu():
        device = f"cpu {torch.backends.cpu.get_cpu_capability().lower()}"
    else:
        device = current_platform.get_device_name()
    backend = config.attention_config.backend
    spec = config.speculative_config
    parts = [
        device,
        f"tensor parallel {parallel.tensor_parallel_size}",
        f"pipeline parallel {parallel.pipeline_parallel_size}",
        *([f"nodes {parallel.nnodes}"] if parallel.nnodes > 1 else []),
        f"attention {backend.name.lower() if backend is not None else 'auto'}",
        f"runner {2 if config.use_v2_model_runner else 1}",
        f"torch {torch.__version__}",
    ]
    return ", ".join([*parts, f"drafts by {spec.method}"] if spec is not None else parts)


def is_repeatable(config: Any) -> bool:
    """Return whether, with equal numerics, an answer is token for token the same beside other
    requests, and behind a beginning that is computed as a prompt.

    With vLLM's batch-invariant kernels by its word; in float32 because what is rounded otherwise
    decides no token. `CPU_MLA`'s answers depend on the batch by more than that.
    """
    if envs.VLLM_BATCH_INVARIANT and current_platform.is_cuda():
        return True
    is_whole = config.model_config.dtype == torch.float32
    return bool(is_whole and not computes_prompts_whole(config))


def find(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return where a model is that was loaded: its directory or file; None if it is not found."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name, revision=revision, cache_dir=download_dir, local_files_only=True
        )
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
    return Path(found)


def digest_of_files(place: Path) -> str:
    """Return what stands for a model's files, wherever they are."""
    return digest_of(*(part for file in _files(place) for part in (file.name, *_samples(file))))


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    files = sorted(file for file in place.iterdir() if file.is_file())
    weights: Iterable[Path] = ()
    for suffix in WEIGHTS:
        weights = [file for file in files if file.suffix == suffix]
        if weights:
            break
    return [*(file for file in files if file.suffix in PARTS), *weights]


def _samples(file: Path) -> Iterator[str | bytes]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= WHOLE_BYTES:
            yield opened.read()
            return
        yield str(size)
        yield opened.read(HEAD_BYTES)
        for n in range(1, NUM_PAGES + 1):
            opened.seek((size - PAGE_BYTES) * n // NUM_PAGES)
            yield opened.read(PAGE_BYTES)


def digest_of(*parts: str | bytes) -> str:
    """Return a hash of some parts, each by itself."""
    whole = sha256()
    for part in parts:
        whole.update(sha256(part.encode() if isinstance(part, str) else part).digest())
    return whole.hexdigest()[:32]
