"""`evenflow keys`: what it writes, what it leaves, what it refuses."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cli.keys import command
from services.gateway.access.api_keys import ApiKeys, parse_api_keys

BEFORE = """# Ours.
[[keys]]
name = "alice"  # a friend
key = "sk-alice-0123456789"

[[keys]]
name = "bob"
key = "sk-bob-0123456789"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def keys(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--file", str(file), *arguments])


def test_a_new_key_is_shown_once_and_only_its_hash_is_written(file: Path) -> None:
    limits = ["--tokens-per-minute", "9", "--priorities", "0", "3"]
    added = keys(file, "add", "älice", *limits, "--admin")

    secret = added.output.strip()
    text = file.read_text()
    assert secret not in text
    assert file.stat().st_mode & 0o777 == 0o600
    caller = ApiKeys(parse_api_keys(text)).caller(f"Bearer {secret}")
    assert caller is not None
    assert (caller.name, caller.tokens_per_minute, caller.priorities) == ("älice", 9, (0, 3))
    assert caller.admin
    assert keys(file, "list").output == "älice tokens_per_minute=9 admin=True priorities=(0, 3)\n"


def test_what_is_there_stays_as_it_is_written(file: Path) -> None:
    file.write_text(BEFORE)
    file.chmod(0o640)
    keys(file, "add", "carol")
    assert file.read_text().startswith(BEFORE)

    keys(file, "revoke", "bob")
    keys(file, "revoke", "carol")

    assert file.read_text().strip() == BEFORE[: BEFORE.rindex("[[keys]]")].strip()
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("before", "arguments", "said"),
    [
        (BEFORE, ["add", "alice"], 'there is a key with the name "alice"'),
        (BEFORE, ["add", "carol", "--min-slo-tbt-s", "0"], "min_slo_tbt_s"),
        (BEFORE, ["revoke", "carol"], 'there is no key with the name "carol"'),
        (BEFORE[: BEFORE.rindex("[[keys]]")], ["revoke", "alice"], "the last key"),
        ("no toml", ["list"], "not valid TOML"),
        (
            'keys = [{name="a", key="0123456789abcdef"}, {name="b", key="0123456789abcdeg"}]',
            ["revoke", "a"],
            "by hand",
        ),
    ],
)
def test_what_cannot_be_done_leaves_the_file_alone(
    file: Path, before: str, arguments: list[str], said: str
) -> None:
    file.write_text(before)
    refused = keys(file, *arguments)

    assert refused.exit_code == 1
    assert said in refused.output
    assert file.read_text() == before


def test_one_place_is_named(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.delenv("EVENFLOW_GATEWAY_API_KEYS_FILE", raising=False)
    assert CliRunner().invoke(command, ["list"]).exit_code == 2
    assert keys(file, "--redis-url", "redis://127.0.0.1:1", "list").exit_code == 2
