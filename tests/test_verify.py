"""What stands of a proposal: chains that are compared or drawn, trees, limits; and the shape of trees that a draft grows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import settings_of
from torch import Tensor

import specbench as sb
from specbench.decode import verify as module
from specbench.decode.draft import EagleDraft, Proposal
from specbench.decode.request import Sampling
from specbench.decode.sampling import ACCEPT, CHOOSE, Settings, draw, probabilities
from specbench.decode.tree import Tree, ancestry, spread
from specbench.decode.verify import Accepted, Scored, _accept_drawn, _accept_tree, accept
from specbench.errors import ConfigError

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]  # B073


def chain(tokens: list[list[int]], q: Tensor | None = None) -> Proposal:
    """q: [b, m, vocab], of all the verifier's ids."""
    targets = None if q is None else torch.arange(q.shape[2])
    return Proposal(torch.tensor(tokens), len(tokens[0]), drawn_from=q, targets=targets)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()[None]


def given_numbers(monkeypatch: pytest.MonkeyPatch, accepts: Tensor, chooses: Tensor) -> None:
    """Acceptance and choice read these numbers, [b, m] and [b], in place of hashed ones."""
    tables = {ACCEPT: accepts.double(), CHOOSE: chooses.double()}
    monkeypatch.setattr(module, "uniform", lambda seed, place, purpose: tables[purpose].expand(place.shape))


# --- drawn chains, enumerated


