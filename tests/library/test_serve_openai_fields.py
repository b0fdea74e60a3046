"""Fields of OpenAI's requests that change what is generated or returned, against naive loops and transformers."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from served_checkpoints import Server, started
from small_checkpoints import save_checkpoint

import skipdecode

PROMPTS = ["vehicle: ferry | to: Saltfern\n", "vehicle: train | to: Mossford | leaves: 9.40\n"]
NEW = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("served") / "tiny", 4)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with started(checkpoint) as found:
        yield found


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> tuple[Any, Any]:
    return skipdecode.load(str(checkpoint))


def complete(server: Server, prompt: Any, **fields: Any) -> Any:
    """The first choice of a response."""
    return server.client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": NEW, **fields}).choices[
        0
    ]


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@torch.no_grad()
def penalised(loaded: tuple[Any, Any], prompt: str, presence: float, frequency: float) -> str:
    """The greedy output under OpenAI's penalties, by a full forward pass for each token."""
    model, tokenizer = loaded
    tokens, new = tokenizer(prompt)["input_ids"], []
    while len(new) < NEW and model.config.eos_token_id not in new:
        logits = model(torch.tensor([tokens + new])).logits[0, -1].tolist()
        for token, count in Counter(new).items():
            logits[token] -= presence + frequency * count
        new.append(max(range(len(logits)), key=logits.__getitem__))
    return text_of(tokenizer, new)


def test_penalties_are_those_of_a_naive_loop_for_each_request_of_a_batch(
    server: Server, loaded: tuple[Any, Any]
) -> None:
    cases = [(p, pres, freq) for p in PROMPTS for pres, freq in ((0, 0), (2, 0), (0, 1.5), (0.5, 0.25), (-2, -2))]

    def send(case: tuple[str, float, float], **more: Any) -> str:
        prompt, presence, frequency = case
        return str(complete(server, prompt, presence_penalty=presence, frequency_penalty=frequency, **more).text)

    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(send, cases))
    expected = [penalised(loaded, *case) for case in cases]
    assert found == expected
    assert len(set(expected)) > len(PROMPTS), "the penalties changed nothing"
    assert send(cases[3], extra_body={"lossless": True, "speedup": 2}) == expected[3]


def test_best_of_must_equal_n(server: Server) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS[0], "n": 2, "temperature": 1, "seed": 3}
    answers = [server.client.completions.create(**fields, **more) for more in ({}, {"best_of": 2})]
    assert [choice.text for choice in answers[0].choices] == [choice.text for choice in answers[1].choices]
    for best_of in (1, 3):
        with pytest.raises(openai.BadRequestError, match=f"best_of is {best_of} and n is 2") as refused:
            server.client.completions.create(**fields, best_of=best_of)
        assert refused.value.param == "best_of"


@torch.no_grad()
def logprobs_of(loaded: tuple[Any, Any], tokens: list[int]) -> list[float]:
    """The log probability of each token but the first at full depth."""
    logprobs = loaded[0](torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return [float(logprobs[place, token]) for place, token in enumerate(tokens[1:])]


def test_an_echo_has_the_log_probabilities_of_the_prompt(server: Server, loaded: tuple[Any, Any]) -> None:
    tokenizer = loaded[1]
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for max_tokens in (0, 1, 4):
        answer = server.client.completions.create(
            model="tiny", prompt=prompts, max_tokens=max_tokens, logprobs=2, echo=True
        )
        for prompt, choice in zip(prompts, answer.choices, strict=True):
            plain = complete(server, prompt, max_tokens=max_tokens, logprobs=2) if max_tokens else None
            new = plain.logprobs.token_logprobs if plain else []
            found: Any = choice.logprobs
            assert found.token_logprobs[0] is found.top_logprobs[0] is None
            assert found.token_logprobs[1 : len(prompt)] == pytest.approx(logprobs_of(loaded, prompt), abs=1e-5)
            assert found.token_logprobs[len(prompt) :] == new
            assert all(len(top) == 2 for top in found.top_logprobs[1 : len(prompt)])
            text = text_of(tokenizer, prompt)
            assert choice.text == text + (plain.text if plain else "")
            assert len(found.text_offset) == len(found.tokens) == len(prompt) + len(new)
            assert found.text_offset[len(prompt) :] == [
                len(text) + n for n in (plain.logprobs.text_offset if plain else [])
            ]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in answer.choices) - sum(  # type: ignore[union-attr,arg-type]
            map(len, prompts)
        )


def test_an_echo_at_a_speed_scores_each_token_as_if_it_had_been_generated(server: Server) -> None:
    speed = {"speedup": 2, "over": "decode"}
    start = server.tokenizer(PROMPTS[0])["input_ids"][:1]
    new: list[int] = []
    with server.client.completions.create(
        model="tiny", prompt=start, max_tokens=NEW, logprobs=0, stream=True, extra_body={**speed, "details": True}
    ) as stream:
        logprobs: list[float] = []
        for part in stream:
            new.append(part.skipdecode["token"])  # type: ignore[attr-defined]
            logprobs += part.choices[0].logprobs.token_logprobs  # type: ignore[union-attr,operator]
    how: Any = {"max_tokens": 0, "logprobs": 0, "echo": True}
    found = complete(server, [*start, *new], **how, extra_body=speed).logprobs.token_logprobs[1:]
    assert found == pytest.approx(logprobs, abs=1e-4)
    full = complete(server, [*start, *new], **how).logprobs.token_logprobs[1:]
    assert full != pytest.approx(found, abs=1e-4)
    lossless = complete(
        server, [*start, *new], **how, extra_body={"lossless": True, "speedup": 2}
    ).logprobs.token_logprobs[1:]
    assert lossless == full


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"logprobs": 1, "max_tokens": 0}, {"n": 2, "seed": 1, "top_p": 0.9}]
)
def test_an_echo_is_streamed_as_it_is_returned(server: Server, fields: dict[str, Any]) -> None:
    how: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 4, "echo": True, **fields}
    whole = server.client.completions.create(**how).choices
    texts, logprobs = [""] * len(whole), [[] for _ in whole]  # type: ignore[var-annotated]
    for part in server.client.completions.create(**how, stream=True):
        for choice in part.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole]
    assert all(text.startswith(PROMPTS[n * len(PROMPTS) // len(texts)]) for n, text in enumerate(texts))
    assert logprobs == [choice.logprobs.token_logprobs if choice.logprobs else [] for choice in whole]


def test_without_an_echo_at_least_one_token_is_generated(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match=r"max_tokens is 0: it must be .* unless echo is true"):
        complete(server, PROMPTS[0], max_tokens=0)
