"""One request's tokens as generated and as delivered: `python -m bench.e2e.deposit_picture`.

Takes finished runs of `bench.e2e` and draws, of the request whose deposit covered the most late
tokens, what its reader had in hand (OrbitFlow, Fig. 5).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.e2e.figures import request_figures
from bench.e2e.records import RequestRecord, RunRecord, load_all
from services.pacing.deposit import due_times_s
from simulator.report.charts import Chart, Line, line_chart, svg
from simulator.report.plots import deposit


def main() -> None:
    options = _options()
    runs = [run for run in load_all(options.runs) if run.key.system == options.system]
    run, request = most_covered([run for run in runs if run.key.readers == "paced"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(picture(request, run.slo_s))
    figures = request_figures(request, run.slo_s)
    num_gaps = len(figures.gaps_s)
    print(
        f"{options.out}: {request.request_id} of {run.key.name}, {request.num_prompt_tokens} prompt"
        f" tokens, S {run.slo_s * 1e3:.1f} ms: of {num_gaps} gaps "
        f"{num_gaps - figures.num_in_time} were longer as generated, "
        f"{num_gaps - figures.num_in_time_deposit} were felt"
    )


def most_covered(runs: Sequence[RunRecord]) -> tuple[RunRecord, RequestRecord]:
    """Return the request of all runs whose deposit covered the most late tokens."""

    def num_covered(choice: tuple[RunRecord, RequestRecord]) -> int:
        run, request = choice
        figures = request_figures(request, run.slo_s)
        return figures.num_in_time_deposit - figures.num_in_time

    return max(
        ((run, request) for run in runs for request in run.requests if request.generated_s),
        key=num_covered,
    )


def picture(request: RequestRecord, slo_s: float) -> str:
    """Return tokens over time as an SVG document; seconds from the first token."""
    generated_s = request.generated_s
    start_s = generated_s[0]
    delivered_s = due_times_s(generated_s, slo_s, flushed_s=generated_s[-1])
    counts = range(1, len(generated_s) + 1)
    generated = [(g - start_s, float(k)) for g, k in zip(generated_s, counts, strict=True)]
    delivered = [(d - start_s, float(k)) for d, k in zip(delivered_s, counts, strict=True)]
    return svg(
        line_chart(
            Chart(
                title="",
                x_label="seconds from the first token",
                y_label="tokens",
                lines=[
                    Line(name="generated", points=generated, colour=0, stepped=True),
                    Line(name="delivered", points=delivered, colour=1, stepped=True),
                    Line(
                        name="deposit",
                        points=deposit(generated, delivered),
                        colour=2,
                        stepped=True,
                    ),
                ],
            )
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path(".cache/bench/e2e/runs"))
    parser.add_argument("--system", default="orbitflow")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/deposit.svg"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
