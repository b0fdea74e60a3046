"""Lossless decoding: a schedule drafts, full depth verifies, and the output is identical to full depth's.

A round drafts a few tokens of each sequence under the schedule, which reads the keys and values of full depth. Then one
pass at full depth runs all drafts and overwrites their keys and values with its own. Each sequence keeps the drafts
that the acceptance rule accepts, and gets one token more from full depth's logits. The keys and values of rejected
drafts are rolled back by setting lengths. Sequences advance independently; stopping criteria and the streamer see a
position once every sequence has reached it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from skipdecode.fastpath.cuda_graphs import MAX_AHEAD
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.fastpath.sequences import ChosenTokens, DraftedRounds, DraftRule, RunningSequences
from skipdecode.generate.acceptance import accept_greedy, accept_sampled
from skipdecode.generate.draft_policy import MAX_DRAFTS, PACE_STEPS, DraftPolicy, VerifiedRound
from skipdecode.generate.draft_record import LoopKind
from skipdecode.generate.request import DecodeRequest
from skipdecode.generate.runners import LosslessRunner
from skipdecode.generate.score_processing import ScoreProcessor
from skipdecode.generate.stopping import Endings
from skipdecode.internals import padding_token
from skipdecode.schedule.schedule import SkipSchedule

_NO_DRAFTS = DraftRule((), (), ())


@dataclass
class DraftCounts:
    """Counts over the decode steps of lossless calls, for batches of any size.

    Attributes:
        rounds: passes at full depth.
        drafted: tokens that were drafted, of all sequences.
        taken: drafts that were accepted and are part of the output.
        layers: layers of all passes, of drafts and at full depth; a step at full depth has all of the model's.
    """

    rounds: int = 0
    drafted: int = 0
    taken: int = 0
    layers: int = 0


class LosslessLoop:
    """The decoding loop of one lossless call.

    Args:
        choose_draft: returns the schedule that drafts and the draft policy; called once there is something to draft.

    Attributes:
        token_ids: prompts and new tokens, [batch, prompt length + maximum new tokens]; drafts follow a sequence's end.
        counts: new tokens of each sequence.
        ended: whether each sequence has its end token: the rest is padding.
        running: the sequences that the runner runs, as indices in the batch.
        shown: number of new positions that every sequence has reached, and that criteria and streamer have seen.
    """

    def __init__(
        self,
        request: DecodeRequest,
        runner: LosslessRunner,
        choose_draft: Callable[[LoopKind], tuple[SkipSchedule, DraftPolicy]],
        draft_counts: DraftCounts | None = None,
    ) -> None:
        config = request.generation_config
        batch, self._prompt_length = request.input_ids.shape
        # The first token is generated before any limit is looked at.
        self._max_new = max(1, int(config.max_length) - self._prompt_length)
        pad: Any = padding_token(config)
        self._pad = 0 if pad is None else int(pad)  # nothing is padded if no token ends a sequence
        self.token_ids = torch.nn.functional.pad(request.input_ids, (0, self._max_new), value=self._pad)
        self.counts = [0] * batch
        self.ended = [False] * batch
        self.running = list(range(batch))
        self.shown = 0
        self._runner = runner
        self._choose_draft = choose_draft
        self._draft_counts = DraftCounts() if draft_counts is None else draft_counts
        self._config = config
        self._streamer = request.streamer
        self._stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in request.stopping_criteria)
        # If scores are returned, those of ended sequences are too: these go on with padding until the last has ended.
        self._returns_scores = any(
            getattr(config, name) for name in ("return_dict_in_generate", "output_scores", "output_logits")
        )
        self._unfinished = [True] * batch
        self._endings = Endings(request.stopping_criteria, batch)
        processors = request.logits_processor
        self._process = ScoreProcessor(processors, self.token_ids, self._pad, copies=self._returns_scores)
        # Whether the kernels may choose tokens, and whether several before the first is shown.
        self._by_kernels = not processors and not config.do_sample and not self._returns_scores
        self._several_at_once = self._by_kernels and self._streamer is None and self._endings.known
        self._proposed: dict[int, list[torch.Tensor]] = {row: [] for row in range(batch)}  # distributions of drafts
        self._probabilities: dict[int, list[float]] = {row: [] for row in range(batch)}  # the largest of each
        self._pending: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(batch)]  # not yet shown
        self._scores: Any = ()
        self._logits: Any = ()

    def run(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode every sequence to its end. Returns what `decode_loop` does."""
        logits = self._runner.prefill(self.token_ids[:, : self._prompt_length])
        self._extend(self.running, [0] * len(self.running), logits)
        del logits  # frees the prefill's logits, which are large
        ended = self._show()
        if not ended:  # a call for one token needs no drafts
            kind: LoopKind = "kernels" if self._several_at_once else "streamed" if self._by_kernels else "logits"
            self._schedule, self._policy = self._choose_draft(kind)
        while not ended:
            self._drop_ended_rows()
            rows = [row for row in self.running if self._continues(row)]
            by_kernels = self._several_at_once or (self._by_kernels and not self._policy.rests)
            if not (by_kernels and self._run_kernels(rows)):
                self._run_round(rows)
            ended = self._show()
        if self._streamer is not None:
            self._streamer.end()
        token_ids = self.token_ids[:, : self._prompt_length + self.shown]
        if not self._config.return_dict_in_generate:
            return token_ids
        self._runner.roll_back(self.shown - 1)
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, token_ids),
            scores=self._scores if self._config.output_scores else None,
            logits=self._logits if self._config.output_logits else None,
            past_key_values=self._runner.cache,
        )

    def _run_round(self, rows: Sequence[int]) -> None:
        """Draft tokens of the sequences `rows`, verify them in one pass, and append those that are accepted."""
        start = time.perf_counter()
        timed = not self._config.do_sample  # with sampling, the output must not depend on time
        self._proposed, self._probabilities = {row: [] for row in rows}, {row: [] for row in rows}
        drafting = not self._policy.rests and (self._policy.has_pace or not timed)
        drafted = self._draft(rows) if drafting else [0] * len(rows)
        tokens, starts, counts = self._inputs(rows, [1 + draft for draft in drafted])
        logits = self._runner.run(tokens, starts, counts)
        self._draft_counts.rounds += 1
        self._draft_counts.layers += len(self._runner.all_layers)
        before = sum(self.counts[row] for row in rows)
        accepted = self._extend(rows, drafted, logits)
        seconds = time.perf_counter() - start if timed else None
        if seconds is not None and not any(drafted):
            self._policy.learn_pace(len(rows), 1, seconds)
        else:
            new_tokens = sum(self.counts[row] for row in rows) - before
            probabilities = [self._probabilities[row] for row in rows]
            self._policy.learn(VerifiedRound(len(rows), new_tokens, drafted, accepted, probabilities, seconds))

    def _continues(self, row: int) -> bool:
        """Whether a sequence needs more tokens."""
        return self.counts[row] < self._max_count(row) and (not self.ended[row] or self._returns_scores)

    def _max_count(self, row: int) -> int:
        """Maximum number of new tokens of a sequence."""
        if self._returns_scores:
            return self._max_new
        return int(min(self._max_new, self._endings.room(row, self._prompt_length)))

    def _draft(self, rows: Sequence[int]) -> list[int]:
        """Draft tokens of the sequences `rows`. Returns how many each got."""
        room = {row: min(MAX_DRAFTS, self._max_count(row) - self.counts[row] - 1) for row in rows}
        drafting = [row for row in rows if room[row] and not self.ended[row]]
        rule, layers = self._rule(rows, max(room.values()))
        reach = dict.fromkeys(rows, 1.0)  # probability that all drafts so far are accepted
        for done, (threshold, chosen) in enumerate(zip(rule.min_probabilities, layers, strict=True)):
            drafting = [row for row in drafting if done < room[row] and reach[row] > threshold]
            if not drafting:
                break
            ones = [1] * len(drafting)
            tokens, starts, counts = self._inputs(drafting, ones, skip=done)
            logits = self._runner.run(tokens, starts, counts, chosen)
            self._draft_counts.drafted += len(drafting)
            self._draft_counts.layers += len(chosen)
            lengths = [self._prompt_length + self.counts[row] + done for row in drafting]
            distributions = torch.softmax(self._process(drafting, lengths, ones, logits), dim=-1)
            probabilities, drafts = distributions.max(dim=-1)
            if self._config.do_sample:
                drafts = torch.multinomial(distributions, num_samples=1)[:, 0]
                for row, distribution in zip(drafting, distributions, strict=True):
                    self._proposed[row].append(distribution)
            drafts = drafts.to(self.token_ids.dtype)
            if len(drafting) == 1:  # without index tensors, as in `_inputs`
                self.token_ids[drafting[0], lengths[0]] = drafts[0]
            else:
                self.token_ids[drafting, lengths] = drafts
            for row, token, probability in zip(drafting, drafts.tolist(), probabilities.tolist(), strict=True):
                self._probabilities[row].append(probability)
                reach[row] *= rule.acceptance_rate(probability)
                if token in self._endings.tokens:
                    room[row] = 0  # nothing follows an end token
        return [len(self._probabilities[row]) for row in rows]

    def _rule(self, rows: Sequence[int], max_drafts: int) -> tuple[DraftRule, list[Sequence[int]]]:
        """What to draft of the sequences `rows`, and the layers of each draft."""
        if self._policy.rests:
            return _NO_DRAFTS, []
        first = min(self.counts[row] for row in rows) - 1  # the shortest sequence decides for all
        budgets = [self._schedule.budget(first + n) for n in range(max_drafts)]
        rule = self._policy.rule(len(rows), budgets)
        return rule, [self._schedule.layers_for(budget) for budget in budgets[: len(rule.min_probabilities)]]

    def _run_kernels(self, rows: Sequence[int]) -> bool:
        """Run steps or rounds of the sequences `rows` in one call of the kernels. Returns False if these can't."""
        start = time.perf_counter()
        sequences = self._sequences(rows)
        rule, layers = self._rule(rows, min(MAX_DRAFTS, max(sequences.max_tokens) - 1))
        if not (layers and self._policy.has_pace):
            if not self._several_at_once:
                return False
            chosen = self._runner.choose(sequences, min(PACE_STEPS if layers else MAX_AHEAD, max(sequences.max_tokens)))
            if chosen is None:
                return False
            self._append(rows, chosen)
            steps = max(chosen.counts)
            self._draft_counts.rounds += steps
            self._draft_counts.layers += steps * len(self._runner.all_layers)
            self._policy.learn_pace(len(rows), steps, time.perf_counter() - start)
            return True
        found = self._runner.draft(sequences, layers, rule, self._policy.rounds if self._several_at_once else 1)
        if found is None:
            return False
        self._append(rows, found.chosen)
        self._count(found, [len(each) for each in layers])
        seconds = (time.perf_counter() - start) / len(found.drafted)
        for drafted, accepted, by_draft in zip(found.drafted, found.accepted, found.probabilities, strict=True):
            probabilities = [[by_draft[n][at] for n in range(count)] for at, count in enumerate(drafted)]
            new_tokens = [count + 1 for count in accepted if count >= 0]
            verified = VerifiedRound(len(new_tokens), sum(new_tokens), drafted, accepted, probabilities, seconds)
            self._policy.learn(verified)
        return True

    def _sequences(self, rows: Sequence[int]) -> RunningSequences:
        """The sequences `rows` as the kernels take them."""
        last = [self._prompt_length + self.counts[row] - 1 for row in rows]
        # One sequence is read without index tensors: making them takes long compared with a small model's step.
        tokens = self.token_ids[rows, last] if len(rows) > 1 else self.token_ids[rows[0], last[0] : last[0] + 1]
        places = [self.running.index(row) for row in rows]
        starts = [self.counts[row] - 1 for row in rows]
        max_new = [self._max_count(row) - self.counts[row] for row in rows]
        return RunningSequences(tokens, places, starts, max_new, self._endings.tokens)

    def _append(self, rows: Sequence[int], chosen: ChosenTokens) -> None:
        """Append full depth's tokens to the sequences `rows`."""
        for n, (row, count) in enumerate(zip(rows, chosen.counts, strict=True)):
            start = self._prompt_length + self.counts[row]
            self.token_ids[row, start : start + count] = chosen.tokens[n, :count]
            self.counts[row] += count
            if self._endings.tokens and int(chosen.tokens[n, count - 1]) in self._endings.tokens:
                self._end(row, self.counts[row])

    def _count(self, found: DraftedRounds, layers: Sequence[int]) -> None:
        """Add the kernels' rounds to the counts; `layers` gives the layers of each draft."""
        left = list(found.chosen.counts)
        for drafted, accepted in zip(found.drafted, found.accepted, strict=True):
            self._draft_counts.rounds += 1
            self._draft_counts.drafted += sum(drafted)
            self._draft_counts.layers += sum(layers[: max(drafted)]) + len(self._runner.all_layers)
            for at, count in enumerate(accepted):  # drafts after an end token are not part of the output
                self._draft_counts.taken += min(left[at], max(0, count))
                left[at] -= count + 1

    def _inputs(
        self, rows: Sequence[int], counts: Sequence[int], skip: int = 0
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """The runner's arguments for tokens of the sequences `rows`: `counts` each, `skip` after the last token on.

        Returns the tokens, and for each running sequence the index of its first token and the number of tokens.
        """
        count_of = dict(zip(rows, counts, strict=True))
        firsts = {row: self.counts[row] - 1 + skip for row in self.running}
        if len(rows) == 1:  # without index tensors: making them takes long compared with a small model's step
            first = self._prompt_length + firsts[rows[0]]
            tokens = self.token_ids[rows[0], first : first + counts[0]]
        else:
            places = [(row, self._prompt_length + firsts[row] + n) for row in rows for n in range(count_of[row])]
            tokens = self.token_ids[[row for row, _ in places], [position for _, position in places]]
        return tokens, list(firsts.values()), [count_of.get(row, 0) for row in self.running]

    def _extend(self, rows: Sequence[int], drafted: Sequence[int], logits: torch.Tensor) -> list[int]:
        """Append to the sequences `rows` the drafts that are accepted, and full depth's next token.

        Full depth's logits [tokens, vocabulary] are of each sequence's last token and its drafts. Returns how many of
        these were accepted for each sequence.
        """
        starts = [self._prompt_length + self.counts[row] for row in rows]
        scores = self._process(rows, starts, [1 + count for count in drafted], logits)
        drafts = [
            self.token_ids[row, at : at + n].tolist() if n else []
            for row, at, n in zip(rows, starts, drafted, strict=True)
        ]
        if self._config.do_sample:
            found = accept_sampled(drafts, [self._proposed[row] for row in rows], scores)
        else:
            found = accept_greedy(drafts, scores)
        first = 0
        accepted = [len(new) - 1 for new in found]
        for row, start, count, new in zip(rows, starts, drafted, found, strict=True):
            self._draft_counts.taken += self._extend_one(row, start, new)
            if self._returns_scores:
                self._pending[row] += [(scores[first + n], logits[first + n]) for n in range(len(new))]
            first += count + 1
        return accepted

    def _extend_one(self, row: int, start: int, new: list[int]) -> int:
        """Append tokens to a sequence up to an end token; cuts `new` there. Returns how many drafts are among them."""
        accepted = len(new) - 1
        if self.ended[row]:
            new[:] = [self._pad]
        elif ends := [n for n, token in enumerate(new) if token in self._endings.tokens]:
            del new[ends[0] + 1 :]
        self.token_ids[row, start + len(new) - 1] = new[-1]  # the drafts before it are already there
        self.counts[row] += len(new)
        if new[-1] in self._endings.tokens:
            self._end(row, self.counts[row])
        return min(len(new), accepted)

    def _end(self, row: int, count: int) -> None:
        """End a sequence after `count` new tokens."""
        self.counts[row], self.ended[row] = count, True
        self.token_ids[row, self._prompt_length + count :] = self._pad

    def _show(self) -> bool:
        """Show positions that every sequence has reached to criteria and streamer. Returns whether all have ended."""
        if self._several_at_once:
            return self._show_together()
        while all(self.counts[row] > self.shown or not self._continues(row) for row in range(len(self.counts))):
            position = self._prompt_length + self.shown
            self.shown += 1
            if self._returns_scores:
                at_hand = [pending.pop(0) for pending in self._pending]
                if self._config.output_scores:
                    self._scores += (torch.stack([scores for scores, _ in at_hand]),)
                if self._config.output_logits:
                    self._logits += (torch.stack([logits for _, logits in at_hand]),)
            if self._streamer is not None:
                self._streamer.put(self.token_ids[:, position].cpu())
            visible = cast(torch.LongTensor, self.token_ids[:, : position + 1])
            before, ends = self._unfinished, self._endings(visible, self._scores or None)
            self._unfinished = [continued and not end for continued, end in zip(before, ends, strict=True)]
            if not any(self._unfinished):
                return True
            if self._stops_at_eos:
                for row, (continued, end) in enumerate(zip(before, ends, strict=True)):
                    if continued and end:
                        self._end(row, self.shown)
                        self._pending[row].clear()
        return False

    def _show_together(self) -> bool:
        """The same if criteria needn't see each position by itself, because counts say which sequences have ended."""
        continuing = [self.counts[row] for row in range(len(self.counts)) if self._continues(row)]
        shown = min(continuing) if continuing else max(self.counts)
        if shown > self.shown:
            self._endings.show(self.token_ids, self._prompt_length + shown)
            self.shown = shown
        return not continuing

    def _drop_ended_rows(self) -> None:
        """Stop running sequences that need no more tokens, if that saves time."""
        self._runner.roll_back(max(self.counts[row] for row in self.running) - 1)
        kept = None if self._returns_scores else rows_to_keep([self._continues(row) for row in self.running])
        if kept is not None:
            self._runner.keep_rows(kept)
            self.running = [self.running[n] for n in kept]
