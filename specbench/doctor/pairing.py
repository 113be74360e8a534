"""What the two sides say about one another: tokenizers, the verifier that a draft was trained for, quantization files, caches.

What enters: a subject. What leaves: findings. Tokenizers are compared only where their files lie on this machine already.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoint.families import look
from ..checkpoint.files import read_json
from ..errors import CheckpointFileError
from ..pair import Checkpoint, text_part
from .findings import Affected, Finding
from .subject import SIDES, Subject, finding

TOKENIZER = "tokenizer.json"
SHOWN = 3


def pairing_findings(subject: Subject) -> Iterator[Finding]:
    yield from _another_verifier(subject)
    for side in SIDES:
        yield from _empty_quantization(side, subject.side(side))
    yield from _cache(subject.pair.verifier)
    if subject.dtype != "auto":
        sentence = "the verifier's config names no dtype; engines take that of its tensors or their default, specbench asks for dtype="
        yield finding("dtype-absent", sentence, {"verifier config.json: dtype": "absent"})
    yield from _tied(subject)
    yield from _mask(subject)
    yield from _tokenizers(subject)


def _another_verifier(subject: Subject) -> Iterator[Finding]:
    draft, verifier = subject.pair.draft.config, subject.pair.verifier.config
    meant, ours = look(draft, "speculators_config.verifier.architectures").value, verifier.get("architectures")
    if isinstance(meant, list) and isinstance(ours, list) and meant and ours and not set(map(str, meant)) & set(map(str, ours)):
        said = {"draft config.json: speculators_config.verifier.architectures": meant, "verifier config.json: architectures": ours}
        yield finding("another-verifier", f"the draft was made for a {meant[0]}; the verifier is a {ours[0]}", said)
    kind, own = draft.get("target_model_type"), text_part(verifier).get("model_type")
    if isinstance(kind, str) and isinstance(own, str) and kind not in (own, verifier.get("model_type")):
        types = {"draft config.json: target_model_type": kind, "verifier config.json: model_type": own}
        yield finding("another-verifier", f"the draft was made for a verifier of type {kind}; this one is {own}", types, severity="info")


def _empty_quantization(side: str, checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.quantization is not None:
        return
    if checkpoint.config.get("quantization_config") == {}:
        yield finding(
            "quantization-empty", f"the {side}'s quantization_config is empty: plain", {f"{side} config.json: quantization_config": "{}"}
        )
    if (checkpoint.path / "hf_quant_config.json").is_file():
        nested = read_json(checkpoint.path / "hf_quant_config.json").get("quantization")
        sentence = f"the {side} ships hf_quant_config.json, which names no algorithm: plain"
        yield finding("quantization-empty", sentence, {f"{side} hf_quant_config.json: quantization": nested})


def _cache(verifier: Checkpoint) -> Iterator[Finding]:
    section = verifier.quantization or {}
    found = next((key for key in ("kv_cache_scheme", "kv_cache_quant_algo") if section.get(key)), None)
    if found:
        sentence = "the verifier's key/value cache is quantized; the draft's own keeps the dtype that it computes in"
        yield finding("kv-cache-quantized", sentence, {f"verifier {verifier.quantization_source}.{found}": section[found]})


def _tied(subject: Subject) -> Iterator[Finding]:
    tied = subject.dialect.size("tie_word_embeddings")
    head = subject.dialect.tensors.get("lm_head.weight")
    if tied.value and head is not None:
        said = {f"draft config.json: {tied.key}": True, f"draft {head.file.name}: {head.name}": list(head.shape)}
        sentence = "the draft's tie_word_embeddings is true, but it stores a head of its own, which is used"
        who = Affected("SGLang of mid-2026", "sglang", "ignored", "the embedding is used as head", "llama_eagle3.py honours the flag")
        yield finding("tied-draft", sentence, said, affected=(who,))


def _mask(subject: Subject) -> Iterator[Finding]:
    mask, own = subject.dialect.tensors.get("t2d"), subject.dialect.size("vocab_size")
    theirs = text_part(subject.pair.verifier.config)["vocab_size"]
    if mask is not None and mask.shape[0] not in (theirs, own.value):
        said = {f"draft {mask.file.name}: {mask.name}": list(mask.shape), "verifier config.json: vocab_size": theirs}
        sentence = f"t2d has {mask.shape[0]} entries; one for each of the verifier's {theirs} ids is expected"
        yield finding("vocabulary-sizes", sentence, said, severity="warning")


def _tokenizers(subject: Subject) -> Iterator[Finding]:
    claimed, theirs = subject.dialect.size("vocab_size"), text_part(subject.pair.verifier.config)["vocab_size"]
    padded, draft = claimed.value not in (None, theirs), subject.pair.draft.path / TOKENIZER
    if not padded and not draft.is_file():
        return  # reading a tokenizer takes longer than everything else
    ours = _vocabulary(subject.pair.verifier.path)
    if ours is not None and padded and len(ours) > claimed.value:
        said = {f"verifier {TOKENIZER}: entries": len(ours), f"draft config.json: {claimed.key}": claimed.value}
        sentence = (
            f"the verifier's tokenizer has {len(ours)} entries, the draft's vocabulary only {claimed.value}: it belongs to another verifier"
        )
        yield finding("tokenizer-too-large", sentence, said)
    if ours is None or not draft.is_file() or draft.read_bytes() == (subject.pair.verifier.path / TOKENIZER).read_bytes():
        return
    own = _vocabulary(subject.pair.draft.path)
    if own is None:
        return
    moved = [token for token, number in own.items() if ours.get(token, number) != number]
    unknown = [token for token in own if token not in ours]
    if moved:
        token = moved[0]
        said = {f"draft {TOKENIZER}: {token}": own[token], f"verifier {TOKENIZER}: {token}": ours[token]}
        sentence = f"{len(moved)} tokens have other ids in the draft's tokenizer than in the verifier's, {token!r} first"
        yield finding("tokenizers-differ", sentence, said)
    elif unknown:
        said = {f"draft {TOKENIZER}: {token}": own[token] for token in unknown[:SHOWN]}
        sentence = f"the draft's tokenizer has {len(unknown)} tokens that the verifier's lacks"
        yield finding("tokenizers-differ", sentence, said, severity="info")


def _vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json; None where there is none, or one of another layout."""
    try:
        content = read_json(folder / TOKENIZER)
    except CheckpointFileError:
        return None
    vocabulary: Any = look(content, "model.vocab").value
    if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    if not isinstance(vocabulary, dict) or not all(isinstance(index, int) for index in vocabulary.values()):
        return None
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int):
            vocabulary[entry["content"]] = entry["id"]
    return vocabulary
