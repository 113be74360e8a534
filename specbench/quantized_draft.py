"""A quantized copy of a draft, to stand beside verifiers of any format, or to propose faster.

What enters: a pair and a folder. What leaves: the pair with the copy in the draft's place. It does not know acceptance; scales are searched
for the least squared error of the weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CheckpointFileError, ConfigError
from .pair import Pair, open_pair

if TYPE_CHECKING:
    from torch import Tensor


def quantized_copy(pair: Pair, folder: str | Path, name: str = "w4a16", edges: bool = False) -> Pair:
    """Write `pair`'s draft with its decoder layers quantized (compressed-tensors pack-quantized, symmetric) and open it.

    A copy that is already there is written again.

    Args:
        name: "w4a16" in groups of 64 under searched scales, or "w8a16" with a scale a row.
        edges: the same for `fc` and `lm_head`, which stay plain otherwise. What a draft proposes never changes the output: fewer bits cost
            some acceptance and fewer bytes a step.

    Raises:
        CheckpointFileError: the draft's weights are not safetensors.
        ConfigError: another name.
    """
    from safetensors.torch import load_file, save_file

    from .plan import resolve
    from .quant.compress import SCHEMES, compress
    from .quant.quantize import config_section, int4, pack, search_scales

    if name not in ("w4a16", "w8a16"):
        raise ConfigError(f"a draft is copied as w4a16 or w8a16, not as {name!r}")

    source, folder = pair.draft.path, Path(folder)
    files = sorted({info.file for info in pair.draft.tensors.values()})
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise CheckpointFileError(f"draft {pair.draft.name} is read from {[f.name for f in files]}; a copy is made of safetensors files")
    known = resolve(pair).dialect.tensors
    chosen = {i.name for n, i in known.items() if n.startswith("layers.") and n.endswith("_proj.weight")}
    chosen |= {known[n].name for n in ("fc.weight", "lm_head.weight") if edges and n in known}
    scheme = int4(64) if name == "w4a16" else SCHEMES[name]
    tensors: dict[str, Tensor] = {}
    for key, tensor in (item for file in files for item in load_file(file).items()):
        if key not in chosen:
            tensors[key] = tensor
            continue
        four = name == "w4a16"
        packed = pack(tensor, search_scales(tensor, scheme.weights), scheme.weights) if four else compress(tensor, scheme)
        tensors |= {key.removesuffix("weight") + leaf: stored for leaf, stored in packed.items()}
    work = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {
        "quantization_config": config_section(scheme, [] if edges else ["lm_head", "fc"])
    }
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    work.rename(folder)
    return open_pair(pair.verifier.path, folder)
