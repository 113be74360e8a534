"""The draft's training unrolls what decoding computes, and its checkpoint holds what was trained."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data" / "recipe"))

import average
import corpus
import evaluate
import export
import generate
import invent
import measure
import train
import varied
from draft import Draft, DraftConfig, HeadLoss

HIDDEN, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, WIDTH, INNER, LAYERS = 64, 96, 40, 4, 2, 16, 96, 3


def tiny_draft(norm_before_residual: bool = True, layers: int = 1) -> Draft:
    torch.manual_seed(3)
    return Draft(DraftConfig(HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, 1e-5, 1e4, DRAFT_VOCAB, 3, norm_before_residual, layers))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


class Plain:
    """One sequence, one token at a time, with a growing key/value cache; written from the layer's definition."""

    def __init__(self, draft: Draft) -> None:
        self.w = dict(draft.named_parameters())
        self.before = draft.config.norm_before_residual
        self.layers = draft.config.num_hidden_layers
        self.kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(self.layers)]  # keys and values [kv_heads, d]

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """[heads, d], pairs (i, i + d/2) turned by position * theta^(-2i/d)."""
        angle = position * 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        a, b = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)

    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Feed one pair at the next position; returns the state before the final norm."""
        w = self.w
        normed = norm(hidden, w["layers.0.hidden_norm.weight"])
        inputs = torch.cat((norm(embedded, w["layers.0.input_layernorm.weight"]), normed))
        x = self.layer(0, inputs, normed if self.before else hidden)
        for i in range(1, self.layers):
            x = self.layer(i, norm(x, w[f"layers.{i}.input_layernorm.weight"]), x)
        return x

    def layer(self, index: int, inputs: Tensor, residual: Tensor) -> Tensor:
        w, kept = {n.removeprefix(f"layers.{index}."): p for n, p in self.w.items()}, self.kept[index]
        q, k, v = (w[f"self_attn.{n}_proj.weight"] @ inputs for n in "qkv")
        position = len(kept)
        kept.append((self.rotated(k.view(KV_HEADS, WIDTH), position), v.view(KV_HEADS, WIDTH)))
        heads = []
        for i, query in enumerate(self.rotated(q.view(HEADS, WIDTH), position)):
            keys, values = (torch.stack([pair[side][i // (HEADS // KV_HEADS)] for pair in kept]) for side in (0, 1))
            heads.append((keys @ query / WIDTH**0.5).softmax(0) @ values)
        x = residual + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        y = norm(x, w["post_attention_layernorm.weight"])
        return x + w["mlp.down_proj.weight"] @ (F.silu(w["mlp.gate_proj.weight"] @ y) * (w["mlp.up_proj.weight"] @ y))

    def forget(self, length: int) -> None:
        for kept in self.kept:
            del kept[length:]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_every_step_is_what_decoding_computes(norm_before_residual: bool, layers: int) -> None:
    draft, length, first, steps = tiny_draft(norm_before_residual, layers), 11, 3, 4
    embedded, aux = torch.randn(length, HIDDEN), torch.randn(length, 3 * HIDDEN)
    with torch.no_grad():
        outputs = draft(embedded[None], aux[None], first, steps)
        fc = aux @ draft.fc.weight.T
        decoder = Plain(draft)
        for column in range(length):
            state = decoder(embedded[column], fc[column])  # step 0, and the true key of this column
            if column < first:
                continue
            torch.testing.assert_close(outputs[0][0, column - first], state, rtol=1e-4, atol=1e-4)
            for j in range(1, min(steps, length - column)):  # draft on from here, then take the drafted keys back
                state = decoder(embedded[column + j], state)
                torch.testing.assert_close(outputs[j][0, column - first], state, rtol=1e-4, atol=1e-4)
            decoder.forget(column + 1)


def test_padding_on_the_right_changes_nothing() -> None:
    draft = tiny_draft()
    embedded, aux = torch.randn(1, 9, HIDDEN), torch.randn(1, 9, 3 * HIDDEN)
    padded = [F.pad(x, (0, 0, 0, 4), value=7.0) for x in (embedded, aux)]
    with torch.no_grad():
        for short, long in zip(draft(embedded, aux, 2, 3), draft(*padded, 2, 3), strict=True):
            torch.testing.assert_close(long[:, : short.shape[1]], short)


def test_head_loss_is_cross_entropy_and_so_are_its_gradients() -> None:
    torch.manual_seed(0)
    rows, final, weights = torch.randn(DRAFT_VOCAB, HIDDEN), torch.randn(300, HIDDEN), torch.rand(2, 300)
    states = torch.randn(2, 300, HIDDEN, requires_grad=True)
    head = torch.randn(DRAFT_VOCAB, HIDDEN, requires_grad=True)
    loss = HeadLoss.apply(states, weights, head, final, rows)
    found = torch.autograd.grad(loss * 0.5, (states, head))
    plain = -((states @ head.T).log_softmax(-1) * (final @ rows.T).softmax(-1)).sum(-1).mul(weights).sum()
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-2)
    for got, expected in zip(found, torch.autograd.grad(plain * 0.5, (states, head)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_walk_counts_rounds() -> None:
    conversation = corpus.Conversation(0, 2, torch.arange(9), torch.zeros(9, 1))
    hits = torch.zeros(3, 9, dtype=torch.bool)
    hits[0, 1] = hits[1, 2] = True  # first round, from column 1: two right, third wrong
    hits[0, 4] = hits[2, 6] = True  # second round, from column 4: one right; a late hit after a miss does not count
    assert evaluate.walk(hits, conversation) == [2, 1, 0]


@pytest.fixture
def verifier_folder(tmp_path: Path) -> Path:
    """A tiny verifier on disk: embedding, norm and last layer are all that training reads."""
    torch.manual_seed(1)
    folder = tmp_path / "verifier"
    folder.mkdir()
    config = {
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    last = f"model.layers.{LAYERS - 1}"
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{last}.input_layernorm.weight": (HIDDEN,), f"{last}.post_attention_layernorm.weight": (HIDDEN,),
        f"{last}.self_attn.q_proj.weight": (HEADS * WIDTH, HIDDEN), f"{last}.self_attn.k_proj.weight": (KV_HEADS * WIDTH, HIDDEN),
        f"{last}.self_attn.v_proj.weight": (KV_HEADS * WIDTH, HIDDEN), f"{last}.self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
        f"{last}.mlp.gate_proj.weight": (INNER, HIDDEN), f"{last}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{last}.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    save_file({name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Shards of a language in which the next token follows from the last one, with states that know it."""
    torch.manual_seed(2)
    folder, table = tmp_path / "text", torch.randperm(VOCAB)
    folder.mkdir()
    code = torch.randn(VOCAB, 4 * HIDDEN)
    for number in range(2):
        tokens, lengths = [], []
        for _ in range(12):
            row = [int(torch.randint(VOCAB, ()))]
            while len(row) < 18 + number:
                row.append(int(table[row[-1]]))
            tokens += row
            lengths.append(len(row))
        ids = torch.tensor(tokens)
        shard = {
            "tokens": ids.int(), "states": code[ids].bfloat16(), "lengths": torch.tensor(lengths, dtype=torch.int32),
            "prompt_lengths": torch.full((12,), 4, dtype=torch.int32), "prompt_ids": torch.arange(12, dtype=torch.int32) + 12 * number,
        }
        save_file(shard, folder / f"text-{number:04d}.safetensors")
    return folder


