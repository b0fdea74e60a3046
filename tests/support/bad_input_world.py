"""The folder in which bad inputs are tried: runs, one of them cut off, checkpoints of several kinds, data, files."""

import gzip
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import torch
from forked_commands import Forked
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_checkpoints import save_checkpoint
from small_runs import SMALL
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from data import load_task
from data.vocabulary import train_tokenizer
from skipdecode import SkipSchedule

CODE = """\
from pathlib import Path
Path("code-ran").write_text("")
from transformers import OPTConfig, OPTForCausalLM
class TheirConfig(OPTConfig):
    model_type = "theirs"
class TheirModel(OPTForCausalLM):
    config_class = TheirConfig
"""
# In parts, so that nothing that looks for secrets finds one here.
SECRETS = {
    "SECRET-openai": "sk-" + "proj-" + "aB3dE6gH9jK2mN5pQ8sT" * 2,
    "SECRET-github": "github" + "_pat_" + "11ABCDEFG0aBcDeFgHiJkL_" + "mN3pQ6rS9tU2vW5xY8zA1bC4dE7fG0hI" * 2,
    "SECRET-oauth": "gho" + "_" + "aB3dE6gH9jK2mN5pQ8sTuV1wX4yZ7aB3dE6g",
    "SECRET-slack": "xoxb" + "-123456789012-1234567890123-" + "aB3dE6gH9jK2mN5pQ8sTuV1w",
    "SECRET-google": "AIza" + "SyA3dE6gH9jK2mN5pQ8sTuV1wX4yZ7aB3dE",
    "SECRET-gitlab": "glpat" + "-" + "aB3dE6gH9jK2mN5pQ8sT",
    "SECRET-wandb": "3f9a1c7e5b2d8046" + "9e1b7c3d5f0a2846" + "c9d1e3f5",
    "SECRET-database": "postgres" + "://someone:" + "hunter2hunter2" + "@db.example.org/runs",
    "SECRET-hub": "hf" + "_" + "aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
}

# Of base models, each in a folder of its own: what their generation_config.json says, or their config.json where it is
# marked so, as that of older models.
BASES: dict[str, dict[str, Any]] = {
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive-sampled": {"penalty_alpha": 0.6, "do_sample": True},
    "dola": {"dola_layers": "high"},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "early-exit": {"assistant_early_exit": 2},
    "guided": {"guidance_scale": 1.5},
    "forced-words": {"force_words_ids": [[5]]},
    "greedy-pair": {"num_return_sequences": 2},
    "cold": {"do_sample": True, "temperature": 0.0},
    "unknown-cache": {"cache_implementation": "statik"},
    "compiled": {"compile_config": {}},
    "no-tokens": {"max_new_tokens": 0},
    "beyond-vocabulary": {"bad_words_ids": [[10**6]]},
    "forced-beyond": {"forced_eos_token_id": 10**6},
    "wrong-end": {"eos_token_id": "</s>"},
    "processor": {"logits_processor": []},
    "old-lookup": {"config.json": True, "prompt_lookup_num_tokens": 3},
    "old-contrastive": {"config.json": True, "penalty_alpha": 0.6},
    "old-cache-word": {"config.json": True, "use_cache": "no"},
    "uncached": {"use_cache": False},
    "beams": {"num_beams": 4, "length_penalty": 0.5, "early_stopping": True},
    "beam-groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "stops": {"stop_strings": ["\n"]},
    "healed": {"token_healing": True},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "static": {"cache_implementation": "static"},
    "offloaded": {"cache_implementation": "offloaded"},
    "quantized": {"cache_implementation": "quantized"},
    "sampled-pair": {"do_sample": True, "num_return_sequences": 2},
    "old-uncached": {"config.json": True, "use_cache": False},
    "old-beams": {"config.json": True, "num_beams": 4},
    "old-tuples": {"config.json": True, "return_dict": False},
    "old-states": {"config.json": True, "output_hidden_states": True},
}


