"""What Prometheus reads of a server."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from skipdecode.engine.engine import EngineState

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics:
    """The figures of one server.

    Args:
        state: the engine's at the moment.
    """

    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(state))
        self.requests = Counter(
            "skipdecode_requests", "Requests that were answered", ["path", "status"], registry=self._registry
        )
        self.first_token, self.between_tokens, self.whole = (
            Histogram(f"skipdecode_{name}", what, buckets=_SECONDS, registry=self._registry)
            for name, what in (
                ("first_token_seconds", "From a text's submission to its first token"),
                ("between_tokens_seconds", "Between two tokens of a text"),
                ("text_seconds", "From a text's submission to its end"),
            )
        )

    def page(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, state: Callable[[], EngineState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for name, what, value in (
            ("waiting", "Requests that wait to be admitted", state.waiting),
            ("running", "Texts that decode: the batch", state.running),
            ("cache_columns", "Columns of keys and values, over all layers", state.columns),
            ("cache_columns_free", "Those of them that are free", state.free_columns),
        ):
            yield GaugeMetricFamily(f"skipdecode_{name}", what, value)
        for name, what, value in (
            ("tokens", "Tokens that were chosen", state.tokens),
            ("prompt_tokens", "Tokens of prompts that were run", state.prompt_tokens),
            ("steps", "Decode steps", state.steps),
            ("step_tokens", "Tokens that decode steps ran; over steps the mean batch", state.rows),
            ("step_layers", "Layers that these ran; over step_tokens the layers a token", state.layers),
        ):
            yield CounterMetricFamily(f"skipdecode_{name}", what, value)
