"""The exactness model notices one wrong KV block, on stock vLLM."""

import random
from collections.abc import Iterator

import pytest
from vllm import LLM
from vllm.v1.engine.llm_engine import LLMEngine

from lab.models import NUM_LAYERS, VOCAB_SIZE, exactness_model
from tests.kv_blocks import BlockRef, greedy_tokens, swap_blocks

# The engine runs in this process: its own warnings are not ours to fail on.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(1_800)]

BLOCK_SIZE = 32  # the smallest that the CPU attention takes
NUM_BLOCKS_OF_PROMPT = 8
NUM_TRIALS = 64  # requests of one batch; every swap is a trial for two of them
NUM_TOKENS_AFTER_SWAP = 48


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        llm = LLM(
            str(exactness_model()),
            dtype="float32",
            max_model_len=1_024,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_TRIALS,
            max_num_batched_tokens=NUM_TRIALS * NUM_BLOCKS_OF_PROMPT * BLOCK_SIZE,
            enable_prefix_caching=False,
            enforce_eager=True,
        )
        yield llm.llm_engine
        llm.llm_engine.engine_core.shutdown()


def make_prompts() -> dict[str, list[int]]:
    draw = random.Random(7)
    return {
        f"trial-{number}": [
            draw.randrange(5, VOCAB_SIZE) for _ in range(NUM_BLOCKS_OF_PROMPT * BLOCK_SIZE)
        ]
        for number in range(NUM_TRIALS)
    }


def swap_in_every_request(engine: LLMEngine) -> None:
    """Swap one block between requests 0 and 1, 2 and 3, ...; every layer has its share."""
    draw = random.Random(8)
    for number in range(0, NUM_TRIALS, 2):
        refs = [
            BlockRef(
                request_id=f"trial-{number + side}",
                layer=number // 2 % NUM_LAYERS,
                index=draw.randrange(NUM_BLOCKS_OF_PROMPT),
            )
            for side in (0, 1)
        ]
        swap_blocks(engine, *refs)


def swap_there_and_back(engine: LLMEngine) -> None:
    swap_in_every_request(engine)
    swap_in_every_request(engine)


def test_one_swapped_block_of_one_layer_changes_the_next_48_tokens(engine: LLMEngine) -> None:
    prompts, num_tokens = make_prompts(), NUM_TOKENS_AFTER_SWAP + 1
    expected = greedy_tokens(engine, prompts, num_tokens=num_tokens)
    control = greedy_tokens(
        engine, prompts, num_tokens=num_tokens, after_first_token=swap_there_and_back
    )
    swapped = greedy_tokens(
        engine, prompts, num_tokens=num_tokens, after_first_token=swap_in_every_request
    )

    assert control == expected
    assert all(swapped[name][0] == expected[name][0] for name in prompts)
    num_noticed = sum(swapped[name] != expected[name] for name in prompts)
    print(f"{num_noticed} of {NUM_TRIALS} swaps noticed")
    assert num_noticed >= 0.95 * NUM_TRIALS, f"{num_noticed} of {NUM_TRIALS} swaps noticed"


def test_tokens_do_not_depend_on_the_batch(engine: LLMEngine) -> None:
    prompts = make_prompts()
    alone = ["trial-0", "trial-33", "trial-63"]

    together = greedy_tokens(engine, prompts, num_tokens=64)

    for name in alone:
        assert greedy_tokens(engine, {name: prompts[name]}, num_tokens=64)[name] == together[name]


def test_answers_are_varied_and_never_end(engine: LLMEngine) -> None:
    prompt = make_prompts()["trial-0"]

    (tokens,) = greedy_tokens(engine, {"long": prompt}, num_tokens=512).values()

    assert len(tokens) == 512
    assert min(tokens) >= 5  # no special token
    assert len(set(tokens)) > 100
