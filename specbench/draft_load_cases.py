"""The second bug on real files: a draft whose own load settings an engine ignores.

What enters: a pair, a folder, policies, prompts. What leaves: a row per case and policy: what was loaded, or what stopped it, and the
acceptance that is left. It knows no outcome beforehand; every row is a real load of real files, which it writes below the folder.

Cases, each with a `draft_load_config` that says where the draft's weights are: a `.bin` draft beside a verifier that reads safetensors
only; a draft in a hub cache of its own (`download_dir`) while the common cache holds an older one; a `dummy` (random) verifier with a real
draft.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .failure_atlas import acceptance, agree, fingerprint
from .pair import Pair, open_pair
from .policies import Policy, get_policy

if TYPE_CHECKING:
    import pandas as pd

REPO, COMMIT = "specbench/bundled-draft", "0" * 40  # a repository that exists in the caches written here alone
POLICIES = ("vllm-0.30.0-mrv2", "vllm-0.31.0", "draft")


@dataclass(frozen=True, slots=True)
class Case:
    """name: of the case. pair: with its load configs. cache: the hub cache that everybody shares while it is loaded, or None."""

    name: str
    pair: Pair
    cache: Path | None = None


def draft_load_cases(
    pair: Pair,
    folder: str | Path,
    *,
    policies: Sequence[str | Policy] = POLICIES,
    prompts: Sequence[Any] | None = None,
    num_speculative_tokens: int = 3,
    max_new_tokens: int = 48,
    device: str = "auto",
) -> pd.DataFrame:
    """Load every case under every policy.

    Args:
        pair: a verifier and a draft in local folders.
        folder: where the cases' files are written.
        prompts: on which acceptance is measured, beside the real verifier; None measures none.

    Returns:
        case | policy | draft_load_config | used (the load config that the policy led to) | outcome ("the draft", "other weights", or the
        error's class) | detail | mean_acceptance_length (over rounds, bonus counted).
    """
    import pandas as pd

    from .errors import SpecbenchError
    from .load import load_draft
    from .load_settings import draft_load_config
    from .verifier import load_verifier

    verifier = load_verifier(pair, device=device)
    reference = fingerprint(load_draft(pair, device=device, verifier=verifier))
    rows = []
    for case in write_cases(pair, Path(folder)):
        for policy in map(get_policy, policies):
            used, tau, detail = draft_load_config(case.pair, policy), None, ""
            with offline(case.cache):
                try:
                    draft = load_draft(case.pair, policy, device=device, verifier=verifier)
                except SpecbenchError as error:
                    outcome, detail = type(error).__name__, str(error).splitlines()[0]
                else:
                    outcome = "the draft" if agree(reference, fingerprint(draft)) else "other weights"
                    if prompts is not None:
                        tau = acceptance(verifier, draft, prompts, num_speculative_tokens, max_new_tokens)
            rows.append((case.name, policy.name, str(case.pair.draft_load), str(used), outcome, detail, tau))
    columns = ["case", "policy", "draft_load_config", "used", "outcome", "detail", "mean_acceptance_length"]
    return pd.DataFrame(rows, columns=columns)


def write_cases(pair: Pair, folder: Path) -> list[Case]:
    """Write the files of all cases below `folder` (again, where they are there) and open them."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    verifier, source = pair.verifier.path, pair.draft.path
    tensors = {name: tensor for file in sorted(source.glob("*.safetensors")) for name, tensor in load_file(file).items()}

    pickled = _copied_config(source, folder / "draft-bin")
    torch.save(tensors, pickled / "pytorch_model.bin")
    own = _copied_config(source, _snapshot(folder / "own-cache"))
    save_file(tensors, own / "model.safetensors", metadata={"format": "pt"})
    older = _copied_config(source, _snapshot(folder / "common-cache"))
    save_file(_older(tensors), older / "model.safetensors", metadata={"format": "pt"})

    own_cache, common = {"download_dir": str(folder / "own-cache")}, folder / "common-cache"
    with offline(common):
        cached = open_pair(verifier, REPO, draft_load_config=own_cache)
    return [
        Case(
            ".bin draft",
            open_pair(verifier, pickled, load_config={"load_format": "safetensors"}, draft_load_config={"load_format": "auto"}),
        ),
        Case("own download_dir", cached, common),
        Case(
            "dummy verifier",
            open_pair(verifier, source, load_config={"load_format": "dummy"}, draft_load_config={"load_format": "safetensors"}),
        ),
    ]


@contextlib.contextmanager
def offline(cache: Path | None) -> Iterator[None]:
    """No hub, and `cache` as the cache that everybody shares; None changes nothing."""
    if cache is None:
        yield
        return
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE
    constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = True, str(cache)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE = before


def _snapshot(cache: Path) -> Path:
    """Where the hub's client keeps `REPO` in `cache`."""
    home = cache / f"models--{REPO.replace('/', '--')}"
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / "main").write_text(COMMIT)
    return home / "snapshots" / COMMIT


def _copied_config(source: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copyfile(source / "config.json", folder / "config.json")
    return folder


def _older(tensors: dict[str, Any]) -> dict[str, Any]:
    """The draft as it was before training moved it: its decoder layer's matrices with a tenth of their rows still at zero."""
    kept = {}
    for name, tensor in tensors.items():
        kept[name] = tensor.clone()
        if name.endswith("_proj.weight"):
            kept[name][::10] = 0
    return kept
