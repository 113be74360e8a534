"""Conversations from the shards of `generate.write_text`, cut into training batches.

What enters: shard folders. What leaves: padded batches of tokens and verifier states. It does not know models or losses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from generate import read_text
from torch import Tensor

HELD_OUT = 40  # one prompt in this many is kept for evaluation
HELD_OUT_SIZE = 64  # conversations evaluated at most


@dataclass(frozen=True, slots=True)
class Conversation:
    """tokens: int32 [T]. states: bf16 [T, (K + 1) * hidden], a view into a shard; the last row is no state."""

    prompt_id: int
    prompt_length: int
    tokens: Tensor
    states: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations. tokens: int64 [B, T]; states: bf16 [B, T, width].

    answers: bool [B, T], columns where drafting can begin: token t + 1 belongs to the answer and the state at t + 1 exists.
    first: the lowest such column of the batch.
    """

    tokens: Tensor
    states: Tensor
    answers: Tensor
    first: int

    def to(self, device: torch.device) -> Batch:
        return Batch(self.tokens.to(device), self.states.to(device), self.answers.to(device), self.first)


def load(folder: Path, name: str = "text-*.safetensors") -> list[Conversation]:
    """All conversations in the shards of `folder` whose file name matches `name`, in file order."""
    found = []
    for shard in read_text(folder, name):
        begin = 0
        lengths, prompt_lengths, ids = (shard[n].tolist() for n in ("lengths", "prompt_lengths", "prompt_ids"))
        for length, prompt_length, prompt_id in zip(lengths, prompt_lengths, ids, strict=True):
            part = slice(begin, begin + length)
            found.append(Conversation(prompt_id, prompt_length, shard["tokens"][part], shard["states"][part]))
            begin += length
    return found


def split(conversations: list[Conversation]) -> tuple[list[Conversation], list[Conversation]]:
    """Training and held-out conversations; the two share no prompt, whichever folder a conversation is from."""
    held_out = [c for c in conversations if c.prompt_id % HELD_OUT == 0]
    every = max(len(held_out) // HELD_OUT_SIZE, 1)  # some of each folder
    return [c for c in conversations if c.prompt_id % HELD_OUT], held_out[::every][:HELD_OUT_SIZE]


def answer_counts(conversations: list[Conversation], vocab_size: int) -> Tensor:
    """How often each token occurs in answers: int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for c in conversations:
        counts += torch.bincount(c.tokens[c.prompt_length :].long(), minlength=vocab_size)
    return counts


def draft_vocabulary(conversations: list[Conversation], vocab_size: int, size: int, known: Tensor | None = None) -> Tensor:
    """The `size` most frequent answer tokens, ascending int64; ties and unseen tokens go to the lower id (BPE ids grow rarer).

    known: tokens that are in it whatever their count.
    """
    counts = answer_counts(conversations, vocab_size)
    if known is not None:
        counts[known] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def batches(conversations: list[Conversation], size: int, seed: str) -> list[list[Conversation]]:
    """Shuffled batches of `size` conversations of similar length."""
    rng = random.Random(seed)
    shuffled = rng.sample(conversations, len(conversations))
    window = 32 * size
    ordered = [c for i in range(0, len(shuffled), window) for c in sorted(shuffled[i : i + window], key=lambda c: len(c.tokens))]
    groups = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    rng.shuffle(groups)
    return groups


def collate(group: list[Conversation]) -> Batch:
    """Pad a group on the right."""
    longest = max(len(c.tokens) for c in group)
    tokens = torch.zeros(len(group), longest, dtype=torch.int64)
    states = torch.zeros(len(group), longest, group[0].states.shape[1], dtype=group[0].states.dtype)
    answers = torch.zeros(len(group), longest, dtype=torch.bool)
    for row, c in enumerate(group):
        length = len(c.tokens)
        tokens[row, :length] = c.tokens
        states[row, :length] = c.states
        answers[row, c.prompt_length - 1 : length - 2] = True
    return Batch(tokens, states, answers, min(c.prompt_length for c in group) - 1)
