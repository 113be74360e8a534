"""Train the bundled EAGLE-3 draft on text that its verifier wrote.

What enters: a verifier checkpoint and shard folders (`generate.write_text`). What leaves: a draft in the speculators layout and a manifest
of how it came about. Interrupt it at any time: the loop saves itself every few minutes and goes on where it was.
It does not know how text is written, or what decodes with the draft.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import Conversation, batches, collate, draft_vocabulary, load, split
from draft import Draft, DraftConfig, HeadLoss, warm_start
from evaluate import evaluate
from export import load_weights, read_verifier, read_vocabulary, save_draft, versions
from torch import Tensor
from tqdm.auto import tqdm

from specbench.quant.products import multiplies_bf16


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run.

    minutes: bounds it; the learning rate falls to zero with the larger of the shares of steps and time.
    matrix_lr, head_lr, other_lr: peak learning rates of fc and the layer, of lm_head, of the norms.
    hold: share of the run at the peak rate, before the linear fall. first_step_only: share of the run that trains step 0 alone,
    but for every `full_every`-th batch, which trains all steps (0: none does).
    muon, warm: Muon for the matrices (else AdamW); start from the verifier's last layer and head (else at random).
    num_hidden_layers: more than the draft that training begins from has: the others begin as layers that add nothing.
    draft_vocab_size: more than the draft that training begins from has: its vocabulary is extended (`extend_head`).
    target_temperature: of the verifier's distribution in the loss; below 1 its first choice counts for more.
    average: the draft that is kept is a mean of the weights over about this last share of the run's steps (polynomial-decay averaging,
    Shamir and Zhang, arXiv 1212.1824); 0 keeps the last ones.
    reachable_only: leave out columns whose next token is outside the draft vocabulary.
    """

    epochs: int = 3
    max_steps: int | None = None
    minutes: float = 1e9
    batch: int = 8
    matrix_lr: float = 1e-3
    other_lr: float = 6e-4
    head_lr: float = 3e-4
    warmup: int = 20
    hold: float = 0.3
    weight_decay: float = 0.0
    step_weights: tuple[float, ...] = (1.0, 0.8, 0.64)
    first_step_only: float = 0.0
    full_every: int = 0
    muon: bool = True
    warm: bool = True
    embedding_scale: float = 0.02
    norm_before_residual: bool = True
    num_hidden_layers: int = 1
    draft_vocab_size: int = 8192
    target_temperature: float = 1.0
    average: float = 0.0
    reachable_only: bool = False
    seed: int = 0
    save_minutes: float = 3.0


class Verifier:
    """What training needs of the verifier: embedding and head rows, and the weights that the draft starts from. Their dtype is the one that
    training and evaluation multiply in: bf16, but fp32 on processors where bf16 takes seven times as long."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.config, tensors = read_verifier(folder)
        last = f"model.layers.{self.config['num_hidden_layers'] - 1}."
        dtype = torch.bfloat16 if torch.device(device).type != "cpu" or multiplies_bf16() else torch.float32
        self.embedding = tensors["model.embed_tokens.weight"].to(device, dtype)
        self.head = tensors.get("lm_head.weight", self.embedding).to(device, dtype)
        self.norm = tensors["model.norm.weight"].float()
        self.last_layer = {name.removeprefix(last): t.float() for name, t in tensors.items() if name.startswith(last)}


def new_draft(verifier: Verifier, settings: Settings, vocabulary: Tensor, sample: list[Conversation]) -> Draft:
    """A fresh draft with the verifier's sizes; `sample` tells the width and scale of the states."""
    torch.manual_seed(settings.seed)
    c = verifier.config
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    aux_states = sample[0].states.shape[1] // hidden - 1
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    config = DraftConfig(
        hidden, c["intermediate_size"], heads, c["num_key_value_heads"], c.get("head_dim") or hidden // heads,
        c["rms_norm_eps"], theta, len(vocabulary), aux_states, settings.norm_before_residual,
        settings.num_hidden_layers,
    )
    draft = Draft(config)
    if settings.warm:
        last = torch.cat([x.states[x.prompt_length : -1, -2 * hidden : -hidden] for x in sample[:64]])
        scale = float(last.float().pow(2).mean().sqrt())
        warm_start(draft, verifier.last_layer, verifier.norm, verifier.head.cpu()[vocabulary].float(), scale, settings.embedding_scale)
    return draft


