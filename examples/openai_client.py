"""Stream a chat answer with the stock openai package, at a reading rate if you like.

python examples/openai_client.py "What is the with statement?" --rate-tps 12
"""

import argparse
import sys

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first model on offer")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    args = parser.parse_args()

    client = OpenAI(base_url=args.base_url, api_key="none")
    # `extra_body` carries what OpenAI's API does not know; a header would do for the rate alone.
    pacing = {"consumption_rate_tps": args.rate_tps, "pace_tail": True} if args.rate_tps else None
    chunks = client.chat.completions.create(
        model=args.model or first_model(client),
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        stream=True,
        extra_body={"evenflow": pacing} if pacing else None,
    )
    for chunk in chunks:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


def first_model(client: OpenAI) -> str:
    models = client.models.list().data
    if not models:
        sys.exit("no model is being served")
    return models[0].id


if __name__ == "__main__":
    main()
