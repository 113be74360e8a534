"""The kernel that executes notebooks: this interpreter's own, whatever kernels are registered on the machine.

What enters: nothing. What leaves: a kernel manager class for nbclient. It does not know notebooks. Run as a module it is the kernel
process itself: `tqdm.auto` is imported before there is a kernel, which makes it choose text bars. The waiting terminal can show those, but
no widgets.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..errors import SpecbenchError

if TYPE_CHECKING:
    from jupyter_client.manager import AsyncKernelManager


NEEDED = ("ipykernel", "jupyter_client", "nbconvert", "nbformat", "papermill")


class KernelError(SpecbenchError, RuntimeError):
    """This interpreter cannot start a kernel."""


def kernel_manager_class() -> type[AsyncKernelManager]:
    """A manager that starts `sys.executable`, for any kernel name.

    Raises:
        KernelError: a package that notebooks need is not installed for this interpreter; the text lists the kernels that are registered.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise KernelError(
            f"{', '.join(missing)} missing for {sys.executable}, so it executes no notebooks (registered kernels: {registered_kernels()}); "
            "next: pip install 'specbench[notebooks]' for this interpreter"
        )
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    argv = [sys.executable, "-m", "specbench.bench.kernel", "-f", "{connection_file}", "--log-level=CRITICAL"]
    spec = KernelSpec(argv=argv, display_name="Python of this environment", language="python")

    class ThisInterpreter(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

    return ThisInterpreter


def registered_kernels() -> str:
    """The names of the machine's kernels, for messages."""
    if find_spec("jupyter_client") is None:
        return "unknown, as jupyter_client is missing"
    from jupyter_client.kernelspec import find_kernel_specs

    return ", ".join(sorted(find_kernel_specs())) or "none"


if __name__ == "__main__":
    import tqdm.auto  # noqa: F401
    from ipykernel.kernelapp import launch_new_instance

    launch_new_instance()
