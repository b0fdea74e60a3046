"""The order of layers that greedy removal finds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fastpath_cases import fresh
from small_checkpoints import save_checkpoint
from tiny_models import VOCABULARY
from torch.nn import functional

from skipdecode import ConfigError
from skipdecode.checkpoint.export import keep_layers
from skipdecode.cli.options import main
from skipdecode.families import decoder_layers
from skipdecode.training.layer_order import LayerOrder, choose_rows, find_order, read_order

DEPTH = 6
FAMILIES = ["opt", "opt-350m", "llama", "gpt2", "bloom"]


def rows(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Of unlike lengths, so that a batch is padded."""
    generator = torch.Generator().manual_seed(seed)

    def ids(length: int) -> list[int]:
        found: list[int] = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
        return found

    return [(ids(prompt), ids(completion)) for prompt, completion in [(5, 3), (2, 6), (9, 1), (4, 4)]]


def naive_divergence(family: str, kept: list[int]) -> float:
    """The mean divergence per predicted token of a model that has the layers `kept` alone, row by row, unpadded."""
    whole, part = fresh(family), fresh(family)
    keep_layers(part, kept)
    total, tokens = 0.0, 0
    for prompt, completion in rows():
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = [model(ids).logits[0, len(prompt) - 1 : -1] for model in (whole, part)]
        full, fewer = (each.double().log_softmax(dim=-1) for each in logits)
        total += float((full.exp() * (full - fewer)).sum())
        tokens += len(completion)
    return total / tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_each_removed_layer_is_the_one_that_a_naive_search_finds_and_the_model_stays_unchanged(family: str) -> None:
    model = fresh(family).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = find_order(model, rows(), shortlist=None)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(each._forward_pre_hooks for each in decoder_layers(model))
    kept = list(range(DEPTH))
    for layer in reversed(found.order[2:]):
        tried = {each: naive_divergence(family, [n for n in kept if n != each]) for each in kept[1:-1]}
        assert tried[layer] == pytest.approx(min(tried.values()), rel=1e-3)
        kept.remove(layer)
        assert found.divergence[len(kept)] == pytest.approx(tried[layer], rel=1e-3)
    assert kept == sorted(found.order[:2]) == [0, DEPTH - 1]
    assert found.divergence[DEPTH] == 0
    assert (found.rows, found.tokens) == (4, 14)


def test_block_influence_is_one_minus_the_mean_cosine_of_a_layers_input_and_output() -> None:
    model = fresh("llama")
    cosines = torch.zeros(DEPTH - 1)
    tokens = 0
    for prompt, completion in rows():
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        for layer in range(DEPTH - 1):  # the last state has been through the final norm
            cosines[layer] += functional.cosine_similarity(states[layer][0], states[layer + 1][0], dim=-1).sum()
        tokens += ids.shape[1]
    found = find_order(model, rows())
    torch.testing.assert_close(torch.tensor(found.influence[:-1]), 1 - cosines / tokens, rtol=1e-4, atol=1e-5)
    assert found.by_influence[:2] == (0, DEPTH - 1)
    middle = [found.influence[layer] for layer in found.by_influence[2:]]
    assert middle == sorted(middle, reverse=True)


def test_with_a_shortlist_every_layer_is_still_removed_once() -> None:
    calls: list[tuple[int, int]] = []
    found = find_order(fresh("opt"), rows(), shortlist=1, advance=lambda done, total, _: calls.append((done, total)))
    assert sorted(found.order) == list(range(DEPTH))
    assert calls == [(n, DEPTH - 2) for n in range(1, DEPTH - 1)]


def test_rows_are_drawn_without_replacement_within_a_limit_of_tokens() -> None:
    data = [{"prompt_ids": [n] * 50, "completion_ids": [n]} for n in range(200)]
    chosen = choose_rows(data, 64, seed=1)
    assert len(chosen) == len({prompt[0] for prompt, _ in chosen}) == 64
    assert chosen == choose_rows(data, 64, seed=1) != choose_rows(data, 64, seed=2)
    assert len(choose_rows(data, 500, seed=1)) == 4096 // 51
    assert len(choose_rows([{"prompt_ids": [1] * 9999, "completion_ids": [1]}], 3, seed=0)) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "there are no rows"),
        ([([1], [2]), ([], [3])], "row 1 has no prompt"),
        ([([1], [])], "row 0 has no completion"),
        ([([1], [2]), ([5] * 99, [6])], "a row has 100 tokens, and the model 96 positions"),
    ],
)
def test_rows_that_an_order_cannot_be_measured_on_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_order(fresh("opt"), given)


def test_predictions_that_are_not_finite_are_refused() -> None:
    model: Any = fresh("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = torch.nan
    with pytest.raises(ConfigError, match="predictions are not finite"):
        find_order(model, rows())


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    found = LayerOrder((0, 3, 1, 2), {4: 0.0, 3: 0.25}, (0.5, 0.1, 0.2, 1.0), 3, 14, 0.5)
    found.save(tmp_path / "order.json")
    assert LayerOrder.load(tmp_path / "order.json") == found
    assert read_order(tmp_path / "order.json", 4) == (0, 3, 1, 2)
    (tmp_path / "list.json").write_text("[0, 2, 1, 3]")
    assert read_order(tmp_path / "list.json", 4) == (0, 2, 1, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't be read"),
        ("{", "can't be read"),
        ("{}", "has no key 'order'"),
        ("7", "order is 7: it must be a list"),
        ('{"order": null}', "must be a list"),
        ("[0, 1]", "has 2 layers: it must have each of the model's 4 once"),
        ("[1, 0, 2, 3]", "must start with layer 0"),
        ('["0", "1", "2", "3"]', "must be a list of layer indices"),
    ],
)
def test_a_file_that_is_not_an_order_is_refused_by_its_name(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "order.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"order file '.*order\.json'.*{message}"):
        read_order(file, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("order") / "whole", DEPTH, max_position_embeddings=256)


def test_skipdecode_order_reads_rows_from_a_file_or_a_task(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"prompt": f"to: Saltfern | leaves: {n}\n", "completion": f"It leaves at {n}."} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    words = ["order", str(checkpoint), "--rows", "4"]
    assert main([*words, "--file", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "one.json")]) == 0
    words += ["--task", "departures", "--max-prompt-tokens", "200"]
    assert main([*words, "--output", str(tmp_path / "two.json")]) == 0
    shown = capsys.readouterr().out
    for name in ("one.json", "two.json"):
        found = LayerOrder.load(tmp_path / name)
        assert sorted(found.order) == list(range(DEPTH))
        assert found.rows == 4
        assert f"order, the most important layer first: {' '.join(map(str, found.order))}\n" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the rows by either --task NAME or --file FILE"),
        (["--task", "departures", "--file", "rows.jsonl"], "give the rows by either --task NAME or --file FILE"),
        (["--file", "rows.jsonl", "--data-dir", "E2E"], "--data-dir and --task-option belong to --task"),
        (["--file", "nowhere.jsonl"], "--file .*nowhere.jsonl.* can't be read"),
        (["--file", "empty.jsonl"], "has no rows"),
        (["--file", "prompts.jsonl"], "line 1: expected a JSON object whose completion is a string"),
        (["--file", "lines.txt"], "line 1: expected a JSON object with a prompt and a completion"),
        (["--task", "departure"], "did you mean 'departures'"),
        (["--task", "departures", "--rows", "0"], "--rows is 0: it must be between 1 and 1000000"),
        (["--task", "departures", "--shortlist", "0"], "--shortlist is 0"),
        (["--task", "departures", "--max-prompt-tokens", "9"], r"has \d+ tokens, at most 9 are allowed"),
        (["--task", "departures", "--output", "rows.jsonl"], "--output rows.jsonl exists already: name a new file"),
        (["--task", "departures", "--output", "nowhere/order.json"], "nowhere is not a folder"),
    ],
)
def test_invalid_arguments_of_skipdecode_order_are_refused_in_one_line(
    words: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {"rows.jsonl": "", "empty.jsonl": "\n", "prompts.jsonl": '{"prompt": "a"}\n', "lines.txt": "hello\n"}
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    assert main(["order", str(checkpoint), "--output", "order.json", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert re.search(message, line), line
    assert not (tmp_path / "order.json").exists()
