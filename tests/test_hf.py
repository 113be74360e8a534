"""Any transformers causal LM as verifier: families beside their own plain calls, and the loop over them."""

from __future__ import annotations

import pytest
import torch
from hf_families import EVERY_SECOND, FAMILIES, LAYERS, SIZES, random_model, saved
from proposers import AUX, Oracle, Steered, prompts, text
from safetensors.torch import load_file
from tiny import tiny_draft, tiny_w4a16_verifier

import specbench as sb
from specbench.decode.draft import EagleDraft, Proposal
from specbench.decode.engine import Run, decode
from specbench.decode.request import Options, Request, Sampling
from specbench.decode.tree import Tree
from specbench.models.hf import HFVerifier

PROMPT = [5, 99, 7, 200, 31, 64]


def load(folder, draft_folder):
    pair = sb.open_pair(folder, draft_folder)
    verifier = sb.load_verifier(pair, device="cpu", backend="transformers")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """(verifier, draft) of one family, read from folders."""
    folder = tmp_path_factory.mktemp(request.param)
    return load(saved(request.param, folder / "v"), tiny_draft(folder / "d"))


def run(verifier, proposer, requests, k, batch_size=1, aux_layers=AUX, **options):
    going = Run(verifier, proposer, requests, Options(k, batch_size, **options), aux_layers)
    for _ in going:
        pass
    return going.generations()


def greedily(verifier, proposer, prompt, k, n=20, aux_layers=AUX):
    return decode(verifier, proposer, prompt, num_speculative_tokens=k, max_new_tokens=n, aux_layers=aux_layers, eos_ids=())


def generated(model, prompt, n):
    return model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None)[0, len(prompt) :].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("causal", [True, False], ids=["prompt pass", "masked pass"])
def test_logits_and_states_equal_the_plain_call(both, causal):
    verifier, _ = both
    tokens, last = torch.randint(0, 256, (2, 30)), {}
    hook = verifier.layers[-1].register_forward_hook(lambda module, args, output: last.update(state=output))
    plain = verifier.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    hook.remove()
    step = verifier.step(torch.arange(30).expand(2, -1), 30, causal=causal)
    ids = tuple(range(LAYERS + 2))
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in verifier.layers]
    hidden, aux = verifier(tokens, step, verifier.new_cache(30, 2), ids)
    assert torch.allclose(verifier.lm_head(hidden), plain.logits, atol=1e-4)
    expected = [*plain.hidden_states[:LAYERS], last["state"], plain.hidden_states[LAYERS]]
    for name, ours, theirs in zip(ids, aux.chunk(len(ids), -1), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4), name
    assert not torch.allclose(last["state"], hidden, atol=0.1)
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in verifier.layers], "no hook outlives its pass"


def test_the_loop_alone_is_generate(both):
    verifier, _ = both
    out = greedily(verifier, None, PROMPT, 0)
    assert out.token_ids == generated(verifier.model, PROMPT, 20)
    assert len(set(out.token_ids)) > 5


@pytest.mark.parametrize("k", [1, 4])
def test_a_random_draft_changes_nothing(both, k):
    verifier, draft = both
    for prompt in prompts(3):
        reference = greedily(verifier, None, prompt, 0)
        assert greedily(verifier, EagleDraft(draft), prompt, k).token_ids == reference.token_ids


def test_a_perfect_draft_is_accepted_whole(both):
    verifier, _ = both
    known = text(verifier, PROMPT, 20)
    out = greedily(verifier, Oracle(known), PROMPT, 4)
    assert out.token_ids == known.tokens
    assert out.accepted_per_round == out.proposed_per_round == [4, 4, 4, 3]


def test_a_draft_that_is_often_right_changes_nothing(both):
    verifier, _ = both
    known = text(verifier, PROMPT, 20)
    out = greedily(verifier, Oracle(known, luck=0.7), PROMPT, 4)
    assert out.token_ids == known.tokens
    assert 0 < sum(out.accepted_per_round) < sum(out.proposed_per_round)