def output_of_one(p: Tensor, q: Tensor, rule: Callable[..., Accepted], proposes: Tensor) -> tuple[Tensor, Tensor]:
    """Distribution of the first output token, and the chance that each token is accepted where it is proposed.

    Exact: for each proposal x, with chance proposes[x], acceptance flips at p / q and the choice at cumulative weights. The unit square of
    the two random numbers is cut there, one row of a batch looks into each piece, and pieces weigh as much as they are large.

    Args:
        p, q: float64 [vocab].
    """
    vocab = len(p)
    output, accepted = torch.zeros(vocab, dtype=torch.float64), torch.zeros(vocab, dtype=torch.float64)
    residual = (p - q).clamp(min=0)
    for x in range(vocab):
        if proposes[x] == 0:
            continue
        cuts = {0.0, 1.0, min(1.0, float(p[x] / q[x])) if q[x] else 1.0}
        cuts |= {float(p[x]), min(1.0, vocab * float(p[x]))}  # where the wrong rules below flip
        choices = {0.0, 1.0}
        for weights in (p, residual, p.new_ones(vocab)):
            if weights.sum() > 0:
                choices |= set((weights.cumsum(0) / weights.sum()).tolist())
        a, c = (torch.tensor(sorted(v), dtype=torch.float64) for v in (cuts, choices))
        a, c = a[torch.cat((a.diff() > 1e-14, a.new_ones(1).bool()))], c[torch.cat((c.diff() > 1e-14, c.new_ones(1).bool()))]
        middles = [((v[1:] + v[:-1]) / 2, v.diff()) for v in (a, c)]
        rows = list(product(range(len(middles[0][0])), range(len(middles[1][0]))))
        first = torch.tensor([[middles[0][0][i]] for i, _ in rows], dtype=torch.float64)
        second = torch.tensor([middles[1][0][j] for _, j in rows], dtype=torch.float64)
        size = torch.tensor([middles[0][1][i] * middles[1][1][j] for i, j in rows], dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            given_numbers(patch, first, second)
            b = len(rows)
            both = p.expand(b, 2, -1)
            found = rule(both, chain([[x]] * b, q.expand(b, 1, -1)), settings_of(*[Sampling(1.0)] * b, vocab=vocab), torch.ones(b).long())
        output.index_add_(0, found.tokens[:, 0], proposes[x] * size)
        accepted[x] += float((size * found.count).sum())
    return output, accepted


def drawn(p: Tensor, proposal: Proposal, settings: Settings, lengths: Tensor, allowed: int = 9) -> Accepted:
    return _accept_drawn(p, proposal, settings, lengths, torch.full_like(lengths, allowed))


distributions = st.lists(st.integers(0, 9), min_size=2, max_size=6).filter(any)


@given(distributions, distributions)
def test_output_of_a_drawn_proposal_follows_p_exactly(left: list[int], right: list[int]) -> None:
    size = min(len(left), len(right))
    p, q = (torch.tensor(v[:size], dtype=torch.float64) for v in (left, right))
    if not p.any() or not q.any():
        return
    p, q = p / p.sum(), q / q.sum()
    output, accepted = output_of_one(p, q, drawn, q)
    assert torch.allclose(output, p, atol=1e-12, rtol=0)
    assert torch.allclose(accepted[q > 0], (p / q).clamp(max=1)[q > 0], atol=1e-12, rtol=0)


def test_b073_a_draft_that_samples() -> None:
    p, q = torch.tensor(P).double(), torch.tensor(Q).double()
    output, accepted = output_of_one(p, q, drawn, q)
    assert float((accepted * q).sum()) == pytest.approx(0.70)
    assert output.tolist() == pytest.approx(P, abs=1e-7)


def test_b073_a_draft_that_takes_its_best() -> None:
    """Whether one-hot q goes through the ratio or the token is compared with the verifier's choice, 0.3 are accepted."""
    p, q = torch.tensor(P).double(), torch.tensor([0.0, 1.0, 0.0]).double()
    output, accepted = output_of_one(p, q, drawn, q)
    assert accepted[1] == pytest.approx(0.30) and output.tolist() == pytest.approx(P, abs=1e-7)
    rest = (p - q).clamp(min=0)
    assert (rest / rest.sum()).tolist() == pytest.approx([5 / 7, 0, 2 / 7])
    b = 20_000
    scored = Scored(p.log().float().expand(b, 2, -1), None, causal(2))
    settings = settings_of(*[Sampling(1.0)] * b, vocab=3)
    found = accept(scored, chain([[1]] * b), settings, torch.ones(b).long(), torch.full((b,), 9), True)
    assert float(found.count.float().mean()) == pytest.approx(0.30, abs=0.015)
    assert torch.bincount(found.tokens[:, 0], minlength=3).div(b).tolist() == pytest.approx(P, abs=0.015)
    after = found.tokens[found.count == 0, 0]
    assert torch.bincount(after, minlength=3).div(len(after)).tolist() == pytest.approx([5 / 7, 0, 2 / 7], abs=0.02)


def test_b073_the_wrong_mix_is_caught() -> None:
    """The draft's best token held to the draft's whole distribution: the enumeration above sees [.4, .6, 0]."""
    p, q = torch.tensor(P).double(), torch.tensor(Q).double()
    output, _ = output_of_one(p, q, drawn, torch.tensor([0.0, 1.0, 0.0]).double())
    assert output.tolist() == pytest.approx([0.4, 0.6, 0.0], abs=1e-7)
    assert float((output - p).abs().sum() / 2) == pytest.approx(0.30)


@pytest.mark.parametrize("wrong", ["residual is p", "accepts where u < p", "q of a later place"])
def test_wrong_rules_are_caught_by_the_enumeration(wrong: str) -> None:
    p, q = torch.tensor(P).double(), torch.tensor(Q).double()

    def rule(both: Tensor, proposal: Proposal, settings: Settings, lengths: Tensor) -> Accepted:
        right = drawn(both, proposal, settings, lengths)
        if wrong == "q of a later place":
            return drawn(both, chain(proposal.tokens.tolist(), torch.full_like(proposal.drawn_from, 1 / 3)), settings, lengths)
        if wrong == "accepts where u < p":
            numbers = module.uniform(settings.seed, lengths[:, None], ACCEPT)
            count = (numbers < both[:, 0].gather(1, proposal.tokens)).sum(1)
        else:
            count = right.count
        other = draw(both[:, 0], module.uniform(settings.seed, lengths, CHOOSE))
        return Accepted(torch.where(count[:, None] > 0, proposal.tokens, other[:, None]), count)

    output, _ = output_of_one(p, q, rule, q)
    assert float((output - p).abs().sum() / 2) > 0.01


@given(st.lists(distributions, min_size=4, max_size=4), st.integers(0, 2))
def test_chains_follow_p_at_every_place_and_stop_where_they_must(rows: list[list[int]], allowed: int) -> None:
    """Two proposals: enumerated over proposals and a grid of numbers that lies between all steps of the rule."""
    size = min(map(len, rows))
    p1, q1, p2, q2 = (torch.tensor(v[:size]).double() + 0.25 for v in rows)
    p1, q1, p2, q2 = (v / v.sum() for v in (p1, q1, p2, q2))
    p3 = p1.flip(0)
    for x, y in product(range(size), range(size)):
        bounds = [min(1.0, float(p1[x] / q1[x])), min(1.0, float(p2[y] / q2[y]))]
        inside = [[b / 2 for b in bounds], [(b + 1) / 2 for b in bounds]]  # accepts, rejects (if anything does)
        cases = [(i, j) for i in (0, 1) for j in (0, 1) if (not i or bounds[0] < 1) and (not j or bounds[1] < 1)]
        fine = (torch.arange(7).double() + 0.5) / 7
        for i, j in cases:
            expected = min(0 if i else 1 if j else 2, allowed)
            free = expected == allowed
            p, q = ((p1, q1), (p2, q2), (p3, torch.zeros_like(p3)))[expected]
            rest = p if free else (p - q).clamp(min=0)
            with pytest.MonkeyPatch.context() as patch:
                given_numbers(patch, torch.tensor([[inside[i][0], inside[j][1]]]).expand(7, -1), fine)
                both = torch.stack((p1, p2, p3)).expand(7, -1, -1)
                proposal = chain([[x, y]] * 7, torch.stack((q1, q2)).expand(7, -1, -1))
                found = drawn(both, proposal, settings_of(*[Sampling(1.0)] * 7, vocab=size), torch.ones(7).long(), allowed)
            assert found.count.tolist() == [expected] * 7
            assert found.tokens[:, :expected].tolist() == [[x, y][:expected]] * 7
            assert found.tokens[:, expected].tolist() == draw(rest.expand(7, -1), fine).tolist()


def test_a_draft_vocabulary_is_spread_over_the_verifiers_ids() -> None:
    """Draft ids 0, 1 are the verifier's 3 and 1: q is theirs there, and 0 elsewhere."""
    q = torch.tensor([[[0.75, 0.25]]])
    proposal = Proposal(torch.tensor([[3]]), 1, drawn_from=q, targets=torch.tensor([3, 1]))
    assert module.expand(proposal, 5).tolist() == [[[0, 0.25, 0, 0.75, 0]]]


@given(st.integers(0, 2**31), st.integers(1, 5))
def test_rows_are_accepted_each_by_its_own_numbers(seed: int, batch: int) -> None:
    """A batch of drawn chains equals its rows alone."""
    g = torch.Generator().manual_seed(seed)
    scores, drafts = (torch.randn(batch, n, 6, generator=g) for n in (4, 3))
    samplings = [Sampling(float(t)) for t in torch.tensor([0.0, 0.5, 1.0, 2.0])[torch.randint(4, (batch,), generator=g)]]
    settings = settings_of(*samplings, vocab=6)
    q = probabilities(drafts, settings)
    tokens = draw(q, torch.rand(batch, 3, generator=g, dtype=torch.float64))
    lengths, allowed = (torch.randint(m, (batch,), generator=g) for m in (50, 5))
    proposal = Proposal(tokens, 3, drawn_from=q, targets=torch.arange(6))
    together = accept(Scored(scores, None, causal(4)), proposal, settings, lengths, allowed, True)
    for row in range(batch):
        one = slice(row, row + 1)
        own = Proposal(tokens[one], 3, drawn_from=q[one], targets=torch.arange(6))
        alone = accept(Scored(scores[one], None, causal(4)), own, settings.first(1, row), lengths[one], allowed[one], True)
        n = int(alone.count[0])
        assert int(together.count[row]) == n <= int(allowed[row])
        assert together.tokens[row, : n + 1].tolist() == alone.tokens[0, : n + 1].tolist()
        if samplings[row].temperature == 0:
            assert alone.tokens[0, n] == scores[row, n].argmax() and (tokens[row, :n] == scores[row, :n].argmax(-1)).all()


# --- chains that are compared


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=4))
def test_greedy_chains_are_accepted_up_to_the_first_difference(rows: list[tuple[list[int], int]]) -> None:
    """The verifier's choice is 1 at every place."""
    scores = torch.tensor([0.0, 2.0, 1.0]).expand(len(rows), 5, -1)
    lengths, allowed = torch.full((len(rows),), 3), torch.tensor([limit for _, limit in rows])
    settings = settings_of(*[Sampling()] * len(rows), vocab=3)
    found = accept(Scored(scores, None, causal(5)), chain([tokens for tokens, _ in rows]), settings, lengths, allowed, False)
    for row, (tokens, limit) in enumerate(rows):
        matching = next((i for i, t in enumerate(tokens) if t != 1), 4)
        assert int(found.count[row]) == min(matching, limit)
    assert found.tokens.eq(1).all()


