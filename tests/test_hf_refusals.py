"""Transformers models that cannot be verifiers, and folders that are not what they must be."""

from __future__ import annotations

import pytest
import torch
from hf_families import random_model
from safetensors.torch import load_file, save_file
from tiny import tiny_verifier
from transformers import AttentionInterface

import specbench as sb
from specbench.errors import CheckpointError, ConfigError
from specbench.models.hf import HFVerifier

HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 3}
REFUSED = {
    "mamba": ({"state_size": 8}, "linear_attention|recurrent state"),
    "qwen3_next": (HYBRID | {"num_experts": 4, "num_experts_per_tok": 2}, "layers of kind linear_attention"),
    "llama4_text": ({"num_local_experts": 2, "intermediate_size_mlp": 128}, "layers of kind chunked_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 3}, "layers of kind conv"),
    "bloom": ({}, "takes no position_ids"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rolled_back_or_placed_is_refused_by_name(family):
    changes, message = REFUSED[family]
    model = random_model(family, **changes)
    with pytest.raises(ConfigError, match=rf"{type(model).__name__} \({family}\).*({message})"):
        HFVerifier(model)


def test_encoder_decoders_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64))
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration \(t5\) is an encoder-decoder"):
        HFVerifier(model)


def test_models_without_a_head_are_refused():
    with pytest.raises(ConfigError, match="no output embeddings; load it with AutoModelForCausalLM"):
        HFVerifier(random_model("llama").model)


def test_attention_that_takes_no_mask_is_refused():
    model = random_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match="attn_implementation is 'flash_attention_2'; load it with 'sdpa' or 'eager'"):
        HFVerifier(model)


def deaf_to_masks(model, monkeypatch):
    plain = AttentionInterface()["sdpa"]
    deaf = lambda module, q, k, v, mask, **rest: plain(module, q, k, v, None, **rest)  # noqa: E731
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", deaf)


def deaf_to_positions(model, monkeypatch):
    forward = model.model.forward

    def deaf(input_ids=None, attention_mask=None, position_ids=None, cache=None, **rest):
        return forward(input_ids=input_ids, attention_mask=attention_mask, cache=cache, **rest)

    monkeypatch.setattr(model.model, "forward", deaf)


def with_more_than_a_head(model, monkeypatch):
    forward = model.forward

    def doubled(**rest):
        output = forward(**rest)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(model, "forward", doubled)


@pytest.mark.parametrize("fault", [deaf_to_masks, deaf_to_positions, with_more_than_a_head])
def test_a_model_that_goes_its_own_way_is_found_out(fault, monkeypatch):
    model = random_model("llama", "sdpa")
    HFVerifier(model)
    fault(model, monkeypatch)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM \(llama\).* deviate by .* standard deviations"):
        HFVerifier(model)


def test_folders_fill_every_parameter(tmp_path, tiny):
    folder = tiny_verifier(tmp_path / "v")
    tensors = load_file(folder / "model.safetensors")

    def opened(changed):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return sb.load_verifier(sb.open_pair(folder, tiny["draft"]), device="cpu", backend="transformers")

    lacking = {name: tensor for name, tensor in tensors.items() if name != "model.layers.3.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.3\.mlp\.up_proj\.weight \(1\)"):
        opened(lacking)
    with pytest.raises(CheckpointError, match=r"has unexpected model\.layers\.3\.extra \(1\)"):
        opened({**tensors, "model.layers.3.extra": torch.zeros(2)})
    with pytest.raises((CheckpointError, ConfigError), match=r"norm\.weight|mismatch"):
        opened({**tensors, "model.norm.weight": torch.zeros(32)})
    assert opened({**tensors, "mtp.norm.weight": torch.zeros(2)}).config.vocab_size == 256


def test_code_in_a_folder_is_not_run(tmp_path, tiny):
    folder = tiny_verifier(tmp_path / "v", model_type="homemade", auto_map={"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.C"})
    (folder / "code.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ConfigError, match="transformers does not load it"):
        sb.load_verifier(sb.open_pair(folder, tiny["draft"]), device="cpu", backend="transformers")


def test_settings_of_the_other_backend_are_refused(tiny):
    pair = sb.open_pair(tiny["verifier"], tiny["draft"])
    with pytest.raises(ConfigError, match="packed=False"):
        sb.load_verifier(pair, device="cpu", packed=False, backend="transformers")
    with pytest.raises(ConfigError, match="backend is 'vllm'; expected 'native' or 'transformers'"):
        sb.load_verifier(pair, device="cpu", backend="vllm")