@pytest.mark.parametrize("tree", [None, Tree(3, 3, 8)], ids=["chain", "tree"])
def test_a_ragged_batch_and_a_tree_equal_plain_runs(both, tree):
    """Five prompts through three places: rows move and are joined behind; the tree's nodes lie in slots that are not their positions."""
    verifier, draft = both
    asked = [Request(prompt, 8 + 4 * i, stop_ids=()) for i, prompt in enumerate(prompts(5, seed=1))]
    together = run(verifier, EagleDraft(draft, tree), asked, 3, batch_size=3)
    for request, out in zip(asked, together, strict=True):
        assert out.token_ids == greedily(verifier, None, request.prompt_ids, 0, request.max_new_tokens).token_ids


class Thicket(Oracle):
    """A tree along what is known to follow, in which every right token comes after a wrong sibling."""

    tree = Tree(3, 2, 6)

    def propose(self, count, lengths, longest, settings):
        right = self.ahead(3)[0]
        tokens = torch.stack(((right + 1) % 256, right), 1).view(1, 6)
        return Proposal(tokens, 3, parents=torch.tensor([[0, 0, 2, 2, 4, 4]]), depths=torch.tensor([[1, 1, 2, 2, 3, 3]]))


def test_a_path_through_a_tree_is_moved_to_where_it_belongs(both):
    verifier, _ = both
    known = text(verifier, PROMPT, 20)
    out = greedily(verifier, Thicket(known), PROMPT, 3)
    assert out.token_ids == known.tokens
    assert out.accepted_per_round == [3, 3, 3, 3, 2]


def test_sampled_tokens_are_those_of_the_verifier_alone(both):
    verifier, draft = both
    asked = [Request(prompt, 12, Sampling(0.8, seed=i), stop_ids=()) for i, prompt in enumerate(prompts(3, seed=2))]
    alone, drafted = run(verifier, None, asked, 0), run(verifier, EagleDraft(draft), asked, 4, batch_size=3)
    assert [out.token_ids for out in alone] == [out.token_ids for out in drafted]
    assert alone[0].token_ids != greedily(verifier, None, asked[0].prompt_ids, 0, 12).token_ids


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_of_8_on_every_second_layer(family, attention):
    changes = {"use_sliding_window": True, "sliding_window": 8, "layer_types": EVERY_SECOND}
    model = random_model(family, attention, **changes)
    verifier = HFVerifier(model)
    assert verifier.windows == {"full_attention": None, "sliding_attention": 8}
    known = text(verifier, PROMPT, 20)
    assert known.tokens == generated(model, PROMPT, 20)
    for luck in (0.0, 0.7, 1.0):
        assert greedily(verifier, Oracle(known, luck=luck), PROMPT, 4).token_ids == known.tokens
    unbounded = random_model(family, attention, **{**changes, "layer_types": ["full_attention"] * LAYERS})
    assert generated(unbounded, PROMPT, 20) != known.tokens, "the window matters"


def test_the_cache_stays_where_it_is():
    """Rejections move no tensor and copy nothing: what counts is the position, and what was rejected is written over."""
    verifier = HFVerifier(random_model("llama"))
    known = text(verifier, PROMPT, 20)
    going = Run(verifier, Oracle(known, luck=0.5), [Request(PROMPT, 20, stop_ids=())], Options(4), AUX)
    rounds = iter(going)
    next(rounds)
    before = [(t.data_ptr(), t.shape) for pair in going.cache.tensors.values() for t in pair]
    assert len(before) == 2 * LAYERS
    for _ in rounds:
        assert [(t.data_ptr(), t.shape) for pair in going.cache.tensors.values() for t in pair] == before
    out = going.generations()[0]
    assert out.token_ids == known.tokens
    assert sum(a < p for a, p in zip(out.accepted_per_round, out.proposed_per_round, strict=True)) >= 3
    assert going.cache.nbytes() == going.cache.length * LAYERS * 2 * 2 * 16 * 4