def test_b075_temperature_0_compares_and_never_takes_a_ratio() -> None:
    """p(0) / q(0) is above 1, and yet token 1 is the verifier's; whether the draft proposes its best or draws."""
    p, q = torch.tensor([0.30, 0.50, 0.10, 0.05, 0.05]), torch.tensor([0.22, 0.195, 0.195, 0.195, 0.195])
    b = 1000
    scored = Scored(p.log().expand(b, 2, -1), None, causal(2))
    settings = settings_of(*[Sampling()] * b, vocab=5)
    lengths, allowed = torch.arange(b), torch.full((b,), 9)
    for proposal, sampled in ((chain([[0]] * b), False), (chain([[0]] * b), True), (chain([[0]] * b, q.expand(b, 1, -1)), True)):
        found = accept(scored, proposal, settings, lengths, allowed, sampled)
        assert found.count.eq(0).all() and found.tokens[:, 0].eq(1).all()


@pytest.mark.parametrize("mode", ["greedy", "probabilistic"])
def test_b076_temperature_reaches_the_speculative_path(mode: str) -> None:
    p, b = torch.tensor([0.36, 0.33, 0.31]), 300
    counts = {}
    for temperature in (1.0, 0.1):
        settings = settings_of(*[Sampling(temperature)] * b, vocab=3)
        scored = Scored(p.log().expand(b, 3, -1), None, causal(3))
        q = probabilities(torch.tensor([0.0, 0.5, 0.2]).expand(b, 2, -1), settings)
        tokens = draw(q, torch.rand(b, 2, dtype=torch.float64)) if mode == "probabilistic" else torch.ones(b, 2, dtype=torch.int64)
        proposal = chain(tokens.tolist(), q if mode == "probabilistic" else None)
        found = accept(scored, proposal, settings, torch.ones(b).long(), torch.full((b,), 9), True)
        counts[temperature] = torch.bincount(found.tokens[:, 0], minlength=3)
        assert 0 < int((found.count > 0).sum()) < b
    assert (counts[1.0] > 0).all()
    expected = b * p
    assert float(((counts[1.0] - expected) ** 2 / expected).sum()) < 13.8  # chi-square, 2 degrees, .001
    assert counts[0.1].tolist() != counts[1.0].tolist() and counts[0.1][0] > counts[1.0][0]


