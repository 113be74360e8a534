"""Rules for embedding, head and vocabularies: whose they are, how large, and how draft ids become verifier ids.

What enters: a `Question`. What leaves: `Setting`s (see `settings`). It reads no value of any map, only headers.
"""

from __future__ import annotations

from .checkpoint.files import TensorInfo
from .errors import ConfigError
from .pair import Checkpoint
from .settings import Question, Setting


def vocabulary(q: Question) -> list[Setting]:
    """Embedding rows, draft vocabulary, and who owns embedding and head."""
    tensors, config_vocab = q.dialect.tensors, q.dialect.size("vocab_size")
    own, other = tensors.get("embed_tokens.weight"), verifier_embedding(q.verifier)
    verifier_vocab = int(q.verifier_config["vocab_size"])
    choice = q.overrides.get("embed_tokens")
    if choice not in (None, "draft", "verifier"):
        raise ConfigError(f"override embed_tokens is {choice!r}; 'draft' or 'verifier' is expected")
    if choice == "draft" and own is None:
        raise q.fail("override embed_tokens='draft', but it has no embed_tokens.weight", "embedding-missing")
    shareable = other is not None and (own is None or own.shape == other.shape)
    prefer_own = choice == "draft" or (choice is None and _own_embedding_first(q))
    if own is not None and (prefer_own or not shareable):
        if choice == "verifier":
            raise q.fail(
                f"override embed_tokens='verifier', but its own is {list(own.shape)} and the verifier's "
                f"{list(other.shape) if other else 'absent'}",
                "embedding-width",
            )
        note = "" if prefer_own else "the shapes differ, so it is not shared"
        embedding = Setting("embed_tokens", "draft", "draft tensors: embed_tokens.weight", None, note, code="embedding-own")
        vocab = own.shape[0]
    elif other is not None:
        hidden = q.dialect.size("hidden_size").value
        if other.shape[1] != hidden:
            raise q.fail(
                f"it has no embedding and hidden_size {hidden}; the verifier's is {list(other.shape)} and cannot be borrowed",
                "embedding-width",
                {q.said("hidden_size"): hidden, f"verifier tensors: {other.name}": list(other.shape)},
            )
        note = "borrowed: the draft has none" if own is None else "the draft's own embedding is thrown away"
        embedding = Setting(
            "embed_tokens", "verifier", f"verifier tensors: {other.name}", None, note, own is not None,
            "embedding-borrowed" if own is None else "embedding-replaced",
        )  # fmt: skip
        vocab = other.shape[0]
    else:
        raise q.fail(
            "neither it (embed_tokens.weight) nor the verifier (model.embed_tokens.weight) has an embedding",
            "embedding-missing",
            {"draft tensors: embed_tokens.weight": "absent", "verifier tensors: model.embed_tokens.weight": "absent"},
        )
    differs = config_vocab.value is not None and config_vocab.value != verifier_vocab
    note = f"the draft's config says {config_vocab.value}, the verifier's {verifier_vocab}: padded differently" if differs else ""
    size = Setting("vocab_size", vocab, embedding.source, verifier_vocab, note, code="vocabulary-padded")
    return [embedding, size, *_draft_vocabulary(q, verifier_vocab, vocab)]


def _own_embedding_first(q: Question) -> bool:
    rule = q.policy.rule("embed_tokens")
    return rule == "draft" or (rule == "verifier-unless-target-hidden-size" and q.dialect.flag("target_hidden_size").key is not None)


def _draft_vocabulary(q: Question, verifier_vocab: int, embedding_rows: int) -> list[Setting]:
    tensors = q.dialect.tensors
    claimed = q.dialect.flag("draft_vocab_size")
    head, d2t, t2d = (tensors.get(name) for name in ("lm_head.weight", "d2t", "t2d"))
    head_rows = next((i.shape[0] for n, i in tensors.items() if n in ("lm_head.weight", "lm_head.weight_packed")), None)
    counts = {
        "draft_vocab_size in config.json": claimed.value,
        "rows of lm_head": head_rows,
        "entries of d2t": d2t.shape[0] if d2t else None,
    }
    known = {k: v for k, v in counts.items() if v is not None}
    if len(set(known.values())) > 1:
        extra = f"; t2d has {t2d.shape[0]} entries" if t2d else ""
        said = {f"draft: {k}": v for k, v in known.items()} | ({"draft tensors: t2d": list(t2d.shape)} if t2d else {})
        raise q.fail(
            "vocabulary sizes conflict: " + ", ".join(f"{k} {v}" for k, v in known.items()) + extra + "; nothing is cut or padded to fit",
            "vocabulary-sizes",
            said,
        )
    size = next(iter(known.values()), verifier_vocab)
    if size > max(verifier_vocab, embedding_rows):
        said = {f"draft: {k}": v for k, v in known.items()} | {"verifier config.json: vocab_size": verifier_vocab}
        raise q.fail(f"its draft vocabulary {size} is larger than the verifier's {verifier_vocab}", "vocabulary-sizes", said)
    source = ", ".join(known) or "full vocabulary: neither config.json nor a tensor names a smaller one"
    settings = [Setting("draft_vocab_size", size, f"draft: {source}", verifier_vocab)]
    if head_rows is not None:
        settings.append(Setting("lm_head", "draft", "draft tensors: " + (head.name if head else "lm_head")))
    elif size == verifier_vocab:
        settings.append(
            Setting(
                "lm_head",
                "verifier",
                "verifier's lm_head",
                None,
                "borrowed: the draft has none and its vocabulary is the verifier's",
                code="head-borrowed",
            )  # fmt: skip
        )
    else:
        raise q.fail(
            f"it has no lm_head, and its vocabulary {size} is not the verifier's {verifier_vocab}, so none can be borrowed",
            "head-missing",
            {"draft tensors: lm_head.weight": "absent", f"draft: {source}": size, "verifier config.json: vocab_size": verifier_vocab},
        )
    if d2t is not None:
        settings.append(Setting("d2t", "draft", "draft tensors: d2t (offsets: verifier id = draft id + d2t)"))
    elif size in (verifier_vocab, embedding_rows):
        settings.append(Setting("d2t", "identity", "full vocabulary, no d2t stored", code="map-identity"))
    elif t2d is not None and q.policy.rule("checks") == "strict":
        settings.append(
            Setting(
                "d2t", "t2d", "draft tensors: t2d", None, "d2t is absent; the ids that t2d marks, in order, stand in", True, "map-from-mask"
            )
        )
    elif q.policy.rule("checks") != "strict":
        note = "no d2t: draft ids are taken for verifier ids"
        settings.append(Setting("d2t", "identity", f"policy {q.policy.name}", None, note, True, "map-missing"))
    else:
        raise q.fail(
            f"draft vocabulary {size} is smaller than the verifier's {verifier_vocab}, and there is neither d2t nor t2d to map it",
            "map-missing",
            {
                f"draft: {source}": size,
                "verifier config.json: vocab_size": verifier_vocab,
                "draft tensors: d2t": "absent",
                "draft tensors: t2d": "absent",
            },
        )
    return settings


def verifier_embedding(verifier: Checkpoint) -> TensorInfo | None:
    """The header of the verifier's embedding, wherever its architecture keeps it."""
    names = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
    return next((verifier.tensors[name] for name in names if name in verifier.tensors), None)
