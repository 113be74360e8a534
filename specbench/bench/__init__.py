"""The measuring rooms: prompts, metrics, records and the runner that fills them."""

from __future__ import annotations

from ..errors import SpecbenchError


class DataError(SpecbenchError, ValueError):
    """Prompts, counts or records are not what they must be, so no figure is made from them."""
