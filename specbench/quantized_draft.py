"""A 4-bit copy of a draft, to stand beside verifiers of any format.

What enters: a pair and a folder. What leaves: the pair with the copy in the draft's place. It does not know acceptance; scales are searched
for the least squared error of the weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointFileError
from .pair import Pair, open_pair

if TYPE_CHECKING:
    from torch import Tensor


def quantized_copy(pair: Pair, folder: str | Path, group_size: int = 64) -> Pair:
    """Write `pair`'s draft with its decoder layers in 4 bits (compressed-tensors pack-quantized, symmetric groups) and open it.

    `fc` and `lm_head` stay plain. A copy that is already there is written again.

    Raises:
        CheckpointFileError: the draft's weights are not safetensors.
    """
    from safetensors.torch import load_file, save_file

    from .plan import resolve
    from .quant.quantize import config_section, int4, pack, search_scales

    source, folder = pair.draft.path, Path(folder)
    files = sorted({info.file for info in pair.draft.tensors.values()})
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointFileError(f"draft {pair.draft.name} is read from {[f.name for f in files]}; a copy is made of safetensors files")
    projections = {i.name for n, i in resolve(pair).dialect.tensors.items() if n.startswith("layers.") and n.endswith("_proj.weight")}
    scheme = int4(group_size)
    tensors: dict[str, Tensor] = {}
    for name, tensor in (item for file in files for item in load_file(file).items()):
        if name in projections:
            packed = pack(tensor, search_scales(tensor, scheme.weights), scheme.weights)
            tensors |= {name.removesuffix("weight") + leaf: stored for leaf, stored in packed.items()}
        else:
            tensors[name] = tensor
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": config_section(scheme, ignore=["lm_head", "fc"])}
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    return open_pair(pair.verifier.path, folder)
