"""What a prompt adds to a step: a fixed part and one per token, from steps of several sizes."""

import pytest

from services.control.measures.fits import PRIOR_S_PER_TOKEN, ChunkFit


def test_nothing_is_said_before_the_first_step() -> None:
    assert ChunkFit().solve() == (0.0, 0.0)


def test_both_parts_are_found() -> None:
    fit = ChunkFit()
    for step in range(100):
        num_tokens = (64, 128, 512)[step % 3]
        fit.add(num_tokens, 0.006 + 2e-4 * num_tokens)

    base_s, token_s = fit.solve()
    assert base_s == pytest.approx(0.006, rel=0.02)
    assert token_s == pytest.approx(2e-4, rel=0.02)


def test_chunks_of_one_size_say_how_long_they_take_together() -> None:
    fit = ChunkFit()
    for _ in range(50):
        fit.add(128, 0.0256)

    base_s, token_s = fit.solve()
    assert base_s + 128 * token_s == pytest.approx(0.0256, rel=0.01)


def test_what_is_no_longer_true_is_forgotten() -> None:
    fit = ChunkFit()
    for num_tokens in (64, 512) * 50:
        fit.add(num_tokens, 1e-4 * num_tokens)
    for num_tokens in (64, 512) * 100:
        fit.add(num_tokens, 3e-4 * num_tokens)

    assert fit.solve()[1] == pytest.approx(3e-4, rel=0.02)


def test_prompts_that_take_nothing_are_not_taken_for_less() -> None:
    fit = ChunkFit()
    fit.add(512, 0.0)

    base_s, token_s = fit.solve()
    assert base_s == 0.0
    assert 0.0 < token_s <= PRIOR_S_PER_TOKEN