@torch.inference_mode()
def test_the_native_verifier_of_the_same_folder_agrees(tiny):
    pair = sb.open_pair(tiny["verifier"], tiny["draft"])
    native = sb.load_verifier(pair, device="cpu")
    verifier, draft = load(tiny["verifier"], tiny["draft"])
    assert (verifier.eos_ids, verifier.folder, verifier.dtype) == (native.eos_ids, native.folder, native.dtype)
    for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers", "num_key_value_heads", "head_dim", "hidden_size"):
        assert getattr(verifier.config, name) == getattr(native.config, name)
    tokens, ids = torch.randint(0, 256, (2, 40)), (0, 2, 4, 5, 8, 9)
    found = []
    for model in (verifier, native):
        hidden, aux = model(tokens, model.step(torch.arange(40).expand(2, -1), 40), model.new_cache(40, 2), ids)
        found.append((model.lm_head(hidden), aux))
    assert all(torch.allclose(ours, theirs, atol=1e-4) for ours, theirs in zip(*found, strict=True))
    theirs = sb.load_draft(pair, device="cpu", verifier=native)
    for prompt in prompts(3):
        here, there = greedily(verifier, EagleDraft(draft), prompt, 4), greedily(native, EagleDraft(theirs), prompt, 4)
        assert (here.token_ids, here.accepted_per_round) == (there.token_ids, there.accepted_per_round)


def test_a_draft_borrows_rows_without_gemmas_factor_and_the_capped_head(tmp_path):
    verifier, draft = load(saved("gemma2", tmp_path / "v"), tiny_draft(tmp_path / "d"))
    weight = load_file(tmp_path / "v" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(draft.embed_tokens(torch.tensor([7])), weight[[7]])
    assert draft.embed_tokens.weight.data_ptr() == verifier.model.get_input_embeddings().weight.data_ptr()
    assert not torch.allclose(verifier.model.get_input_embeddings()(torch.tensor([7])), weight[[7]])
    assert verifier.lm_head(torch.full((1, 64), 100.0)).detach().abs().max() <= 3.0


def test_quantized_folders_run_with_their_own_quantizer(tmp_path, tiny):
    folder = tiny_w4a16_verifier(tmp_path / "v")
    verifier, draft = load(folder, tiny["draft"])
    native = sb.load_verifier(sb.open_pair(folder, tiny["draft"]), device="cpu", packed=False)
    for prompt in prompts(2):
        reference = greedily(verifier, None, prompt, 0).token_ids
        assert greedily(verifier, EagleDraft(draft), prompt, 4).token_ids == reference
        assert greedily(native, None, prompt, 0).token_ids == reference


def test_models_that_also_see_are_verifiers_of_text():
    """The text part is run alone; its three kinds of positions are equal without an image."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    eyes = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=SIZES | {"rope_parameters": rope}, vision_config=eyes)
    config.text_config.initializer_range = 0.25
    model = AutoModelForImageTextToText.from_config(config)
    verifier = HFVerifier(model)
    known = text(verifier, PROMPT, 20)
    assert known.tokens == generated(model, PROMPT, 20)
    assert greedily(verifier, Oracle(known, luck=0.7), PROMPT, 4).token_ids == known.tokens


def test_keys_and_values_may_pass_through_fp8(tiny):
    pair = sb.open_pair(tiny["verifier"], tiny["draft"])
    native = sb.load_verifier(pair, device="cpu", kv_cache_dtype="fp8")
    verifier = sb.load_verifier(pair, device="cpu", kv_cache_dtype="fp8", backend="transformers")
    assert greedily(verifier, None, PROMPT, 0).token_ids == greedily(native, None, PROMPT, 0).token_ids


@pytest.mark.parametrize("tree", [None, Tree(4, 2, 8)], ids=["chain", "tree"])
def test_learned_positions_end_where_the_context_does(tmp_path, tiny, tree):
    """GPT-2 has no row for a position beyond its context, and a tree's nodes may lie there."""
    model = random_model("gpt2", n_embd=64, n_layer=LAYERS, n_head=4, n_positions=24, max_position_embeddings=24)
    verifier = HFVerifier(model)
    draft = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")
    out = run(verifier, EagleDraft(draft, tree), [Request(PROMPT, 100, stop_ids=())], 4)[0]
    assert (len(out.token_ids), out.finish_reason) == (18, "context")
    assert out.token_ids == generated(model, PROMPT, 18)


def test_longrope_ends_where_its_rotations_would_change():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = random_model("phi3", rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=128)
    verifier = HFVerifier(model)
    assert verifier.config.max_position_embeddings == 32
    plain = greedily(verifier, None, PROMPT, 0, 100)
    assert (plain.token_ids, plain.finish_reason) == (generated(model, PROMPT, 26), "context")
    out = greedily(verifier, Steered(plain), PROMPT, 4, 100)
    assert out.token_ids == plain.token_ids
    assert out.accepted_per_round == out.proposed_per_round
