"""Lossless decoding: a schedule drafts, full depth verifies, and the text is full depth's.

A round drafts a few tokens of each row under the schedule, on the keys and values of full depth, and runs them all
through every layer in one pass, which writes its keys and values over the drafts'. Each row takes the drafts that full
depth chose too, and one token more, which full depth's logits give. What is rejected is rolled back by the row's
length. Rows go on at their own pace; stopping criteria and the streamer see whole columns, as soon as every row has
them.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from skipdecode.fastpath.cpu_steps import ChosenTokens, DraftedRounds, DraftRule, RunningSequences
from skipdecode.fastpath.cuda_graphs import MAX_AHEAD
from skipdecode.fastpath.row_compaction import rows_to_keep
from skipdecode.generate.acceptance import accept_chosen, accept_sampled
from skipdecode.generate.draft_policy import MOST_DRAFTS, PACE_STEPS, DraftLength, LoopKind
from skipdecode.generate.runners import ColumnsRunner
from skipdecode.generate.stopping import Endings
from skipdecode.internals import padding_token, prefix_allowed_tokens
from skipdecode.schedule.schedule import SkipSchedule

# Processors that look at no text: all tokens go through them at once.
_OF_SCORES_ALONE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
_NO_DRAFTS = DraftRule((), (), ())


@dataclass
class DraftCounts:
    """Counted over the decode steps of lossless calls, of batches of any size.

    Attributes:
        rounds: passes of full depth.
        drafted: tokens that were drafted, of all rows.
        taken: those of them that stand in the texts.
        layers: of all passes, drafts' and full depth's: at full depth alone a step has all of the model's.
    """

    rounds: int = 0
    drafted: int = 0
    taken: int = 0
    layers: int = 0


class LosslessLoop:
    """One generation. The arguments are those that `generate` gives a `custom_generate`.

    Args:
        runner: of the call.
        choose_draft: gives the schedule that drafts and how much, in a loop of a kind; it is asked once there is
            something to draft.

    Attributes:
        texts: prompts and new tokens [batch, prompt columns + new tokens at most]; drafts behind a row's text.
        counts: new tokens of each row.
        ended: rows with an end token: what follows is padding.
        running: the rows that the runner runs, by their places in the batch.
        shown: columns of new tokens that every row has, and that criteria and streamer have seen.
    """

    def __init__(
        self,
        runner: ColumnsRunner,
        choose_draft: Callable[[LoopKind], tuple[SkipSchedule, DraftLength]],
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        draft_counts: DraftCounts | None = None,
    ) -> None:
        batch, self.prompt = input_ids.shape
        self.most = max(1, generation_config.max_length - self.prompt)  # a token is chosen before anybody asks
        pad: Any = padding_token(generation_config)
        self.pad = 0 if pad is None else int(pad)  # nothing is padded where no token ends a text
        self.texts = torch.nn.functional.pad(input_ids, (0, self.most), value=self.pad)
        self.counts = [0] * batch
        self.ended = [False] * batch
        self.running = list(range(batch))
        self.shown = 0
        self._runner = runner
        self._choose_draft = choose_draft
        self._drafts = DraftCounts() if draft_counts is None else draft_counts
        self._asked: Collection[int] = ()  # rows that processors are asked about
        self._processor = LogitsProcessorList(map(self._asked_of_rows_at_hand, logits_processor))
        self._config = generation_config
        self._streamer = streamer
        self._stops_at_eos = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        # What ended rows compute is handed out, too: they go on with padding until the last row has ended.
        self._handed_out = any(
            getattr(generation_config, name) for name in ("return_dict_in_generate", "output_scores", "output_logits")
        )
        self._unfinished = [True] * batch
        self._ends = Endings(stopping_criteria, batch)
        # Whether several tokens may be chosen before anybody sees the first of them: drafts, and full depth's own.
        self._ahead = not logits_processor and not generation_config.do_sample and not self._handed_out
        self._plain = self._ahead and streamer is None and self._ends.known
        self._proposed: dict[int, list[torch.Tensor]] = {row: [] for row in range(batch)}  # what drafts are drawn from
        self._confidence: dict[int, list[float]] = {row: [] for row in range(batch)}  # largest of these probabilities
        self._kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(batch)]  # that aren't shown yet
        self._scores: Any = ()
        self._logits: Any = ()

    def _asked_of_rows_at_hand(self, processor: Any) -> Any:
        """A processor; one that calls a function for each row calls it for those alone whose text is looked at."""
        if not isinstance(processor, PrefixConstrainedLogitsProcessor):
            return processor
        allowed = prefix_allowed_tokens(processor)
        return PrefixConstrainedLogitsProcessor(
            lambda row, text: allowed(row, text) if row in self._asked else [self.pad], num_beams=1
        )

    def run(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Decode every row to its end. Returns what `decode_loop` does."""
        logits = self._runner.prefill(self.texts[:, : self.prompt])
        self._extend(self.running, [0] * len(self.running), logits)
        del logits  # those of a prefill are large
        ended = self._show()
        if not ended:  # a prompt alone costs what a prompt costs
            kind: LoopKind = "ahead" if self._plain else "streamed" if self._ahead else "looked at"
            self._schedule, self._length = self._choose_draft(kind)
        while not ended:
            self._let_rows_leave()
            rows = [row for row in self.running if self._goes_on(row)]
            ahead = self._plain or (self._ahead and not self._length.rests)
            if not (ahead and self._run_ahead(rows)):
                self._run_round(rows)
            ended = self._show()
        if self._streamer is not None:
            self._streamer.end()
        texts = self.texts[:, : self.prompt + self.shown]
        if not self._config.return_dict_in_generate:
            return texts
        self._runner.roll_back(self.shown - 1)
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, texts),
            scores=self._scores if self._config.output_scores else None,
            logits=self._logits if self._config.output_logits else None,
            past_key_values=self._runner.cache,
        )

    def _run_round(self, rows: Sequence[int]) -> None:
        """Draft tokens of `rows`, verify them in one pass, and give each row those that full depth takes."""
        start = time.perf_counter()
        timed = not self._config.do_sample  # sampled texts must not depend on the clock
        self._proposed, self._confidence = {row: [] for row in rows}, {row: [] for row in rows}
        drafting = not self._length.rests and (self._length.has_pace or not timed)
        drafts = self._draft(rows) if drafting else [0] * len(rows)
        tokens, starts, counts = self._columns(rows, [1 + draft for draft in drafts])
        logits = self._runner.run(tokens, starts, counts)
        self._drafts.rounds += 1
        self._drafts.layers += len(self._runner.all_layers)
        before = sum(self.counts[row] for row in rows)
        outcomes = self._extend(rows, drafts, logits)
        seconds = time.perf_counter() - start if timed else None
        if seconds is not None and not any(drafts):
            self._length.learn_pace(len(rows), 1, seconds)
        else:
            given = sum(self.counts[row] for row in rows) - before
            self._length.learn(outcomes, drafts, given, len(rows), seconds)

    def _goes_on(self, row: int) -> bool:
        """True for a row that needs more tokens."""
        return self.counts[row] < self._most(row) and (not self.ended[row] or self._handed_out)

    def _most(self, row: int) -> int:
        """New tokens that a row may have."""
        return self.most if self._handed_out else int(min(self.most, self._ends.room(row, self.prompt)))

    def _draft(self, rows: Sequence[int]) -> list[int]:
        """Draft tokens of `rows` behind their texts. Returns how many each got."""
        room = {row: min(MOST_DRAFTS, self._most(row) - self.counts[row] - 1) for row in rows}
        drafting = [row for row in rows if room[row] and not self.ended[row]]
        rule, layers = self._rule(rows, max(room.values()))
        reach = dict.fromkeys(rows, 1.0)
        for done, (least, chosen) in enumerate(zip(rule.min_probabilities, layers, strict=True)):
            drafting = [row for row in drafting if done < room[row] and reach[row] > least]
            if not drafting:
                break
            tokens, starts, counts = self._columns(drafting, [1] * len(drafting), skip=done)
            logits = self._runner.run(tokens, starts, counts, chosen)
            self._drafts.drafted += len(drafting)
            self._drafts.layers += len(chosen)
            scores = self._process(drafting, [1] * len(drafting), logits, skip=done)
            probabilities = torch.softmax(scores, dim=-1)
            confidence, drafted = probabilities.max(dim=-1)
            if self._config.do_sample:
                drafted = torch.multinomial(probabilities, num_samples=1)[:, 0]
                for row, proposed in zip(drafting, probabilities, strict=True):
                    self._proposed[row].append(proposed)
            drafted = drafted.to(self.texts.dtype)
            if len(drafting) == 1:  # without the making of indices, as in `_columns`
                self.texts[drafting[0], self.prompt + self.counts[drafting[0]] + done] = drafted[0]
            else:
                self.texts[drafting, [self.prompt + self.counts[row] + done for row in drafting]] = drafted
            for row, token, sure in zip(drafting, drafted.tolist(), confidence.tolist(), strict=True):
                self._confidence[row].append(sure)
                reach[row] *= rule.acceptance_rate(sure)
                if token in self._ends.tokens:
                    room[row] = 0  # nothing follows
        return [len(self._confidence[row]) for row in rows]

    def _rule(self, rows: Sequence[int], most: int) -> tuple[DraftRule, list[Sequence[int]]]:
        """What to draft of `rows`, so many at most, and the layers of each draft."""
        if self._length.rests:
            return _NO_DRAFTS, []
        first = min(self.counts[row] for row in rows) - 1  # of several rows the earliest says the layers
        budgets = [self._schedule.budget(first + n) for n in range(most)]
        rule = self._length.rule(len(rows), budgets)
        return rule, [self._schedule.layers_for(budget) for budget in budgets[: len(rule.min_probabilities)]]

    def _run_ahead(self, rows: Sequence[int]) -> bool:
        """Give `rows` tokens of full depth, several before anybody looks. Returns False where that can't be."""
        start = time.perf_counter()
        texts = self._at_hand(rows)
        rule, layers = self._rule(rows, min(MOST_DRAFTS, max(texts.max_tokens) - 1))
        if not (layers and self._length.has_pace):
            if not self._plain:
                return False
            steps = min(PACE_STEPS if layers else MAX_AHEAD, max(texts.max_tokens))
            found = self._runner.choose(texts, steps)
            if found is None:
                return False
            self._take(rows, found)
            done = max(found.counts)
            self._drafts.rounds += done
            self._drafts.layers += done * len(self._runner.all_layers)
            self._length.learn_pace(len(rows), done, time.perf_counter() - start)
            return True
        rounds = self._length.rounds if self._plain else 1
        drafted = self._runner.draft(texts, layers, rule, rounds)
        if drafted is None:
            return False
        self._take(rows, drafted.chosen)
        self._count(drafted, [len(each) for each in layers])
        seconds = (time.perf_counter() - start) / len(drafted.drafted)
        for counts, agreed, probabilities in zip(*drafted[1:], strict=True):
            outcomes = [
                (probabilities[n][text], n < same)
                for text, (count, same) in enumerate(zip(counts, agreed, strict=True))
                for n in range(min(count, same + 1))
            ]
            going = [same + 1 for same in agreed if same >= 0]
            self._length.learn(outcomes, counts, sum(going), len(going), seconds)
        return True

    def _at_hand(self, rows: Sequence[int]) -> RunningSequences:
        last = [self.prompt + self.counts[row] - 1 for row in rows]
        # Of one row without the making of indices, which takes a while beside a small model's step.
        tokens = self.texts[rows, last] if len(rows) > 1 else self.texts[rows[0], last[0] : last[0] + 1]
        places = [self.running.index(row) for row in rows]
        starts = [self.counts[row] - 1 for row in rows]
        most = [self._most(row) - self.counts[row] for row in rows]
        return RunningSequences(tokens, places, starts, most, self._ends.tokens)

    def _take(self, rows: Sequence[int], found: ChosenTokens) -> None:
        """Write tokens of full depth behind the texts of `rows`."""
        for n, (row, count) in enumerate(zip(rows, found.counts, strict=True)):
            start = self.prompt + self.counts[row]
            self.texts[row, start : start + count] = found.tokens[n, :count]
            self.counts[row] += count
            if self._ends.tokens and int(found.tokens[n, count - 1]) in self._ends.tokens:
                self._end(row, self.counts[row])

    def _count(self, found: DraftedRounds, layers: Sequence[int]) -> None:
        """Add rounds, whose drafts ran so many layers each."""
        left = list(found.chosen.counts)
        for counts, agreed in zip(found.drafted, found.accepted, strict=True):
            self._drafts.rounds += 1
            self._drafts.drafted += sum(counts)
            self._drafts.layers += sum(layers[: max(counts)]) + len(self._runner.all_layers)
            for text, same in enumerate(agreed):  # an end token among the drafts is the last
                self._drafts.taken += min(left[text], max(0, same))
                left[text] -= same + 1

    def _columns(
        self, rows: Sequence[int], counts: Sequence[int], skip: int = 0
    ) -> tuple[torch.Tensor, list[int], list[int]]:
        """What the runner is given for so many tokens of `rows`, from the last of their texts on or `skip` behind it.

        Returns the tokens, and for each row that runs the number of its first one and how many there are.
        """
        at_hand = dict(zip(rows, counts, strict=True))
        firsts = {row: self.counts[row] - 1 + skip for row in self.running}
        if len(rows) == 1:  # without the making of indices, which takes a while beside a small model's step
            first = self.prompt + firsts[rows[0]]
            tokens = self.texts[rows[0], first : first + counts[0]]
        else:
            places = [(row, self.prompt + firsts[row] + n) for row in rows for n in range(at_hand[row])]
            tokens = self.texts[[row for row, _ in places], [column for _, column in places]]
        return tokens, list(firsts.values()), [at_hand.get(row, 0) for row in self.running]

    def _process(self, rows: Sequence[int], counts: Sequence[int], logits: torch.Tensor, skip: int = 0) -> torch.Tensor:
        """The scores that choose tokens, of logits [tokens, vocabulary], so many of each row.

        Processors see the whole batch at one length, as in any loop, and what they say of the row that has it counts.
        """
        # Copied where somebody looks: processors write into what they are given.
        looked_at = bool(self._processor) or self._handed_out
        logits = logits.to(copy=looked_at, dtype=torch.float32, device=self.texts.device)
        if not self._processor:
            return logits
        if all(type(each) in _OF_SCORES_ALONE for each in self._processor):
            return self._processor(cast(torch.LongTensor, self.texts), cast(torch.FloatTensor, logits))
        starts = {self.counts[row] for row in rows}
        if len(rows) == len(self.texts) == len(logits) and len(starts) == 1:  # as in any loop
            self._asked = rows
            text = self.texts[:, : self.prompt + starts.pop() + skip]
            return self._processor(cast(torch.LongTensor, text), cast(torch.FloatTensor, logits))
        places = [
            (row, self.prompt + self.counts[row] + skip + n)
            for row, count in zip(rows, counts, strict=True)
            for n in range(count)
        ]
        scores = torch.empty_like(logits)
        for length in {length for _, length in places}:
            at = [n for n, (_, other) in enumerate(places) if other == length]
            of_rows = self._asked = [places[n][0] for n in at]
            whole = logits.new_zeros(len(self.texts), logits.shape[1])
            whole[of_rows] = logits[at]
            scores[at] = self._processor(cast(torch.LongTensor, self.texts[:, :length]), whole)[of_rows]
        return scores

    def _extend(self, rows: Sequence[int], counts: Sequence[int], logits: torch.Tensor) -> list[tuple[float, bool]]:
        """Give `rows` the drafts that full depth takes, so many at most, and its own next token.

        `logits` [tokens, vocabulary] are full depth's, of each row's last token and its drafts. Returns the drafts'
        probabilities and whether they were taken, where that is known.
        """
        scores = self._process(rows, [1 + count for count in counts], logits)
        starts = [self.prompt + self.counts[row] for row in rows]
        drafts = [
            self.texts[row, at : at + n].tolist() if n else [] for row, at, n in zip(rows, starts, counts, strict=True)
        ]
        if self._config.do_sample:
            found = accept_sampled(drafts, [self._proposed[row] for row in rows], scores)
        else:
            found = accept_chosen(drafts, scores)
        first = 0
        outcomes: list[tuple[float, bool]] = []
        for row, start, count, new in zip(rows, starts, counts, found, strict=True):
            agreed = len(new) - 1
            outcomes += zip(self._confidence[row], [True] * agreed + [False], strict=False)
            if self.ended[row]:
                new = [self.pad]
            elif ends := [n for n, token in enumerate(new) if token in self._ends.tokens]:
                new = new[: ends[0] + 1]
            self._drafts.taken += min(len(new), agreed)
            self.texts[row, start + len(new) - 1] = new[-1]  # those before are the drafts, which stand there
            self.counts[row] += len(new)
            if self._handed_out:
                self._kept[row] += [(scores[first + n], logits[first + n]) for n in range(len(new))]
            if new[-1] in self._ends.tokens:
                self._end(row, self.counts[row])
            first += count + 1
        return outcomes

    def _end(self, row: int, count: int) -> None:
        """End a row's text behind so many new tokens."""
        self.counts[row], self.ended[row] = count, True
        self.texts[row, self.prompt + count :] = self.pad

    def _show(self) -> bool:
        """Show the columns that every row has to criteria and streamer. Returns whether all texts have ended."""
        if self._plain:
            return self._show_together()
        while all(self.counts[row] > self.shown or not self._goes_on(row) for row in range(len(self.counts))):
            column = self.prompt + self.shown
            self.shown += 1
            if self._handed_out:
                at_hand = [kept.pop(0) for kept in self._kept]
                if self._config.output_scores:
                    self._scores += (torch.stack([scores for scores, _ in at_hand]),)
                if self._config.output_logits:
                    self._logits += (torch.stack([logits for _, logits in at_hand]),)
            if self._streamer is not None:
                self._streamer.put(self.texts[:, column].cpu())
            text = cast(torch.LongTensor, self.texts[:, : column + 1])
            before, ends = self._unfinished, self._ends(text, self._scores or None)
            self._unfinished = [went_on and not end for went_on, end in zip(before, ends, strict=True)]
            if not any(self._unfinished):
                return True
            if self._stops_at_eos:
                for row in (
                    row for row, (went_on, end) in enumerate(zip(before, ends, strict=True)) if went_on and end
                ):
                    self._end(row, self.shown)
                    self._kept[row].clear()
        return False

    def _show_together(self) -> bool:
        """The same where nobody looks at each column by itself, and counts say which texts have ended."""
        going = [self.counts[row] for row in range(len(self.counts)) if self._goes_on(row)]
        shown = min(going) if going else max(self.counts)
        if shown > self.shown:
            self._ends.show(self.texts, self.prompt + shown)
            self.shown = shown
        return not going

    def _let_rows_leave(self) -> None:
        """Take rows that need no more tokens out of the passes, where that pays."""
        self._runner.roll_back(max(self.counts[row] for row in self.running) - 1)
        kept = None if self._handed_out else rows_to_keep([self._goes_on(row) for row in self.running])
        if kept is not None:
            self._runner.keep_rows(kept)
            self.running = [self.running[n] for n in kept]