# --- trees


def random_tree(g: torch.Generator, m: int, vocab: int) -> tuple[list[int], list[int], list[int]]:
    """Parents, depths and tokens of m nodes below a root, siblings distinct."""
    parents: list[int] = []
    depths: list[int] = []
    tokens: list[int] = []
    while len(parents) < m:
        parent = int(torch.randint(len(parents) + 1, (), generator=g))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab) if t not in taken]
        if free:
            parents.append(parent)
            depths.append(1 if parent == 0 else depths[parent - 1] + 1)
            tokens.append(free[int(torch.randint(len(free), (), generator=g))])
    return parents, depths, tokens


def walk(parents: list[int], tokens: list[int], chosen: list[int], allowed: int) -> tuple[list[int], list[int]]:
    """Rows passed and tokens gained, followed one node at a time from the root."""
    node, rows, gained = 0, [0], [chosen[0]]
    while len(rows) <= allowed:
        child = next((i + 1 for i, p in enumerate(parents) if p == node and tokens[i] == chosen[node]), None)
        if child is None:
            break
        node = child
        rows.append(node)
        gained.append(chosen[node])
    return rows, gained


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 4), st.integers(2, 4))
def test_trees_are_followed_like_a_walk_from_node_to_node(seed: int, m: int, batch: int, vocab: int) -> None:
    g = torch.Generator().manual_seed(seed)
    trees = [random_tree(g, m, vocab) for _ in range(batch)]
    parents, depths, tokens = (torch.tensor([tree[i] for tree in trees]) for i in range(3))
    longest = int(depths.max())
    chosen = torch.randint(vocab, (batch, m + 1), generator=g)
    allowed = torch.randint(longest + 1, (batch,), generator=g)
    found = _accept_tree(chosen, Proposal(tokens, longest, parents, depths), ancestry(parents, longest), allowed)
    assert found.path is not None and found.path.shape == found.tokens.shape == (batch, longest + 1)
    assert int(found.path.min()) >= 0
    for row in range(batch):
        rows, gained = walk(trees[row][0], trees[row][2], chosen[row].tolist(), int(allowed[row]))
        n = int(found.count[row])
        assert found.path[row, : n + 1].tolist() == rows and found.tokens[row, : n + 1].tolist() == gained


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 3))
def test_ancestry_and_visibility_equal_a_walk_upwards(seed: int, m: int, batch: int) -> None:
    g = torch.Generator().manual_seed(seed)
    trees = [random_tree(g, m, 9) for _ in range(batch)]
    parents, depths = (torch.tensor([tree[i] for tree in trees]) for i in range(2))
    seen = ancestry(parents, int(depths.max()))
    start = torch.randint(5, (batch,), generator=g)
    limit = int(start.max()) + m + 1
    all_depths = torch.cat((torch.zeros(batch, 1).long(), depths), 1)
    visible, positions = spread(seen, all_depths, start, limit)
    for row in range(batch):
        s = int(start[row])
        for node in range(m + 1):
            way, here = {node}, node
            while here:
                here = trees[row][0][here - 1]
                way.add(here)
            assert seen[row, node].nonzero()[:, 0].tolist() == sorted(way)
            assert visible[row, node].nonzero()[:, 0].tolist() == [*range(s), *(s + w for w in sorted(way))]
        assert positions[row, : s + m + 1].tolist() == [*range(s), *(s + d for d in all_depths[row].tolist())]


