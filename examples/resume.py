"""Stream a chat answer over a connection that breaks, and read on where it broke.

python examples/resume.py "What is the with statement?" --rate-tps 12 --break-after 20
"""

import argparse
import json
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

import httpx

ROUND_TRIP_S = 10.0
PAUSE_S = 0.5  # before a client comes back
NOTHING_MORE = 204


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    parser.add_argument("--break-after", type=int, default=0, help="events; default: never")
    args = parser.parse_args()

    timeout = httpx.Timeout(ROUND_TRIP_S, read=None)
    with httpx.Client(base_url=args.base_url, timeout=timeout) as http:
        body = {
            "model": args.model or http.get("/models").json()["data"][0]["id"],
            "messages": [{"role": "user", "content": args.prompt}],
            "max_tokens": args.max_tokens,
            "stream": True,
            "evenflow": {"resumable": True, "consumption_rate_tps": args.rate_tps},
        }
        for data in resumable(http, body, args.break_after):
            if data != "[DONE]":
                delta = json.loads(data)["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print()


def resumable(http: httpx.Client, body: dict[str, object], break_after: int) -> Iterator[str]:
    """Yield the data of each event of a stream once, however often its connection breaks; it is
    broken on purpose after each `break_after` events, never if that is 0.
    """
    name, last_event_id = f"resume-{uuid.uuid4()}", ""
    call = http.build_request("POST", "/chat/completions", json=body)
    call.headers["x-request-id"] = name
    while True:
        number = 0
        with suppress(httpx.TransportError):
            answer = http.send(call, stream=True)
            if answer.is_error:
                sys.exit(answer.read().decode())
            if answer.status_code == NOTHING_MORE:
                return
            for event_id, data in events(answer):
                yield data
                last_event_id, number = event_id, number + 1
                if data == "[DONE]":
                    return
                if number == break_after:
                    break
            answer.close()
        time.sleep(PAUSE_S)
        call = http.build_request("GET", f"/streams/{name}")
        if last_event_id:
            call.headers["last-event-id"] = last_event_id


def events(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    """Yield id and data of each whole event. Packages for server-sent events do this, too."""
    members: dict[str, str] = {}
    for line in answer.iter_lines():
        if line:
            member, _, value = line.partition(": ")
            members[member] = value
        elif "data" in members:
            yield members["id"], members["data"]
            members = {}


if __name__ == "__main__":
    main()
