"""The decoding loop: it chooses tokens from logits until every sequence has ended, whatever computes the logits."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers.generation import GenerateDecoderOnlyOutput

from skipdecode.generate.request import DecodeRequest
from skipdecode.generate.stopping import Endings
from skipdecode.internals import has_unfinished_sequences, padding_token


class Runner(Protocol):
    """Computes the logits of the prefill and of each decode step, for the sequences that are still running."""

    def prefill(self, input_ids: Any) -> torch.Tensor:
        """Run the prompts [batch, prompt length]. Returns the last position's logits [batch, vocabulary]."""

    def step(self, i: int, input_ids: Any) -> torch.Tensor:
        """Run generated token i, the last one of `input_ids` [sequences, length]. Returns logits [sequences, vocab]."""

    def choose(
        self, i: int, input_ids: Any, room: Sequence[float], ends: Collection[int], padding: Any
    ) -> torch.Tensor | None:
        """Run generated token i and choose the next token greedily, and possibly several more.

        Args:
            room: how many tokens each sequence may still grow by; 0 if it has ended.
            ends: tokens that end a sequence.
            padding: the token that follows a sequence's end.

        Returns:
            Token ids [sequences, new tokens]; None if the runner can only compute logits.
        """

    def drop_ended_rows(self, unfinished: Sequence[int], *, may_leave: bool) -> list[int] | None:
        """Stop running sequences that have ended, if they `may_leave` and that saves time.

        Args:
            unfinished: for each sequence of the last step, whether it continues. Nobody reads the logits of the others.

        Returns:
            The sequences that the next steps run, as indices among those of the last step; None if all stay.
        """

    @property
    def cache(self) -> Any:
        """The cache that `generate` returns as `past_key_values`."""


def decode_loop(runner: Runner, request: DecodeRequest) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Choose tokens until every sequence has ended.

    Sequences that have ended may leave the runner's steps. Processors, criteria and the streamer see the whole batch
    nevertheless, and sampling draws as many random numbers as without that: the tokens after a sequence's end are
    padding, whatever their logits are. Returns token ids [batch, prompt length + new tokens], or a
    GenerateDecoderOnlyOutput if it was requested.
    """
    config, streamer, logits_processor = request.generation_config, request.streamer, request.logits_processor
    input_ids: Any = request.input_ids  # transformers asks for a LongTensor, which type checkers hold for another type
    pad_token = padding_token(config)
    endings = Endings(request.stopping_criteria, len(input_ids))
    stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in request.stopping_criteria)
    scores: Any = ()
    raw_logits: Any = ()
    unfinished = [True] * len(input_ids)
    finished = False
    rows = torch.arange(input_ids.shape[0], device=input_ids.device)  # indices in the batch of the running sequences
    # These return what ended sequences compute, too.
    returned = ("return_dict_in_generate", "output_scores", "output_logits")
    may_leave = not request.synced_gpus and not any(getattr(config, name) for name in returned)
    needs_logits = bool(logits_processor) or bool(config.do_sample) or not may_leave
    several_at_once = not needs_logits and streamer is None and endings.known

    logits: torch.Tensor | None = runner.prefill(input_ids)
    tokens: torch.Tensor | None = None  # [batch, new tokens], in place of logits
    step = 0
    while True:
        if not finished:  # with synced_gpus, a finished process keeps running the model because its peers need it
            if logits is not None:
                logits = logits.to(copy=needs_logits, dtype=torch.float32, device=input_ids.device)  # [rows, vocab]
                if len(rows) < len(input_ids):
                    logits = logits.new_zeros(len(input_ids), logits.shape[1]).index_copy_(0, rows, logits)
                next_scores = logits_processor(input_ids, cast(torch.FloatTensor, logits))
                if config.output_scores:
                    scores += (next_scores,)
                if config.output_logits:
                    raw_logits += (logits,)
                next_tokens = _choose(next_scores, do_sample=bool(config.do_sample))
                if stops_at_eos and not all(unfinished):
                    continues = torch.tensor(unfinished, device=input_ids.device)
                    next_tokens = torch.where(continues, next_tokens, pad_token)
                if streamer is not None:
                    streamer.put(next_tokens.cpu())
                tokens = next_tokens[:, None]
            assert tokens is not None
            input_ids = torch.cat([input_ids, tokens], dim=-1)
            ended = endings(input_ids, scores or None, tokens.shape[1])
            unfinished = [before and not end for before, end in zip(unfinished, ended, strict=True)]
            finished = not any(unfinished)
        logits = tokens = None  # frees the prefill's logits, which are large
        if not has_unfinished_sequences(request.model, finished, request.synced_gpus, input_ids.device):
            break
        if stops_at_eos and not finished:  # otherwise sequences keep growing until the last one has ended
            running = unfinished if len(rows) == len(input_ids) else [unfinished[row] for row in rows.tolist()]
            remaining = runner.drop_ended_rows(running, may_leave=may_leave)
            rows = rows if remaining is None else rows[remaining]
        running_ids = input_ids if len(rows) == len(input_ids) else input_ids[rows]
        if several_at_once:
            length = input_ids.shape[1]
            room = [endings.room(row, length) if unfinished[row] else 0 for row in rows.tolist()]
            tokens = runner.choose(step, running_ids, room, endings.tokens, pad_token)
        if tokens is None:
            logits = runner.step(step, running_ids)
            step += 1
        else:
            step += tokens.shape[1]
            if len(rows) < len(input_ids):
                padding = tokens.new_full((len(input_ids), tokens.shape[1]), int(cast(Any, pad_token)))
                tokens = padding.index_copy_(0, rows, tokens)

    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return cast(torch.Tensor, input_ids)
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,
        scores=scores if config.output_scores else None,
        logits=raw_logits if config.output_logits else None,
        past_key_values=runner.cache,
    )


def _choose(scores: torch.Tensor, *, do_sample: bool) -> torch.Tensor:
    """The next token of each sequence, from processed scores [batch, vocabulary]."""
    if do_sample:
        return torch.multinomial(nn.functional.softmax(scores, dim=-1), num_samples=1).squeeze(1)
    return torch.argmax(scores, dim=-1)
