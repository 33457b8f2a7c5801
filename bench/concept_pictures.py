"""The three pictures of docs/concepts.md: `python -m bench.concept_pictures` writes them anew.

They explain and measure nothing: each is drawn from a few numbers, which are said in it. Colours
follow the theme of the machine that shows them.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path

from services.pacing.deposit import due_times_s

FOLDER = Path(__file__).parents[1] / "docs/pictures"
WIDTH = 720  # pixels
STYLE = """<style>
svg { --ground: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0;
      --pool: #1a7f37; --host: #0969da; --wait: #bc4c00; --read: #8250df; }
@media (prefers-color-scheme: dark) {
svg { --ground: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d;
      --pool: #3fb950; --host: #58a6ff; --wait: #f0883e; --read: #bc8cff; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); } .in { fill: var(--ground); font-weight: 600; }
.axis { stroke: var(--line); } .curve { fill: none; stroke-width: 2.5; }
</style>"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture)


def pictures() -> dict[str, str]:
    """Return the text of each file, by its name."""
    return {"deposit.svg": deposit(), "step.svg": step(), "turns.svg": turns()}


def drawing(height: int, title: str, parts: Iterable[str]) -> str:
    """Return a whole SVG; `title` is what it says to those that cannot see it."""
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{title}">',
            STYLE,
            f'<rect width="{WIDTH}" height="{height}" rx="6" fill="var(--ground)"/>',
            *parts,
            "</svg>\n",
        )
    )


def text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def bar(begin: float, end: float, y: float, colour: str, *, words: str = "") -> str:
    """Return a bar 22 pixels high, with `words` in its middle."""
    rect = (
        f'<rect x="{begin:.1f}" y="{y}" width="{end - begin - 1:.1f}" height="22" rx="2" '
        f'fill="var(--{colour})"/>'
    )
    return rect + (
        text((begin + end) / 2, y + 15.5, words, kind="in", anchor="middle") if words else ""
    )


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="axis"/>'


def seconds(left: float, top: float, bottom: float, scale: float, last_s: int) -> list[str]:
    """Return the axis of time, a line for each second; `scale`: pixels per second."""
    at = [left + scale * second for second in range(last_s + 1)]
    return [
        *(line(x, top, x, bottom) for x in at),
        *(text(x, bottom + 17, f"{s} s", kind="soft", anchor="middle") for s, x in enumerate(at)),
    ]


def deposit() -> str:
    """Draw one answer: generated at 10 tokens/s with a rest between, read at 5 tokens/s."""
    rate_tps, engine_tps, rest_s = 5.0, 10.0, 2.0
    generated_s = [1 + k / engine_tps + rest_s * (k >= 25) for k in range(50)]
    due_s = due_times_s(generated_s, 1 / rate_tps)
    left, bottom, scale, per_token = 46, 262, 59, 4.4

    def curve(times_s: Sequence[float], end_s: float) -> list[tuple[float, float]]:
        """Return the corners of a count that grows by one at each time."""
        corners = [(times_s[0], 0.0)]
        for k, (since_s, until_s) in enumerate(pairwise([*times_s, end_s]), start=1):
            corners += [(since_s, k), (until_s, k)]
        return [(left + scale * t, bottom - per_token * n) for t, n in corners]

    def points(corners: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)

    made, read = curve(generated_s, due_s[-1]), curve(due_s, due_s[-1])
    return drawing(
        300,
        "Tokens generated and tokens read over time; the gap between them is the deposit.",
        [
            *seconds(left, 24, bottom, scale, 11),
            text(left - 6, 18, "tokens", kind="soft"),
            text(left - 8, bottom - per_token * 50 + 4, "50", kind="soft", anchor="end"),
            text(left - 8, bottom - per_token * 25 + 4, "25", kind="soft", anchor="end"),
            f'<polygon points="{points([*made, *reversed(read)])}" fill="var(--host)" '
            'opacity="0.22"/>',
            f'<polyline points="{points(made)}" class="curve" stroke="var(--pool)"/>',
            f'<polyline points="{points(read)}" class="curve" stroke="var(--read)"/>',
            bar(left + scale * 3.4, left + scale * 5.5, 104, "host", words="parked, 2 s"),
            text(left + scale * 1.1, 96, "generated at 10/s"),
            text(left + scale * 8.1, 36, "all is generated"),
            text(left + scale * 7.5, 92, "deposit"),
            text(left + scale * 7.3, 150, "read at 5/s, without a gap"),
        ],
    )


def step() -> str:
    """Draw a decode step of eight layers, two of them on the host, behind two links."""
    left, layer_px = 92.0, 50.0
    parts = []
    for top, copy_layers, words in ((40, 2.6, "A fast link"), (150, 4.6, "A slow one")):
        computed, copied = step_times(copy_layers)
        ends = [end for _, end in computed.values()]
        parts += [
            text(left, top - 10, f"{words}: the step takes the time of {ends[-1]:g} layers"),
            text(left - 8, top + 15, "compute", kind="soft", anchor="end"),
            text(left - 8, top + 51, "link", kind="soft", anchor="end"),
        ]
        for before, (number, (begin, end)) in zip([0.0, *ends], computed.items(), strict=False):
            if begin > before:
                parts.append(
                    bar(
                        left + layer_px * before,
                        left + layer_px * begin,
                        top,
                        "wait",
                        words="waits",
                    )
                )
            parts.append(
                bar(left + layer_px * begin, left + layer_px * end, top, "pool", words=str(number))
            )
        parts += [
            bar(
                left + layer_px * begin,
                left + layer_px * end,
                top + 36,
                "host",
                words=f"layer {number}",
            )
            for number, (begin, end) in copied.items()
        ]
    title = "A decode step: layers 4 and 8 are on the host, and are copied in while others compute."
    return drawing(226, title, parts)


Times = dict[int, tuple[float, float]]


def step_times(copy_layers: float) -> tuple[Times, Times]:
    """Return when each layer is computed and when those of the host are copied in, all in times of
    one layer, of which a copy takes `copy_layers`. There is one staging buffer: the second copy
    begins when the first has been read.
    """
    computed: Times = {}
    copied: Times = {}
    now = buffer_free = 0.0
    for layer in range(1, 9):
        if layer % 4 == 0:
            copied[layer] = (buffer_free, buffer_free + copy_layers)
            now = max(now, copied[layer][1])
            buffer_free = now + 1
        computed[layer] = (now, now + 1)
        now += 1
    return computed, copied


TURN_TOKENS = 5  # that a reader reads in a turn of a second; the engine makes twice as many
ANSWER_TOKENS = 60
ARRIVALS_S = (0, 0, 0, 2)
COLOURS = {"in the pool": "pool", "parked": "host", "waits": "wait", "all generated": "read"}


def turns() -> str:
    """Draw four answers in a pool of three: in the order of arrival, and in turns."""
    left, scale = 40.0, 37.0
    parts = []
    for top, takes_turns, words in (
        (42, False, "First come, first served: D waits until another request has ended"),
        (
            208,
            True,
            "In turns: the request with most in hand is parked, and no reader lacks a token",
        ),
    ):
        parts.append(text(left, top - 14, words))
        parts += seconds(left, top - 4, top + 106, scale, 18)
        for row, (name, states) in enumerate(zip("ABCD", schedule(takes_turns), strict=True)):
            y = top + 26 * row
            parts.append(text(left - 10, y + 15.5, name, anchor="end"))
            now = float(ARRIVALS_S[row])
            for state, run in groupby(states):
                end = now + len(list(run))
                parts.append(bar(left + scale * now, left + scale * end, y, COLOURS[state]))
                now = end
    for column, (state, colour) in enumerate(COLOURS.items()):
        x = left + 160 * column
        parts += [bar(x, x + 23, 350, colour), text(x + 30, 366, state)]
    return drawing(384, "Four requests in a pool that holds three, served in two ways.", parts)


def schedule(takes_turns: bool) -> list[list[str]]:
    """Return what each request does in each second from its arrival until all of it is read."""
    states: list[list[str]] = [[] for _ in ARRIVALS_S]
    made, read = [0] * len(ARRIVALS_S), [0] * len(ARRIVALS_S)
    for now_s in range(18):
        present = [
            r for r, at_s in enumerate(ARRIVALS_S) if at_s <= now_s and read[r] < ANSWER_TOKENS
        ]
        to_make = [r for r in present if made[r] < ANSWER_TOKENS]
        if takes_turns:
            to_make.sort(key=lambda r: made[r] - read[r])
        for r in present:
            runs = r in to_make[:3]
            made[r] += 2 * TURN_TOKENS * runs
            if made[r]:
                read[r] += TURN_TOKENS
            assert read[r] <= made[r]
            if runs:
                states[r].append("in the pool")
            elif made[r] == ANSWER_TOKENS:
                states[r].append("all generated")
            else:
                states[r].append("parked" if made[r] else "waits")
    return states


if __name__ == "__main__":
    main()
