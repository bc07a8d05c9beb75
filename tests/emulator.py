"""CUDA C kernels on the host, for tests of their index arithmetic where there is no GPU."""

import ctypes
import functools
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.compile import HERE, INCLUDE

EMULATED = {"bf16.cuh", "async_copy.cuh", "mma.cuh"}
FLAGS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fsanitize=alignment,shift", "-fsanitize-undefined-trap-on-error", "-Wno-unknown-pragmas"),
)


@contextmanager
def emulating(on, backwards=False):
    """Within this context CUDA C launches run here, on NumPy arrays, as if on the Device `on`.

    Run a kernel with `backwards` and without: emulator.h says what a difference means.
    """

    def run(kernel, grid, block, args, stream, shared=0):
        grid, block = launch._three(grid), launch._three(block)
        if 0 in grid:
            return
        held = [_value(a) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        entry = getattr(_library(kernel), f"emulate_{kernel.entry}")
        assert entry(pointers, grid[0], grid[1], block[0], shared, int(backwards)) == 0, (
            f"{kernel.entry}: a barrier that not every thread reaches"
        )

    real = launch.launch
    with launch.recording(on):
        launch.launch = run
        try:
            yield
        finally:
            launch.launch = real


def _value(arg):
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    return np.ctypeslib.as_ctypes_type(arg.dtype)(arg.item())


@functools.cache
def _library(kernel):
    source = _with_includes(HERE / "ops" / f"{kernel.path}.cu", set())
    source = source.replace("extern __shared__ uint4 memory[];", "")
    entries = re.findall(r"__global__[^{]*?(\w+)\(const", source)
    assert kernel.entry in entries
    calls = "".join(
        f'extern "C" int emulate_{e}(void** args, int x, int y, int threads, int shared, int back) '
        f"{{ return launch({e}, args, x, y, threads, shared, back); }}\n"
        for e in entries
    )
    text = '#include "emulator.h"\n' + source + calls
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        macros = [f"-D{name}={value}" for name, value in kernel.macros]
        done = subprocess.run(
            ["g++", *FLAGS, *macros, "-x", "c++", "-", f"-I{Path(__file__).parent}", "-o", library],
            input=text.encode(),
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        return ctypes.CDLL(str(library))


def _with_includes(path, seen):
    """The text of a source file with the project's headers put in, each once."""
    lines = []
    for line in path.read_text().splitlines():
        found = re.match(r'#include "(.*)"', line)
        if not found:
            lines.append("" if line == "#pragma once" else line)
        elif found[1] not in seen:
            seen.add(found[1])
            if found[1] not in EMULATED:
                lines.append(_with_includes(INCLUDE / found[1], seen))
    return "\n".join(lines) + "\n"
