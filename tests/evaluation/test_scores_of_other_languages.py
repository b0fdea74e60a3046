"""Scores of texts in any language are correct or replaced by a reason; those of English texts don't change."""

import json
import sys
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.tokenizers import tokenizer_spm
from small_runs import train_small_on
from tiny_bert import save_tiny_bert

import eval.cli
import eval.score.cli
import eval.search.cli
import train.weights_and_biases
from data.task import Convention
from eval.card import write_card
from eval.report.page import write_page
from eval.results import Report
from eval.score.loadable import values_of
from eval.score.metric import BertModel, NotAvailableError, Texts
from eval.score.registry import METRICS
from eval.score.scores import obstacles, score
from eval.score.tokenizers import TOKENIZERS, load_tokenizer
from skipdecode import ConfigError

LANGUAGES = {
    "Russian": ["Ресторан «Мельница» — дешёвый паб у реки.", "Там подают итальянскую еду, и детям рады."],
    "Greek": ["Το εστιατόριο βρίσκεται δίπλα στο ποτάμι.", "Σερβίρει φθηνό ιταλικό φαγητό για παιδιά."],
    "Hindi": ["यह रेस्तरां नदी के किनारे पर है।", "यहाँ सस्ता इतालवी खाना मिलता है।"],
    "Arabic": ["المطعم يقع بجانب النهر، وهو رخيص.", "يقدم الطعام الإيطالي للعائلات والأطفال."],
    "Chinese": ["这家餐厅在河边，价格便宜。", "那里提供意大利菜，也欢迎儿童。"],
    "Japanese": ["このレストランは川のそばにあります。", "安いイタリア料理を出しています。"],
    "Thai": ["ร้านอาหารนี้อยู่ริมแม่น้ำ", "มีอาหารอิตาเลียนราคาถูกสำหรับเด็ก"],
    "Korean": ["이 식당은 강 옆에 있고 값이 쌉니다.", "그곳은 이탈리아 음식을 아이들에게 팝니다."],
    "emoji": ["👍🎉🍕🍝", "😀👨‍👩‍👧🍷🌊"],
    "mixed": ["Цена iPhone 15 в магазине выросла.", "我在 London 的 pub 喝了 beer。"],
}
OTHERS = {name: texts[::-1] for name, texts in LANGUAGES.items()}
WITHOUT_SPACES = {"Chinese", "Japanese", "Thai"}
NAMES = ["bleu", "nist", "rouge1", "rouge2", "rougeL", "rougeLsum", "cider"]
OFFLINE = ["13a", "intl", "zh", "char", "none"]
# Letters of many scripts with combining marks, and other characters of texts.
LETTERS = "aZßéÅﬁıяЖЁλΣςאبيकिीখগதไก็ำລໍខ្មមြབོ中漢𠀀かガー한ግᏣ"
ANY = st.text(
    st.one_of(
        st.sampled_from(LETTERS + "   .,!?'\"«»—。、।؟0٣\n\t<&>👍🏽\u200d\u0301\u2028"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
TEXTS = ANY.filter(lambda text: any(map(str.isalpha, text)))


def own(texts: list[str]) -> list[list[str]]:
    return [[text] for text in texts]


def computed(texts: Texts) -> tuple[dict[str, float], dict[str, str]]:
    """The scores of `score`, without intervals, which take a hundred times as long."""
    unavailable = obstacles(texts, NAMES)
    return {name: METRICS[name].compute(texts).value for name in NAMES if name not in unavailable}, unavailable


@settings(max_examples=300, deadline=None)
@given(
    st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from([None, *OFFLINE]), st.sampled_from(["mteval", "webnlg"])
)
def test_predictions_equal_to_references_score_the_maximum_or_a_reason_is_given(
    texts: list[str], tokenizer: str | None, convention: Convention
) -> None:
    given = Texts(texts, own(texts), tokenizer=tokenizer, convention=convention)
    values, unavailable = computed(given)
    assert all(unavailable.values())
    for name, value in values.items():
        if name in ("bleu", "rouge1", "rougeL", "rougeLsum") or (
            name == "rouge2" and "count as 0" not in METRICS[name].describe(given)
        ):
            assert value == pytest.approx(100), (name, unavailable)
        assert value > 0, name


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(ANY, TEXTS), min_size=1, max_size=4),
    st.sampled_from([None, *OFFLINE]),
    st.sampled_from(["NFC", "NFD"]),
    st.sampled_from(["NFC", "NFD"]),
)
def test_scores_do_not_depend_on_unicode_normalization(
    pairs: list[tuple[str, str]], tokenizer: str | None, of_predictions: Any, of_references: Any
) -> None:
    predictions, references = [one for one, _ in pairs], own([other for _, other in pairs])
    other_predictions = [unicodedata.normalize(of_predictions, text) for text in predictions]
    other_references = [[unicodedata.normalize(of_references, text) for text in texts] for texts in references]
    found = computed(Texts(other_predictions, other_references, tokenizer=tokenizer))
    assert found == computed(Texts(predictions, references, tokenizer=tokenizer))


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_a_tokenizer_metrics_limited_to_ascii_or_spaces_give_a_reason(language: str) -> None:
    texts = LANGUAGES[language]
    scores = score(texts, own(texts), [*NAMES, "meteor", "slot_error_rate"], meanings=["name[Aromi]"] * 2)
    assert {"rouge1", "rouge2", "rougeL", "rougeLsum"} <= scores.unavailable.keys()
    if language in WITHOUT_SPACES:
        assert not scores.values
        assert "script without spaces between words" in scores.unavailable["bleu"]
        assert "flores200 or char" in scores.unavailable["rouge1"]
    elif language != "emoji":
        assert {"meteor", "slot_error_rate"} <= scores.unavailable.keys()
        assert "are for English" in scores.unavailable["slot_error_rate"]
        assert "choose the tokenizer" in scores.unavailable["rouge1"]
    if language in ("Russian", "Greek", "Arabic", "Korean"):
        assert scores.values == {"bleu": pytest.approx(100), "nist": scores.values["nist"], "cider": pytest.approx(10)}
    if language == "Hindi":
        assert "end at combining vowel signs" in scores.unavailable["cider"]
        assert scores.values["bleu"] == pytest.approx(100)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("tokenizer", OFFLINE)
def test_with_any_tokenizer_equal_texts_score_the_maximum_and_others_less(language: str, tokenizer: str) -> None:
    texts = LANGUAGES[language]
    scores = score(texts, own(texts), NAMES, tokenizer=tokenizer)
    if language in WITHOUT_SPACES and tokenizer not in ("char", "none") and (language, tokenizer) != ("Chinese", "zh"):
        assert not scores.values
        return
    fits = (language, tokenizer) == ("Chinese", "zh") or (tokenizer == "intl" and language != "mixed")
    if tokenizer == "char" or fits:
        assert scores.unavailable == {}
        assert tokenizer in scores.metrics["bleu"]
        assert tokenizer in scores.metrics["rouge1"]
    for name in scores.values.keys() & {"bleu", "rouge1", "rougeL", "rougeLsum"}:
        assert scores.values[name] == pytest.approx(100)
    others = score(OTHERS[language], own(texts), NAMES, tokenizer=tokenizer)
    for name, value in others.values.items():
        assert value < scores.values[name]


@pytest.mark.parametrize("tokenizer", OFFLINE)
def test_bleu_with_a_tokenizer_equals_sacrebleu(tokenizer: str) -> None:
    texts = [text for texts in LANGUAGES.values() for text in texts]
    texts += ["The Café isn't cheap: £20-25!", "It is 3.5 km (2 miles) away."]
    predictions = [text[:-3] + text[-1] for text in texts]
    found = METRICS["bleu"].compute(Texts(predictions, own(texts), tokenizer=tokenizer)).value
    expected = sacrebleu.corpus_bleu(predictions, [texts], lowercase=True, tokenize=tokenizer)
    assert found == pytest.approx(expected.score)


def test_rouge_counts_the_tokens_of_a_tokenizer_without_punctuation() -> None:
    # By hand: 我 爱 北京 against 我 爱 上海, as characters 2 of 4 in common; and 1 of 3 pairs.
    scores = score(["我爱北京。"], [["我爱上海！"]], ["rouge1", "rouge2"], tokenizer="zh")
    assert scores.values == {"rouge1": pytest.approx(50), "rouge2": pytest.approx(100 / 3)}
    assert "tokens of sacrebleu's zh" in scores.metrics["rouge1"]


def test_a_few_accents_or_foreign_names_do_not_make_english_references_unscorable() -> None:
    texts = ["The Café Rouge near Café Brazil is a pub.", "Dvořák lived in Zürich, 北京 and then in Saint Petersburg."]
    scores = score(texts, own(texts), NAMES)
    assert scores.unavailable == {}
    assert "are other characters" in scores.metrics["rouge1"]
    assert "are other characters" not in score(["a cheap pub"], [["a cheap pub"]]).metrics["rouge1"]


def test_a_part_of_the_test_set_that_cannot_be_scored_has_its_own_reason() -> None:
    texts = ["one two three four five", "six seven eight nine ten", "Yes."]
    scores = score(texts, own(texts), ["bleu", "rouge1"], parts=["long", "long", "short"])
    assert scores.values.keys() == {"bleu", "bleu:long", "rouge1", "rouge1:long", "rouge1:short"}
    assert "no reference has as many" in scores.unavailable["bleu:short"]


def test_bertscore_gives_a_reason_where_the_model_does_not_know_the_script(tmp_path: Path) -> None:
    bert = BertModel(str(save_tiny_bert(tmp_path)), 2)
    for name, texts in LANGUAGES.items():
        assert "are unknown to" in score(texts, own(texts), ["bertscore"], bert=bert).unavailable["bertscore"], name
    assert score(["a pub"], [["a pub."]], ["bertscore"], bert=bert).unavailable == {}


def test_the_evaluate_modules_support_tokenizers_and_give_reasons() -> None:
    texts = Texts(["Да"], [["Да"]], tokenizer="intl")
    rouge = [METRICS[name] for name in ("rouge1", "rouge2")]
    reason = {"rouge2": "no reference has two words that it counts"}
    assert values_of(rouge, texts) == {"rouge1": 100, "rouge2": None, "unavailable": reason}
    with pytest.raises(NotAvailableError, match="ROUGE-1: not computable, because its words consist of a-z and 0-9"):
        values_of(rouge, Texts(["Да"], [["Да"]]))


@pytest.mark.parametrize("name", ["flores101", "flores200"])
def test_a_failed_tokenizer_download_prints_a_one_line_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def no_network(*_: Any, **__: Any) -> Any:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setitem(sys.modules, "sentencepiece", SimpleNamespace(SentencePieceProcessor=object))
    monkeypatch.setattr(tokenizer_spm, "SACREBLEU_DIR", str(tmp_path / "sacrebleu"))
    monkeypatch.setattr("urllib.request.urlopen", no_network)
    assert scored(tmp_path, ["你好"], "--metrics", "bleu", "--tokenizer", name) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"the tokenizer {name!r} needs a model that sacrebleu downloads into" in error
    assert "Temporary failure in name resolution" in error
    assert not (tmp_path / "scores.json").exists()


@pytest.mark.parametrize(
    ("name", "package"), [("ja-mecab", "MeCab"), ("ko-mecab", "mecab_ko"), ("flores200", "sentencepiece")]
)
def test_the_error_for_a_tokenizer_names_its_missing_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("tokenizer_ja_mecab", "tokenizer_ko_mecab"):
        monkeypatch.delitem(sys.modules, f"sacrebleu.tokenizers.{module}", raising=False)
    with pytest.raises(ConfigError, match=rf"the tokenizer {name!r} needs a package .*: pip install ") as caught:
        load_tokenizer(name)
    assert "\n" not in str(caught.value)


def test_all_tokenizers_are_from_sacrebleu_and_others_are_refused() -> None:
    from sacrebleu.metrics.bleu import _TOKENIZERS

    assert TOKENIZERS.keys() <= _TOKENIZERS.keys()
    with pytest.raises(ConfigError, match="unknown tokenizer 'jp-mecab': did you mean 'ja-mecab'"):
        score(["a"], [["a"]], tokenizer="jp-mecab")


def scored(folder: Path, texts: list[str], *arguments: str) -> int:
    lines = [{"id": n, "prompt": "", "prediction": text, "references": [text]} for n, text in enumerate(texts)]
    file = folder / "system.jsonl"
    file.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return eval.score.cli.main(["--predictions", str(file), "--output", str(folder / "scores.json"), *arguments])


def test_the_score_command_says_what_is_not_computable_in_place_of_the_number(tmp_path: Path, capsys: Any) -> None:
    assert scored(tmp_path, LANGUAGES["Chinese"], "--metrics", "bleu", "rouge1") == 2
    assert "no metric can be computed: bleu: the references are in a script" in capsys.readouterr().err
    assert scored(tmp_path, LANGUAGES["Russian"], "--metrics", "bleu", "rouge1") == 0
    output = capsys.readouterr().out
    assert "ROUGE-1: not computable, because its words consist of a-z and 0-9, and 100% of the" in output
    found = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert (found["bleu"], found["rouge1"]) == (pytest.approx(100), None)
    assert found["unavailable"].keys() == {"rouge1"}
    (tmp_path / "scores.json").unlink()
    assert scored(tmp_path, LANGUAGES["Chinese"], "--metrics", "bleu", "rouge1", "--tokenizer", "zh") == 0
    found = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert (found["bleu"], found["rouge1"], found["tokenizer"]) == (pytest.approx(100), 100, "zh")
    assert "tok:zh" in found["metrics"]["bleu"]
    assert scored(tmp_path, ["a"], "--metrics", "bleu", "--tokenizer", "zhh") == 2
    assert "unknown tokenizer 'zhh': did you mean 'zh'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on Chinese texts with its evaluation."""
    folder = tmp_path_factory.mktemp("chinese")
    rows = [{"prompt": f"{n}?", "completion": f"{text}{n}"} for n in range(8) for text in LANGUAGES["Chinese"]]
    data = folder / "data"
    data.mkdir()
    for split in ("train", "validation", "test"):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (data / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    columns = "prompt_column: prompt, completion_column: completion"
    section = f"{{task: text, path: {data}, options: {{{columns}}}}}"
    evaluated = ["train.max_steps=2", "evaluation.speedups=[1,2]", "evaluation.max_new_tokens=4"]
    with pytest.raises(ConfigError, match=r"evaluation after training would fail: no metric .* tokenizer zh"):
        train_small_on(section, folder / "refused", *evaluated)
    assert not (folder / "refused" / "config.json").exists()
    return train_small_on(section, folder / "run", *evaluated, "evaluation.tokenizer=zh")


def test_the_evaluation_of_a_recipe_names_the_tokenizer_wherever_it_shows_scores(chinese: Path, tmp_path: Path) -> None:
    report = Report.load(chinese / "eval" / "report.json")
    assert report.tokenizer == "zh"
    assert "--tokenizer zh" in report.command
    assert "tok:zh" in report.to_markdown()
    write_page([str(chinese / "eval")], tmp_path / "page.html")
    assert "(zh tokens, case-insensitive," in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_an_evaluation_shows_the_reason_in_place_of_a_score(chinese: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["--checkpoint", str(chinese), "--data-dir", str(chinese.parent / "data"), "--max-new-tokens", "4"]
    arguments += ["--speedup", "1"]
    assert eval.cli.main([*arguments, "--output", str(tmp_path / "none")]) == 2
    assert "no metric can be computed: bleu: the references are in a script" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    output = tmp_path / "eval"
    assert eval.cli.main([*arguments, "--metrics", "bleu", "meteor", "--tokenizer", "zh", "--output", str(output)]) == 0
    sentence = "METEOR: not computable, because its stems and synonyms are for English"
    assert sentence in capsys.readouterr().out
    assert sentence in (output / "report.md").read_text(encoding="utf-8")
    assert json.loads((output / "report.json").read_text(encoding="utf-8"))["unavailable"].keys() == {"meteor"}
    write_page([str(output)], tmp_path / "page.html")
    for suffix in (".html", ".md"):
        assert sentence in (tmp_path / "page").with_suffix(suffix).read_text(encoding="utf-8")
    logged: dict[str, Any] = {}
    run = SimpleNamespace(log=lambda values: None, summary=logged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(Table=lambda **_: None, Image=lambda _: None))
        train.weights_and_biases.Tracker(run).evaluation(output, Report.load(output / "report.json"))
    assert logged["meteor_1x"].startswith("not computable, because its stems and synonyms are for English")
    own_report, kept = chinese / "eval" / "report.json", (chinese / "eval" / "report.json").read_text(encoding="utf-8")
    own_report.write_text((output / "report.json").read_text(encoding="utf-8"), encoding="utf-8")
    assert sentence in write_card(chinese).read_text(encoding="utf-8")
    own_report.write_text(kept, encoding="utf-8")
    other = json.loads(kept)
    other["tokenizer"] = "char"
    (tmp_path / "char.json").write_text(json.dumps(other), encoding="utf-8")
    compared = ["--tokenizer", "zh", "--compare", f"char={tmp_path / 'char.json'}"]
    assert eval.cli.main([*arguments, *compared, "--output", str(tmp_path / "none")]) == 2
    assert "--compare char: the scores of that report use the tokenizer char, these zh" in capsys.readouterr().err


def test_a_search_supports_tokenizers_and_refuses_a_metric_that_cannot_be_computed(
    chinese: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = ["--checkpoint", str(chinese), "--data-dir", str(chinese.parent / "data"), "--max-new-tokens", "4"]
    arguments += ["--mean-layers", "4", "--trials", "3", "--metric", "rougeL", "--output", str(tmp_path / "found")]
    assert eval.search.cli.main(arguments) == 2
    assert "rougeL: its words consist of a-z and 0-9" in capsys.readouterr().err
    assert eval.search.cli.main([*arguments, "--tokenizer", "zh"]) == 0
    assert "tokens of sacrebleu's zh" in (tmp_path / "found" / "search.md").read_text(encoding="utf-8")
