"""specbench: a workbench for EAGLE-3 speculative decoding beside quantized verifiers.

This module is the public API and nothing else; names are imported on first use, so that `import specbench` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import plots as plots
    from .bench.records import load_runs as load_runs
    from .bench.runner import benchmark as benchmark
    from .bundled import bundled_pair as bundled_pair
    from .doctor.diagnosis import diagnose as diagnose
    from .failure_atlas import atlas as atlas
    from .load import load_draft as load_draft
    from .page import report as report
    from .pair import open_pair as open_pair
    from .plan import resolve as resolve
    from .text import generate as generate
    from .text import stream as stream
    from .verifier import load_verifier as load_verifier

_HOMES = {
    "atlas": "failure_atlas",
    "open_pair": "pair",
    "bundled_pair": "bundled",
    "resolve": "plan",
    "diagnose": "doctor.diagnosis",
    "load_draft": "load",
    "load_verifier": "verifier",
    "generate": "text",
    "stream": "text",
    "benchmark": "bench.runner",
    "load_runs": "bench.records",
    "report": "page",
}
_MODULES = ("plots",)
__all__ = [
    "__version__",
    "atlas",
    "benchmark",
    "bundled_pair",
    "diagnose",
    "generate",
    "load_draft",
    "load_runs",
    "load_verifier",
    "open_pair",
    "plots",
    "report",
    "resolve",
    "stream",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module 'specbench' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
