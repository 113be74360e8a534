"""The exceptions that specbench raises: a small tree with fields, each also a builtin kind.

What enters: the facts of a failure (names, values found and expected, where each came from). What leaves: an
exception whose fields hold those facts and whose text says the next step. It does not know who catches it: code
written for `KeyError`, `ValueError` or `OSError` keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SpecbenchError(Exception):
    """Root of every error that specbench raises on purpose.

    code: what went wrong, as the doctor calls it ("fc-width"); "" where it has no page. evidence: place ("draft config.json:
    hidden_size") -> the value that was found there.
    """

    def __init__(self, *args: Any, code: str = "", evidence: Mapping[str, Any] | None = None) -> None:
        super().__init__(*args)
        self.code, self.evidence = code, dict(evidence or {})

    def __str__(self) -> str:  # KeyError would show repr(args[0]), which hides line breaks
        return str(self.args[0]) if self.args else ""


class ConfigError(SpecbenchError, ValueError):
    """A configuration says something impossible, unknown or contradictory."""


class DataError(SpecbenchError, ValueError):
    """Prompts, counts or records are not what they must be, so no figure is made from them."""


class CheckpointError(SpecbenchError, ValueError):
    """Stored tensors and what was to be read from them disagree."""


class CheckpointKeyError(SpecbenchError, KeyError):
    """A stored tensor finds no parameter; `args[0]` is exactly the parameter name that was looked up, as upstream."""

    def __init__(self, name: str, *, tensor: str, module_parameters: tuple[str, ...], source: str) -> None:
        super().__init__(name, code="tensors-unexpected")
        self.name = name
        self.tensor = tensor
        self.module_parameters = module_parameters
        self.source = source


class CheckpointShapeError(CheckpointError, AssertionError):
    """A stored tensor and its parameter have different shapes; engines assert here."""


class UnsupportedLayerError(SpecbenchError, NotImplementedError):
    """A format from which no linear layer can be built."""


class CheckpointFileError(SpecbenchError, OSError):
    """A checkpoint file is missing, cut short or unreadable."""


class DownloadError(SpecbenchError, OSError):
    """Something that had to be fetched could not be fetched, or is not what it should be."""
