"""The mean of finished drafts: what several runs from one beginning learned, without the chance of each.

What enters: folders of drafts with one vocabulary and one shape. What leaves: a draft folder with the mean of their weights and a manifest
that names them. It does not know text or training. (Model soups, Wortsman et al., arXiv 2203.05482.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def average(folders: list[Path], out: Path) -> None:
    """Write the mean, in fp32 and rounded once, of the weights in `folders` into `out`.

    Raises:
        SystemExit: vocabularies, shapes or configs differ.
    """
    drafts = [load_file(folder / "model.safetensors") for folder in folders]
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    first = drafts[0]
    for folder, other, config in zip(folders[1:], drafts[1:], configs[1:], strict=True):
        if config != configs[0]:
            raise SystemExit(f"{folder} has another config.json than {folders[0]}")
        if any(not torch.equal(first[name], other[name]) for name in ("d2t", "t2d")):
            raise SystemExit(f"{folder} has another vocabulary than {folders[0]}")
    mean = {
        name: tensor if name in ("d2t", "t2d") else torch.stack([d[name].float() for d in drafts]).mean(0).to(tensor.dtype)
        for name, tensor in first.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(mean, out / "model.safetensors.partial", metadata={"format": "pt"})
    os.replace(out / "model.safetensors.partial", out / "model.safetensors")
    shutil.copyfile(folders[0] / "config.json", out / "config.json")
    told, begun = [], []
    for folder in folders:
        weights, manifest = folder / "model.safetensors", folder / "training.json"
        known = json.loads(manifest.read_text()) if manifest.exists() else {}
        begun.append(known.get("begin_from"))
        told.append({"model_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(), **known})
    common = {"begin_from": begun[0]} if all(other == begun[0] for other in begun) else {}  # told once
    mean_of = [{name: value for name, value in one.items() if name not in common} for one in told]
    (out / "training.json").write_text(json.dumps({"mean_of": mean_of, **common}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("drafts", type=Path, nargs="+")
    given = parser.parse_args()
    average(given.drafts, given.out)
