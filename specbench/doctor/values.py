"""What only values can tell: whether the vocabulary maps agree, and whether the draft's embedding is the verifier's.

What enters: a subject. What leaves: findings. It reads d2t and t2d and some embedding rows from files on this machine; of a hub repository
whose weights are not in the cache it reads nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..checkpoint.files import DTYPES, TensorInfo, read_tensor
from ..checkpoint.load_formats import weights
from ..pair import Checkpoint
from ..vocabulary import verifier_embedding
from .findings import Finding
from .subject import PLAIN_DTYPES, Subject, finding

ROWS = 512  # embedding rows that are compared


def value_findings(subject: Subject) -> Iterator[Finding]:
    draft, tensors = subject.pair.draft, subject.dialect.tensors
    wanted = [tensors[name] for name in ("d2t", "t2d", "embed_tokens.weight") if name in tensors]
    away = [info for info in wanted if not info.file.is_file()]
    if away:
        sentence = f"{away[0].file.name} of {draft.name} is not on this machine, so no value was read"
        yield finding("values-unread", sentence, {f"draft files: {away[0].file.name}": "not in the cache"})
        return
    if "d2t" in tensors:
        yield from _maps(subject)
    if "embed_tokens.weight" in tensors:
        yield from _embedding(subject)


def _read(checkpoint: Checkpoint, info: TensorInfo) -> Any:
    return weights(checkpoint.path, checkpoint.opened_with).read(info.name) if info.pickled else read_tensor(info)


def _maps(subject: Subject) -> Iterator[Finding]:
    import torch

    tensors, draft = subject.dialect.tensors, subject.pair.draft
    vocab = int(subject.question.verifier_config["vocab_size"])
    d2t, place = _read(draft, tensors["d2t"]).long(), f"draft {tensors['d2t'].file.name}: d2t"
    count = len(d2t)
    target = torch.arange(count) + d2t
    distinct = len(target.unique())
    if count and (int(target.min()) < 0 or int(target.max()) >= vocab or distinct < count):
        absolute = bool(((d2t >= 0) & (d2t < vocab)).all()) and bool((d2t.diff() > 0).all()) and count > 1
        what = "it seems to hold ids, not offsets" if absolute else "it holds offsets: verifier id = draft id + d2t"
        found = f"{int(target.min())}..{int(target.max())}, {distinct} distinct"
        sentence = f"draft ids + d2t lead to {found} of {count}, but distinct ids in 0..{vocab - 1} are expected; {what}"
        yield finding("map-invalid", sentence, {place: found, "verifier config.json: vocab_size": vocab})
        return
    if not bool(d2t.any()):
        zeros = {place: "all 0", "verifier config.json: vocab_size": vocab}
        if count == vocab:
            yield finding("map-identity", "d2t is all zero, which is right for a full vocabulary: the identity", zeros)
    if "t2d" in tensors:
        mask = _read(draft, tensors["t2d"]).bool()
        marked = int(mask.sum())
        if marked != count or int(target.max()) >= len(mask) or not bool(mask[target].all()):
            sentence = f"d2t leads to {count} ids, t2d marks {marked}, and they are not the same ids"
            yield finding("map-invalid", sentence, {place: count, f"draft {tensors['t2d'].file.name}: t2d": marked})


def _embedding(subject: Subject) -> Iterator[Finding]:
    import torch

    from ..load import ALIKE

    own, other = subject.dialect.tensors["embed_tokens.weight"], verifier_embedding(subject.pair.verifier)
    if other is None or own.shape != other.shape or {own.dtype, other.dtype} - set(PLAIN_DTYPES) or own.pickled or other.pickled:
        return
    if not other.file.is_file():
        return
    rows = torch.linspace(0, own.shape[0] - 1, min(ROWS, own.shape[0])).long().tolist()
    ours, theirs = (torch.stack([_row(info, row) for row in rows]).float() for info in (own, other))
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).mean())
    if not cosine >= ALIKE:  # also NaN
        sentence = f"rows of the draft's embedding have a mean cosine of {cosine:.2f} with the verifier's: it may never have been trained"
        places = {
            f"draft {own.file.name}: {own.name}": f"{len(rows)} rows",
            f"verifier {other.file.name}: {other.name}": f"{len(rows)} rows",
        }
        yield finding("embedding-unlike", sentence, places)


def _row(info: TensorInfo, row: int) -> Any:
    size = info.shape[1] * DTYPES[info.dtype].itemsize
    begin = info.begin + row * size
    return read_tensor(replace(info, shape=(info.shape[1],), begin=begin, end=begin + size))
