"""What the planner counts."""

from prometheus_client import Counter

PLANS = Counter("evenflow_planner_plans_total", "Plans made.", ["policy", "status"])
