"""Drafts that know too much, too little or nothing, for tests of the decode loop; and greedy decoding without a loop of ours."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from specbench.decode.draft import EagleDraft, Proposal

AUX = (2, 4, 5)


@torch.inference_mode()
def read(verifier, tokens, aux=()):
    """Logits [n, vocab] and auxiliary states of a text, in one fresh pass."""
    n = len(tokens)
    hidden, states = verifier(torch.tensor([tokens]), verifier.step(torch.arange(n)[None], n), verifier.new_cache(n), aux)
    return verifier.lm_head(hidden)[0], states


def greedy(verifier, prompt, count):
    """Greedy decoding without a cache or a loop of ours: the whole text is read again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(read(verifier, tokens)[0][-1].argmax()))
    return tokens[len(prompt) :]


def prompts(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (int(torch.randint(1, 20, (1,), generator=g)),), generator=g).tolist() for _ in range(count)]


@dataclass(frozen=True)
class Text:
    """A prompt, what greedily follows it, the verifier's second choice at every place, and its states [1, n, K * hidden] over all of it."""

    prompt: list[int]
    tokens: list[int]
    seconds: list[int]
    aux: torch.Tensor


def text(verifier, prompt, count):
    tokens = greedy(verifier, prompt, count)
    logits, aux = read(verifier, prompt + tokens, AUX)
    scores = logits[len(prompt) - 1 : -1].scatter(1, torch.tensor(tokens)[:, None], float("-inf"))
    return Text(prompt, tokens, scores.argmax(-1).tolist(), aux)


class Solo:
    """A proposer for one sequence that wants real pairs only: `take` and `ahead` in place of `extend` and `propose`."""

    width = 0

    def begin(self, rows, length):
        assert rows == 1

    def extend(self, tokens, aux, positions, last, row, limit, causal):
        n = int(last[0]) + 1
        assert row == 0 and positions[0].tolist() == list(range(int(positions[0, 0]), int(positions[0, 0]) + tokens.shape[1]))
        assert limit >= int(positions[0, n - 1]) + 1
        self.take(tokens[:, :n], None if aux is None else aux[:, :n], int(positions[0, 0]))

    def propose(self, count, lengths, longest, settings):
        assert int(lengths[0]) <= longest
        return Proposal(self.ahead(count), count)

    def move(self, source, target, length):
        raise AssertionError("one sequence has nowhere to move")


class Oracle(Solo):
    """Proposes what is known to follow; with `second` the verifier's second choices, with `luck` random ids now and then.

    On the way it checks that the loop hands it every pair once, in order, with the states of the committed text.
    """

    def __init__(self, known, second=False, luck=1.0, seed=0, shift=0):
        self.known, self.choices, self.luck, self.shift = known, known.seconds if second else known.tokens, luck, shift
        self.random = torch.Generator().manual_seed(seed)
        self.committed, self.asked = known.prompt[:1], []
        self.width = known.aux.shape[2]

    def begin(self, rows, length):
        assert rows == 1 and length >= len(self.known.prompt)

    def take(self, tokens, aux, start):
        assert start == len(self.committed) - 1, "pairs follow one another without gap or overlap"
        self.committed = self.committed + tokens[0].tolist()
        assert self.committed == (self.known.prompt + self.known.tokens)[: len(self.committed)]
        assert aux.shape[1] == tokens.shape[1]
        known = self.known.aux[:, start : start + tokens.shape[1]]
        # by the largest of them: fp32 sums differ with the number of rows, more on some processors than on others
        assert (aux - known).abs().max() <= 1e-5 * known.abs().max() + 1e-6, "states of rejected or shifted rows"

    def ahead(self, count):
        self.asked.append(count)
        place = len(self.committed) - len(self.known.prompt)
        ahead = (self.choices[place:] + [0] * count)[:count]
        unlucky = torch.rand(count, generator=self.random) >= self.luck
        noise = torch.randint(0, 256, (count,), generator=self.random)
        return torch.where(unlucky, noise, torch.tensor(ahead) + self.shift)[None]


class Untouchable:
    """A proposer that must not be called."""

    width = 0

    def __getattr__(self, name):
        raise AssertionError(name) if name in ("begin", "extend", "propose", "move") else AttributeError(name)


class Fixed(Solo):
    """Proposes whatever it was given, again and again, and reads no states."""

    def __init__(self, ids):
        self.ids = ids

    def take(self, tokens, aux, start):
        assert aux is None

    def ahead(self, count):
        return torch.tensor([(self.ids * count)[:count]])


class Steered(Solo):
    """Proposes the tokens of a known output, whatever became of it."""

    def __init__(self, reference):
        self.reference, self.start = reference, len(reference.prompt_ids)

    def take(self, tokens, aux, start):
        self.end = start + tokens.shape[1] + 1

    def ahead(self, count):
        ahead = self.reference.token_ids[self.end - self.start :]
        return torch.tensor([[*ahead, *[0] * count][:count]])


class Watched(EagleDraft):
    """An EAGLE-3 chain that looks into both caches at the beginning of every round."""

    def __init__(self, draft, verifier, prompt):
        super().__init__(draft)
        self.verifier, self.text, self.rounds = verifier, list(prompt[:1]), 0
        self.caches = []
        make = verifier.new_cache
        verifier.new_cache = lambda *args: self.caches.append(make(*args)) or self.caches[-1]

    def extend(self, tokens, aux, positions, last, row, limit, causal):
        super().extend(tokens, aux, positions, last, row, limit, causal)
        assert int(positions[0, 0]) == len(self.text) - 1
        self.text += tokens[0, : int(last[0]) + 1].tolist()

    def propose(self, count, lengths, longest, settings):
        self.rounds += 1
        n = len(self.text)  # committed; the last one is pending
        assert lengths.tolist() == [n]
        fresh, aux = read(self.verifier, self.text, AUX)
        cache = copy.deepcopy(self.caches[0])
        for layer in cache.layers:
            layer.kv[:, :, n - 1 :] = float("nan")  # whatever lies there must not be seen
        positions = torch.tensor([[n - 1]])
        hidden, _ = self.verifier(torch.tensor([self.text[-1:]]), self.verifier.step(positions, n), cache)
        assert torch.allclose(self.verifier.lm_head(hidden)[0, -1], fresh[-1], atol=1e-4), "verifier cache"

        clean = self.draft.new_cache(n)
        step = self.draft.step(torch.arange(n - 1)[None], n - 1)
        states = self.draft(torch.tensor([self.text[1:]]), self.draft.fuse(aux[:, :-1]), step, clean)
        assert torch.allclose(self.hidden[0, -1], states[0, -1], atol=1e-4), "draft state"
        for ours, theirs in zip(self.cache.layers, clean.layers, strict=True):
            assert torch.allclose(ours.kv[:, :, : n - 1], theirs.kv[:, :, : n - 1], atol=1e-4), "draft cache"
        return super().propose(count, lengths, longest, settings)
