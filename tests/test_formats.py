"""Every quantized format, from its real names on disk: weights against an independent fp64 reading, kernels against the expanded
reference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from stored import BY_NAME, CASES, Case, store
from tiny import tiny_draft, verifier_config, verifier_tensors, write

import specbench as sb
from specbench.errors import CheckpointError, CheckpointFileError, ConfigError
from specbench.models.decoder import Decoder
from specbench.quant.activations import fake_quantize
from specbench.quant.kernels import Dequantized
from specbench.quant.linear import Linear
from specbench.quant.products import product


def write_verifier(folder: Path, case: Case, seed: int = 0, **changes) -> tuple[Path, dict[str, torch.Tensor]]:
    config = verifier_config(layers=8, dtype="bfloat16", **changes)
    tensors, expected = store(verifier_tensors(config, seed, torch.bfloat16), case)
    if case.file == "config.json":
        config["quantization_config"] = case.section
    write(folder, config, tensors)
    if case.file != "config.json":
        (folder / case.file).write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": case.section}))
    return folder, expected


def linears(model: Decoder) -> dict[str, Linear]:
    return {m.name: m for m in model.modules() if isinstance(m, Linear)}


def parts(name: str) -> list[str]:
    """Checkpoint modules that a fused layer holds."""
    for fused, members in {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.items():
        if name.endswith(fused):
            return [name.removesuffix(fused) + member for member in members]
    return [name]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: c.name)
def loaded(request, tmp_path_factory):
    case = request.param
    root = tmp_path_factory.mktemp("formats")
    folder, expected = write_verifier(root / "v", case)
    pair = sb.open_pair(folder, tiny_draft(root / "d"))
    return case, pair, expected


def test_weights_are_bit_for_bit_those_of_the_file(loaded) -> None:
    case, pair, expected = loaded
    model = sb.load_verifier(pair, packed=False)
    quantized = {name: layer for name, layer in linears(model).items() if layer.scheme is not None}
    assert len(quantized) == 8 * 4
    for name, layer in quantized.items():
        assert isinstance(layer.kernel, Dequantized)
        want = torch.cat([expected[part] for part in parts(name)])
        assert torch.equal(layer.kernel.weight, want.float().to(torch.bfloat16)), (case.name, name)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 4, 80])
def test_kernels_compute_what_the_reference_computes(loaded, rows: int) -> None:
    case, pair, _ = loaded
    reference, packed = (linears(sb.load_verifier(pair, packed=p)) for p in (False, True))
    generator = torch.Generator().manual_seed(rows)
    for name in ("model.layers.0.self_attn.qkv_proj", "model.layers.3.mlp.down_proj"):
        x = torch.randn(rows, packed[name].in_features, generator=generator).to(torch.bfloat16)
        want, got = reference[name](x).float(), packed[name](x).float()
        # Weight-only: bf16 rounding of products and sums. Quantized inputs: integers and fp8 sums are exact where the reference rounds to
        # bf16.
        assert (want - got).abs().max() <= 0.02 * want.abs().max(), (case.name, name, type(packed[name].kernel).__name__)
        assert packed[name].kernel.nbytes() <= reference[name].kernel.nbytes()


@torch.inference_mode()
def test_the_reference_quantizes_inputs_as_the_scheme_says(loaded) -> None:
    case, pair, _ = loaded
    layer = linears(sb.load_verifier(pair, packed=False))["model.layers.1.mlp.down_proj"]
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    inputs = layer.kernel.inputs
    assert (inputs is None) == case.weight_only
    if inputs is None:
        assert torch.equal(layer(x), product(x, layer.kernel.weight))
        return
    narrowed = fake_quantize(x, inputs.how, inputs.scale, inputs.zero_point)
    assert not torch.equal(narrowed, x) and torch.equal(layer(x), product(narrowed, layer.kernel.weight))
    assert (narrowed - x).abs().max() < 0.6 * x.abs().max()
    assert (inputs.scale is not None) == ("static" in case.name or case.name in ("NVFP4", "ModelOpt FP8", "ModelOpt NVFP4"))


@torch.inference_mode()
def test_a_plain_draft_decodes_losslessly_beside_it(loaded) -> None:
    _, pair, _ = loaded
    verifier = sb.load_verifier(pair, dtype="float32")
    draft = sb.load_draft(pair, dtype="float32", verifier=verifier)
    prompts = [[5, 6, 7, 8]]
    plain = sb.generate(verifier, None, prompts, num_speculative_tokens=0, max_new_tokens=20)
    assert plain.token_ids == sb.generate(verifier, draft, prompts, num_speculative_tokens=3, max_new_tokens=20).token_ids


# actorder "group" was removed from compressed-tensors 0.20; files that have it are still read here.
COMPRESSED = [case for case in CASES if case.section.get("quant_method") == "compressed-tensors" and "actorder" not in case.name]


@pytest.mark.parametrize("case", COMPRESSED, ids=lambda c: c.name)
def test_compressed_tensors_reads_the_same_weights(case: Case) -> None:
    """The bytes that these tests write are what compressed-tensors itself would decompress to the same weights."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    leaves, expected = case.write(weight)
    scheme = QuantizationConfig.model_validate(case.section).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(case.section["format"])
    state = (
        {name: leaf for name, leaf in leaves.items() if name != "weight_shape"}
        if case.section["format"] != "pack-quantized"
        else dict(leaves)
    )
    got = compressor.decompress(state, scheme)["weight"]
    assert (got.double() - expected).abs().max() <= 0.005 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "leaf", "change", "words", "kind"),
    [
        ("W4A16", "weight_scale", lambda t: t.fill_(float("nan")), "finite", CheckpointError),
        ("W4A16", "weight_scale", lambda t: t.zero_(), "finite and positive", CheckpointError),
        ("W4A16", "weight_packed", lambda t: t[:, :-1], "weight_packed", CheckpointError),
        ("W4A16", "weight_shape", lambda t: t + 8, "weight_shape", CheckpointError),
        ("W4A16 actorder", "weight_g_idx", lambda t: t + 7, "g_idx", CheckpointError),
        ("AWQ", "qweight", lambda t: t[:-8], "qweight", CheckpointError),
        ("AWQ", "scales", lambda t: t * 0, "finite and positive", CheckpointError),
        ("GPTQ desc_act", "g_idx", lambda t: t - 1, "g_idx", CheckpointError),
        ("FP8 channel", "weight_scale", lambda t: t * float("inf"), "finite", CheckpointError),
        ("fp8 block", "weight_scale_inv", lambda t: t[:-1], "weight_scale_inv", CheckpointError),
        ("NVFP4A16", "weight_global_scale", lambda t: t * 0, "finite and positive", CheckpointError),
        ("ModelOpt FP8", "weight", lambda t: t.to(torch.bfloat16), "expected float8_e4m3fn", CheckpointError),
    ],
)
def test_damaged_tensors_are_named(name: str, leaf: str, change, words: str, kind: type[Exception], tmp_path: Path) -> None:
    case = BY_NAME[name]

    def damaged(weight: torch.Tensor):
        leaves, expected = case.write(weight)
        return leaves | {leaf: change(leaves[leaf].clone()).contiguous()}, expected

    folder, _ = write_verifier(tmp_path / "v", Case(name, case.section, damaged, file=case.file))
    with pytest.raises(kind, match=words):
        sb.load_verifier(sb.open_pair(folder, tiny_draft(tmp_path / "d")))


