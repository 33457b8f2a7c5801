"""What a process of the stack serves at /metrics."""

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def sums_by_name(exposition: str) -> dict[str, float]:
    """Return each sample's sum over labels, by its name. `exposition`: in Prometheus' format."""
    sums: dict[str, float] = {}
    for sample in _samples(exposition):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def sums_by_label(exposition: str, name: str, label: str) -> dict[str, float]:
    """Return sums of the samples of one name, by the values of a label that they have."""
    sums: dict[str, float] = {}
    for sample in _samples(exposition):
        if sample.name == name:
            value = sample.labels[label]
            sums[value] = sums.get(value, 0.0) + sample.value
    return sums


def _samples(exposition: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(exposition):
        yield from family.samples
