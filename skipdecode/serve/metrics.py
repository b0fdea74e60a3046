"""The server's metrics for Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from skipdecode.engine.state import EngineState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The metrics of one server; `state` returns the current state of its engine."""

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(state))
        self.requests = Counter(
            "skipdecode_requests", "Requests that got a response", ["path", "status"], registry=self._registry
        )
        self.open_requests = 0
        being_answered = Gauge("skipdecode_open_requests", "Requests that are being answered", registry=self._registry)
        being_answered.set_function(lambda: self.open_requests)
        self.first_token, self.between_tokens, self.sequence = (
            Histogram(f"skipdecode_{name}", what, buckets=_SECONDS, registry=self._registry)
            for name, what in (
                ("first_token_seconds", "Time from the submission of a sequence to its first token"),
                ("between_tokens_seconds", "Time between two tokens of a sequence"),
                ("text_seconds", "Time from the submission of a sequence to its end"),
            )
        )

    async def page(self) -> bytes:
        """What /metrics shows, in the text format of Prometheus."""
        return self.own_page()

    def own_page(self) -> bytes:
        """The metrics of this server."""
        return generate_latest(self._registry)


def merged_page(pages: Mapping[str, bytes]) -> bytes:
    """One page of the pages of several replicas, by their names, which become the label `replica`."""
    merged: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Merged(merged.values()))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class _EngineCollector(Collector):
    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, what, value in (
            ("waiting", "Sequences that wait to be admitted", state.waiting),
            ("running", "Sequences that decode: the batch size", state.running),
            ("cache_columns", "KV slots, over all layers", state.slots),
            ("cache_columns_free", "Free KV slots", state.free_slots),
            ("prefix_bytes", "Size of the keys and values of earlier prompts", state.prefix_bytes),
        ):
            yield GaugeMetricFamily(f"skipdecode_{name}", what, value)
        for name, what, value in (
            ("tokens", "Tokens generated", state.tokens),
            ("prompt_tokens", "Prompt tokens computed", state.prompt_tokens),
            ("prefix_tokens", "Prompt tokens that weren't, as an earlier prompt began alike", state.prefix_tokens),
            ("steps", "Decode steps", state.steps),
            ("step_tokens", "Tokens that decode steps ran; divided by steps, the mean batch size", state.step_tokens),
            (
                "step_layers",
                "Layers that those tokens ran; divided by step_tokens, the mean layers per token",
                state.step_layers,
            ),
        ):
            yield CounterMetricFamily(f"skipdecode_{name}", what, value)
