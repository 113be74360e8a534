"""How the draft's weights are found and read: whose load config counts, and what it leads to.

What enters: a pair and a policy. What leaves: the `LoadConfig` that loading executes, and its rows of the plan. It does not open a weight
file, and decides nothing else about the draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .checkpoint.load_config import LoadConfig
from .checkpoint.weight_files import weight_files
from .errors import CheckpointFileError
from .settings import Setting

if TYPE_CHECKING:
    from .pair import Pair
    from .policies import Policy


def draft_load_config(pair: Pair, policy: Policy) -> LoadConfig:
    """The load config that the draft is loaded with: the very object, the draft's own or the verifier's."""
    if policy.rule("load_config") == "draft-else-verifier" and pair.draft_load is not None:
        return pair.draft_load
    return pair.verifier_load


def load_settings(pair: Pair, policy: Policy) -> list[Setting]:
    """Rows load_config, load_format, download_dir and weights."""
    config, other = draft_load_config(pair, policy), pair.verifier_load
    if config is pair.draft_load:
        source, note, ignored = "draft_load_config", "", False
    elif pair.draft_load is None:
        source, note, ignored = "verifier's load config", "inherited: draft_load_config is unset", False
    else:
        source, note = f"verifier's load config (policy {policy.name})", f"draft_load_config is ignored ({pair.draft_load})"
        ignored = config != pair.draft_load
    dummy = "random weights: the draft's files are not read" if config.load_format == "dummy" else ""
    place = "" if config.download_dir is None or pair.draft.revision else "a local folder is read where it lies"
    return [
        Setting("load_config", config, source, other, note, ignored),
        Setting("load_format", config.load_format, source, other.load_format, "; ".join(filter(None, (dummy, note))), bool(dummy)),
        Setting("download_dir", config.download_dir, source, other.download_dir, "; ".join(filter(None, (place, note)))),
        _weights(pair, config),
    ]


def _weights(pair: Pair, config: LoadConfig) -> Setting:
    draft = pair.draft
    if draft.revision is not None:
        return Setting("weights", "of the hub", f"draft {draft.name} at {draft.revision}", None, draft.note)
    try:
        files = weight_files(draft.path, config.load_format)
    except CheckpointFileError as error:
        return Setting("weights", None, f"draft {draft.name}", None, str(error), True)
    return Setting("weights", ", ".join(file.name for file in files.files) or "drawn", f"draft {draft.name}", None, files.note)
