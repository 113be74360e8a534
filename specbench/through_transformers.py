"""Verifiers that transformers reads for us: GGUF files and bitsandbytes checkpoints as plain weights, and any folder as its own model.

What enters: a .gguf file, or a checkpoint folder. What leaves: a plain checkpoint folder, plain tensors by name, or a transformers model.
It does not know drafts; nothing that a checkpoint brings along is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .build_once import build_once, cache_folder
from .errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

METHODS = ("bitsandbytes",)  # quant_method values whose weights are expanded by transformers
HEAD_BYTES = 1 << 20  # of a GGUF, which together with its size and name stand for the file


def plain_gguf(gguf: Path, cache: Path | None = None) -> Path:
    """A plain bf16 checkpoint folder with the weights, config and tokenizer of a .gguf file, written once to the cache.

    Raises:
        ConfigError: transformers does not read this architecture, or a package that it needs is missing.
        CheckpointFileError: the cache cannot be written or is full.
    """
    with gguf.open("rb") as file:
        head = hashlib.sha256(file.read(HEAD_BYTES)).hexdigest()
    recipe = {"gguf": gguf.name, "bytes": gguf.stat().st_size, "sha256_of_head": head, "version": 1}
    folder = (cache_folder() if cache is None else cache) / f"{gguf.stem}-{head[:12]}"
    return build_once(folder, recipe, 5 * gguf.stat().st_size, lambda work: write_plain(gguf, work))


def write_plain(gguf: Path, work: Path) -> None:
    """Fill the folder `work` with a plain bf16 checkpoint of `gguf`: config.json, model.safetensors, tokenizer and chat template."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        where: Any = {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    except ImportError as error:
        raise ConfigError(f"{gguf.name}: transformers needs a package to read it ({error}); pip install gguf accelerate") from error
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{gguf.name}: transformers does not read it ({error})") from error
    vars(model.config).pop("quantization_config", None)  # of the GGUF: the weights are plain now
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    edit_json(work / "config.json", _plain_config)
    edit_json(work / "tokenizer_config.json", lambda config: _plain_tokenizer_config(config, model.config.max_position_embeddings))
    _check_tokenizer(work, tokenizer)


def _plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers 5 leaves out and earlier releases read, and without what the GGUF's metadata left behind."""
    config.pop("_model_name_or_path", None)
    config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")  # 1e-05, which went through fp32
    return config | {"rope_theta": config["rope_parameters"]["rope_theta"], "torch_dtype": config["dtype"]}


def _plain_tokenizer_config(config: dict[str, Any], model_max_length: int) -> dict[str, Any]:
    for key in ("backend", "is_local", "local_files_only"):
        config.pop(key, None)
    # The name that transformers 5 writes (TokenizersBackend) is unknown to earlier releases, and to engines that run them.
    return config | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model_max_length}


def _check_tokenizer(folder: Path, original: Any) -> None:
    """The saved tokenizer must encode as the one that the GGUF describes."""
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder)
    texts = ["Grüße, 世界!  def f(x):\n\treturn x**2", "<|im_start|>user\nIt's 12.5 %<|im_end|>\n", ""]
    same = [saved(t)["input_ids"] for t in texts] == [original(t)["input_ids"] for t in texts]
    if same and original.chat_template:
        messages = [{"role": "user", "content": texts[0]}]
        rendered = [t.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) for t in (saved, original)]
        same = rendered[0] == rendered[1]
    if not same:
        raise CheckpointError(
            f"the tokenizer written to {folder} does not encode as the one in the GGUF; try another release of transformers"
        )


def edit_json(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Rewrite a JSON object."""
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def expanded(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Plain weights, by checkpoint name, of a folder that transformers' quantizers read (bitsandbytes int8, nf4, fp4).

    Raises:
        ConfigError: a package that the quantizer needs is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu", trust_remote_code=False)
    except ImportError as error:
        raise ConfigError(f"{folder}: transformers needs a package to read it ({error}); pip install 'specbench[quantizers]'") from error
    with torch.no_grad():
        return {name: tensor.to(dtype) for name, tensor in model.dequantize().state_dict().items()}


def causal_model(folder: Path, where: str, device: torch.device, dtype: torch.dtype | None, extra: Callable[[str], bool]) -> Any:
    """The transformers causal LM of a checkpoint folder, every parameter from its files, with transformers' own quantizers.

    Args:
        dtype: of plain weights; None is what config.json says.
        extra: stored tensors that need no place in the model.

    Raises:
        ConfigError: transformers does not know the architecture, or a package that it needs is missing.
        CheckpointError: tensors missing, unexpected or of another shape.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", device_map={"": device}, trust_remote_code=False, output_loading_info=True
        )
    except ImportError as error:
        raise ConfigError(f"{where}: transformers needs a package to read it ({error}); pip install 'specbench[quantizers]'") from error
    except (ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{where}: transformers does not load it ({error})") from error
    model, found = loaded
    unexpected = [name for name in found["unexpected_keys"] if not extra(name)]
    faults = {"lacks": found["missing_keys"], "has unexpected": unexpected, "has another shape of": found["mismatched_keys"]}
    said = [f"{what} {', '.join(sorted(map(str, names))[:5])} ({len(names)})" for what, names in faults.items() if names]
    if said:
        raise CheckpointError(f"{where}: beside {type(model).__name__} of transformers, the file {'; '.join(said)}")
    return model
