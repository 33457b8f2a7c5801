"""`python -m bench.fuzz [--inputs N] [--seed N] [--out DIR]`: send that many inputs to a gateway.

Beside them 64 paced streams are read as they should be. Writes figures as JSON, prints them as
Markdown; exits with 1 if the gateway did what it should not.
"""

import argparse
import sys
from pathlib import Path

import uvloop

from bench.fuzz.campaign import Plan, campaign

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".cache/fuzz"))
    asked = parser.parse_args()
    plan = Plan(
        num_inputs=asked.inputs, seed=asked.seed, num_paced=64, interval_s=30.0, out=asked.out
    )
    failures = uvloop.run(campaign(plan))
    print(*failures, sep="\n")
    sys.exit(bool(failures))
