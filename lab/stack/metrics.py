"""What a process of the stack serves at /metrics."""

from prometheus_client.parser import text_string_to_metric_families


def sums_by_name(exposition: str) -> dict[str, float]:
    """Return each sample's sum over labels, by its name. `exposition`: in Prometheus' format."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums
