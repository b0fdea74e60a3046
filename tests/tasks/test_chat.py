"""Conversations: training has the token ids with which the server asks the model, and of the answers it expects."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import datasets
import pytest
from chat_templates import KINDS, chat_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import train_small_on
from starlette.testclient import TestClient
from tiny_models import randomised, tiny_config

import eval.cli
from data import Example, load_task
from data.batches import encode_pairs, encode_prompts
from eval.score.scores import score
from skipdecode import ConfigError, Engine
from skipdecode.generate.stopping import end_tokens
from skipdecode.serve.app import make_app
from skipdecode.serve.settings import ServeSettings

CALL = {"id": "1", "type": "function", "function": {"arguments": '{"to": "Saltfern", "at": null}', "name": "timetable"}}
TOOLS = [{"type": "function", "function": {"name": "timetable", "parameters": {"to": {"type": "string"}}}}]


class Recorder(Engine):
    """An engine that records the prompts that the server submits."""

    prompts: list[list[int]]

    def submit(self, prompt: Sequence[int], **settings: Any) -> Any:
        self.prompts.append(list(prompt))
        return super().submit(prompt, **settings)


class Served(NamedTuple):
    kind: str
    model: Any
    tokenizer: Any
    engine: Recorder
    client: TestClient

    def prompt(self, messages: Any) -> list[int]:
        """The token ids that the server sends to the model."""
        body = {"model": "tiny", "messages": messages, "max_tokens": 1}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return self.engine.prompts.pop()

    def rows(self, examples: Sequence[Example]) -> list[tuple[list[int], list[int]]]:
        """The prompts and completions that training sees."""
        ends = end_tokens(self.model, self.tokenizer)
        limits: Any = {"max_prompt_tokens": 9999, "max_completion_tokens": 9999}
        columns = encode_pairs(self.tokenizer, examples, **limits, end_tokens=ends)
        return list(zip(columns["prompt_ids"], columns["completion_ids"], strict=True))

    @property
    def special(self) -> tuple[str, ...]:
        return KINDS[self.kind].special


@pytest.fixture(scope="module", params=sorted(KINDS))
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    tokenizer = chat_tokenizer(request.param)
    sizes = {"intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    model = randomised(tiny_config("llama", max_position_embeddings=16384, **sizes), seed=0)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(KINDS[request.param].ends))
    engine = Recorder(model, tokenizer)
    engine.prompts = []
    with TestClient(make_app(engine, tokenizer, ServeSettings("tiny"))) as client:
        yield Served(request.param, model, tokenizer, engine, client)


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages of the user and the assistant in turn."""
    first = [] if system is None else [message("system", system)]
    return [*first, *(message(("user", "assistant")[n % 2], text) for n, text in enumerate(texts))]


def load(rows: Sequence[dict[str, Any]], suffix: str = "jsonl", split: Any = "train", **options: Any) -> list[Example]:
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{split}.{suffix}")
        if suffix == "parquet":
            datasets.Dataset.from_list(list(rows)).to_parquet(file)
        else:
            lines = [json.dumps(row) for row in rows]
            file.write_text("\n".join(lines) if suffix == "jsonl" else f"[{','.join(lines)}]")
        return load_task("chat", path=folder, **options).load(split)


def texts(special: Sequence[str]) -> st.SearchStrategy[str]:
    """Text with line breaks, spaces, and what looks like special tokens and like the ends of turns."""
    parts = st.sampled_from(
        [*special, "\n", "\n\n", " ", "a", "an", "[/INST]", "assistant", "</s>", "<|im_end|>", "{{"]
    )
    return st.lists(parts | st.text(st.characters(codec="utf-8"), max_size=4), max_size=5).map("".join)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_training_has_the_token_ids_of_the_servers_prompts_and_of_what_the_model_answers(
    served: Served, data: st.DataObject
) -> None:
    text = texts(served.special)
    turns = data.draw(st.lists(st.tuples(text, text.filter(str.strip)), min_size=1, max_size=3))
    system = data.draw(st.none() | text) if KINDS[served.kind].system else None
    messages = chat(*(each for turn in turns for each in turn), system=system)
    examples = load([{"messages": messages}])
    assert len(examples) == len(turns)
    ends = {int(token) for token in served.model.generation_config.eos_token_id}
    for number, (question, answer) in enumerate(turns):
        asked = messages[: 2 * number + 1 + (system is not None)]
        assert asked[-1]["content"] == question
        if any(end in answer for end in KINDS[served.kind].ends):
            with pytest.raises(ConfigError, match="contains a token that ends generation"):
                served.rows(examples[number : number + 1])
            continue
        ((prompt, completion),) = served.rows(examples[number : number + 1])
        assert prompt == served.prompt(asked)
        assert [token in ends for token in completion] == [False] * (len(completion) - 1) + [True]
        after = served.prompt([*asked, message("assistant", answer), message("user", "a")])
        decoded = [served.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (prompt, after)]
        both = served.tokenizer.decode([*prompt, *completion], clean_up_tokenization_spaces=False)
        assert both == decoded[1][: len(both)]
        rest = both[len(decoded[0]) : -len(served.tokenizer.decode(completion[-1:]))]
        if served.kind == "mistral":  # its tokenizer puts a space after special tokens
            rest, answer = rest.replace(" ", ""), answer.replace(" ", "")
        assert rest in (answer, answer.strip())  # some templates strip contents


def test_a_turn_is_one_example_of_its_own_or_only_the_last_answer_counts(served: Served) -> None:
    messages = chat("Hi", "Hello.", "2 + 2?", "4")
    every, last = load([{"messages": messages}]), load([{"messages": messages}], answers="last")
    assert [(e.id, e.references) for e in every] == [("chat-train-0.0", ("Hello.",)), ("chat-train-0.1", ("4",))]
    assert [(e.id, e.references) for e in last] == [("chat-train-0", ("4",))]
    assert every[1].prompt == last[0].prompt == "user: Hi\nassistant: Hello.\nuser: 2 + 2?\n"
    assert served.rows(last) == served.rows(every)[1:]
    # In prompt and completion, the answers of the prompt aren't learnt.
    halves = load([{"prompt": messages[:3], "completion": messages[3:]}])
    assert [e.references for e in halves] == [("4",)]
    assert served.rows(halves) == served.rows(last)
    assert [ids.ids for ids in encode_prompts(served.tokenizer, halves, 9999, "")] == [served.rows(last)[0][0]]


@pytest.mark.parametrize("served", ["chatml"], indirect=True)  # the other templates have no tools
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_parts_of_contents_and_tool_calls_are_rendered_as_by_the_server(suffix: str, served: Served) -> None:
    render = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m | tojson }}<|im_end|>{% endfor %}"
    )
    template, served.tokenizer.chat_template = served.tokenizer.chat_template, render
    called = message("assistant", None, tool_calls=[CALL])
    rows: list[dict[str, Any]] = [
        {"messages": [message("user", "When?"), called, message("tool", "9.40"), *chat("", "At 9.40.")[1:]]}
    ]
    if suffix != "parquet":  # whose columns have one type
        rows[0]["messages"][0]["content"] = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "en?"}]
    try:
        examples = load(rows, suffix)
        (first, _), (second, _) = served.rows(examples)
        assert first == served.prompt(rows[0]["messages"][:1])
        assert second == served.prompt(rows[0]["messages"][:3])
        with_tools = load([{**rows[0], "tools": json.dumps(TOOLS)}], suffix, answers="last")
        ((prompt, _),) = served.rows(with_tools)
        assert served.tokenizer.decode(prompt).startswith(json.dumps(TOOLS))
        assert json.loads(examples[0].references[0])[0]["function"]["name"] == "timetable"
    finally:
        served.tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, r"row 1: no messages: expected messages, or prompt and completion, and it has text"),
        ({"prompt": chat("a")}, "no messages"),
        ({"messages": []}, r"messages is \[\]: it must be a list of messages"),
        ({"prompt": "a", "completion": "b"}, "prompt is 'a': it must be a list of messages.*use the task text"),
        ({"messages": ["a"]}, "messages.0 is 'a': it must be an object"),
        ({"messages": [message("bot", "a")]}, "messages.0.role is 'bot': it must be one of system, .*, tool"),
        ({"messages": [{"content": "a"}]}, "messages.0.role is None"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ({"messages": [message("user", 5)]}, "messages.0.content is 5: it must be text"),
        ({"messages": [message("user", [{"type": "image_url"}])]}, "messages.0.content.0 is .*images and sounds"),
        ({"messages": chat("a", "b", "c")}, "messages.2.role is 'user': the last message must be an answer"),
        ({"prompt": chat("a", "b"), "completion": chat("c")}, "completion.0.role is 'user'"),
        ({"messages": chat("a", " \n")}, r"messages.1.content is ' \\n': an answer must not be empty or blank"),
        ({"messages": [message("assistant", "a")]}, "messages.0 is an answer without a message before it.*last"),
        ({"messages": [message("user", "a"), message("assistant", "b", tool_calls=5)]}, "tool_calls is 5"),
        ({"messages": chat("a", "b"), "tools": "["}, r"tools is '\[': it must be a list of JSON schemas"),
    ],
)
def test_an_invalid_conversation_is_refused_with_its_row_and_field(row: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load([row])
    assert "train.jsonl, row 1" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_template_refuses_or_changes_is_refused_with_its_row(served: Served) -> None:
    def refusal(messages: Any, template: str | None = "") -> str:
        own = served.tokenizer.chat_template
        if template != "":
            served.tokenizer.chat_template = template
        try:
            with pytest.raises(ConfigError, match=r"train\.jsonl, row 1: messages\.\d") as caught:
                served.rows(load([{"messages": messages}], answers="last"))
        finally:
            served.tokenizer.chat_template = own
        return str(caught.value)

    end = KINDS[served.kind].ends[-1]
    each = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    assert "has no chat template" in refusal(chat("a", "b"), None)
    assert "changes the messages before this answer" in refusal(
        chat("a", "b"), each + "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    )
    dropped = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}" + end + "{% endfor %}"
    assert "drops or changes a part of the answer" in refusal(chat("a", "<think>hm</think>b"), dropped)
    assert "has no token that ends generation" in refusal(chat("a", "b"), each.replace(end, "\n"))
    assert "ends generation" in refusal(chat("a", f"b{end}c"))
    if not KINDS[served.kind].system:
        says = "System role" if served.kind == "gemma" else "must alternate"
        assert says in refusal(chat("a", "b", system="s"))
        assert "must alternate" in refusal([*chat("a"), *chat("a", "b")])


def test_the_share_of_results_that_equal_the_references_is_scored() -> None:
    rows = [{"messages": chat(str(n), f"So it is.\n#### {n}")} for n in ("1,248", "7", "-3", "5")]
    examples = load(rows, split="test", answer_after="####")
    outputs = ["#### 1\n#### 1248 ", "7", "####-3\nand so on", "#### 6"]
    meanings = [example.meaning for example in examples]
    found = score(outputs, [e.references for e in examples], ["exact_match"], meanings=meanings)
    assert found.values == {"exact_match": 50}
    assert found.intervals["exact_match"][0] < 50 < found.intervals["exact_match"][1]
    assert load_task("chat", path=".", answer_after="####").metrics[0] == "exact_match"
    assert "exact_match" not in load_task("chat", path=".").metrics
    without = score(["a"], [["a"]], ["exact_match"], meanings=[load(rows, split="test")[0].meaning])
    assert "answer_after" in without.unavailable["exact_match"]


def test_conversations_are_trained_on_and_evaluated(tmp_path: Path) -> None:
    rows = [json.dumps({"messages": chat(f"{n} + 1?", f"It is more.\n#### {n + 1}")}) + "\n" for n in range(12)]
    for split, lines in (("train", rows[:10]), ("test", rows[10:])):
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    chat_tokenizer("chatml").save_pretrained(tmp_path / "tokenizer")
    data = f"{{task: chat, path: {tmp_path}}}"
    # The marker is no YAML comment.
    limits = (
        "data.options.answer_after=####",
        "data.max_prompt_tokens=64",
        "data.max_completion_tokens=32",
        "schedule.horizon=16",
    )
    model = (f"model.tokenizer={tmp_path / 'tokenizer'}", "model.vocab_size=512")
    run = train_small_on(data, tmp_path / "run", *model, *limits, "train.max_steps=2")
    output = tmp_path / "eval"
    arguments = ["--checkpoint", str(run), "--data-dir", str(tmp_path), "--speedup", "2", "--max-new-tokens", "8"]
    assert eval.cli.main([*arguments, "--output", str(output)]) == 0
    report = json.loads((output / "report.json").read_text())
    assert (report["task"], report["examples"], report["rows"][1]["scores"]["exact_match"]) == ("chat", 2, 0)
    (first, _) = [json.loads(line) for line in (output / "predictions" / "2x.jsonl").read_text().splitlines()]
    assert (first["prompt"], first["references"]) == ("user: 10 + 1?\n", ["It is more.\n#### 11"])


def test_options_of_the_task_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"data\.path is missing"):
        load_task("chat")
    with pytest.raises(ConfigError, match=r"answers is 'first'.*'all' or 'last'"):
        load_task("chat", path=".", answers="first")
    with pytest.raises(ConfigError, match="answer_after is ' '"):
        load_task("chat", path=".", answer_after=" ")