def optimizers(draft: Draft, s: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (AdamW when off), AdamW for norms and head."""
    matrices = [p for n, p in draft.named_parameters() if p.ndim == 2 and n != "lm_head.weight"]
    norms = [p for p in draft.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": norms, "lr": s.other_lr}, {"params": [draft.lm_head.weight], "lr": s.head_lr}]
    made: list[torch.optim.Optimizer] = []
    if s.muon:
        made.append(torch.optim.Muon(matrices, lr=s.matrix_lr, weight_decay=s.weight_decay, adjust_lr_fn="match_rms_adamw"))
    else:
        groups.append({"params": matrices, "lr": s.matrix_lr, "weight_decay": s.weight_decay})
    made.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


@torch.no_grad()
def extend_head(draft: Draft, old: Draft, where: Tensor, rows: Tensor) -> None:
    """Copy `old` into `draft`, whose vocabulary holds the old one at the places `where`.

    A new head row is what the linear map that best takes the verifier's rows to the trained ones makes of the verifier's row.

    Args:
        rows: [draft_vocab_size, hidden], the verifier's head rows of the new vocabulary.
    """
    trained = old.lm_head.weight
    learned = torch.linalg.lstsq(rows[where].float(), trained).solution
    values = {name: p for name, p in old.state_dict().items() if name != "lm_head.weight"}
    draft.load_state_dict({**values, "lm_head.weight": (rows.float() @ learned).index_copy(0, where, trained)})


def begin(verifier: Verifier, s: Settings, fit: list[Conversation], begin_from: Path | None) -> tuple[Draft, Tensor]:
    """The draft as it enters training, and its vocabulary."""
    vocab_size = verifier.config["vocab_size"]
    if begin_from is None:
        vocabulary = draft_vocabulary(fit, vocab_size, s.draft_vocab_size)
        return new_draft(verifier, s, vocabulary, fit), vocabulary
    known = read_vocabulary(begin_from)
    old = new_draft(verifier, s, known, fit)
    load_weights(old, begin_from)
    if s.draft_vocab_size <= len(known):
        return old, known
    vocabulary = draft_vocabulary(fit, vocab_size, s.draft_vocab_size, known)
    draft = new_draft(verifier, s, vocabulary, fit)
    extend_head(draft, old, torch.searchsorted(vocabulary, known), verifier.head.cpu()[vocabulary])
    return draft, vocabulary


@torch.no_grad()
def step_into(mean: Draft, draft: Draft, share: float) -> None:
    """Move the weights of `mean` by `share` of the way towards those of `draft`."""
    for kept, new in zip(mean.parameters(), draft.parameters(), strict=True):
        kept.lerp_(new, share)


def loss_of(
    draft: Draft, verifier: Verifier, vocabulary: Tensor, group: list[Conversation], step_weights: tuple[float, ...], s: Settings
) -> tuple[Tensor, int]:
    """Summed loss of one batch and its number of columns; divide by them for the mean."""
    batch = collate(group).to(verifier.embedding.device)
    hidden, answers = draft.config.hidden_size, batch.answers
    if s.reachable_only:
        answers = answers & torch.isin(batch.tokens.roll(-2, 1), vocabulary)
    dtype = verifier.embedding.dtype
    known = batch.states.to(dtype)
    with torch.autocast(answers.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = draft(verifier.embedding[batch.tokens.roll(-1, 1)], known[..., :-hidden], batch.first, len(step_weights))
        row, column = answers.nonzero(as_tuple=True)
        drafting = batch.answers.int().argmax(1)[row]  # the first column of each conversation
        states, weights = [], []
        for j, output in enumerate(outputs):
            reached = column >= drafting + j
            states.append(output[row, (column - batch.first - j).clamp_min(0)])
            weights.append(reached * step_weights[j])
        stacked = draft.norm(torch.stack(states))
    final = known[row, column + 1, -hidden:] / s.target_temperature
    rows = verifier.head[vocabulary]
    loss = HeadLoss.apply(stacked, torch.stack(weights).float(), draft.lm_head.weight, final, rows)  # type: ignore[no-untyped-call]
    return loss, len(row)


def train(verifier: Verifier, folders: list[Path], out: Path, s: Settings, begin_from: Path | None = None) -> dict[str, Any]:
    """Run or resume the training in `out`; writes the draft there when it ends and returns its manifest.

    Args:
        folders: shards; a second folder holds the states of another verifier (a quantized one) over the same or more text.
        begin_from: a finished draft to go on from, with its vocabulary, instead of a fresh one.
    """
    device = verifier.embedding.device
    out.mkdir(parents=True, exist_ok=True)
    saved = out / "training.pt"
    state: dict[str, Any] = torch.load(saved, map_location=device, weights_only=True) if saved.exists() else {}
    conversations = [c for folder in folders for c in load(folder)]
    count = state.get("conversations", len(conversations))
    if count > len(conversations):
        raise SystemExit(f"{saved} was trained on {count} conversations, but {', '.join(map(str, folders))} hold {len(conversations)}")
    fit, held_out = split(conversations[:count] if len(folders) == 1 else conversations)
    if not fit:
        raise SystemExit(f"{', '.join(map(str, folders))} hold no finished conversation to train on; let more be written")
    if state:
        vocabulary = state["vocabulary"]
        draft = new_draft(verifier, s, vocabulary, fit)
    else:
        draft, vocabulary = begin(verifier, s, fit, begin_from)
    draft, vocabulary = draft.to(device), vocabulary.to(device)
    engines, averaged = optimizers(draft, s), copy.deepcopy(draft) if s.average else draft
    position: dict[str, Any] = {"step": 0, "seconds": 0.0}
    history: list[dict[str, Any]] = state.get("history", [])
    if state:
        draft.load_state_dict(state["draft"])
        averaged.load_state_dict(state["averaged"])
        for engine, values in zip(engines, state["optimizers"], strict=True):
            engine.load_state_dict(values)
        position = state["position"]
    per_epoch = -(-len(fit) // s.batch)
    total = min(per_epoch * s.epochs, s.max_steps or per_epoch * s.epochs)

    def save() -> None:
        torch.save(
            {
                "draft": draft.state_dict(), "averaged": averaged.state_dict(), "optimizers": [e.state_dict() for e in engines],
                "position": position, "vocabulary": vocabulary.cpu(), "conversations": len(conversations[:count]), "history": history,
            },
            f"{saved}.partial",
        )  # fmt: skip
        Path(f"{saved}.partial").rename(saved)

    def check() -> dict[str, Any]:
        return evaluate(averaged, verifier.embedding, verifier.head, vocabulary, held_out)

    started = time.monotonic() - position["seconds"]
    bar = tqdm(total=total, initial=position["step"], desc="steps", smoothing=0.05)
    last_save, running, latest = time.monotonic(), 0.0, ""
    while (done := max(position["step"] / total, position["seconds"] / 60 / s.minutes)) < 1:
        epoch, index = divmod(position["step"], per_epoch)
        if index == 0 or "order" not in locals():
            order = batches(fit, s.batch, f"{s.seed}-{epoch}")
        full = done >= s.first_step_only or (s.full_every and position["step"] % s.full_every == 0)
        step_weights = s.step_weights if full else s.step_weights[:1]
        scale = min(1.0, (position["step"] + 1) / s.warmup, (1 - done) / max(1 - s.hold, 1e-9))
        for engine in engines:
            for group in engine.param_groups:
                group["lr"] = group["peak"] * scale
        loss, columns = loss_of(draft, verifier, vocabulary, order[index], step_weights, s)
        (loss / columns).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for engine in engines:
            engine.step()
            engine.zero_grad(set_to_none=True)
        if averaged is not draft:
            step_into(averaged, draft, 1 / (1 + s.average * position["step"]))
        mean = float(loss.detach()) / columns / sum(step_weights)
        running = mean if not running else 0.95 * running + 0.05 * mean
        position = {"step": position["step"] + 1, "seconds": time.monotonic() - started}
        bar.update()
        bar.set_postfix_str(f"loss {running:.3f} {latest}", refresh=False)
        if position["step"] % per_epoch == 0 or time.monotonic() - last_save > 60 * s.save_minutes:
            found = check()
            history.append({**position, "loss": round(running, 4), **found})
            latest = f"held-out {found['conditional']} tau {found['tau']}"
            save()
            last_save = time.monotonic()
    bar.close()
    found = check()
    manifest = {
        "tokens": sum(len(c.tokens) for c in fit), "conversations": len(fit), "epochs": round(position["step"] / per_epoch, 2),
        "steps": position["step"], "seconds": round(position["seconds"]), "settings": asdict(s), "held_out": found, "history": history,
        "begin_from": json.loads((begin_from / "training.json").read_text()) if begin_from else None, "versions": versions(),
    }
    save()
    save_draft(averaged.cpu(), vocabulary.cpu(), verifier.config, out)
    (out / "training.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verifier", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings, JSON values")
    parser.add_argument("--begin-from", type=Path, help="a finished draft to go on from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(**{name: json.loads(value) for name, value in (item.split("=", 1) for item in given.set)})
    manifest = train(Verifier(given.verifier, given.device), given.text, given.out, settings, given.begin_from)
    print(json.dumps({k: manifest[k] for k in ("tokens", "steps", "seconds", "held_out")}))


if __name__ == "__main__":
    main()
