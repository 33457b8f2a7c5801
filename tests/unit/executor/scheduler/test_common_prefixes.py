"""What requests have in common, against a look at every pair."""

import random
from collections.abc import Sequence

from services.control.prefixes.shared_prefixes import Stretch, shared_prefixes
from services.executor.scheduler.plain.common_prefixes import CommonPrefixes


def test_a_request_begins_with_what_was_others_first() -> None:
    prefixes = CommonPrefixes()
    prefixes.add("a", "xyz")
    prefixes.add("b", "xyv")
    prefixes.add("c", "xyvw")

    assert prefixes.stretches("a") == [Stretch(1, 3)]
    assert prefixes.stretches("b") == [Stretch(1, 2), Stretch(2, 3)]
    assert prefixes.stretches("c") == [Stretch(1, 2), Stretch(2, 3), Stretch(3, 4)]


def num_in_common(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def test_whoever_comes_and_goes_pairs_share_what_they_have_in_common() -> None:
    rng, prefixes, live = random.Random(5), CommonPrefixes(), dict[str, list[str]]()
    num_shared = 0
    for number in range(400):
        if live and rng.random() < 0.45:
            prefixes.remove(gone := rng.choice(list(live)))
            del live[gone]
        else:
            # A hash stands for all before it: so does a beginning of the text.
            text = "".join(rng.choices("ab", k=rng.randint(0, 6)))
            live[f"r{number}"] = [text[: end + 1] for end in range(len(text))]
            prefixes.add(f"r{number}", live[f"r{number}"])
        if len(live) < 2:
            continue
        one, other = rng.sample(list(live), 2)
        shared = shared_prefixes([prefixes.stretches(one), prefixes.stretches(other)])
        num_rows = sum(shared.rows)
        assert num_rows == num_in_common(live[one], live[other])
        num_shared += num_rows
    assert num_shared >= 50
    for name in live:
        prefixes.remove(name)
    assert not prefixes._blocks
