"""Ask for one paced answer: `paced_answer.py URL`. Ends with status 1 if it does not come whole."""

import json
import os
import ssl
import sys
import urllib.request

NUM_TOKENS = 12
RATE_TPS = 20


def asked(path, body=None):
    """Open a path of the gateway, whose certificate may be one of the cluster's own."""
    headers = {"content-type": "application/json"}
    if key := os.environ.get("EVENFLOW_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(sys.argv[1] + path, data=data, headers=headers)
    unchecked = ssl._create_unverified_context()
    return urllib.request.urlopen(request, timeout=300, context=unchecked)


def main():
    model = json.load(asked("/v1/models"))["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "evenflow": {"consumption_rate_tps": RATE_TPS},
    }
    lines = asked("/v1/chat/completions", body)
    events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
    usage = [json.loads(event)["usage"] for event in events[:-1] if b'"usage":{' in event]
    print(f"{model}: {len(events)} events, usage {usage}")
    if events[-1:] != [b"[DONE]"] or usage[-1]["completion_tokens"] != NUM_TOKENS:
        sys.exit("the answer is not whole")


main()
