"""`tokenflow`: the paper's Fig. 6 by hand, and what its formulas do as they are printed."""

import math
from dataclasses import dataclass

from services.placement.run.papers.tokenflow import TokenflowRules, decide
from services.placement.run.types import RunDecision, RunPhase, RunSnapshot, StepCosts
from tests.unit.placement.run.snapshots import ask, make_engine, make_snapshot, parked, runs

# Two seats, 40 tokens/s each; a way back takes no time.
STEP_S = 1 / 40
COSTS = StepCosts(
    outside_s=0.0, base_s=STEP_S, token_s=0.0, context_s=0.0, chunk_base_s=0.0, chunk_token_s=0.0
)
RULES = TokenflowRules(interval_s=1.0, mu=2.5, critical_s=1.0)


@dataclass
class Reader:
    """One request of Fig. 6."""

    rate_tps: float
    num_in_hand: float = 0.0
    num_generated: float = 0.0

    @property
    def buffer_s(self) -> float:
        return self.num_in_hand / self.rate_tps


class Toy:
    """Time in seconds: who runs is given 40 tokens, everybody who began reads."""

    def __init__(self, rules: TokenflowRules = RULES) -> None:
        self.rules = rules
        self.readers = {"R1": Reader(20.0), "R2": Reader(30.0), "R3": Reader(25.0)}
        self.running = ["R1", "R2"]
        self.least_s = math.inf  # that anybody had in hand at the end of a second

    def snapshot(self) -> RunSnapshot:
        requests = []
        for name, reader in self.readers.items():
            seen = {
                "rate_tps": reader.rate_tps,
                "num_output_tokens": int(reader.num_generated),
                "slack_s": reader.buffer_s,
                "max_tokens": 1_000,
            }
            if name in self.running:
                requests.append(runs(name, 10, **seen))
            elif reader.num_generated:
                requests.append(parked(name, 10, **seen))
            else:
                requests.append(ask(name, 10, **(seen | {"slack_s": math.inf})))
        in_order = sorted(requests, key=lambda r: not r.runs)
        engine = make_engine(max_num_seqs=2, num_blocks=4_000)
        return make_snapshot(*in_order, engine=engine, costs=COSTS, h2d_bytes_per_s=1e15)

    def second(self) -> tuple[str, ...]:
        """Decide, and let a second pass; return who ran in it."""
        decision = decide(self.snapshot(), self.rules)
        self.running = [name for name in decision.run][:2]
        for name, reader in self.readers.items():
            made = 40.0 if name in self.running else 0.0
            reader.num_generated += made
            if reader.num_generated:
                reader.num_in_hand += made - reader.rate_tps
                self.least_s = min(self.least_s, reader.buffer_s)
        return tuple(sorted(self.running))


def test_figure_6() -> None:
    toy = Toy()

    ran = [toy.second() for _ in range(12)]

    # At t = 2 nobody has enough in hand; at 3 R1 leaves for R3; at 5 R2 for R1, which runs dry.
    assert ran[:3] == [("R1", "R2")] * 3
    assert ran[3:5] == [("R2", "R3")] * 2
    assert ran[5] == ("R1", "R3")
    assert toy.least_s >= 0.0  # nobody stalls


def test_printed_admission_by_the_newcomers_own_buffer_would_admit_nobody() -> None:
    """b_i >= mu r_i tau holds of no newcomer, which has no token; of a victim it does."""
    toy = Toy()
    newcomer = next(r for r in toy.snapshot().requests if r.phase is RunPhase.NEW)
    assert not newcomer.has_begun
    assert RULES.mu * RULES.interval_s > 0.0

    assert [toy.second() for _ in range(4)][-1] == ("R2", "R3")


def test_printed_utility_would_park_the_empty_buffer() -> None:
    """U = v t' - gamma phi(b) is least where b is 0; what running adds is most there."""
    rules = RULES

    def printed(buffer_s: float) -> float:
        return rules.interval_s / STEP_S - rules.gamma * math.exp(-buffer_s)

    assert printed(0.0) < printed(5.0)
    snapshot = make_snapshot(
        runs("rich", 10, rate_tps=20.0, slack_s=30.0),
        parked("empty", 10, rate_tps=20.0, slack_s=0.0),
        engine=make_engine(max_num_seqs=1),
        costs=COSTS,
        h2d_bytes_per_s=1e15,
    )
    assert decide(snapshot, rules).run == ("empty",)


def test_printed_working_set_over_the_pool_would_park_nobody() -> None:
    """W = M / beta (Eq. 4) over the GPU's memory is full with those who run."""

    def printed(num_fit: int, num_running: int, rate: float) -> float:
        return num_fit - rate * (num_fit - num_running)  # Eq. 5

    toy = Toy()
    assert printed(2, len(toy.running), 0.0) == len(toy.running)  # no room for R3, ever
    assert printed(2, 0, 1.0) == 0.0  # with a rate of 1 nobody comes into an empty engine

    for _ in range(4):
        toy.second()
    assert all(reader.num_generated for reader in toy.readers.values())


def test_who_reads_faster_together_than_the_engine_generates_is_served_by_arrival() -> None:
    members = [
        runs("new", 10, rate_tps=70.0, slack_s=0.5, age_s=5.0),
        parked("old", 10, rate_tps=70.0, slack_s=0.0, age_s=50.0),
        ask("newest", 10, rate_tps=70.0),
    ]
    snapshot = make_snapshot(*members, engine=make_engine(max_num_seqs=1), costs=COSTS)

    assert decide(snapshot, RULES) == RunDecision(
        run=("old",), park=frozenset({"new"}), valid_for_s=1.0
    )


def test_gamma_at_the_lengths_to_come_is_no_larger() -> None:
    """At the present ones a burst is let in that cannot be served when it has grown."""
    burst = [ask(f"r{n}", 100, rate_tps=30.0, max_tokens=1_000) for n in range(10)]
    snapshot = make_snapshot(*burst, engine=make_engine(num_blocks=800))

    now = decide(snapshot, TokenflowRules(ahead_frac=0.0))
    later = decide(snapshot, TokenflowRules(ahead_frac=0.5))

    assert len(later.run) < len(now.run)
