"""A verifier that is a table, a draft that is another, and a draft that follows a script: any batch, no matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

from specbench.decode.draft import Proposal
from specbench.decode.sampling import PROPOSE, draw, probabilities, uniform
from specbench.models.cache import Cache


class TableVerifier:
    """The next token's scores are table[phase, last token], the phase that of its place: place p has phase (p - 1) % len(table).

    Its hidden state is (token, place), and so are its auxiliary states: tags to recognise.
    """

    dtype, device, folder, eos_ids = torch.float32, torch.device("cpu"), None, frozenset()

    def __init__(self, table, context=1 << 20):
        self.table = table  # [phases, vocab, vocab]
        vocab = table.shape[1]
        self.config = SimpleNamespace(
            vocab_size=vocab, max_position_embeddings=context, num_hidden_layers=1, num_key_value_heads=1, head_dim=1
        )
        self.passes = []  # (rows, tokens a row) of every pass

    def new_cache(self, length, batch=1):
        return Cache(1, batch, length, 1, 1, self.dtype, self.device)

    def step(self, positions, limit, *, row=0, masked=True, causal=False, slots=None, seen=None, key_positions=None):
        return SimpleNamespace(positions=positions, slots=positions if slots is None else slots, row=row)

    def __call__(self, tokens, step, cache, aux_layers=()):
        self.passes.append(tuple(tokens.shape))
        hidden = torch.stack((tokens, step.positions), 2).float()
        rows = torch.arange(step.row, step.row + len(tokens))[:, None]
        cache.layers[0].kv.transpose(1, 2)[rows, step.slots] = hidden.unflatten(2, (2, 1))  # so that slots out of range are errors here too
        return hidden, hidden if aux_layers else None

    def lm_head(self, hidden):
        token, place = hidden.long().unbind(2)
        return self.table[place % len(self.table), token]


class TableDraft:
    """Proposes by a table of scores over draft ids; draft id i is the verifier's targets[i]."""

    width = 0

    def __init__(self, table, targets):
        self.table, self.targets = table, targets  # [phases, vocab, draft_vocab], [draft_vocab]

    def begin(self, rows, length):
        self.pending = torch.zeros(rows, dtype=torch.int64)

    def extend(self, tokens, aux, positions, last, row, limit, causal):
        self.pending[row : row + len(tokens)] = tokens.gather(1, last[:, None])[:, 0]

    def propose(self, count, lengths, longest, settings):
        token, tokens, shares = self.pending[: len(lengths)], [], []
        for j in range(count):
            scores = self.table[(lengths - 1 + j) % len(self.table), token][:, None]
            if settings is None:
                best = scores.argmax(-1)
            else:
                shares.append(probabilities(scores, settings))
                best = draw(shares[-1], uniform(settings.seed, lengths[:, None] + j, PROPOSE))
            token = self.targets[best[:, 0]]
            tokens.append(token)
        return Proposal(torch.stack(tokens, 1), count, drawn_from=torch.cat(shares, 1) if shares else None, targets=self.targets)

    def move(self, source, target, length):
        self.pending[target] = self.pending[source]


@dataclass
class Scripted:
    """Knows what each prompt leads to (`outputs`), and in its round r proposes scripts[i][r] right tokens, then wrong ones; all right ones
    where the script has ended. It finds out which prompt a row belongs to by the pairs that it is handed, and checks each of them."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    scripts: list[list[int]]
    vocab: int
    width: int = 0
    texts: list[list[int]] = field(default_factory=list)  # of every row, without its first token
    rounds: dict[int, int] = field(default_factory=dict)
    batches: list[int] = field(default_factory=list)

    def begin(self, rows, length):
        self.texts, self.length = [[] for _ in range(rows)], length

    def extend(self, tokens, aux, positions, last, row, limit, causal):
        assert int(positions.min()) >= 0 and int(positions.max()) < self.length and limit <= self.length
        assert int(last.min()) >= 0, "every row has a pair that is new"
        for i in range(len(tokens)):
            start, text = int(positions[i, 0]), self.texts[row + i]
            del text[start:]
            assert len(text) == start, "pairs follow one another without a gap"
            text += tokens[i, : int(last[i]) + 1].tolist()
            if aux is not None:  # tags (token, place) of the states that the pairs begin with
                tags = aux[i, : int(last[i]) + 1].long()
                assert tags[:, 1].tolist() == list(range(start, start + len(tags)))
                assert tags[1:, 0].tolist() == text[start:-1]

    def propose(self, count, lengths, longest, settings):
        self.batches.append(len(lengths))
        rows = []
        for row, n in enumerate(lengths.tolist()):
            text = self.texts[row]
            assert len(text) == n - 1
            which = [i for i, p in enumerate(self.prompts) if (p + self.outputs[i])[1:n] == text and len(p) < n]
            assert which, "committed text is nobody's own"
            index = which[0]
            self.rounds[index] = self.rounds.get(index, -1) + 1
            script = self.scripts[index]
            right = script[self.rounds[index]] if self.rounds[index] < len(script) else count
            known = (self.prompts[index] + self.outputs[index])[n:][:count]
            known += [0] * (count - len(known))
            rows.append([token if j < right else (token + 1) % self.vocab for j, token in enumerate(known)])
        return Proposal(torch.tensor(rows), count)

    def move(self, source, target, length):
        self.texts[target] = list(self.texts[source])
