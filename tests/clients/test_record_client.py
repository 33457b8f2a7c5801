"""What is written down of a client: its requests as they are, but for prose and secrets."""

import json
import sys
from pathlib import Path

from tests.client_session import Session, with_filler, without_prose
from tests.fake_executor import MODEL
from tests.record_client import make_parser, record

SECRET = "sk-of-somebody"
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
CLIENT = """
import json, os, urllib.request
for base_url in (os.environ["BASE_URL"], {address!r}):
    headers = {{"content-type": "application/json", "authorization": "Bearer {secret}"}}
    asked = urllib.request.Request(base_url + "/v1/chat/completions", {body!r}, headers)
    print(json.load(urllib.request.urlopen(asked))["object"])
"""


async def test_a_command_is_recorded_wherever_it_finds_the_address(tmp_path: Path) -> None:
    out = tmp_path / "session.json"
    client = CLIENT.format(address="$BASE_URL", secret=SECRET, body=json.dumps(ASKED).encode())
    options = ["--client", "urllib", "--out", str(out), "--context", "8192"]

    status = await record(make_parser().parse_args([*options, "--", sys.executable, "-c", client]))

    session = Session.read(out)
    assert (status, session.client, session.contexts) == (0, "urllib", [8192])
    assert [step.body for step in session.steps] == [ASKED, ASKED]
    assert SECRET not in out.read_text()


def test_prose_is_kept_as_its_length_only() -> None:
    prose = {"type": "text", "text": "It is said at length. " * 9, "description": "Short."}
    plain = {
        "name": "x" * 64,
        "pattern": "^[a-z]{1,9}$",
        "arguments": json.dumps({"a": "b c " * 9}),
    }

    kept = without_prose({"parts": [prose, plain]})

    assert kept["parts"] == [
        {"type": "text", "text": "<198 characters>", "description": "<6 characters>"},
        plain,
    ]
    assert len(with_filler(kept)["parts"][0]["text"]) == 198
    assert without_prose(kept) == kept
