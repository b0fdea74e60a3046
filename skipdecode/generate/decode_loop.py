"""The decoding loop: from logits to tokens until every row is done, whatever computes the logits."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from skipdecode.generate.stopping import Endings
from skipdecode.internals import has_unfinished_sequences, padding_token

# A PreTrainedModel with GenerationMixin; transformers has no public type that says so.
GenerativeModel: TypeAlias = Any


class Runner(Protocol):
    """The source of the loop's logits, for all rows of a batch or for those that haven't left."""

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompt [batch, columns]. Returns the last column's logits [batch, vocabulary]."""

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last column of `input_ids` [rows, columns]. Returns logits [rows, vocabulary]."""

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        """Run generated token i and choose what follows, greedily, and maybe several tokens more.

        Args:
            i, input_ids: as of `step`.
            room: the tokens that each row may grow by; 0 for one that has ended.
            ends: tokens that end a row's text.
            padding: the token behind a row's end.

        Returns:
            Token ids [rows, new tokens]; None where only `step` will do.
        """

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """Let rows leave whose texts have ended, where they may and that pays.

        Args:
            unfinished: for each row that the last step ran, whether its text goes on. The others' logits are nobody's.
            may_leave: whether those may leave.

        Returns:
            The rows that the next steps run, by their places among those that the last one ran; None where all stay.
        """

    @property
    def cache(self) -> Any:
        """The cache that `generate` hands out as `past_key_values`."""


def decode_loop(
    model: GenerativeModel,
    runner: Runner,
    input_ids: Any,  # a Tensor; transformers asks for a LongTensor, which type checkers take for another type
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool,
    streamer: BaseStreamer | None,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Choose tokens until every row is done; the arguments are those that `generate` gives a `custom_generate`.

    Rows that are done may leave the runner's steps. Processors, criteria and the streamer see the whole batch all the
    same, and sampling draws as many numbers as ever: what follows the end of a row is padding, whatever its logits are.

    Returns:
        Token ids [batch, prompt columns + new tokens], or a GenerateDecoderOnlyOutput where it is asked for.
    """
    pad_token = padding_token(generation_config)
    ended = Endings(stopping_criteria, len(input_ids))
    stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    scores: Any = ()
    raw_logits: Any = ()
    unfinished = [True] * len(input_ids)
    finished = False
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)  # those that the runner runs
    handed_out = ("return_dict_in_generate", "output_scores", "output_logits")  # what ended rows computed, too
    may_leave = not synced_gpus and not any(getattr(generation_config, name) for name in handed_out)
    looked_at = bool(logits_processor) or bool(generation_config.do_sample) or not may_leave
    ahead = not looked_at and streamer is None and ended.known  # nobody sees a token before the next one

    logits: torch.Tensor | None = runner.prefill(input_ids)
    tokens: torch.Tensor | None = None  # [batch, new columns], in place of logits
    step = 0
    while True:
        if not finished:  # under synced_gpus a rank that is done goes on running the model for its peers' sake
            if logits is not None:
                logits = logits.to(copy=looked_at, dtype=torch.float32, device=input_ids.device)  # [rows, vocab]
                if len(rows) < len(input_ids):
                    logits = logits.new_zeros(len(input_ids), logits.shape[1]).index_copy_(0, rows, logits)
                next_scores = logits_processor(input_ids, logits)
                if generation_config.output_scores:
                    scores += (next_scores,)
                if generation_config.output_logits:
                    raw_logits += (logits,)
                next_tokens = _choose(next_scores, do_sample=bool(generation_config.do_sample))
                if stops_at_eos and not all(unfinished):
                    going_on = torch.tensor(unfinished, device=input_ids.device)
                    next_tokens = torch.where(going_on, next_tokens, pad_token)
                if streamer is not None:
                    streamer.put(next_tokens.cpu())
                tokens = next_tokens[:, None]
            assert tokens is not None
            input_ids = torch.cat([input_ids, tokens], dim=-1)
            ends = ended(input_ids, scores or None, tokens.shape[1])
            unfinished = [before and not end for before, end in zip(unfinished, ends, strict=True)]
            finished = not any(unfinished)
        logits = tokens = None  # those of a prefill are large
        if not has_unfinished_sequences(model, finished, synced_gpus, input_ids.device):
            break
        if stops_at_eos and not finished:  # else what a row writes until the last is done is in its text
            going = unfinished if len(rows) == len(input_ids) else [unfinished[row] for row in rows.tolist()]
            remaining = runner.drop_ended_rows(going, may_leave=may_leave)
            rows = rows if remaining is None else rows[remaining]
        at_hand = input_ids if len(rows) == len(input_ids) else input_ids[rows]
        if ahead:
            columns = input_ids.shape[1]
            room = [ended.room(row, columns) if unfinished[row] else 0 for row in rows.tolist()]
            tokens = runner.choose(step, at_hand, room, ended.tokens, pad_token)
        if tokens is None:
            logits = runner.step(step, at_hand)
            step += 1
        else:
            step += tokens.shape[1]
            if len(rows) < len(input_ids):
                padding = tokens.new_full((len(input_ids), tokens.shape[1]), int(cast(Any, pad_token)))
                tokens = padding.index_copy_(0, rows, tokens)

    if streamer is not None:
        streamer.end()
    if not generation_config.return_dict_in_generate:
        return cast(torch.Tensor, input_ids)
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,
        scores=scores if generation_config.output_scores else None,
        logits=raw_logits if generation_config.output_logits else None,
        past_key_values=runner.cache,
    )


def _choose(scores: torch.Tensor, *, do_sample: bool) -> torch.Tensor:
    """The next token of each row, from processed scores [batch, vocab]."""
    if do_sample:
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    return torch.argmax(scores, dim=-1)