SETTINGS = train.Settings(epochs=12, batch=4, warmup=2, matrix_lr=5e-3, head_lr=1e-2, draft_vocab_size=DRAFT_VOCAB)


@pytest.mark.parametrize("bf16", [True, False])
def test_a_few_steps_learn_and_the_checkpoint_round_trips(
    verifier_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    """On processors with and without bf16 products."""
    monkeypatch.setattr(train, "multiplies_bf16", lambda: bf16)
    verifier, out = train.Verifier(verifier_folder), tmp_path / "draft"
    assert verifier.head.dtype == verifier.embedding.dtype == (torch.bfloat16 if bf16 else torch.float32)
    manifest = train.train(verifier, [text_folder], out, SETTINGS)
    losses = [entry["loss"] for entry in manifest["history"]]
    assert losses[-1] < 0.8 * losses[0]

    tensors, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == tensors["lm_head.weight"].shape[0]
    assert config["norm_before_residual"] is True
    targets = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert (targets.diff() > 0).all()
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], targets)
    counts = corpus.answer_counts(corpus.split(corpus.load(text_folder))[0], VOCAB)
    assert counts[tensors["t2d"]].min() >= counts[~tensors["t2d"]].max()
    assert {t.dtype for n, t in tensors.items() if n.endswith("weight")} == {torch.bfloat16}

    again = tiny_draft()
    export.load_weights(again, out)
    assert torch.equal(export.read_vocabulary(out), targets)
    saved = torch.load(out / "training.pt", weights_only=True)["draft"]
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, saved[name].bfloat16().float()), name


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_an_interrupted_run_ends_like_an_uninterrupted_one(
    verifier_folder: Path, text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    verifier = train.Verifier(verifier_folder)
    settings = train.Settings(epochs=2, batch=4, warmup=2, draft_vocab_size=DRAFT_VOCAB, save_minutes=0.0, average=share)
    train.train(verifier, [text_folder], tmp_path / "whole", settings)
    calls, real = [0], train.loss_of

    def failing(*args: object) -> object:
        calls[0] += 1
        if calls[0] == 8:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "loss_of", failing)
    with pytest.raises(KeyboardInterrupt):
        train.train(verifier, [text_folder], tmp_path / "parts", settings)
    train.train(verifier, [text_folder], tmp_path / "parts", settings)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, msg=name)