def make_world(folder: Path) -> None:
    """Make it, which takes as long as two short runs. Raises AssertionError where a command that is right fails."""
    folder.mkdir(parents=True)
    small = ["train", "--recipe", "quickstart", *SMALL, "train.max_steps=4"]
    _right([*small, "output.dir=run"], folder)
    _right([*small, "output.dir=shallow", "schedule.prompt=max"], folder)
    evaluation = ["eval", "--limit", "4", "--speedup", "1", "2", "--metrics", "bleu"]
    _right([*evaluation, "--checkpoint", "run", "--output", "evaluated"], folder)
    _right([*evaluation, "--checkpoint", "shallow", "--output", "other-evaluated"], folder)
    _cut_off([*small, "output.dir=unfinished", "train.max_steps=9", "train.save_steps=3"], folder)
    save_checkpoint(folder / "foreign", 12, max_position_embeddings=256)
    _checkpoints(folder)
    _bases(folder)
    _data(folder)
    _files(folder)
    _forms(folder / "forms")


def _right(words: list[str], folder: Path) -> None:
    command = Forked(words, folder)
    while not command.ended():
        time.sleep(0.01)
    command.end()
    assert command.status == 0, f"{' '.join(words)}:\n{command.stderr}"


def _cut_off(words: list[str], folder: Path) -> None:
    """A run that is killed after its second checkpoint."""
    command = Forked(words, folder)
    while not command.ended() and not (folder / "unfinished" / "checkpoint-6").exists():
        time.sleep(0.001)
    command.end()
    assert not (folder / "unfinished" / "config.json").exists(), "the run was at its end before it could be killed"


