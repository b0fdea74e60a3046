"""The state of an engine at a moment."""

from dataclasses import dataclass

from skipdecode.errors import renamed


@dataclass(frozen=True)
class EngineState:
    """The state of an engine, and its counters since its start.

    Attributes:
        waiting: requests that wait.
        running: requests that decode, or whose prompts run.
        slots: KV slots, over all layers.
        free_slots: those of them that no sequence holds.
        free_regions: contiguous regions that these form; 1 if no sequence holds any.
        requests: requests that have ended, cancelled and failed ones included.
        tokens: tokens generated, the first tokens of the sequences (from prefills) included.
        prompt_tokens: prompt tokens computed.
        prefix_tokens: prompt tokens whose keys and values came from the prefix cache instead.
        prefix_bytes: size of the prefix cache.
        steps: decode steps.
        step_tokens: tokens that decode steps ran; divided by `steps`, the mean batch size.
        step_layers: layers that those tokens ran, summed; divided by `step_tokens`, the mean number of layers.
    """

    waiting: int
    running: int
    slots: int
    free_slots: int
    free_regions: int
    requests: int
    tokens: int
    prompt_tokens: int
    prefix_tokens: int
    prefix_bytes: int
    steps: int
    step_tokens: int
    step_layers: int

    columns = renamed("columns", "slots")
    free_columns = renamed("free_columns", "free_slots")
    rows = renamed("rows", "step_tokens")
    layers = renamed("layers", "step_layers")