def test_averaged_weights_are_a_mean_over_the_last_share_of_steps() -> None:
    """Weights that grow by one a step: their mean lies half the share behind the last ones."""
    mean, draft = tiny_draft(), tiny_draft()
    for step in range(400):
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.fill_(float(step))
        train.step_into(mean, draft, 1 / (1 + 0.25 * step))
    found = mean.fc.weight.detach()
    assert found.min() == found.max() and 399 - 0.3 * 400 < float(found[0, 0]) < 399 - 0.1 * 400


def test_the_mean_of_drafts(verifier_folder: Path, text_folder: Path, tmp_path: Path) -> None:
    verifier = train.Verifier(verifier_folder)
    for seed, size in ((0, DRAFT_VOCAB), (1, DRAFT_VOCAB), (2, DRAFT_VOCAB - 8)):
        settings = train.Settings(epochs=1, batch=4, draft_vocab_size=size, seed=seed)
        train.train(verifier, [text_folder], tmp_path / str(seed), settings)
    average.average([tmp_path / "0", tmp_path / "1"], tmp_path / "mean")
    one, two, mean = (load_file(tmp_path / name / "model.safetensors") for name in ("0", "1", "mean"))
    assert torch.equal(mean["d2t"], one["d2t"]) and torch.equal(mean["t2d"], one["t2d"])
    assert torch.equal(mean["fc.weight"], ((one["fc.weight"].float() + two["fc.weight"].float()) / 2).bfloat16())
    assert not torch.equal(one["fc.weight"], two["fc.weight"])
    manifest = json.loads((tmp_path / "mean" / "training.json").read_text())
    assert [t["settings"]["seed"] for t in manifest["mean_of"]] == [0, 1] and manifest["begin_from"] is None
    assert len({t["model_sha256"] for t in manifest["mean_of"]}) == 2 and "begin_from" not in manifest["mean_of"][0]
    with pytest.raises(SystemExit, match="another config"):
        average.average([tmp_path / "0", tmp_path / "2"], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_run_goes_on_with_a_larger_vocabulary(verifier_folder: Path, text_folder: Path, tmp_path: Path) -> None:
    verifier = train.Verifier(verifier_folder)
    small = train.Settings(epochs=2, batch=4, warmup=2, draft_vocab_size=DRAFT_VOCAB)
    train.train(verifier, [text_folder], tmp_path / "small", small)
    fit = corpus.split(corpus.load(text_folder))[0]
    larger = train.Settings(
        epochs=1, batch=4, draft_vocab_size=DRAFT_VOCAB + 16, target_temperature=0.7, reachable_only=True, first_step_only=0.5, full_every=2
    )
    draft, vocabulary = train.begin(verifier, larger, fit, tmp_path / "small")
    known = export.read_vocabulary(tmp_path / "small")
    assert len(vocabulary) == DRAFT_VOCAB + 16
    where = torch.searchsorted(vocabulary, known)
    assert torch.equal(vocabulary[where], known)
    before = load_file(tmp_path / "small" / "model.safetensors")
    assert torch.equal(draft.lm_head.weight[where], before["lm_head.weight"].float())
    assert torch.equal(draft.fc.weight, before["fc.weight"].float())
    manifest = train.train(verifier, [text_folder], tmp_path / "larger", larger, tmp_path / "small")
    assert manifest["begin_from"]["settings"]["draft_vocab_size"] == DRAFT_VOCAB
    assert torch.equal(export.read_vocabulary(tmp_path / "larger"), vocabulary)


def test_a_run_goes_on_with_a_further_layer(verifier_folder: Path, text_folder: Path, tmp_path: Path) -> None:
    """The layer adds nothing at first, learns, and is written as engines read it."""
    verifier = train.Verifier(verifier_folder)
    small = train.Settings(epochs=2, batch=4, warmup=2, draft_vocab_size=DRAFT_VOCAB)
    train.train(verifier, [text_folder], tmp_path / "small", small)
    fit, held_out = corpus.split(corpus.load(text_folder))
    larger = replace(SETTINGS, epochs=4, num_hidden_layers=2)
    draft, vocabulary = train.begin(verifier, larger, fit, tmp_path / "small")
    before, _ = train.begin(verifier, small, fit, tmp_path / "small")
    embedded, aux = torch.randn(1, 9, HIDDEN), torch.randn(1, 9, 3 * HIDDEN)
    with torch.no_grad():
        for one, two in zip(before(embedded, aux), draft(embedded, aux), strict=True):
            torch.testing.assert_close(two, one)
    manifest = train.train(verifier, [text_folder], tmp_path / "larger", larger, tmp_path / "small")
    assert manifest["settings"]["num_hidden_layers"] == 2
    tensors, config = load_file(tmp_path / "larger" / "model.safetensors"), json.loads((tmp_path / "larger" / "config.json").read_text())
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (HEADS * WIDTH, HIDDEN)
    assert tensors["layers.1.mlp.down_proj.weight"].abs().max() > 0 and "layers.1.hidden_norm.weight" not in tensors
    again, known = measure.read_draft(tmp_path / "larger", verifier, held_out)
    assert torch.equal(known, vocabulary) and again.config.num_hidden_layers == 2
    assert torch.equal(again.layers[1].mlp.down_proj.weight, tensors["layers.1.mlp.down_proj.weight"].float())


def test_columns_out_of_reach_do_not_count(verifier_folder: Path, text_folder: Path) -> None:
    verifier = train.Verifier(verifier_folder)
    group = corpus.load(text_folder)[:4]
    vocabulary = torch.arange(DRAFT_VOCAB)
    draft = train.new_draft(verifier, SETTINGS, vocabulary, group)
    every = train.loss_of(draft, verifier, vocabulary, group, (1.0,), train.Settings())[1]
    some = train.loss_of(draft, verifier, vocabulary, group, (1.0,), train.Settings(reachable_only=True))[1]
    following = torch.cat([c.tokens[c.prompt_length + 1 :] for c in group])  # what the answer columns foresee
    assert every == len(following)
    assert some == int((following < DRAFT_VOCAB).sum())


def test_made_prompts_are_distinct_deterministic_and_clear_of_the_evaluation_prompts() -> None:
    rows, held_out = varied.varied_prompts(1600), invent.evaluation_prompts()
    assert rows == varied.varied_prompts(1600)
    assert len({row["prompt"] for row in rows}) == len(rows) > 1300
    assert len({row["category"] for row in rows}) == 8
    assert not any("{" in row["prompt"].replace("{}", "") for row in rows if row["category"] != "coding")
    forbidden = set().union(*map(invent.shingles, held_out))
    assert not any(invent.shingles(row["prompt"]) & forbidden for row in rows)
    near = (held_out[49], "Tell me: " + held_out[20], "How far is a comet from an asteroid, a meteor?")
    assert invent.admitted([{"category": "stem", "prompt": text} for text in near], held_out) == []


def test_best_is_argmax() -> None:
    logits = torch.randn(5, 2500)
    assert torch.equal(generate.best(logits), logits.argmax(-1))
