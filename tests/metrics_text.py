"""Reading Prometheus' text in tests."""

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples_of(text: bytes) -> Samples:
    """Every sample by its name and sorted labels; asserts that none comes twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def value_of(text: bytes, name: str, **labels: str) -> float | None:
    """One sample; None when it is not there."""
    return samples_of(text).get((name, tuple(sorted(labels.items()))))


def sum_of(text: bytes, name: str, **labels: str) -> float:
    """All samples of a name that have these labels, added up."""
    named = (key for key in samples_of(text).items() if key[0][0] == name)
    return sum(value for (_, found), value in named if labels.items() <= dict(found).items())
