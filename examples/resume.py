"""Stream a chat answer from one of several gateways, and go on at the next where one is lost.

python examples/resume.py "What is the with statement?" --gateway http://a:8000 --gateway http://b:8000
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx

PAUSE_S = 0.5  # before the next gateway is asked
TIMEOUT = httpx.Timeout(10.0, read=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--gateway", action="append", help="default: http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args()

    gateways = args.gateway or ["http://127.0.0.1:8000"]
    models = httpx.get(f"{gateways[0]}/v1/models").json()["data"]
    body = {
        "model": args.model or models[0]["id"],
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "temperature": 0,
    }
    for chunk in sent_again(gateways, body):
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


def sent_again(gateways: Sequence[str], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a chat answer once, from as many gateways as it takes: each gets the same
    body and the ids so far, and knows nothing else of the answer.
    """
    ids: list[int] = []
    for gateway in itertools.cycle(gateways):
        asked = body | {"stream": True, "return_token_ids": True}
        if ids:
            asked["evenflow"] = body.get("evenflow", {}) | {"resume": {"token_ids": ids}}
        with suppress(httpx.TransportError):
            for data in events(f"{gateway}/v1/chat/completions", asked):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    break  # the gateway, or its last executor, is going
                for choice in chunk["choices"]:
                    ids += choice["token_ids"]
                yield chunk
        time.sleep(PAUSE_S)


def events(url: str, body: dict[str, Any]) -> Iterator[str]:
    """Yield the data of each event of a stream."""
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT) as answer:
        if answer.is_client_error:
            sys.exit(answer.read().decode())
        for line in answer.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


if __name__ == "__main__":
    main()
