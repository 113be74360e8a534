"""pyproject.toml, constraints.txt and environment.yml agree, and hold what they promise."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(line) for line in [*PROJECT["dependencies"], *EXTRAS["notebooks"], *EXTRAS["test"]]]
PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if (requirement := Requirement(line) if line and not line.startswith("#") else None)
}
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
CONDA_PIP = next(entry["pip"] for entry in CONDA if isinstance(entry, dict))


def version_of(pin: Requirement) -> str:
    (specifier,) = pin.specifier
    assert specifier.operator == "==", f"{pin}: constraints pin exactly"
    return specifier.version


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_inside_its_range(requirement: Requirement) -> None:
    pin = PINS[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version_of(pin)), f"{pin} is outside {requirement}"


def test_pins_are_plain_versions() -> None:
    for pin in PINS.values():
        assert not pin.url and not pin.extras and "+" not in version_of(pin), pin


def test_conda_delegates_to_pip() -> None:
    assert f"python={PROJECT['requires-python'].removeprefix('>=')}" in CONDA
    assert [entry for entry in CONDA if isinstance(entry, str)] == ["python=3.11", "pip"], "every library comes from pip"
    assert CONDA_PIP[:2] == ["-c constraints.txt", "-e .[notebooks,test]"]
    assert set(re.findall(r"\w+", CONDA_PIP[1].partition("[")[2])) <= set(EXTRAS)


def test_conda_lists_what_a_reader_looks_for() -> None:
    names = {"jupyterlab", "torch", "transformers", "safetensors", "matplotlib", "pandas", "papermill", "pytest"}
    assert names <= set(CONDA_PIP)


@pytest.mark.parametrize("name", [line for line in CONDA_PIP if not line.startswith("-")])
def test_a_name_in_the_conda_file_is_a_dependency_without_a_version(name: str) -> None:
    assert canonicalize_name(name) in {canonicalize_name(requirement.name) for requirement in REQUIREMENTS}


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "speculators"])
def test_packages_that_break_beside_a_cpu_torch_are_absent(name: str) -> None:
    for file in ("pyproject.toml", "constraints.txt", "environment.yml"):
        assert name not in (ROOT / file).read_text(encoding="utf-8")


def test_typed_package_and_licence() -> None:
    assert (ROOT / "specbench" / "py.typed").is_file()
    assert "Apache License" in (ROOT / PROJECT["license-files"][0]).read_text(encoding="utf-8")


def imported(folder: str) -> dict[str, Path]:
    """Top-level modules that the files of a folder import, standard library and own files apart, each with one of those files."""
    own = {path.stem for path in ROOT.rglob("*.py") if ".venv" not in path.parts} | {"specbench", "tests"}
    found: dict[str, Path] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found |= {name.partition(".")[0]: path for name in names}
    return {name: path for name, path in found.items() if name not in own and name not in sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("folder", "extras"), [("specbench", ["notebooks"]), ("data/recipe", ["vllm"]), ("tests", ["notebooks", "test", "ray"])]
)
def test_every_import_is_a_declared_dependency(folder: str, extras: list[str]) -> None:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    providers = packages_distributions()
    undeclared = {
        module: path.name
        for module, path in imported(folder).items()
        if not {canonicalize_name(name) for name in providers.get(module, [module])} & declared
    }
    assert not undeclared


def test_commands_exist() -> None:
    for target in PROJECT.get("scripts", {}).values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
