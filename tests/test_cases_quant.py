"""Reported failures of quantized pairs, by id, each with its right outcome (kind: quant; what configs alone decide is in
test_cases_loading).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects import Shape, canonical_tensors, flat, midlayer
from stored import BY_NAME, Case, ct, fp8, gptq, nvfp4, pack_quantized, shuffled_order, store
from tiny import tiny_draft, tiny_verifier, verifier_config, verifier_tensors, write
from torch import Tensor

import specbench as sb
from specbench.errors import CheckpointError, ConfigError
from specbench.quant.formats import dequantize, expand
from specbench.quant.scheme import parse_quantization

PROJECTIONS = lambda name: name.endswith("_proj")  # noqa: E731


def verifier(folder: Path, case: str | Case | None = None, modules: Any = PROJECTIONS, dtype: str = "bfloat16", **changes: Any) -> Path:
    if case is None:
        return tiny_verifier(folder, dtype=dtype, **changes)
    case = BY_NAME[case] if isinstance(case, str) else case
    config = verifier_config(dtype=dtype, **changes)
    tensors, _ = store(verifier_tensors(config, 0, getattr(torch, dtype)), case, modules)
    if case.file == "config.json":
        return write(folder, {**config, "quantization_config": case.section}, tensors)
    write(folder, config, tensors)
    (folder / case.file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": case.section}))
    return folder


def draft(
    folder: Path,
    case: Case | None = None,
    modules: Any = PROJECTIONS,
    shape: Shape | None = None,
    section: dict[str, Any] | None = None,
    **extra: Tensor,
) -> Path:
    shape = shape or Shape()
    tensors = canonical_tensors(shape)
    config = flat(shape, "LlamaForCausalLMEagle3", torch_dtype="bfloat16")
    if case is not None:
        tensors, _ = store(tensors, case, modules)
        config["quantization_config"] = case.section if section is None else section
    return write(folder, config, {midlayer(k): v for k, v in {**tensors, **extra}.items()})


@torch.inference_mode()
def logits(loaded: Any, count: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 256, (1, count), generator=generator)
    aux = torch.randn(1, count, 192, generator=generator).to(loaded.dtype)
    return loaded.logits(loaded(tokens, loaded.fuse(aux), loaded.step(torch.arange(count)[None], count), loaded.new_cache(count))).float()


def same_text(target: Any, loaded: Any) -> None:
    prompts = [[5, 6, 7, 8]]
    plain = sb.generate(target, None, prompts, num_speculative_tokens=0, max_new_tokens=20)
    assert plain.token_ids == sb.generate(target, loaded, prompts, num_speculative_tokens=3, max_new_tokens=20).token_ids


def static_fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, "tensor", static=True, scalar=True)


def test_b025_a_wholly_quantized_draft_beside_a_plain_verifier(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": []}
    everything = lambda name: name.endswith("_proj") or name == "fc"  # noqa: E731
    scales = {f"layers.0.self_attn.{n}_proj.{n}_scale": torch.tensor(0.5) for n in ("k", "v")}
    folder = draft(tmp_path / "d", Case("x", section, static_fp8), everything, **scales)
    pair = sb.open_pair(verifier(tmp_path / "v"), folder)
    quantized = sb.load_draft(pair, packed=False)
    _, expected = store(canonical_tensors(Shape()), Case("x", section, static_fp8), everything)
    assert torch.equal(quantized.fc.kernel.weight, expected["fc"].float().to(torch.bfloat16))
    assert not any(p.dtype == torch.float8_e4m3fn for p in quantized.parameters())
    plain = sb.load_draft(sb.open_pair(tmp_path / "v", draft(tmp_path / "p")))
    assert (logits(quantized) - logits(plain)).abs().max() < 0.25 * logits(plain).abs().max()


def test_b026_a_quantized_head(tmp_path: Path) -> None:
    section = ct("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}) | {"ignore": []}
    section["config_groups"]["group_0"]["targets"] = ["re:.*lm_head"]
    case = Case("x", section, lambda w: pack_quantized(w, 8, w.shape[1]))
    pair = sb.open_pair(verifier(tmp_path / "v"), draft(tmp_path / "d", case, lambda name: name == "lm_head"))
    quantized, plain = (
        sb.load_draft(pair, dtype="float32"),
        sb.load_draft(sb.open_pair(tmp_path / "v", draft(tmp_path / "p")), dtype="float32"),
    )
    assert quantized.layers[0].mlp.down_proj.scheme is None
    hidden = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(1))
    a, b = quantized.logits(hidden)[0], plain.logits(hidden)[0]
    step = canonical_tensors(Shape())["lm_head.weight"].abs().amax() / 127
    bound = step * plain.norm(hidden)[0].abs().sum(-1)
    top = b.topk(2, -1).values
    differ = a.argmax(-1) != b.argmax(-1)
    assert bool(((top[:, 0] - top[:, 1])[differ] <= 2 * bound[differ]).all()) and differ.float().mean() < 0.2


def test_b029_fc_outside_every_rule_is_plain(tmp_path: Path) -> None:
    section = ct("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
    section["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*", "re:.*self_attn.*"]
    case = Case("x", section, lambda w: pack_quantized(w, 4, 32))
    loaded = sb.load_draft(sb.open_pair(verifier(tmp_path / "v"), draft(tmp_path / "d", case)))
    assert loaded.fc.scheme is None and torch.equal(loaded.fc.weight, canonical_tensors(Shape())["fc.weight"].to(torch.bfloat16))
    assert loaded.layers[0].mlp.down_proj.scheme is not None


def test_b030_patterns_in_ignore_lists(tmp_path: Path) -> None:
    case = BY_NAME["W4A16"]
    ignoring = Case("x", {**case.section, "ignore": ["re:.*self_attn.*", "re:.*lm_head"]}, case.write)
    folder = verifier(tmp_path / "v", ignoring, lambda name: ".mlp." in name)
    loaded = sb.load_verifier(sb.open_pair(folder, draft(tmp_path / "d")))
    assert loaded.layers[0].self_attn.qkv_proj.scheme is None and loaded.layers[0].mlp.down_proj.scheme is not None
    literal = Case("x", {**case.section, "ignore": [".*self_attn.*", "lm_head"]}, case.write)
    folder = verifier(tmp_path / "w", literal, lambda name: ".mlp." in name)
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(32\).*self_attn.*missing \(96\)"):
        sb.load_verifier(sb.open_pair(folder, tmp_path / "d"))


def test_b032_draft_tensors_that_ride_in_the_verifiers_file(tmp_path: Path) -> None:
    case = BY_NAME["W4A16"]
    config = verifier_config(dtype="bfloat16", quantization_config=case.section)
    tensors, _ = store(verifier_tensors(config, 0, torch.bfloat16), case)
    rider = {f"mtp.{name}": value for name, value in canonical_tensors(Shape()).items() if value.is_floating_point()}
    folder = write(tmp_path / "v", config, tensors | rider)
    pair = sb.open_pair(folder, draft(tmp_path / "d"))
    assert sb.load_verifier(pair).layers[0].mlp.down_proj.scheme is not None
    assert sb.load_draft(pair).layers[0].mlp.down_proj.scheme is None


def test_b035_a_gptq_draft_on_a_cpu(tmp_path: Path) -> None:
    order = shuffled_order(64, 32)
    section = {**BY_NAME["GPTQ desc_act"].section, "modules_in_block_to_not_quantize": ["fc"]}
    case = Case("x", section, lambda w: gptq(w, 32, 1, 4, shuffled_order(w.shape[1], 32)))
    pair = sb.open_pair(verifier(tmp_path / "v", dtype="float32"), draft(tmp_path / "d", case))
    loaded = sb.load_draft(pair)
    weight = canonical_tensors(Shape())["layers.0.self_attn.o_proj.weight"]
    stored, _ = gptq(weight, 32, 1, 4, order)
    q = torch.stack([(stored["qweight"][i // 8] >> (4 * (i % 8))) & 15 for i in range(64)]).double()  # [in, out]
    zeros = torch.stack([(stored["qzeros"][:, i // 8] >> (4 * (i % 8))) & 15 for i in range(64)], 1).double() + 1  # [groups, out]
    g = stored["g_idx"].long()
    assert not bool((g.diff() >= 0).all())
    by_hand = ((q - zeros[g] % 16) * stored["scales"].double()[g]).t()
    assert torch.allclose(loaded.layers[0].self_attn.o_proj.kernel.weight.double(), by_hand, atol=1e-6)
    same_text(sb.load_verifier(pair), loaded)


def test_b037_the_algorithm_decides_not_the_producer(tmp_path: Path) -> None:
    pair = sb.open_pair(verifier(tmp_path / "v", "ModelOpt NVFP4"), draft(tmp_path / "d"))
    assert sb.load_verifier(pair).layers[0].mlp.down_proj.scheme.format == "modelopt-nvfp4"
    assert sb.load_draft(pair).layers[0].mlp.down_proj.scheme is None
    lying = Case("x", BY_NAME["ModelOpt FP8"].section, lambda w: nvfp4(w, True, modelopt=True), file="hf_quant_config.json")
    with pytest.raises(
        CheckpointError, match=r"(?s)mlp.down_proj.weight: stored \[64, 64\], expected \[64, 128\].*stored U8, expected float8"
    ):
        sb.load_verifier(sb.open_pair(verifier(tmp_path / "w", lying), tmp_path / "d"))


def test_b042_declared_requested_and_effective(tmp_path: Path) -> None:
    pair = sb.open_pair(verifier(tmp_path / "v"), draft(tmp_path / "d"))
    for asked in (None, "verifier", "none"):
        plan = sb.resolve(pair, overrides={} if asked is None else {"quantization": asked})
        rows = plan.to_frame().set_index("setting").value
        assert (
            rows["quantization_declared"] == "none"
            and rows["quantization"] == "none"
            and rows["quantization_requested"] == (asked or "unset")
        )
    packed = sb.open_pair(verifier(tmp_path / "w", "AWQ"), tmp_path / "d")
    with pytest.raises(ConfigError, match="'awq' was asked for, but its config declares none"):
        sb.resolve(packed, overrides={"quantization": "verifier"})


def test_b043_each_model_has_its_own_cache_dtype(tmp_path: Path) -> None:
    pair = sb.open_pair(verifier(tmp_path / "v", dtype="float32"), draft(tmp_path / "d"))
    narrow, wide = sb.load_verifier(pair, kv_cache_dtype="fp8"), sb.load_verifier(pair)
    assert sb.load_draft(pair).kv_cache_dtype is None
    for kind in ("auto", "fp8"):
        same_text(narrow, sb.load_draft(pair, kv_cache_dtype=kind))
    prompt = [[5, 6, 7, 8]]
    run = lambda model: sb.generate(model, None, prompt, num_speculative_tokens=0, max_new_tokens=40).token_ids  # noqa: E731
    assert run(narrow) != run(wide)  # the rounding is real
    with pytest.raises(ConfigError, match="'int3'"):
        sb.load_draft(pair, kv_cache_dtype="int3")


def test_b044_a_packed_head_that_is_borrowed(tmp_path: Path) -> None:
    case = BY_NAME["ModelOpt NVFP4"]
    everything = Case("x", {**case.section, "exclude_modules": []}, case.write, file="hf_quant_config.json")
    folder = verifier(tmp_path / "v", everything, lambda name: name.endswith("_proj") or name == "lm_head")
    shape = Shape(own_head=False, draft_vocab=256, maps=False)
    config = flat(shape, "LlamaForCausalLMEagle3", draft_vocab_size=None)
    path = write(tmp_path / "d", config, {midlayer(k): v for k, v in canonical_tensors(shape).items()})
    pair = sb.open_pair(folder, path)
    target = sb.load_verifier(pair)
    loaded = sb.load_draft(pair, verifier=target)
    assert loaded.lm_head is target.lm_head
    weight = verifier_tensors(verifier_config())["lm_head.weight"]
    stored, expected = case.write(weight)
    scheme = parse_quantization({"quant_method": "modelopt", **everything.section}, "x").for_module("lm_head")
    rows = torch.arange(0, 256, 4)
    chosen = {k: v[rows] if v.dim() == 2 else v for k, v in stored.items()}
    some = dequantize(expand(scheme, chosen, 64, 64, "lm_head"), torch.float32)
    every = dequantize(expand(scheme, stored, 64, 256, "lm_head"), torch.float32)
    assert torch.equal(some, every[rows]) and torch.equal(every.double(), expected.float().double())


def test_b045_declared_scheme_against_stored_tensors(tmp_path: Path) -> None:
    case = BY_NAME["W8A8 dynamic"]
    section = {**case.section, "config_groups": {"group_0": {**case.section["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}}}
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(24\).*mlp.*weight_scale.*dtype \(24\).*mlp"):
        sb.load_verifier(sb.open_pair(verifier(tmp_path / "v", Case("x", section, case.write)), draft(tmp_path / "d")))
    without = lambda w: ({k: v for k, v in gptq(w, 32)[0].items() if k != "g_idx"}, gptq(w, 32)[1])  # noqa: E731
    config = verifier_config(dtype="bfloat16", quantization_config=BY_NAME["GPTQ v1"].section)
    tensors, _ = store(verifier_tensors(config, 0, torch.bfloat16), Case("x", {}, without))
    stray = {"model.layers.3.mlp.down_proj.g_idx": (torch.arange(128) // 32).to(torch.int32)}
    loaded = sb.load_verifier(sb.open_pair(write(tmp_path / "w", config, tensors | stray), tmp_path / "d"))
    assert loaded.layers[3].mlp.down_proj.kernel is not None


QUANTIZED_DRAFTS = [
    "W4A16",
    "W8A16 channel",
    "W8A8 dynamic",
    "FP8 channel",
    "FP8 tensor static",
    "NVFP4A16",
    "MXFP4A16",
    "AWQ",
    "GPTQ v1",
    "fp8 block",
]


@pytest.mark.parametrize("beside", [None, "W4A16", "FP8 channel"])
@pytest.mark.parametrize("name", QUANTIZED_DRAFTS)
def test_quantized_drafts_beside_any_verifier(name: str, beside: str | None, tmp_path: Path) -> None:
    case = BY_NAME[name]
    section = {**case.section, "ignore": ["lm_head", "model.fc", "fc"]} if "config_groups" in case.section else dict(case.section)
    if "config_groups" not in case.section:
        section["modules_to_not_convert"] = section["modules_in_block_to_not_quantize"] = section["ignored_layers"] = ["fc"]
    pair = sb.open_pair(verifier(tmp_path / "v", beside), draft(tmp_path / "d", case, section=section))
    plan = sb.resolve(pair)
    assert plan["quantization"] == section
    loaded = sb.load_draft(pair, packed=False)
    _, expected = store(canonical_tensors(Shape()), case)
    down = loaded.layers[0].mlp.down_proj.kernel.weight
    assert torch.equal(down, expected["layers.0.mlp.down_proj"].float().to(torch.bfloat16))
    target = sb.load_verifier(pair, dtype="float32", packed=False)
    same_text(target, sb.load_draft(pair, dtype="float32", verifier=target))


def test_rotated_verifiers_are_warned_about(tmp_path: Path) -> None:
    case = BY_NAME["W4A16"]
    folded = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_output"}]}}}
    online = {"config_groups": {"R4": {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj"], "location": "input"}]}}}
    pair = sb.open_pair(
        verifier(tmp_path / "v", Case("x", {**case.section, "transform_config": folded}, case.write)), draft(tmp_path / "d")
    )
    assert any("rotated" in warning for warning in sb.resolve(pair).warnings)
    sb.load_verifier(pair)
    pair = sb.open_pair(verifier(tmp_path / "w", Case("x", {**case.section, "transform_config": online}, case.write)), tmp_path / "d")
    with pytest.raises(ConfigError, match="R4 at input"):
        sb.load_verifier(pair)
    assert not [w for w in sb.resolve(sb.open_pair(verifier(tmp_path / "p"), tmp_path / "d")).warnings if "rotat" in w]


def test_a_draft_whose_config_is_silent_about_its_packed_tensors(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", BY_NAME["W4A16"])
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"declares no quantization, but holds layers.0.*weight_packed and 13 more"):
        sb.resolve(sb.open_pair(verifier(tmp_path / "v"), folder))


def test_the_tiny_draft_of_other_tests_is_plain(tmp_path: Path) -> None:
    assert sb.resolve(sb.open_pair(verifier(tmp_path / "v", "fp8 dynamic"), tiny_draft(tmp_path / "d")))["quantization"] is None
