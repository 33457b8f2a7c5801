"""Stream a chat answer over a connection that breaks, and read on where it broke.

python examples/resume.py "What is the with statement?" --rate-tps 12 --break-after 20
python examples/resume.py "What is the with statement?" --gateway http://b:8000/v1

With one gateway the stream is taken up again. With further ones the request is sent to the next
one, with the tokens that came: so it goes on where its gateway is lost.
"""

import argparse
import itertools
import json
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(10.0, read=None)
PAUSE_S = 0.5  # before a client comes back
NOTHING_MORE = 204


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--gateway", action="append", default=[], help="a further base URL")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    parser.add_argument("--break-after", type=int, default=0, help="events; default: never")
    args = parser.parse_args()

    models = httpx.get(f"{args.base_url}/models", timeout=TIMEOUT).json()["data"]
    body = {
        "model": args.model or models[0]["id"],
        "messages": [{"role": "user", "content": args.prompt}],
        "max_tokens": args.max_tokens,
        "evenflow": {"consumption_rate_tps": args.rate_tps},
    }
    if args.gateway:
        chunks = sent_again([args.base_url, *args.gateway], body)
    else:
        chunks = taken_up(args.base_url, body, args.break_after)
    for chunk in chunks:
        for choice in chunk["choices"]:
            print(choice["delta"].get("content") or "", end="", flush=True)
    print()


def taken_up(base_url: str, body: dict[str, Any], break_after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield each chunk of a stream once, however often its connection breaks; it is broken on
    purpose after each `break_after` events, never if that is 0.
    """
    asked = body | {"stream": True, "evenflow": body.get("evenflow", {}) | {"resumable": True}}
    name, last_event_id = f"resume-{uuid.uuid4()}", ""
    with httpx.Client(base_url=base_url, timeout=TIMEOUT) as http:
        call = http.build_request("POST", "/chat/completions", json=asked)
        call.headers["x-request-id"] = name
        while True:
            with suppress(httpx.TransportError):
                answer = http.send(call, stream=True)
                if answer.status_code == NOTHING_MORE:
                    return
                for number, (event_id, data) in enumerate(events(answer), 1):
                    if data == "[DONE]":
                        return
                    yield json.loads(data)
                    last_event_id = event_id
                    if number == break_after:
                        break
                answer.close()
            time.sleep(PAUSE_S)
            call = http.build_request("GET", f"/streams/{name}")
            if last_event_id:
                call.headers["last-event-id"] = last_event_id


def sent_again(base_urls: Sequence[str], body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each chunk of an answer once, from as many gateways as it takes: each gets the same
    body and the ids so far, and knows nothing else of the answer.
    """
    ids: list[int] = []
    for base_url in itertools.cycle(base_urls):
        asked = body | {"stream": True, "return_token_ids": True}
        if ids:
            asked["evenflow"] = body.get("evenflow", {}) | {"resume": {"token_ids": ids}}
        url = f"{base_url}/chat/completions"
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", url, json=asked, timeout=TIMEOUT) as answer,
        ):
            for _, data in events(answer):
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    break  # the gateway, or its last executor, is going
                for choice in chunk["choices"]:
                    ids += choice["token_ids"]
                yield chunk
        time.sleep(PAUSE_S)


def events(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yield id, if it has one, and data of each whole event, as packages for server-sent events do.
    Ends the program if the request is at fault.
    """
    if answer.is_client_error:
        sys.exit(answer.read().decode())
    members: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            member, _, value = line.partition(": ")
            members[member] = value
        elif members:
            if "data" in members:
                yield members.get("id", ""), members["data"]
            members = {}


if __name__ == "__main__":
    main()
