"""Policies as data: each field has evidence or says that it is not established, and each does what its row says when a draft is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dialects import EXAMPLES, Shape, canonical_tensors, flat, midlayer
from tiny import tiny_draft, tiny_pair, tiny_verifier, write

import specbench as sb
from specbench.errors import CheckpointError, CheckpointKeyError, ConfigError
from specbench.policies import DRAFT, POLICIES, RULES, get_policy

ENGINES = [policy for policy in POLICIES.values() if policy is not DRAFT]


def by_name(name: str):
    return next(example for example in EXAMPLES if example.name == name)


@pytest.mark.parametrize("policy", ENGINES, ids=lambda p: p.name)
def test_a_field_has_evidence_exactly_if_it_is_established(policy) -> None:
    assert set(policy.evidence) == {name for name in RULES if getattr(policy, name) is not None}
    assert all(policy.evidence.values())


@pytest.mark.parametrize("policy", ENGINES, ids=lambda p: p.name)
def test_what_is_not_established_is_said(policy, tmp_path: Path) -> None:
    plan = sb.resolve(sb.open_pair(*tiny_pair(tmp_path)), policy.name)
    assert ("unknown" in plan.settings) == bool(policy.unknown)
    if policy.unknown:
        setting = plan.settings["unknown"]
        assert setting.value == ", ".join(policy.unknown) and "not established" in setting.note


def test_unknown_policies_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'vllm-9'; known: draft, .*vllm-0.11.0.*eagle"):
        get_policy("vllm-9")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_loads_a_plain_pair_alike(policy: str, tmp_path: Path) -> None:
    """Beside a plain verifier nothing is taken from the wrong side; only flags that a reader ignores may differ, and this draft sets
    none.
    """
    draft = tiny_draft(tmp_path / "d", norm_before_residual=False)
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), draft)
    ours, theirs = sb.load_draft(pair), sb.load_draft(pair, policy)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert ours.config == theirs.config and ours.aux_layers == theirs.aux_layers


def test_0_10_2_cannot_load_a_quantized_draft(tmp_path: Path) -> None:
    tensors = canonical_tensors(Shape())
    from tiny import pack_w4a16, w4a16_section

    packed = pack_w4a16(tensors)
    config = flat(Shape(), "LlamaForCausalLMEagle3", quantization_config=w4a16_section(ignore=["fc", "lm_head"]))
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), write(tmp_path / "d", config, {midlayer(k): v for k, v in packed.items()}))
    sb.load_draft(pair)
    for policy in ("vllm-0.10.2", "vllm-0.11.0"):
        with pytest.raises(CheckpointKeyError) as caught:
            sb.load_draft(pair, policy)
        assert caught.value.args[0] == "layers.0.mlp.down_proj.weight_packed"


def test_engines_build_as_many_layers_as_the_config_says(tmp_path: Path) -> None:
    example = by_name("safeailab")
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), example.write(tmp_path / "d", num_hidden_layers=3))
    counts = {policy: sb.resolve(pair, policy)["num_hidden_layers"] for policy in ("draft", "vllm-0.11.0", "eagle", "vllm-0.32.0")}
    assert counts == {"draft": 1, "vllm-0.11.0": 1, "eagle": 1, "vllm-0.32.0": 3}
    assert "1 are stored" in sb.resolve(pair, "vllm-0.32.0").settings["num_hidden_layers"].note
    silent = sb.load_draft(pair, "vllm-0.32.0")
    assert len(silent.layers) == 3 and not bool(silent.layers[2].mlp.down_proj.weight.any())


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (
            [1, 3, 4],
            {"draft": (2, 4, 5), "vllm-0.32.0": (1, 3, 4), "vllm-0.32.0-mrv2": (2, 4, 5), "sglang": (2, 4, 5), "vllm-0.11.0": (2, 4, 5)},
        ),
        (
            [3, 5, 6],
            {"draft": (3, 5, 6), "vllm-0.32.0": (3, 5, 6), "vllm-0.32.0-mrv2": (2, 4, 5), "sglang": (3, 5, 6), "vllm-0.11.0": (2, 4, 5)},
        ),
        ([4, 6, 8], {"draft": (4, 6, 8), "vllm-0.32.0": (4, 6, 8), "sglang": (4, 6, 8), "eagle": (2, 4, 5)}),
    ],
)
def test_nested_layer_ids_by_engine(ids: list[int], expected: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    draft = by_name("specforge-nested-ids").write(tmp_path / "d", eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), draft)
    assert {policy: sb.resolve(pair, policy)["aux_layers"] for policy in expected} == expected


def test_a_trained_embedding_is_thrown_away_by_some(tmp_path: Path) -> None:
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), by_name("angelslim").write(tmp_path / "d"))
    choice = {policy: sb.resolve(pair, policy)["embed_tokens"] for policy in ("draft", "vllm-0.11.0", "eagle", "vllm-0.32.0")}
    assert choice == {"draft": "draft", "vllm-0.11.0": "verifier", "eagle": "verifier", "vllm-0.32.0": "draft"}
    assert any("thrown away" in w for w in sb.resolve(pair, "vllm-0.11.0").warnings)


def test_some_never_read_norm_before_residual(tmp_path: Path) -> None:
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), tiny_draft(tmp_path / "d"))
    for policy in ("sglang", "eagle"):
        setting = sb.resolve(pair, policy).settings["norm_before_residual"]
        assert setting.value is False and "never read" in setting.note


def test_unexpected_tensors_by_engine(tmp_path: Path) -> None:
    tensors = {midlayer(k): v for k, v in canonical_tensors(Shape()).items()} | {"midlayer.mlp.extra_proj.weight": torch.ones(2, 2)}
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), write(tmp_path / "d", flat(Shape(), "LlamaForCausalLMEagle3"), tensors))
    with pytest.raises(CheckpointError, match=r"unexpected.*extra_proj"):
        sb.load_draft(pair)
    with pytest.raises(CheckpointKeyError, match="extra_proj"):
        sb.load_draft(pair, "vllm-0.11.0")
    for policy in ("sglang", "eagle"):
        sb.load_draft(pair, policy)


def test_missing_tensors_are_silent_under_engines(tmp_path: Path) -> None:
    tensors = canonical_tensors(Shape())
    del tensors["layers.0.mlp.up_proj.weight"]
    folder = write(tmp_path / "d", flat(Shape(), "LlamaForCausalLMEagle3"), {midlayer(k): v for k, v in tensors.items()})
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), folder)
    with pytest.raises(CheckpointError, match=r"missing.*up_proj"):
        sb.load_draft(pair)
    for policy in ("vllm-0.11.0", "vllm-0.32.0", "sglang", "eagle"):
        sb.load_draft(pair, policy)


def test_a_missing_map_is_silent_under_engines(tmp_path: Path) -> None:
    tensors = {midlayer(k): v for k, v in canonical_tensors(Shape()).items() if k not in ("d2t", "t2d")}
    pair = sb.open_pair(tiny_verifier(tmp_path / "v"), write(tmp_path / "d", flat(Shape(), "LlamaForCausalLMEagle3"), tensors))
    with pytest.raises(ConfigError, match="neither d2t nor t2d"):
        sb.resolve(pair)
    draft = sb.load_draft(pair, "vllm-0.11.0")
    assert torch.equal(draft.to_target(torch.arange(64)), torch.arange(64))


def test_diff_shows_what_changes_and_why(tmp_path: Path) -> None:
    pair = sb.open_pair(*tiny_pair(tmp_path, quantized=True))
    table = sb.resolve(pair).diff(sb.resolve(pair, "vllm-0.11.0")).set_index("setting")
    assert table.loc["quantization", "draft"] == "none"
    assert table.loc["quantization", "vllm-0.11.0"] == "compressed-tensors pack-quantized W4"
    assert "the draft's own files say none" in table.loc["quantization", "why"]
    assert sb.resolve(pair).diff(sb.resolve(pair)).empty


def test_a_policy_of_ones_own(tmp_path: Path) -> None:
    pair = sb.open_pair(*tiny_pair(tmp_path, quantized=True))
    mine = replace(POLICIES["vllm-0.11.0"], name="mine", layer_quantization="draft", evidence={})
    sb.load_draft(pair, mine)
