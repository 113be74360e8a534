"""Chains that end where the draft doubts them: where that is, and that it changes no output."""

from __future__ import annotations

import pytest
import torch
from planted import planted_pair
from proposers import prompts
from tiny import tiny_pair

import specbench as sb
from specbench.decode.draft import EagleDraft
from specbench.decode.engine import Run
from specbench.decode.request import Options, Request, Sampling
from specbench.decode.tree import Tree
from specbench.errors import ConfigError


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pair = sb.open_pair(*planted_pair(tmp_path_factory.mktemp("planted")))
    verifier = sb.load_verifier(pair, device="cpu")
    return verifier, sb.load_draft(pair, device="cpu", verifier=verifier)


def results(run: Run):
    for _ in run:
        pass
    return run.generations()


class Watched(EagleDraft):
    """Proposes whole chains beside its own, from one cache, and keeps (its own, the whole one, the whole one's path probabilities)."""

    def __init__(self, draft, p_min):
        super().__init__(draft, None, p_min)
        self.limit, self.seen = p_min, []

    def propose(self, count, lengths, longest, settings):
        own = super().propose(count, lengths, longest, settings)
        self.p_min = 0.0
        whole = super().propose(count, lengths, longest, settings)  # writes the same slots once more
        self.p_min = self.limit
        self.seen.append((own, whole, self.paths(whole, lengths, longest)))
        return own

    def paths(self, whole, lengths, longest):
        """[b, count] products of probabilities in fp64, from the scores after each of the chain's tokens."""
        hidden, found = self.hidden[: len(lengths)], []
        for j in range(whole.tokens.shape[1]):
            shares = self.draft.logits(hidden).double().softmax(-1)[:, 0]
            found.append(shares.max(-1).values)
            step = self.draft.step(lengths[:, None] - 1 + j, longest + j)
            hidden = self.draft(whole.tokens[:, j : j + 1], hidden, step, self.cache)
        return torch.stack(found, 1).cumprod(1)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_chain_ends_with_the_first_token_that_is_doubted_in_every_row(models, batch):
    verifier, draft = models
    proposer = Watched(draft, 0.02)
    requests = [Request(prompt, 24, stop_ids=()) for prompt in prompts(3, seed=2)]
    made = results(Run(verifier, proposer, requests, Options(4, batch), draft.aux_layers))
    lengths = set()
    for own, whole, paths in proposer.seen:
        surest = paths.amax(0)
        doubted = [j for j in range(paths.shape[1]) if surest[j] < 0.02]
        expected = min(doubted[0] + 1, paths.shape[1]) if doubted else paths.shape[1]
        if not ((surest - 0.02).abs() < 1e-6).any():
            assert own.tokens.shape[1] == own.longest == expected
        assert torch.equal(own.tokens, whole.tokens[:, : own.tokens.shape[1]])
        lengths.add(own.tokens.shape[1])
    assert {1, 2} < lengths, "chains of several lengths, or this says little"
    for one in made:
        assert max(one.proposed_per_round) > min(one.proposed_per_round[:-1]) >= 1
        assert all(
            a <= p == n for a, p, n in list(zip(one.accepted_per_round, one.proposed_per_round, one.nodes_per_round, strict=True))[:-2]
        )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", [Options(4), Options(4, 3), Options(4, 2, adaptive=True)], ids=["alone", "batch", "adaptive"])
def test_the_output_is_that_of_the_verifier_alone(models, temperature, options):
    verifier, draft = models
    requests = [
        Request(prompt, 30, Sampling(temperature, frequency_penalty=0.2 * (i % 2), seed=i), logprobs=1 if i == 2 else None)
        for i, prompt in enumerate(prompts(4, seed=7))
    ]
    plain = [g.token_ids for g in results(Run(verifier, None, requests, Options(0), draft.aux_layers))]
    for p_min in (0.001, 0.05, 0.999):
        run = Run(verifier, EagleDraft(draft, p_min=p_min), requests, options, draft.aux_layers)
        assert [g.token_ids for g in results(run)] == plain


def test_one_token_is_always_proposed_and_a_sure_draft_is_not_held_back(tmp_path):
    pair = sb.open_pair(*tiny_pair(tmp_path))  # its draft has random weights and is sure of nothing
    verifier = sb.load_verifier(pair, device="cpu")
    draft = sb.load_draft(pair, device="cpu", verifier=verifier)
    request = [Request(prompts(1, seed=2)[0], 20, stop_ids=())]
    doubts = results(Run(verifier, EagleDraft(draft, p_min=0.9999), request, Options(4), draft.aux_layers))[0]
    assert set(doubts.proposed_per_round[:-1]) == {1}
    never, plain = (results(Run(verifier, EagleDraft(draft, p_min=p), request, Options(4), draft.aux_layers))[0] for p in (1e-30, 0.0))
    assert never.proposed_per_round == plain.proposed_per_round and never.accepted_per_round == plain.accepted_per_round


def test_what_does_not_go_together_is_refused(models):
    verifier, draft = models
    for wrong in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="draft_p_min"):
            EagleDraft(draft, p_min=wrong)
    with pytest.raises(ConfigError, match="beside a tree"):
        EagleDraft(draft, Tree(2, 2, 3), 0.5)
    asked = {"num_speculative_tokens": 3, "max_new_tokens": 4, "draft_p_min": 0.5}
    with pytest.raises(ConfigError, match="draft_sampling must be 'greedy'"):
        sb.generate(verifier, draft, [[5, 6]], temperature=1.0, draft_sampling="probabilistic", **asked)
    with pytest.raises(ConfigError, match="graphs not True"):
        sb.generate(verifier, draft, [[5, 6]], graphs=True, **asked)
