"""A fingerprint is one wherever a model lies, and another for whatever tells answers apart."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from services.executor.engine import fingerprint
from services.executor.engine.fingerprint import (
    Fingerprints,
    digest_of_files,
    find,
    is_repeatable,
    numerics_of,
)

WEIGHTS = bytes(range(256)) * 64  # 16 KiB


def make_model(place: Path, *, weights: bytes = WEIGHTS) -> Path:
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "tokenizer.json").write_text("[]")
    (place / "README.md").write_text(place.name)
    (place / "model.safetensors").write_bytes(weights)
    return place


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights read in part: 1 KiB of their beginning, and 16 pages of 64 bytes."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(fingerprint, "HEAD_BYTES", 1 << 10)
    monkeypatch.setattr(fingerprint, "PAGE_BYTES", 64)
    monkeypatch.setattr(fingerprint, "NUM_PAGES", 16)


def test_a_copy_elsewhere_is_the_same_model(tmp_path: Path) -> None:
    one, other = make_model(tmp_path / "one"), make_model(tmp_path / "other")
    (other / "pytorch_model.bin").write_bytes(b"the same once more")

    assert digest_of_files(one) == digest_of_files(other)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_each_file_that_makes_a_model_counts(tmp_path: Path, file: str) -> None:
    place = make_model(tmp_path / "one")
    before = digest_of_files(place)
    with (place / file).open("ab") as opened:
        opened.write(b" ")

    assert digest_of_files(place) != before


def test_a_file_counts_by_its_name(tmp_path: Path) -> None:
    place = make_model(tmp_path / "one")
    before = digest_of_files(place)
    (place / "tokenizer.json").rename(place / "vocab.json")

    assert digest_of_files(place) != before


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("where", [0, 1_023, -1, 8_191])
def test_long_weights_are_known_by_their_beginning_and_by_pages(tmp_path: Path, where: int) -> None:
    changed = bytearray(WEIGHTS)
    changed[where] ^= 1
    one = make_model(tmp_path / "one")
    other = make_model(tmp_path / "other", weights=bytes(changed))

    assert digest_of_files(one) != digest_of_files(other)


@pytest.mark.usefixtures("sampled")
def test_long_weights_are_known_by_their_size(tmp_path: Path) -> None:
    one = make_model(tmp_path / "one", weights=bytes(1 << 14))
    other = make_model(tmp_path / "other", weights=bytes((1 << 14) + 1))

    assert digest_of_files(one) != digest_of_files(other)


def test_a_model_of_one_file_is_that_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(WEIGHTS)
    before = digest_of_files(file)
    (tmp_path / "other.gguf").write_bytes(b"")

    assert digest_of_files(file) == before
    assert find(str(tmp_path / "none"), None, None) is None


def make_config(place: Path) -> Any:
    model = SimpleNamespace(
        model=str(place),
        revision=None,
        tokenizer=str(place),
        tokenizer_revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": str(place), "layers": 2}),
        dtype="torch.float32",
        quantization=None,
        tokenizer_mode="auto",
        generation_config="auto",
        override_generation_config={},
        logits_processors=None,
        logprobs_mode="raw_logprobs",
    )
    forms = SimpleNamespace(
        backend="xgrammar", disable_any_whitespace=False, enable_in_reasoning=False
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(download_dir=None, load_format="auto"),
        structured_outputs_config=forms,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, nnodes=1),
        attention_config=SimpleNamespace(backend=None),
        speculative_config=None,
        use_v2_model_runner=False,
    )


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    templates = ["{{ messages }}"]
    monkeypatch.setattr(fingerprint, "templates_of", lambda config, tokenizer: templates)
    return templates


def make_settings() -> Any:
    return SimpleNamespace(tool_call_parser="", reasoning_parser="")


@pytest.mark.parametrize(
    "change",
    [
        lambda config, settings: setattr(config.model_config, "dtype", "torch.bfloat16"),
        lambda config, settings: setattr(config.model_config, "quantization", "fp8"),
        lambda config, settings: setattr(config.cache_config, "cache_dtype", "fp8"),
        lambda config, settings: setattr(settings, "tool_call_parser", "hermes"),
        lambda config, settings: setattr(settings, "reasoning_parser", "deepseek_r1"),
        lambda config, settings: setattr(config.load_config, "load_format", "dummy"),
        lambda config, settings: setattr(
            config.model_config, "hf_config", SimpleNamespace(to_dict=lambda: {"layers": 3})
        ),
        lambda config, settings: setattr(
            config.structured_outputs_config, "disable_any_whitespace", True
        ),
    ],
)
@pytest.mark.usefixtures("template")
def test_what_is_set_beside_the_files_counts(
    tmp_path: Path, change: Callable[[Any, Any], None]
) -> None:
    config, settings = make_config(make_model(tmp_path / "one")), make_settings()
    before = Fingerprints(config, settings, None).of_model
    change(config, settings)

    assert len(before) == 32
    assert Fingerprints(config, settings, None).of_model != before


def test_places_do_not_count_and_templates_and_the_way_of_resuming_do(
    tmp_path: Path, template: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [make_config(make_model(tmp_path / name)) for name in ("one", "other")]
    one, other = (Fingerprints(config, make_settings(), None).of_model for config in configs)
    template.append("{{ tools }}")
    with_tools = Fingerprints(configs[0], make_settings(), None).of_model
    monkeypatch.setattr(fingerprint, "RESUME_VERSION", fingerprint.RESUME_VERSION + 1)
    later = Fingerprints(configs[0], make_settings(), None).of_model

    assert one == other
    assert len({one, with_tools, later}) == 3


@pytest.mark.usefixtures("template")
def test_an_adapter_has_its_own_and_nothing_lost_has_any(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "one"))
    prints = Fingerprints(config, make_settings(), None)
    adapters = [make_model(tmp_path / "a"), make_model(tmp_path / "b", weights=b"others")]
    of_adapters = [prints.of_adapter(str(place)) for place in adapters]
    config.model_config.model = str(tmp_path / "gone")
    lost = Fingerprints(config, make_settings(), None)

    assert len({prints.of_model, *of_adapters}) == 3
    assert prints.of_adapter(str(tmp_path / "gone")) == ""
    assert (lost.of_model, lost.of_adapter(str(adapters[0]))) == ("", "")


def test_what_rounds_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    alone = numerics_of(config)
    config.parallel_config.tensor_parallel_size = 2
    shared = numerics_of(config)
    config.parallel_config.nnodes = 2
    apart = numerics_of(config)
    config.parallel_config.nnodes = 1
    config.speculative_config = SimpleNamespace(method="ngram")

    assert "nodes" not in shared
    assert "pipeline parallel 1, nodes 2, attention" in apart
    assert "tensor parallel 1, pipeline parallel 1, attention auto, runner 1" in alone
    assert "tensor parallel 2" in shared
    assert numerics_of(config) == f"{shared}, drafts by ngram"


@pytest.mark.parametrize(
    ("dtype", "use_mla", "is_chunked", "expected"),
    [
        (torch.float32, False, True, True),
        (torch.bfloat16, False, True, False),
        (torch.float32, True, True, True),
        pytest.param(torch.float32, True, False, False, id="CPU_MLA"),
    ],
)
def test_answers_in_float32_are_repeatable(
    tmp_path: Path, dtype: torch.dtype, use_mla: bool, is_chunked: bool, expected: bool
) -> None:
    config = make_config(tmp_path)
    config.model_config.dtype, config.model_config.use_mla = dtype, use_mla
    config.scheduler_config = SimpleNamespace(enable_chunked_prefill=is_chunked)

    assert is_repeatable(config) is expected


def test_no_cpu_is_invariant_to_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    config.model_config.dtype = torch.bfloat16
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert is_repeatable(config) is current_platform.is_cuda()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert is_repeatable(config)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert not is_repeatable(config)