@pytest.fixture(scope="module")
def draft(tiny):
    verifier = sb.load_verifier(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")
    return sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu", verifier=verifier)


def prepared(draft, tree: Tree | None, lengths: list[int], seed: int = 0) -> EagleDraft:
    """A proposer that has read random pairs of these lengths."""
    proposer = EagleDraft(draft, tree)
    proposer.begin(len(lengths), max(lengths) + 8)
    for row, n in enumerate(lengths):
        g = torch.Generator().manual_seed(seed + row)
        tokens, aux = torch.randint(0, 256, (1, n - 1), generator=g), torch.randn(1, n - 1, proposer.width, generator=g)
        proposer.extend(tokens, aux, torch.arange(n - 1)[None], torch.tensor([n - 2]), row, n - 1, True)
    return proposer


@torch.inference_mode()
def log_shares(draft, n: int, path: list[int], seed: int) -> Tensor:
    """Log-probabilities over the draft's ids after `path` (draft ids), each step in one fresh pass over everything."""
    g = torch.Generator().manual_seed(seed)
    tokens, aux = torch.randint(0, 256, (1, n - 1), generator=g), torch.randn(1, n - 1, draft.config.hidden_size * 3, generator=g)
    hidden = draft.fuse(aux)
    for token in [*path, None]:
        length = tokens.shape[1]
        states = draft(tokens, hidden, draft.step(torch.arange(length)[None], length), draft.new_cache(length))
        if token is None:
            return draft.logits(states[:, -1:])[0, 0].log_softmax(-1)
        tokens = torch.cat((tokens, draft.to_target(torch.tensor([[token]]))), 1)
        hidden = torch.cat((hidden, states[:, -1:]), 1)
    raise AssertionError


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 2, 6), (4, 3, 8), (3, 4, 36), (5, 1, 5)])
def test_a_tree_holds_the_most_probable_paths(draft, shape: tuple[int, int, int]) -> None:
    """Against a recursion without a cache: expand the best top_k nodes of each level, and keep the best of all."""
    tree, lengths = Tree(*shape), [7, 2, 12]
    proposer = prepared(draft, tree, lengths, seed=11)
    found = proposer.propose(0, torch.tensor(lengths), 12, None)
    back = {int(t): i for i, t in enumerate(draft.to_target(torch.arange(draft.config.draft_vocab_size)))}
    for row, n in enumerate(lengths):
        frontier: list[tuple[float, list[int]]] = [(0.0, [])]
        candidates: list[tuple[float, list[int]]] = []
        for _ in range(tree.depth):
            level = []
            for score, path in frontier:
                best = log_shares(draft, n, path, 11 + row).topk(tree.top_k)
                level += [(score + float(v), [*path, int(i)]) for v, i in zip(best.values, best.indices, strict=True)]
            candidates += level
            frontier = sorted(level, key=lambda c: -c[0])[: tree.top_k]
        expected = sorted(candidates, key=lambda c: -c[0])[: tree.nodes]
        parents, depths = found.parents[row].tolist(), found.depths[row].tolist()
        tokens = [back[t] for t in found.tokens[row].tolist()]
        assert all(p <= i for i, p in enumerate(parents)), "parents come first"
        assert depths == [1 if p == 0 else depths[p - 1] + 1 for p in parents] and max(depths) <= tree.depth
        assert len(set(zip(parents, tokens, strict=True))) == tree.nodes, "siblings differ"
        paths: list[list[int]] = []
        for parent, token in zip(parents, tokens, strict=True):
            paths.append([*(paths[parent - 1] if parent else []), token])
        assert sorted(paths) == sorted(path for _, path in expected)


