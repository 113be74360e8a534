"""Every public draft family, loaded through the public API from its real names and config, beside an fp64 restatement."""

from __future__ import annotations

from pathlib import Path

import pytest
import restate
import torch
from dialects import EXAMPLES, Example, canonical_tensors
from tiny import HIDDEN, tiny_verifier

import specbench as sb
from specbench.checkpoint.families import BY_NAME, FAMILIES, rename
from specbench.models.eagle3 import Eagle3


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("families") / "verifier")


def run(draft: Eagle3, tokens: torch.Tensor, aux: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States and logits of all pairs, the last three fed one at a time through the cache."""
    n, head = len(tokens), len(tokens) - 3
    cache, positions = draft.new_cache(n), torch.arange(n)[None]
    states = [draft(tokens[None, :head], draft.fuse(aux[None, :head]), draft.step(positions[:, :head], head), cache)]
    for i in range(head, n):
        states.append(draft(tokens[None, i : i + 1], draft.fuse(aux[None, i : i + 1]), draft.step(positions[:, i : i + 1], i + 1), cache))
    all_states = torch.cat(states, 1)
    return all_states[0], draft.logits(all_states)[0]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
@torch.inference_mode()
def test_family_loads_and_agrees_with_fp64(example: Example, verifier: Path, tmp_path: Path) -> None:
    pair = sb.open_pair(verifier, example.write(tmp_path / "draft"))
    plan = sb.resolve(pair)
    for name, value in example.expect.items():
        assert plan[name] == value, (name, plan.settings[name])
    loaded = sb.load_verifier(pair)
    draft = sb.load_draft(pair, verifier=loaded)
    shape = example.shape
    tensors = canonical_tensors(shape)
    tensors.setdefault("embed_tokens.weight", loaded.embed_tokens.weight)
    tensors.setdefault("lm_head.weight", loaded.lm_head.weight)
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 256, (12,), generator=g)
    aux = torch.randn(12, shape.states * shape.target, generator=g)
    math = {"norm_before_residual": False, "theta": 10000.0, **example.math}
    states, logits = run(draft, tokens, aux)
    expected = restate.draft_states(
        tensors,
        tokens,
        restate.fuse(tensors, aux, 1e-5),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        eps=1e-5,
        **math,
    )
    expected_logits = restate.logits(tensors, expected, 1e-5, math.get("norm_output", False))
    scale = expected_logits.abs().max()
    assert (logits - expected_logits).abs().max() < 1e-4 * scale
    assert (states - expected).abs().max() < 1e-4 * expected.abs().max()
    plain = sb.generate(loaded, None, [[5, 6, 7, 8]], num_speculative_tokens=0, max_new_tokens=24)
    speculative = sb.generate(loaded, draft, [[5, 6, 7, 8]], num_speculative_tokens=3, max_new_tokens=24)
    assert plain.token_ids == speculative.token_ids


def test_rename_tables_are_whole_prefixes() -> None:
    assert rename("midlayer.mlp.up_proj.weight", BY_NAME["specforge"]) == "layers.0.mlp.up_proj.weight"
    assert rename("my_midlayer.mlp.up_proj.weight", BY_NAME["specforge"]) == "my_midlayer.mlp.up_proj.weight"
    assert rename("model.layers.1.mlp.up_proj.weight", BY_NAME["nemo"]) == "layers.1.mlp.up_proj.weight"
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_family_has_an_example(verifier: Path, tmp_path: Path) -> None:
    seen = {sb.resolve(sb.open_pair(verifier, e.write(tmp_path / e.name)))["family"] for e in EXAMPLES}
    assert seen == {family.name for family in FAMILIES}


def test_the_examples_are_really_different(tmp_path: Path) -> None:
    """A reader that ignored a family's switches would pass none of these by luck: each switch changes the logits."""
    tensors = canonical_tensors(EXAMPLES[0].shape) | {
        "embed_tokens.weight": torch.randn(256, HIDDEN, generator=torch.Generator().manual_seed(9))
    }
    tokens, hidden = torch.arange(12), torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(3))
    base = {"heads": 4, "kv_heads": 2, "head_dim": 16, "eps": 1e-5, "norm_before_residual": False, "theta": 10000.0}
    outputs = [
        restate.draft_states(tensors, tokens, hidden, **{**base, **change})
        for change in ({}, {"norm_before_residual": True}, {"theta": 5e5}, {"norm_output": True}, {"windows": (4,)})
    ]
    for i, a in enumerate(outputs):
        assert all((a - b).abs().max() > 1e-2 for b in outputs[i + 1 :])