def _checkpoints(folder: Path) -> None:
    save_checkpoint(folder / "untrained", 6, max_position_embeddings=256)
    _change_json(folder / "untrained" / "config.json", lambda values: values.pop("skipdecode"))
    remote = shutil.copytree(folder / "untrained", folder / "remote")
    own = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirModel"}
    _change_json(remote / "config.json", lambda values: values.update(model_type="theirs", auto_map=own))
    (remote / "theirs.py").write_text(CODE)
    pickled = shutil.copytree(folder / "foreign", folder / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    bert = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("bert", intermediate_size=16, is_decoder=True, **bert)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(folder / "foreign").save_pretrained(folder / "bert")
    train_tokenizer(load_task("departures", train_size=200).stream("train"), 600, 128).save_pretrained(folder / "wide")


def _bases(folder: Path) -> None:
    """Base models of the same weights, with settings of their own."""
    for name, values in BASES.items():
        base = shutil.copytree(
            folder / "untrained", folder / "bases" / name, ignore=shutil.ignore_patterns("model.safetensors")
        )
        (base / "model.safetensors").symlink_to("../../untrained/model.safetensors")
        (base / "generation_config.json").unlink()
        if values.get("config.json"):
            own = {key: value for key, value in values.items() if key != "config.json"}
            _change_json(base / "config.json", lambda config, own=own: config.update(own))
        else:
            (base / "generation_config.json").write_text(json.dumps(values))
    damaged = shutil.copytree(folder / "bases" / "uncached", folder / "bases" / "damaged", symlinks=True)
    (damaged / "generation_config.json").write_text('{"use_cache": ')


def _data(folder: Path) -> None:
    rows = "prompt,completion\n" + "".join(f"from {n} to {n + 1},it leaves at {n}\n" for n in range(20))
    for name, splits in (("text", ("train", "validation", "test")), ("text-no-test", ("train", "validation"))):
        (folder / name).mkdir()
        for split in splits:
            (folder / name / f"{split}.csv").write_text(rows)
    for name, content in (("text-broken", b'{"prompt": '), ("text-latin", b'{"prompt": "\xe9", "completion": "a"}')):
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_bytes(content + b"\n")
    (folder / "text-deep").mkdir()
    (folder / "text-deep" / "train.jsonl").write_text("[" * 10**5 + "\n")


def _files(folder: Path) -> None:
    lines = (folder / "evaluated" / "predictions" / "1x.jsonl").read_text()
    schedule = SkipSchedule(8, 4, 2).to_dict()
    bomb = "a: &a [1]\n"
    for name, before in zip("bcdefghi", "abcdefgh", strict=True):
        bomb += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    files = {
        "predictions.jsonl": lines,
        "twice.jsonl": lines + lines.splitlines()[0] + "\n",
        "a-file": "somebody's\n",
        "secret.txt": "nobody else's\n",
        "prompts.txt": "one\ntwo\n",
        "text.yaml": "model: {shape: opt-tiny}\nschedule: {speedups: [1, 2]}\ndata: {task: text, path: text, options: "
        "{prompt_column: prompt, completion_column: completion}}\n",
        "empty.yaml": "",
        "list.yaml": "- 1\n- 2\n",
        "broken.yaml": "model: {shape: opt-tiny\n",
        "twice.yaml": "model: {shape: opt-tiny}\nmodel: {shape: opt-small}\n",
        "deep.yaml": "model: " + "[" * 10**4 + "\n",
        "bomb.yaml": bomb,
        "broken.json": '{"num_layers": ',
        "deep.json": "[" * 10**5,
        "depth8.json": json.dumps(schedule),
        "depth12.json": SkipSchedule(12, 6, 2).to_json(),
        "horizon.json": json.dumps({**schedule, "horizon": 10**9}),
        "huge.json": json.dumps(schedule).replace("64", "6" * 5000),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    for name in ("latin.json", "latin.yaml"):
        (folder / name).write_bytes(b'{"num_layers": "\xe9"}')
    (folder / "a-folder").mkdir()
    (folder / "a-folder" / "notes.txt").write_text("somebody's\n")


def _forms(folder: Path) -> None:
    """Training files in the forms in which people have them, of 20 rows in each folder, and damaged ones."""
    rows = [{"prompt": f"caf\xe9 {n}", "completion": f"  it leaves\x85 at {n}"} for n in range(20)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    table = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows)
    tabs = table.replace(",", "\t")
    part, whole, lines_whole = (text.encode() for text in ("".join(lines[:10]), table, "".join(lines)))
    forms: dict[str, dict[str, bytes]] = {
        "shards": {"train-00000-of-00002.jsonl": part, "train-00001-of-00002.jsonl": "".join(lines[10:]).encode()},
        "shards-from-1": {"train-1-of-2.jsonl": part, "train-2-of-2.jsonl": part},
        "shards-of-gzip": {f"train-0000{n}-of-00002.jsonl.gz": gzip.compress(part) for n in range(2)},
        "gzip": {"train.jsonl.gz": gzip.compress(lines_whole)},
        "gzip-csv": {"train.csv.gz": gzip.compress(whole)},
        "tsv": {"train.tsv": tabs.encode()},
        "utf-16": {"train.csv": table.encode("utf-16")},
        "utf-16-unmarked": {"train.csv": table.encode("utf-16-le")},
        "cp1252": {"train.tsv": tabs.replace("\x85", "").encode("cp1252")},
        "marked": {"train.jsonl": lines_whole.decode().encode("utf-8-sig")},
        "capitals": {"TRAIN.CSV": whole},
        "separators": {"train.jsonl": lines_whole.replace("\x85".encode(), "\u2028\u2029".encode())},
        "list": {"train.json": json.dumps(rows, indent=1).encode()},
        "index-csv": {"train.csv": whole.replace(b"prompt,", b"__index_level_0__,prompt,").replace(b"caf", b"7,caf")},
        "shard-alone": {"train-00000-of-00002.jsonl": part},
        "shard-missing": {"train-00000-of-00003.jsonl": part, "train-00002-of-00003.jsonl": part},
        "shard-beyond": {"train-00000-of-00001.jsonl": part, "train-00001-of-00001.jsonl": part},
        "shard-twice": {"train-00000-of-00002.jsonl": part, "train-0-of-00002.jsonl": part},
        "shards-of-two": {"train-00000-of-00002.jsonl": part, "train-00001-of-00003.jsonl": part},
        "shards-and-whole": {"train.jsonl": lines_whole, "train-00000-of-00001.jsonl": lines_whole},
        "shards-empty": {"train-00000-of-00002.jsonl": b"", "train-00001-of-00002.jsonl": b"\n"},
        "shard-broken": {"train-00000-of-00002.jsonl": part, "train-00001-of-00002.jsonl": part[:-4]},
        "gzip-cut": {"train.jsonl.gz": gzip.compress(lines_whole)[:-9]},
        "gzip-by-name": {"train.jsonl.gz": lines_whole},
        "commas-in-tsv": {"train.tsv": whole},
        "open-quote": {"train.csv": whole.replace(b"caf", b'"caf', 1)},
        "after-quote": {"train.csv": whole.replace(b"caf", b'"caf" ', 1)},
        "more-fields": {"train.csv": whole + b"a,b,c\n"},
        "named-twice": {"train.csv": whole.replace(b"completion", b"completion,prompt", 1)},
        "object": {"train.json": json.dumps(rows[0], indent=1).encode()},
        "columns": {"train.json": json.dumps({"prompt": {"0": "a"}, "completion": {"0": "b" * 9999}}).encode()},
        "blank": {"train.jsonl": lines_whole + b'{"prompt": "a", "completion": " \\n"}\n'},
        "workbook": {"train.xlsx": b"PK"},
        "parquet-cut": {"train.parquet": b"PAR1"},
    }
    for form, files in forms.items():
        (folder / form).mkdir(parents=True)
        for name, content in files.items():
            (folder / form / name).write_bytes(content)
    (folder / "index").mkdir()
    pandas.DataFrame(rows, index=[7, 3] * 10).to_parquet(folder / "index" / "train.parquet")


def _change_json(path: Path, change: Callable[[Any], Any]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def flip(folder: Path, name: str) -> None:
    """A high bit of the last weight, or a byte of another file."""
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 0x40
    (folder / name).write_bytes(content)


def spoil(folder: Path, name: str, how: str) -> None:
    """Weights that can be read and are wrong."""
    with safe_open(folder / name, "pt") as opened:
        metadata = opened.metadata()
    weights = load_file(folder / name)
    key = next(key for key in weights if key.endswith("layers.1.fc1.weight"))
    if how in ("nan", "inf"):
        weights[key][0, 0] = float(how)
    elif how == "missing":
        del weights[key]
    elif how == "reshaped":
        weights[key] = weights[key][:, :-1].contiguous()
    else:
        weights = {f"other.{key}": value for key, value in weights.items()}
    save_file(weights, folder / name, metadata)


def cut(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def link(folder: Path, name: str, target: str) -> None:
    """A file of the folder becomes a link to another, outside."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(folder / target)


def outside(folder: Path, name: str) -> None:
    """An index of weights that names a file of another folder."""
    shutil.move(folder / name / "model.safetensors", folder / "stolen.safetensors")
    names = dict.fromkeys(load_file(folder / "stolen.safetensors"), "../stolen.safetensors")
    (folder / name / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def say(folder: Path, name: str, secret: str) -> None:
    """A recipe's name becomes a secret."""
    path = folder / name
    path.write_text(path.read_text().replace("project: skipdecode", f"project: {SECRETS[secret]}"))
    assert SECRETS[secret] in path.read_text()


def metadata(folder: Path, name: str, secret: str) -> None:
    save_file(load_file(folder / name), folder / name, {"format": "pt", "note": SECRETS[secret]})


DAMAGE = {each.__name__: each for each in (flip, spoil, cut, remove, link, outside, say, metadata)}