@torch.inference_mode()
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_chain_is_the_tree_of_top_k_1(draft, depth: int) -> None:
    lengths = [9, 3]
    trees = prepared(draft, Tree(depth, 1, depth), lengths).propose(depth, torch.tensor(lengths), 9, None)
    chains = prepared(draft, None, lengths).propose(depth, torch.tensor(lengths), 9, None)
    assert torch.equal(trees.tokens, chains.tokens) and trees.longest == chains.longest == depth
    assert trees.parents.tolist() == [list(range(depth))] * 2 and trees.depths.tolist() == [list(range(1, depth + 1))] * 2


@torch.inference_mode()
def test_growing_leaves_what_was_committed_as_it_was(draft) -> None:
    """Twice the same tree: fed-back nodes lie beyond the committed pairs, and nobody sees them later."""
    lengths = torch.tensor([9, 4])
    proposer = prepared(draft, Tree(4, 3, 9), lengths.tolist())
    before = [layer.kv.clone() for layer in proposer.cache.layers]
    first = proposer.propose(0, lengths, 9, None)
    for row, n in enumerate(lengths.tolist()):
        for kept, layer in zip(before, proposer.cache.layers, strict=True):
            assert torch.equal(kept[row, :, : n - 1], layer.kv[row, :, : n - 1])
    for layer in proposer.cache.layers:
        for row, n in enumerate(lengths.tolist()):
            layer.kv[row, :, n - 1 :] = 1e6
    again = proposer.propose(0, lengths, 9, None)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.parents, again.parents)


@pytest.mark.parametrize("shape", [(0, 1, 1), (2, 0, 2), (3, 2, 2), (2, 2, 7), (1, 4, 5)])
def test_shapes_that_no_tree_has_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"^tree "):
        Tree(*shape)


def test_a_tree_wider_than_the_drafts_vocabulary_is_refused(draft) -> None:
    with pytest.raises(ConfigError, match="top_k 65; the draft's vocabulary has 64"):
        EagleDraft(draft, Tree(1, 65, 65)).begin(1, 8)


def test_a_draft_that_computes_nonsense_still_grows_a_tree(draft, tiny) -> None:
    broken = sb.load_draft(sb.open_pair(tiny["verifier"], tiny["draft"]), device="cpu")
    broken.fc.weight.fill_(float("nan"))
    with torch.inference_mode():
        found = prepared(broken, Tree(3, 3, 9), [5]).propose(0, torch.tensor([5]), 5, None)
    tokens, parents = found.tokens[0].tolist(), found.parents[0].tolist()
    assert len(set(zip(parents, tokens, strict=True))) == 9 and all(0 <= t < 256 for t in tokens)
    assert all(p <= i for i, p in enumerate(parents))
