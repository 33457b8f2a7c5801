"""What the planner counts."""

from prometheus_client import Counter, Gauge, Histogram

PLANS = Counter("evenflow_planner_plans_total", "Plans made.", ["policy", "status"])
PAUSES = Counter("evenflow_planner_pauses_total", "Requests that plans pause.", ["policy"])
PLAN_SECONDS = Histogram(
    "evenflow_planner_plan_duration_seconds",
    "Time to make a plan, without waiting for the solver thread.",
    ["policy"],
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2, 10),
)
GAP = Histogram(
    "evenflow_planner_gap_frac",
    "Certified gap of plans: to the best placement, or of policies without search to no stall.",
    ["policy"],
    buckets=(0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
WARM = Gauge("evenflow_planner_warm", "1 when the solver is compiled and built.")
