"""Verifiers that transformers expands: bitsandbytes folders that it wrote itself, and GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import tiny_draft, tiny_verifier, verifier_config, verifier_tensors

import specbench as sb
from specbench.errors import ConfigError


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_bitsandbytes_folders(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_8bit=True) if kind == "int8" else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind)
    plain = tiny_verifier(tmp_path / "plain", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, device_map="cpu")
    model.save_pretrained(tmp_path / "v")
    pair = sb.open_pair(tmp_path / "v", tiny_draft(tmp_path / "d"))
    verifier = sb.load_verifier(pair)
    weight = verifier_tensors(verifier_config(), 0, torch.bfloat16)["model.layers.3.mlp.down_proj.weight"].float()
    read = verifier.layers[3].mlp.down_proj.weight.float()
    error = (read - weight).abs().max() / weight.abs().max()
    assert 0 < error < (0.02 if kind == "int8" else 0.35)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "v", device_map="cpu").dequantize().state_dict()
    assert torch.equal(read, dense["model.layers.3.mlp.down_proj.weight"].to(torch.bfloat16).float())
    draft = sb.load_draft(pair, verifier=verifier)
    assert draft.layers[0].mlp.down_proj.scheme is None
    plain_text = sb.generate(verifier, None, [[5, 6, 7]], num_speculative_tokens=0, max_new_tokens=8)
    assert len(plain_text.token_ids[0]) == 8


def gguf_file(path: Path) -> Path:
    """A tiny Llama as F32 GGUF, with a two-hundred-and-fifty-six word vocabulary."""
    gguf = pytest.importorskip("gguf")
    config, tensors = verifier_config(), verifier_tensors(verifier_config())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(8)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(256)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    characters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))] + [chr(256 + i) for i in range(67)] + ['!"']
    writer.add_token_list(characters)
    writer.add_token_merges(['! "'])
    writer.add_token_types([1] * 256)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in tensors.items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        values = tensor
        if stem.startswith("layers."):
            _, index, part = stem.split(".", 2)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            if heads:  # llama.cpp interleaves the halves that transformers keeps apart
                values = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
            stored = f"blk.{index}.{parts[part]}.weight"
        else:
            stored = f"{names.get(stem, 'output')}.weight"
        writer.add_tensor(stored, np.ascontiguousarray(values.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config["vocab_size"] == len(characters)
    return path


def test_gguf_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    path = gguf_file(tmp_path / "tiny.gguf")
    pair = sb.open_pair(path, tiny_draft(tmp_path / "d"))
    verifier = sb.load_verifier(pair)
    for name, tensor in verifier_tensors(verifier_config()).items():
        if name.endswith("layers.5.mlp.down_proj.weight"):
            assert torch.equal(verifier.layers[5].mlp.down_proj.weight, tensor.to(torch.bfloat16))
        if name.endswith("layers.5.self_attn.q_proj.weight"):
            assert torch.equal(verifier.layers[5].self_attn.qkv_proj.shard("weight", 0), tensor.to(torch.bfloat16))
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")}
    sb.open_pair(path, tmp_path / "d")
    assert before == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*.safetensors")} and before


def test_what_transformers_does_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"x\.gguf"):
        sb.open_pair(tmp_path / "x.gguf", tiny_draft(tmp_path / "d"))
    assert not list((tmp_path / "cache").glob("x*"))
