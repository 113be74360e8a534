"""Which modules a quantization section covers, held against compressed-tensors' own matching, and which sections are refused."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from tiny import w4a16_section
from torch import nn

from specbench.errors import ConfigError
from specbench.quant.scheme import Scheme, parse_quantization

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
    assert parsed.for_module("model.layers.0.mlp.down_proj") == Scheme("pack-quantized", 4, group_size, symmetric)
    assert str(parsed.scheme) == f"W4A16 pack-quantized g{group_size} {'sym' if symmetric else 'asym'}"


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
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "'awq'"),
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "'fp8'"),
        ({"bits": 4}, "None"),
        (w4a16_section(format="float-quantized"), "'float-quantized'"),
        (w4a16_section(format="int-quantized"), "'int-quantized'"),
        (w4a16_section(format="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (w4a16_section(format="no-such-format"), "no-such-format"),
        (w4a16_section(config_groups={}), "0 config groups"),
        (w4a16_section(config_groups=None), "config_groups"),
        (section_with({"num_bits": 8}), "num_bits=8"),
        (section_with({"type": "float"}), "type='float'"),
        (section_with({"actorder": "group"}), "actorder"),
        (section_with({"strategy": "channel", "group_size": None}), "strategy='channel'"),
        (section_with({"strategy": "channel", "group_size": -1}), "channel"),
        (section_with({"group_size": 0}), "group_size"),
        (section_with({"group_size": "many"}), "compressed-tensors cannot read it"),
        (section_with(input_activations={"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}), "input_activations"),
        (section_with(output_activations={"num_bits": 8, "type": "int", "strategy": "tensor"}), "output_activations"),
        (w4a16_section(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}), "kv_cache_scheme"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_reader_is_refused_by_name(section, named):
    with pytest.raises(ConfigError) as refused:
        parse_quantization(section, "verifier x/config.json: quantization_config")
    assert str(refused.value).startswith("verifier x/config.json: quantization_config: ")
    assert named in str(refused.value)


def test_two_groups_are_refused_and_named():
    section = w4a16_section()
    section["config_groups"]["group_1"] = section["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]}
    with pytest.raises(ConfigError, match=r"2 config groups \(\['group_0', 'group_1'\]\)"):
        parse_quantization(section, "x")


def test_parsing_leaves_the_section_as_it_was():
    section, same = w4a16_section(), w4a16_section()
    parse_quantization(section, "x")
    assert section == same
