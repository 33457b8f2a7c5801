"""`python -m bench.fuzz [--inputs N] [--minutes M] [--seed N] [--out DIR]`: anything, to a gateway.

N inputs, within M minutes. Beside them 64 paced streams are read as they should be. Writes figures
as JSON, prints them as Markdown; exits with 1 if the gateway did what it should not.
"""

import argparse
import sys
from pathlib import Path

import uvloop

from bench.fuzz.campaign import Plan, campaign

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=180.0, help="at most, of sending")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(".cache/fuzz"))
    asked = parser.parse_args()
    plan = Plan(
        num_inputs=asked.inputs,
        limit_s=60.0 * asked.minutes,
        seed=asked.seed,
        num_paced=64,
        interval_s=30.0,
        out=asked.out,
    )
    failures = uvloop.run(campaign(plan))
    print(*failures, sep="\n")
    sys.exit(bool(failures))
