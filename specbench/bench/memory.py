"""How much memory a step takes at its height: CUDA's allocator on a GPU, resident memory of this process on a CPU.

What enters: nothing but the moment. What leaves: bytes. It does not know what the memory holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path


class PeakMemory:
    """The highest memory since it was made, of everything that this process holds.

    device: "cuda..." reads the allocator, anything else resident memory. Nothing is read where the system does not tell (outside Linux).
    """

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        if self.cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(device)
            self._device = device
        self._known = self.cuda or reset_peak()

    def bytes(self) -> int | None:
        """The height so far; None where it is not known."""
        if self.cuda:
            import torch

            return int(torch.cuda.max_memory_allocated(self._device))
        return peak() if self._known else None


def settle() -> None:
    """Give freed memory back, so that what comes next is seen as new."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int | None:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak() -> int | None:
    """The most that `resident` was since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> bool:
    """Let `peak` start anew; False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    """A size of /proc/self/status in bytes."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
