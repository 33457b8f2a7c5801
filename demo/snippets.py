"""Commands to paste into a shell in the repository's root."""

from cli.local.settings import StackSettings
from demo.texts import QUESTION


def snippets(settings: StackSettings, question: str = QUESTION) -> str:
    """Return the addresses of the running stack and ways to call it."""
    url, model = settings.base_url, settings.model_id
    return f"""\
a page       {url}/ui: the engine live, a playground with the pace as a slider
OpenAI API   {url}/v1      gRPC   {settings.address("gateway")}
metrics      {url}/metrics      logs   make logs      stop   make down

# in a terminal: a conversation, the engine at work, a load of readers
.venv/bin/evenflow chat --rate 5
.venv/bin/evenflow watch
.venv/bin/evenflow bench --reading-rates 4,5,7

# curl, at 5 tokens per second
curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\
  -H 'x-consumption-rate-tps: 5' -d '{{"model": "{model}", "stream": true, "temperature": 0,
  "max_tokens": 200, "evenflow": {{"pace_tail": true}}, "messages":
  [{{"role": "user", "content": "{question}"}}]}}'

# the openai package, unpaced
.venv/bin/python - <<'EOF'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
for chunk in client.chat.completions.create(model="{model}", temperature=0, stream=True,
        max_tokens=200, messages=[{{"role": "user", "content": "{question}"}}]):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
EOF

# gRPC: generated stubs, or no stubs at all (server reflection)
.venv/bin/python examples/grpc_client.py --address {settings.address("gateway")} \\
  --model {model} --rate-tps 5 "{question}"
.venv/bin/python examples/grpc_reflection_client.py --address {settings.address("gateway")} \\
  --model {model} "{question}"
"""
