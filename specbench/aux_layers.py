"""Which verifier states a draft reads: the two conventions of `eagle_aux_hidden_state_layer_ids`, settled in one place.

What enters: the draft's configuration and the verifier's layer count. What leaves: ascending ids in one convention, recorded with the
reason. It does not know weights or acceptance.

Everywhere below id i means the residual stream entering layer i (vLLM's numbering; id n leaves the last layer, before the final norm; id n
+ 1 is the same after it). SpecForge and ModelOpt write the index of the layer whose output is read, one less, under the same key.
"""

from __future__ import annotations

from typing import Any

from .settings import Question, Setting

KEY = "eagle_aux_hidden_state_layer_ids"


def aux_layers(q: Question) -> list[Setting]:
    """The ids, by override, config or default; checked against the verifier's depth and the width of fc.

    Raises:
        ConfigError: ids outside the verifier, repeated ids, or a count that fc does not have.
    """
    n = int(q.verifier_config["num_hidden_layers"])
    width = _states(q)
    if not any(name.startswith("fc.") for name in q.dialect.tensors):
        return [
            Setting(
                "aux_layers",
                (n + 1,),
                "draft tensors: no fc",
                None,
                "the verifier's final state after its norm, as ModelOpt without aux states",
            )
        ]
    found = q.dialect.flag(KEY)
    if "aux_layers" in q.overrides:
        chosen = _checked(q, q.overrides["aux_layers"], n, "override aux_layers")
        setting = Setting("aux_layers", chosen, "override", None, "convention: input")
    elif found.key and _reads(q, found.key):
        setting = _from_config(q, found.value, found.key, n)
    else:
        setting = _default(q, n, found.value)
    if width is not None and len(setting.value) != width:
        raise q.fail(
            f"fc reads {width} states, but {len(setting.value)} ids {list(setting.value)} come from {setting.source}; set {KEY} in "
            f"config.json, or override aux_layers",
            "aux-layers-count",
            {"draft tensors: fc.weight": list(q.dialect.tensors["fc.weight"].shape), setting.source: list(setting.value)},
        )
    return [setting]


def _reads(q: Question, key: str) -> bool:
    rule = q.policy.rule("aux_layers")
    if rule == "first-is-1":
        return "." in key
    return rule != "default" and not (rule == "top-level-unshifted" and "." in key)


def _states(q: Question) -> int | None:
    fc, target = q.dialect.tensors.get("fc.weight"), int(q.verifier_config["hidden_size"])
    if fc is None or len(fc.shape) != 2:
        return None
    if fc.shape[1] % target:
        raise q.fail(
            f"fc.weight is {list(fc.shape)}; its width is expected to be a multiple of the verifier's hidden size {target}",
            "fc-width",
            {"draft tensors: fc.weight": list(fc.shape), "verifier config.json: hidden_size": target},
        )
    return fc.shape[1] // target


def _from_config(q: Question, ids: Any, key: str, n: int) -> Setting:
    convention, why, sure = _convention(q, ids, key, n)
    shifted = [i + 1 for i in ids] if convention == "output" else list(ids)
    where = f"{key} {list(ids)} read as layer {convention}s ({why})"
    chosen = _checked(q, shifted, n, where, shift=int(convention == "output"))
    return Setting(
        "aux_layers",
        chosen,
        f"draft config.json: {key}",
        None,
        f"convention: {convention}; {why}",
        not sure,
        "" if sure else "aux-layers-ambiguous",
    )


def _convention(q: Question, ids: Any, key: str, n: int) -> tuple[str, str, bool]:
    """input or output, the reason, and whether it is certain."""
    if not isinstance(ids, list | tuple) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise q.fail(f"{key} is {ids!r}; a list of layer ids is expected", "config-value", {q.said(key): ids})
    forced = q.overrides.get("aux_layer_convention")
    if forced is not None:
        if forced not in ("input", "output"):
            raise q.fail(f"override aux_layer_convention is {forced!r}; 'input' or 'output' is expected", "config-value")
        return forced, "override", True
    rule = q.policy.rule("aux_layers")
    if rule in ("config-unshifted", "top-level-unshifted"):
        return "input", f"policy {q.policy.name} never shifts", True
    if rule == "first-is-1":
        return ("output" if ids[0] == 1 else "input"), f"policy {q.policy.name} shifts exactly if the first id is 1", True
    if q.dialect.family.ids_convention is not None:
        return q.dialect.family.ids_convention, f"the {q.dialect.family.name} format", True
    if "." not in key:
        return "input", "a top-level key, vLLM's numbering", True
    if max(ids) == n:
        return "input", f"id {n} exists only as the output of the last layer", True
    if list(ids) == [2, n // 2, n - 3]:
        return "input", "the ids are vLLM's default", True
    if ids[0] == 1:
        return "output", "the first id is 1, as in SpecForge's and ModelOpt's default (1, n // 2 - 1, n - 4)", True
    return "input", "undecidable from the ids; override aux_layer_convention to try the other", False


def _default(q: Question, n: int, ignored: Any) -> Setting:
    default = _checked(q, (2, n // 2, n - 3), n, "the default (2, n // 2, n - 3)")
    if ignored is None:
        return Setting(
            "aux_layers", default, "default (2, n // 2, n - 3)", None, f"guessed: config.json has no {KEY}", True, "aux-layers-guessed"
        )
    return Setting(
        "aux_layers",
        default,
        "default (2, n // 2, n - 3)",
        None,
        f"config.json says {ignored}, which policy {q.policy.name} never reads",
        True,
        "aux-layers-moved",
    )


def _checked(q: Question, ids: Any, n: int, where: str, shift: int = 0) -> tuple[int, ...]:
    """`ids` (already in the input convention) within [shift, n], distinct and ascending; messages speak in the file's own numbers."""
    ids = tuple(int(i) for i in ids)
    written, valid = [i - shift for i in ids], f"0..{n - shift}"
    said = {f"draft: {where}": written, "verifier config.json: num_hidden_layers": n}
    outside = [i - shift for i in ids if not shift <= i <= n]
    if outside:
        raise q.fail(f"{where}: {written} beside {n} layers: {outside} lie outside {valid}", "aux-layers-range", said)
    if any(a >= b for a, b in zip(ids, ids[1:], strict=False)):
        raise q.fail(f"{where}: {written} beside {n} layers: distinct ascending ids in {valid} are expected", "aux-layers-range", said)
    return ids