def test_a_cut_file_is_refused_before_anything_else(tmp_path: Path) -> None:
    folder, _ = write_verifier(tmp_path / "v", BY_NAME["W4A16"])
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointFileError, match="cut short"):
        sb.open_pair(folder, tiny_draft(tmp_path / "d"))


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    section = {**BY_NAME["AWQ"].section, "group_size": 48}
    folder, _ = write_verifier(tmp_path / "v", Case("x", section, BY_NAME["AWQ"].write))
    with pytest.raises(ConfigError, match="64 input columns do not divide into groups of 48"):
        sb.load_verifier(sb.open_pair(folder, tiny_draft(tmp_path / "d")))


def test_config_and_tensors_that_disagree_are_both_named(tmp_path: Path) -> None:
    case = BY_NAME["W4A16"]
    folder, _ = write_verifier(tmp_path / "v", Case("x", {**case.section, "ignore": ["lm_head", "re:.*mlp.*"]}, case.write))
    with pytest.raises(CheckpointError, match=r"(?s)unexpected \(72\).*mlp.down_proj.weight_packed.*missing \(24\).*mlp.down_proj.weight"):
        sb.load_verifier(sb.open_pair(folder, tiny_draft(tmp_path / "d")))


def test_packed_weights_stay_packed() -> None:
    """Bytes of a layer of the bundled verifier's shapes, W4A16 group 64, beside bf16's."""
    weight = torch.randn(1536, 576, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    from stored import pack_quantized

    from specbench.quant.int4 import cpu_int4_layout
    from specbench.quant.scheme import Scheme

    if cpu_int4_layout() is None:
        pytest.skip("torch's packed int4 operator for CPU is not here")
    layer = Linear("x", 576, (1536,), Scheme("pack-quantized", 4, "group", 64), torch.bfloat16).to_empty(device="cpu")
    for leaf, tensor in pack_quantized(weight, 4, 64)[0].items():
        getattr(layer, leaf).data.copy_(tensor)
    layer.finish()
    assert not list(layer.parameters())
    assert layer.kernel.nbytes() < 0.45 * weight.nbytes
