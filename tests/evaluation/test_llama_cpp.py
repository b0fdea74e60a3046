"""llama.cpp as a peer computes the given model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import randomised
from transformers import AutoConfig, PreTrainedModel

from eval.speed.cli import main
from eval.speed.gguf_file import write_gguf
from eval.speed.llama import GreedyLlama
from skipdecode import ConfigError

REASON = "the extra llama-cpp is not installed"
gguf = pytest.importorskip("gguf", reason=REASON)
pytest.importorskip("llama_cpp", reason=REASON)

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 61}
KINDS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_key_value_heads": 2},
    "tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "heads wider than their share": {"head_dim": 32, "num_key_value_heads": 1},
    "llama3 positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 100.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
}


def llama(kind: str) -> PreTrainedModel:
    return randomised(AutoConfig.for_model("llama", **SIZES, **KINDS[kind], eos_token_id=None), seed=2)


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(4, SIZES["vocab_size"], (rows, 7), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_in_float32_generates_the_same_tokens_as_transformers(kind: str, tmp_path: Path) -> None:
    model, ids = llama(kind), prompts(3)
    write_gguf(model, tmp_path / "model.gguf", "F32")
    decoder = GreedyLlama(tmp_path / "model.gguf", threads=1)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)[:, 7:]
    assert len({tuple(row) for row in expected.tolist()}) == 3  # rows differ, so exchanged rows would be detected
    for new_tokens in (20, 5):  # a second run starts with an empty cache
        assert decoder.run(ids.tolist(), new_tokens).tokens == expected[:, :new_tokens].tolist()
    assert decoder.run(ids[1:2].tolist(), 20).tokens == expected[1:2].tolist()


def test_sizes_that_are_not_multiples_of_the_quantization_group_are_refused(tmp_path: Path) -> None:
    model = randomised(AutoConfig.for_model("llama", **{**SIZES, "intermediate_size": 72}), seed=2)
    with pytest.raises(ConfigError, match=r"down_proj.weight has 72 inputs: Q4_0 needs a multiple of 32"):
        write_gguf(model, tmp_path / "model.gguf", "Q4_0")
    assert not list(tmp_path.iterdir())


def test_llama_cpp_takes_turns_in_the_benchmark(tmp_path: Path) -> None:
    shape, output = tmp_path / "tiny.yaml", tmp_path / "speed.json"
    shape.write_text("model_type: llama\n" + "".join(f"{key}: {value}\n" for key, value in SIZES.items()))
    words = ["--model", str(shape), "--output", str(output), "--peers", "transformers", "llama.cpp", "--predict"]
    words += ["--batch-size", "1", "2", "--new-tokens", "6", "--repeats", "2", "--speedup", "1"]
    assert main(words) == 0
    for row in json.loads(output.read_text())["rows"]:
        assert set(row["over_peers"]) == {"transformers", "llama.cpp Q8_0", "llama.cpp Q4_0"}
        assert all(seconds > 0 for seconds in row["peer_decode_seconds"].values())
        assert set(row["prefill_over_peers"]) == set(row["peer_prefill_seconds"]) == set(row["over_peers"])
    assert output.with_suffix(".md").read_text().count("| llama.cpp Q8_0 |") == 2


@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0"])
def test_llama_cpp_quantized_generates_the_tokens_of_the_quantized_weights(quantization: str, tmp_path: Path) -> None:
    model, ids = llama("shared keys"), prompts(8)
    write_gguf(model, tmp_path / "model.gguf", quantization)
    tokens = torch.tensor(GreedyLlama(tmp_path / "model.gguf", threads=2).run(ids.tolist(), 20).tokens)
    plain = lost(model, ids, tokens)
    kind = gguf.GGMLQuantizationType[quantization]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            rounded = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(rounded)
    found = lost(model, ids, tokens)
    assert found.max() < 0.2  # llama.cpp quantizes activations too
    assert found.mean() < 0.01
    assert plain.mean() > 2 * found.mean()  # other weights would be detected


def lost(model: PreTrainedModel, ids: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The highest logit minus that of the chosen token, in standard deviations, [batch, new tokens]."""
    with torch.no_grad():
        logits = model(torch.cat([ids, tokens], dim=1)).logits[:, ids.shape[1] - 1 : -1]
    return (logits.max(-1).values - logits.gather(-1, tokens[..., None]).squeeze(-1)) / logits.std()
