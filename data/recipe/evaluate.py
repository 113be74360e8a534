"""How well a draft foresees the verifier: accuracy at each step, and the acceptance length that follows.

What enters: a draft in training and conversations with states. What leaves: numbers. It does not know files or optimizers.
"""

from __future__ import annotations

from typing import Any

import torch
from corpus import Conversation, batches, collate
from draft import Draft
from torch import Tensor
from torch.nn import functional as F


@torch.inference_mode()
def foresight(
    draft: Draft, embedding: Tensor, head: Tensor, vocabulary: Tensor, group: list[Conversation], steps: int
) -> list[tuple[Tensor, Tensor]]:
    """Where each step hits the verifier's greedy token.

    Args:
        embedding, head: [V, hidden], the verifier's, in the dtype that all is multiplied in. vocabulary: target id of every draft token.

    Returns:
        For each conversation, (hits, greedy): hits bool [steps, T], hits[j, t] says whether step j at column t names the verifier's
        most likely token over its full vocabulary; greedy bool [T], whether the text itself has that token there.
    """
    batch = collate(group).to(embedding.device)
    dtype = embedding.dtype
    states = batch.states.to(dtype)
    with torch.autocast(embedding.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        outputs = draft(embedding[batch.tokens.roll(-1, 1)], states[..., : -draft.config.hidden_size], batch.first, steps)
    rows, columns = batch.answers.nonzero(as_tuple=True)
    best = torch.full_like(batch.tokens, -1)
    final = states[rows, columns + 1, -draft.config.hidden_size :]
    best[rows, columns] = torch.cat([F.linear(part, head).argmax(-1) for part in final.split(1024)])
    hits = torch.zeros(len(group), steps, best.shape[1], dtype=torch.bool, device=best.device)
    weight = draft.lm_head.weight.to(dtype)
    for j, output in enumerate(outputs):
        allowed = columns >= batch.first + j
        r, t = rows[allowed], columns[allowed]
        normed = draft.norm(output[r, t - batch.first - j]).to(dtype)
        guess = torch.cat([F.linear(part, weight).argmax(-1) for part in normed.split(1024)])
        hits[r, j, t] = vocabulary[guess] == best[r, t]
    following = batch.tokens.roll(-2, 1)
    greedy = (best == following) & batch.answers
    return [(hits[i, :, : len(c.tokens)].cpu(), greedy[i, : len(c.tokens)].cpu()) for i, c in enumerate(group)]


def conditional(found: list[tuple[Tensor, Tensor]], conversations: list[Conversation]) -> list[tuple[int, int]]:
    """(right, tried) of each step, where all earlier steps of the chain were right and the text follows them."""
    totals: list[tuple[int, int]] = []
    for (hits, greedy), c in zip(found, conversations, strict=True):
        begin, end = c.prompt_length - 1, len(c.tokens) - 2
        alive = torch.ones(max(end - begin, 0), dtype=torch.bool)
        for j in range(hits.shape[0]):
            alive = alive[: max(end - begin - j, 0)]
            hit = hits[j, begin + j : begin + j + len(alive)]
            if len(totals) <= j:
                totals.append((0, 0))
            totals[j] = (totals[j][0] + int((hit & alive).sum()), totals[j][1] + int(alive.sum()))
            alive = alive & hit & greedy[begin + j : begin + j + len(alive)]
    return totals


def walk(hits: Tensor, conversation: Conversation) -> list[int]:
    """Accepted draft tokens of every round when greedy speculative decoding writes this (greedy) conversation."""
    accepted, anchor, end = [], conversation.prompt_length - 1, len(conversation.tokens) - 2
    while anchor < end:
        count = 0
        while count < hits.shape[0] and anchor + count < end and hits[count, anchor + count]:
            count += 1
        accepted.append(count)
        anchor += count + 1
    return accepted


def evaluate(
    draft: Draft, embedding: Tensor, head: Tensor, vocabulary: Tensor, conversations: list[Conversation], steps: int = 3
) -> dict[str, Any]:
    """Conditional accuracies over `conversations` and the acceptance length 1 + a1 + a1 a2 + ... that they imply."""
    found: list[tuple[Tensor, Tensor]] = []
    ordered: list[Conversation] = []
    for group in batches(conversations, 16, "evaluate"):
        ordered += group
        found += foresight(draft, embedding, head, vocabulary, group, steps)
    rates = [right / max(tried, 1) for right, tried in conditional(found, ordered)]
    length, product = 1.0, 1.0
    for rate in rates:
        product *= rate
        length += product
    positions = sum(len(c.tokens) - c.prompt_length for c in ordered)
    return {"conditional": [round(r, 4) for r in rates], "tau": round(length, 4), "positions": positions}
