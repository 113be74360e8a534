"""A sweep as a file: which notebook, and the parameter sets that its grid expands to.

What enters: a YAML file. What leaves: a `SweepSpec`. It does not know how runs are started or what they measure.

    notebook: ../notebooks/04_acceptance.ipynb    # relative to this file
    run_dir: ../data/runs/acceptance              # relative to this file; left out: data/runs/<name of this file>
    parameters: {max_new_tokens: 64}              # the same in every run
    grid:                                         # every combination of these
      prompts_per_category: [1, 4]
      num_speculative_tokens: [[1, 3], [5]]       # a parameter that is a list itself: a list of lists
    sets:                                         # values that belong together; each is combined with every point of the grid
      - {verifier: "bundled:w4a16", reference: ""}
      - {verifier: "bundled:bf16", reference: ""}
    jobs: 2                                       # runs at a time; left out: one per GPU, else one
    threads: 4                                    # CPU threads of each run; left out: cores / jobs
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .session import runs_root


@dataclass(frozen=True, slots=True)
class SweepSpec:
    """What a sweep file says, paths absolute. sets: one mapping of parameters per run, in the order of the file."""

    notebook: Path
    run_dir: Path
    sets: list[dict[str, Any]]
    jobs: int | None = None
    threads: int | None = None


FILE_KEYS = ("notebook", "run_dir", "parameters", "grid", "sets", "jobs", "threads")
assert {field.name for field in fields(SweepSpec)} <= set(FILE_KEYS)


def read_spec(file: str | Path) -> SweepSpec:
    """Read and expand a sweep file.

    Raises:
        ConfigError: not YAML, an unknown or repeated key, a value of another kind, or a parameter that is named in two places.
    """
    path = Path(file).resolve()
    given = _load(path)
    unknown = sorted(set(given) - set(FILE_KEYS))
    if unknown:
        raise ConfigError(f"{path}: unknown key {', '.join(unknown)}; a sweep file has {', '.join(FILE_KEYS)}")
    if not isinstance(given.get("notebook"), str):
        raise ConfigError(f"{path}: notebook is {given.get('notebook')!r}; expected the path of a notebook, relative to this file")
    counts = {key: _count(given.get(key), f"{path}: {key}") for key in ("jobs", "threads")}
    run_dir = path.parent / str(given["run_dir"]) if given.get("run_dir") else runs_root() / path.stem
    return SweepSpec((path.parent / given["notebook"]).resolve(), run_dir.resolve(), expand(given, str(path)), **counts)


def expand(given: Mapping[str, Any], origin: str) -> list[dict[str, Any]]:
    """The parameter sets of `parameters`, `grid` and `sets` (see above), each a combination of the three."""
    constants, grid, sets = given.get("parameters") or {}, given.get("grid") or {}, given.get("sets") or [{}]
    for name, section in (("parameters", constants), ("grid", grid)):
        if not isinstance(section, dict):
            raise ConfigError(f"{origin}: {name} is {section!r}; expected parameters by name")
    if not isinstance(sets, list) or not all(isinstance(entry, dict) for entry in sets):
        raise ConfigError(f"{origin}: sets is {sets!r}; expected a list of parameters by name")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{origin}: grid.{name} is {values!r}; expected a list of values, even for one")
    homes = [*constants, *grid, *{name for entry in sets for name in entry}]
    twice = sorted({name for name in homes if homes.count(name) > 1})
    if twice:
        raise ConfigError(f"{origin}: {', '.join(twice)} in more than one of parameters, grid and sets; say each parameter once")
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    return [{**entry, **point, **constants} for entry in sets for point in points]  # what varies comes first in a run's name


def _load(path: Path) -> dict[str, Any]:
    import yaml

    class UniqueKeys(yaml.SafeLoader):
        """YAML takes the last of two equal keys; a sweep would silently lack runs."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            twice = [key for i, key in enumerate(keys) if key in keys[:i]]
            if twice:
                raise ConfigError(f"{path}, line {node.start_mark.line + 1}: key {twice[0]!r} stands twice; keep one")
            return super().construct_mapping(node, deep)

    try:
        # The loader is yaml's safe one with one check more.
        document = yaml.load(path.read_text(encoding="utf-8"), UniqueKeys)  # noqa: S506
    except FileNotFoundError:
        raise ConfigError(f"sweep file {path} does not exist") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds {type(document).__name__}; expected keys such as {', '.join(FILE_KEYS[:4])}")
    return document


def _count(value: Any, name: str) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{name} is {value!r}; expected a whole number from 1")
    return value
