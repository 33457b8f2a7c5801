"""Stream a message with the stock anthropic package, at a reading rate if you like.

python examples/anthropic_client.py "What is the with statement?" --rate-tps 12
"""

import argparse

from anthropic import Anthropic


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--rate-tps", type=float, help="tokens per second; default: not paced")
    args = parser.parse_args()

    client = Anthropic(base_url=args.base_url, api_key="none")
    pacing = {"consumption_rate_tps": args.rate_tps, "pace_tail": True} if args.rate_tps else None
    with client.messages.stream(
        model=args.model,
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        extra_body={"evenflow": pacing} if pacing else None,
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
