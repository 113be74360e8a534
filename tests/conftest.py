"""What all tests share: one thread, fixed seeds, no deadlines, tiny pairs loaded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from tiny import tiny_draft, tiny_verifier, tiny_w4a16_verifier

settings.register_profile("specbench", deadline=None, print_blob=True)  # the machine may be busy: time says nothing here
settings.load_profile("specbench")
torch.set_num_threads(1)  # tensors are tiny; threads only wait for one another


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m gpu` on a machine without one says so instead of failing."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folders of three checkpoints that no test may change: `verifier` (fp32), `w4a16` (its 4-bit twin, fp32 scales) and `draft`."""
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "verifier": tiny_verifier(folder / "verifier"),
        "w4a16": tiny_w4a16_verifier(folder / "w4a16"),
        "draft": tiny_draft(folder / "draft"),
    }
