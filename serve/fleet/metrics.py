"""One /metrics for all ingresses and replicas: the families of each, with labels that say whose they are."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.serve.fleet.client import ReplicaCounts
from slipstream.serve.fleet.replica import ReplicaState
from slipstream.serve.http.metrics import PREFIX, EngineCollector, EngineView, cumulative, encoded, family

REPLICA_LABELS = ("replica", "draft")


@dataclass(frozen=True, slots=True)
class IngressReport:
    """The counts of one ingress."""

    name: str
    families: list[Metric]
    replicas: dict[str, ReplicaCounts] = field(default_factory=dict)


class FleetCollector(Collector):
    """Metric families of a deployment at a scrape."""

    def __init__(self, ingresses: Iterable[IngressReport], replicas: Iterable[ReplicaState]) -> None:
        self._ingresses = list(ingresses)
        self._replicas = list(replicas)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for report in self._ingresses:
            for members in report.families:
                join(families, members, {"ingress": report.name})
        for state in self._replicas:
            labels = {"replica": state.name, "draft": state.draft}
            is_up = state.problem is None
            view = EngineView(state.metrics, state.counts, state.num_open, is_up, is_up)
            for members in EngineCollector(view).collect():
                join(families, members, labels)
        yield from families.values()
        yield from self._shares()

    def _shares(self) -> Iterator[Metric]:
        """Requests and accept lengths by replica, of all ingresses together."""
        together = joined_counts(self._ingresses)
        of_replica = {(name, counts.draft): counts for name, counts in together.items()}
        requests = {
            (*key, reason): number for key, counts in of_replica.items() for reason, number in counts.finished.items()
        }
        labels = [*REPLICA_LABELS, "finish_reason"]
        yield family(CounterMetricFamily, "replica_requests", "Ended sequences by replica.", labels, requests)
        for attribute, text in (
            ("lost", "Sequences whose replica was lost."),
            ("resumed", "Sequences taken over from a replica that was lost."),
        ):
            values = {key: getattr(counts, attribute) for key, counts in of_replica.items()}
            yield family(CounterMetricFamily, f"replica_{attribute}", text, REPLICA_LABELS, values)
        lengths = HistogramMetricFamily(
            f"{PREFIX}_replica_accept_length", "Tokens per round of ended sequences.", labels=REPLICA_LABELS
        )
        for key, counts in of_replica.items():
            buckets = cumulative(counts.accept_length)
            lengths.add_metric(key, buckets=buckets, sum_value=counts.accept_length.total)
        yield lengths


def join(families: dict[str, Metric], family: Metric, labels: Mapping[str, str]) -> None:
    """Adds the samples of a family, with further labels, to that of its name in `families`."""
    together = families.get(family.name)
    if together is None:
        together = Metric(family.name, family.documentation, family.type, family.unit)
        families[family.name] = together
    together.samples += [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]


def joined_counts(reports: Iterable[IngressReport]) -> dict[str, ReplicaCounts]:
    """Adds up, by replica, the counts of all ingresses."""
    total = defaultdict[str, ReplicaCounts](ReplicaCounts)
    for report in reports:
        for name, counts in report.replicas.items():
            place = total[name]
            place.draft = place.draft or counts.draft
            place.finished.update(counts.finished)
            place.lost += counts.lost
            place.resumed += counts.resumed
            length = place.accept_length
            pairs = zip(length.counts, counts.accept_length.counts, strict=True)
            length.counts = [first + second for first, second in pairs]
            length.total += counts.accept_length.total
    return total


def render(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Returns the text of all families, and its content type."""
    registry = CollectorRegistry()
    registry.register(collector)
    return encoded(registry, accept)
