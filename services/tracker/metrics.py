"""What the tracker counts about itself."""

from prometheus_client import Counter, Gauge

REPORTS = Counter(
    "evenflow_tracker_reports_total", "Reports that were applied, by kind of sender.", ["sender"]
)
ENTRIES = Counter(
    "evenflow_tracker_entries_total",
    "Reported entries; an illegal one is counted as applied too.",
    ["result"],
)
REGISTRATIONS = Counter(
    "evenflow_tracker_registrations_total", "Registrations of requests.", ["result"]
)
REDIS_ERRORS = Counter(
    "evenflow_tracker_redis_errors_total", "Redis operations that got no answer.", ["kind"]
)
REDIS_UP = Gauge(
    "evenflow_tracker_redis_up", "1 if the newest Redis operation was answered, else 0."
)
