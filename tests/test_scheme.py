"""Which modules a quantization section covers, held against compressed-tensors' own matching, and which sections are refused."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from tiny import w4a16_section
from torch import nn

from specbench.errors import ConfigError
from specbench.quant.scheme import Activations, Scheme, parse_quantization

MODULES = tuple(
    f"model.layers.{i}.{name}" for i in (0, 1, 10) for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
) + ("lm_head",)


def quantized(**changes):
    parsed = parse_quantization(w4a16_section(**changes), "x")
    return {name for name in MODULES if parsed.for_module(name) is not None}


def by_compressed_tensors(**changes):
    """The modules that compressed-tensors itself quantizes in a model with these names."""
    model = nn.Module()
    for name in MODULES:
        *parents, leaf = name.split(".")
        owner = model
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, nn.Module())
            owner = getattr(owner, parent)
        owner.add_module(leaf, nn.Linear(32, 32, bias=False))
    section = w4a16_section(**changes) | {"quantization_status": QuantizationStatus.INITIALIZED}
    apply_quantization_config(model, QuantizationConfig.model_validate(section))
    return {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}


def section_with(weights=None, **group):
    """The W4A16 section with changes below its one group."""
    section = w4a16_section()
    section["config_groups"]["group_0"] |= group
    section["config_groups"]["group_0"]["weights"] |= weights or {}
    return section


def test_no_section_is_no_quantization():
    assert parse_quantization(None, "x") is None
    assert parse_quantization({}, "x") is None


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_the_scheme_says_bits_groups_and_symmetry(symmetric, group_size):
    parsed = parse_quantization(section_with({"symmetric": symmetric, "group_size": group_size}), "x")
    assert parsed.for_module("model.layers.0.mlp.down_proj") == Scheme("pack-quantized", 4, "group", group_size, symmetric=symmetric)
    assert (
        str(parsed.for_module("lm_head") or parsed.rules[0].scheme) == f"W4A16 pack-quantized g{group_size}{'' if symmetric else ' asym'}"
    )


@pytest.mark.parametrize(
    "ignore",
    [
        [],
        ["lm_head"],
        ["model.layers.1.mlp.down_proj"],
        ["model.layers.1"],
        ["down_proj"],
        ["re:.*down_proj"],
        ["re:.*down"],
        ["re:model.layers.1.*"],
        [r"re:model\.layers\.1\..*"],
        ["re:down_proj"],
        ["re:.*self_attn.*", "lm_head", "model.layers.10.mlp.gate_proj"],
        [".*down_proj"],
        ["model.layers.*"],
        ["model?layers.1.mlp.down_proj"],
        ["lm_hea[d]"],
        ["Linear"],
    ],
    ids=str,
)
def test_ignore_lists_match_as_in_compressed_tensors(ignore):
    assert quantized(ignore=ignore) == by_compressed_tensors(ignore=ignore)


@pytest.mark.parametrize(
    "targets", [["Linear"], ["re:.*mlp.*"], ["model.layers.0.mlp.down_proj", "lm_head"], ["re:.*layers.1[.].*"], ["re:.*proj$"]], ids=str
)
def test_targets_match_as_in_compressed_tensors(targets):
    section = section_with(targets=targets)
    parsed = parse_quantization(section, "x")
    assert {name for name in MODULES if parsed.for_module(name)} == by_compressed_tensors(config_groups=section["config_groups"])


def test_exact_names_are_exact():
    assert quantized(ignore=["model.layers.1.mlp.down_proj"]) == set(MODULES) - {"model.layers.1.mlp.down_proj"}
    assert quantized(ignore=["model.layers.1", "down_proj", "layers.1.mlp.down_proj"]) == set(MODULES)


@pytest.mark.parametrize("pattern", ["model.layers.*", ".*down_proj", "model.layers.[01].mlp.down_proj", "lm_head|x", "lm_hea.", "^lm_h"])
def test_metacharacters_without_re_are_literal(pattern):
    assert quantized(ignore=[pattern]) == set(MODULES)
    assert quantized(ignore=[f"re:{pattern}"]) < set(MODULES)


def test_lm_head_is_a_linear_module_unless_ignored():
    assert "lm_head" in quantized(ignore=[])
    assert "lm_head" not in quantized(ignore=["lm_head"])


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"quant_method": "hqq", "bits": 4}, "'hqq'"),
        ({"bits": 4}, "quant_method is ''"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "exllama"}, "'exllama'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "fp8", "activation_scheme": "sometimes"}, "'sometimes'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        (w4a16_section(format="marlin-24"), "'marlin-24'"),
        (w4a16_section(format="no-such-format"), "no-such-format"),
        (w4a16_section(sparsity_config={"format": "sparse-bitmask"}), "'sparse-bitmask'"),
        (w4a16_section(config_groups={}), "0 config groups"),
        (w4a16_section(config_groups=None), "config_groups"),
        (section_with({"type": "float"}), "type"),
        (section_with({"num_bits": 5}), "num_bits"),
        (section_with({"group_size": 0}), "group_size"),
        (section_with({"group_size": "many"}), "group_size"),
        (section_with(output_activations={"num_bits": 8, "type": "int", "strategy": "tensor"}), "output_activations"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_reader_is_refused_by_name(section, named):
    with pytest.raises(ConfigError) as refused:
        parse_quantization(section, "verifier x/config.json: quantization_config")
    assert str(refused.value).startswith("verifier x/config.json: quantization_config: ")
    assert named in str(refused.value)


def test_two_groups_each_with_its_scheme():
    section = w4a16_section()
    section["config_groups"]["group_1"] = {
        "targets": ["re:.*mlp.*"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    }
    section["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    parsed = parse_quantization(section, "x")
    assert parsed.for_module("model.layers.0.mlp.down_proj") == Scheme("pack-quantized", 8, "channel")
    assert parsed.for_module("model.layers.0.self_attn.q_proj") == Scheme("pack-quantized", 4, "group", 32)


SCHEMES = {
    "W8A8 dynamic": (
        {"format": "int-quantized", "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "inputs": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}},
        Scheme("int-quantized", 8, "channel", activations=Activations("int8", True)),
    ),
    "FP8 static": (
        {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}, "inputs": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}},
        Scheme("float-quantized", 8, "tensor", activations=Activations("fp8", False)),
    ),
    "FP8 block": (
        {"format": "float-quantized", "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}, "inputs": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}},
        Scheme("float-quantized", 8, "block", block=(128, 128), activations=Activations("fp8", True, group_size=128)),
    ),
    "NVFP4A16": (
        {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}, "inputs": None},
        Scheme("nvfp4-pack-quantized", 4, "group", 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_of_compressed_tensors(name):
    spec, expected = SCHEMES[name]
    group = {"targets": ["Linear"], "weights": spec["weights"] | {"symmetric": True}, "input_activations": spec["inputs"]}
    section = w4a16_section(format=spec["format"], config_groups={"group_0": group})
    assert parse_quantization(section, "x").for_module("model.layers.0.mlp.down_proj") == expected


def test_other_methods_leave_the_head_plain():
    for section in (
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "fbgemm_fp8"},
    ):
        parsed = parse_quantization(section, "x")
        assert parsed.for_module("lm_head") is None and parsed.for_module("model.layers.0.mlp.down_proj") is not None


def test_modelopt_patterns_and_mixed_precision():
    section = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.1*"]}
    parsed = parse_quantization(section, "x")
    assert {n for n in MODULES if parsed.for_module(n) is None} == {n for n in MODULES if ".1." in n or ".10." in n or n == "lm_head"}
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {MODULES[0]: {"quant_algo": "FP8"}, MODULES[1]: {"quant_algo": "NVFP4", "group_size": 16}},
    }
    parsed = parse_quantization(mixed, "x")
    assert [str(parsed.for_module(n)) for n in MODULES[:3]] == ["W8A8 modelopt-fp8 tensor", "W4A4 modelopt-nvfp4 g16", "None"]


def test_parsing_leaves_the_section_as_it_was():
    section, same = w4a16_section(), w4a16_section()
    parse_quantization(section, "x")
    assert section == same
