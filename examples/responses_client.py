"""Stream a response with the stock openai package, calling a function on the way if need be.

python examples/responses_client.py "What time is it?" --rate-tps 12
"""

import argparse
import time
from typing import Any

from openai import OpenAI

CLOCK: Any = {
    "type": "function",
    "name": "clock",
    "description": "Tell the time of day.",
    "parameters": {"type": "object", "properties": {}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--tools", action="store_true", help="offer a clock")
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="none")
    pacing = {"consumption_rate_tps": args.rate_tps, "pace_tail": True} if args.rate_tps else None
    options: Any = {
        "model": args.model or client.models.list().data[0].id,
        "max_output_tokens": 300,
        "tools": [CLOCK] if args.tools else [],
        "extra_body": {"evenflow": pacing} if pacing else None,
    }
    items: list[Any] = [{"role": "user", "content": args.prompt}]
    while answer(client, items, options):
        pass


def answer(client: OpenAI, items: list[Any], options: Any) -> bool:
    """Print what the model says, and add it and the results of its calls to `items`; say whether
    it called anything. Nothing is kept on the server, so that each turn sends all of them.
    """
    with client.responses.stream(input=items, **options) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
        response = stream.get_final_response()
    print()
    items += [item.model_dump(exclude_none=True) for item in response.output]
    calls = [item.call_id for item in response.output if item.type == "function_call"]
    for call_id in calls:
        said = {"type": "function_call_output", "call_id": call_id, "output": time.strftime("%X")}
        items.append(said)
    return bool(calls)


if __name__ == "__main__":
    main()
