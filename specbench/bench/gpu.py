"""Everything that needs a GPU, in one go and in order of weight: `python -m specbench.bench.gpu OUT`.

What enters: a folder. What leaves in it: gpu_tests.txt (the `gpu`-marked tests), then decoding_cuda.json and decoding_cuda_eager.json (the
figures of `decoding`, with graphs and without), each written as soon as it is known. Correctness comes first: where a test fails, nothing
is measured unless `--anyway`. Meant for a machine that is lent for minutes: every part has a limit of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run from a shell; 0 where tests passed and figures were written, 1 otherwise, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m specbench.bench.gpu", description="Tests, then figures, on a CUDA device.")
    parser.add_argument("out", type=Path, help="folder to fill")
    parser.add_argument("--minutes", type=float, default=8.0, help="all together")
    parser.add_argument("--anyway", action="store_true", help="measure even where a test fails")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: nothing was tested or measured\n")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * options.minutes
    tests = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider", "tests"]
    passed = run(tests, options.out / "gpu_tests.txt", (ends - time.monotonic()) / 2)
    if not passed and not options.anyway:
        sys.stderr.write(f"tests failed, see {options.out / 'gpu_tests.txt'}; nothing measured\n")
        return 1
    figures = [sys.executable, "-m", "specbench.bench.decoding", "--device", "cuda", "--k", "1", "2", "3", "5", "--batches", "2", "8", "32"]
    figures += ["--per-category", "4", "--max-new-tokens", "128"]
    done = passed
    for name, extra in (("decoding_cuda", []), ("decoding_cuda_eager", ["--eager", "--no-transformers"])):
        left = ends - time.monotonic()
        if left < 30:
            sys.stderr.write(f"{name}: no time left\n")
            return 1
        done &= run([*figures, *extra, "--out", str(options.out / f"{name}.json")], options.out / f"{name}.txt", left)
    return 0 if done else 1


def run(command: list[str], log: Path, seconds: float) -> bool:
    """Whether `command` ended well in time; what it printed is in `log`, and its end here."""
    with log.open("w") as file:
        try:
            ended = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            ended = -1
            file.write(f"\nstopped after {seconds:.0f} s\n")
    sys.stdout.write("".join(log.read_text().splitlines(keepends=True)[-30:]))
    return ended == 0


if __name__ == "__main__":
    sys.exit(main())
