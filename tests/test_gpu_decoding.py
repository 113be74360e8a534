"""Decoding on CUDA, with recorded graphs and without; the same paths on the CPU, where nothing is recorded.

python -m pytest -m gpu
"""

from __future__ import annotations

import pytest
import torch
from planted import planted_pair
from proposers import prompts
from tiny import tiny_w4a16_verifier

import specbench as sb
from specbench.decode.lossless import compare
from specbench.decode.sampling import uniform
from specbench.decode.tree import Tree

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WAYS = {
    "chain": {},
    "batch": {"batch_size": 4},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "batch_size": 3},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "batch_size": 2},
    "log-probabilities": {"logprobs": 2, "batch_size": 2},
    "tree": {"tree": Tree(3, 3, 8), "batch_size": 3},
    "sampled tree": {"tree": Tree(3, 2, 6), "temperature": 1.0, "seed": 2},
    "adaptive": {"adaptive": True, "batch_size": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return planted_pair(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module", params=DEVICES)
def pair(request, folders):
    """A verifier and a draft that is often right, fp32."""
    opened = sb.open_pair(*folders)
    verifier = sb.load_verifier(opened, device=request.param)
    return verifier, sb.load_draft(opened, device=request.param, verifier=verifier)


def run(pair, **options):
    verifier, draft = pair
    return sb.generate(verifier, draft, prompts(7, seed=1), max_new_tokens=24, ignore_eos=True, **options)


def plain_of(way):
    return {name: value for name, value in WAYS[way].items() if name not in ("tree", "batch_size", "adaptive")}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graphs", [False, True])
def test_output_equals_the_verifiers_own(pair, way, graphs):
    expected = run(pair, num_speculative_tokens=0, graphs=False, **plain_of(way))
    found = run(pair, graphs=graphs, **WAYS[way])
    assert found.token_ids == expected.token_ids
    assert sum(map(sum, found.accepted_per_round)) > 0 or way == "adaptive"


def test_drawn_proposals_are_the_same_with_graphs_and_without(pair):
    options = {"temperature": 1.0, "seed": 3, "draft_sampling": "probabilistic", "batch_size": 3}
    eager, recorded = (run(pair, graphs=graphs, **options) for graphs in (False, True))
    assert eager.token_ids == recorded.token_ids and eager.accepted_per_round == recorded.accepted_per_round


def test_graphs_are_recorded_on_cuda_and_reused(pair):
    verifier, draft = pair
    stream = sb.stream(verifier, draft, prompts(3, seed=1), max_new_tokens=40, ignore_eos=True)
    rounds = sum(1 for update in stream if update.proposed)
    recorded = len(stream.run.graphs.recorded)
    assert recorded == 0 if verifier.device.type == "cpu" else 0 < recorded < rounds / 2


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_the_same_on_every_device(device):
    seeds, places = torch.tensor([1, 2, 2**62]), torch.arange(12).view(3, 4)
    here = uniform(seeds, places, 1)
    assert torch.equal(uniform(seeds.to(device), places.to(device), 1).cpu(), here)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_weights_in_bf16_differ_at_near_ties_at_most(tmp_path, tiny, device):
    folder = tiny_w4a16_verifier(tmp_path / "v", dtype="bfloat16")
    pair = sb.open_pair(folder, tiny["draft"])
    verifier = sb.load_verifier(pair, device=device)
    draft = sb.load_draft(pair, device=device, verifier=verifier)
    for prompt in prompts(3, seed=4):
        plain, spec = (sb.generate(verifier, draft, [prompt], num_speculative_tokens=k, max_new_tokens=20)[0] for k in (0, 3))
        assert compare(verifier, prompt, plain.token_ids, spec.token_ids).lossless
