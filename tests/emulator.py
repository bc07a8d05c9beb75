"""CUDA C kernels on the host, for tests of their index arithmetic where there is no GPU."""

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from numba import cfunc

from lowgpu_kernels import launch
from lowgpu_kernels.compile import _C_NAMES, HERE, INCLUDE, _numba_type
from lowgpu_kernels.tensor_map import TensorMap

TESTS = Path(__file__).parent
BUILT = TESTS.parent / "build" / "emulated"
EMULATED = {
    *("bf16.cuh", "async_copy.cuh", "mma.cuh", "host.cuh", "named_barrier.cuh"),
    *("warpgroup.cuh", "act_product.cuh", "bulk_copy.cuh", "memory_order.cuh"),
    *("cluster.cuh", "tensor_copy.cuh", "narrow_copy.cuh", "int8_product.cuh"),
    *("int8_levels.cuh", "grid_order.cuh"),
}
FLAGS = (
    *("-std=c++17", "-Og", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing"),
    # Else libraries of one process share constants of classes that their macros make different.
    "-fno-gnu-unique",
    *("-fsanitize=alignment,shift", "-fsanitize-undefined-trap-on-error", "-Wno-unknown-pragmas"),
)


@contextmanager
def emulating(on, backwards=False):
    """Within this context CUDA C launches run here, on NumPy arrays, as if on the Device `on`.

    Run a kernel with `backwards` and without: emulator.h says what a difference means. Numba kernels
    are left out: numba's simulator runs those.
    """

    def run(kernel, grid, block, args, stream, shared=0, cooperative=False, early=None):
        grid, block = launch._three(grid), launch._three(block)
        if 0 in grid:
            return
        held = [_value(a) for a in args]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(a) for a in held))
        library = _library(kernel)
        # Before every launch: kernels that link other functions of the same names share a library.
        for linked in kernel.linked:
            address = ctypes.c_void_p(_compiled(linked).address)
            getattr(library, f"bind_{linked.name}")(address)
        entry = getattr(library, f"emulate_{kernel.entry}")
        # Blocks of a cluster reach each other; here all run together.
        together = cooperative or dict(kernel.macros).get("LG_CLUSTER", 1) > 1
        modes = int(backwards), int(together)
        assert entry(pointers, grid[0], grid[1], block[0], shared, *modes) == 0, (
            f"{kernel.entry}: a barrier that not every thread reaches"
        )

    with (
        launch.recording(on),
        mock.patch.object(launch, "launch", run),
        mock.patch.object(launch, "clear", lambda array, stream: array.fill(0)),
        mock.patch.object(launch.Launchable, "_launch", lambda *_: None),
    ):
        yield


class _Boxes(ctypes.Structure):
    """emulator_int8.h's TensorMap."""

    _fields_ = (
        ("matrix", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
        ("box_rows", ctypes.c_int),
    )


def _value(arg):
    if arg is None:
        return ctypes.c_void_p()
    if isinstance(arg, np.ndarray):
        return ctypes.c_void_p(arg.ctypes.data)
    if isinstance(arg, TensorMap):
        return _Boxes(arg.matrix.ctypes.data, *arg.matrix.shape, arg.box_rows)
    return np.ctypeslib.as_ctypes_type(arg.dtype)(arg.item())


@functools.cache
def _library(kernel):
    source = _with_includes(HERE / "ops" / f"{kernel.path}.cu", set())
    source = re.sub(r"extern __shared__ (__align__\(1024\) )?uint4 memory\[\];", "", source)
    entries = re.findall(r"__global__[^{]*?(\w+)\((?:const|unsigned|float)", source)
    assert kernel.entry in entries
    calls = "".join(
        f'extern "C" int emulate_{e}(void** args, int x, int y, int threads, int shared, int back, '
        f"int all) {{ return launch({e}, args, x, y, threads, shared, back, all); }}\n"
        for e in entries
    )
    links = "".join(map(_link, kernel.linked))
    macros = tuple(f"-D{name}={value}" for name, value in kernel.macros)
    return ctypes.CDLL(_built('#include "emulator.h"\n' + links + source + calls, macros))


def _built(text, macros):
    """The path of a library, made once for all processes that test: they would compile most twice."""
    made_of = text, macros, FLAGS, *(path.read_text() for path in sorted(TESTS.glob("*.h")))
    library = BUILT / f"{hashlib.sha256(repr(made_of).encode()).hexdigest()}.so"
    if library.exists():
        return library
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        part = Path(folder) / "kernel.so"
        done = subprocess.run(
            ["g++", *FLAGS, *macros, "-x", "c++", "-", f"-I{TESTS}", "-o", part],
            input=text.encode(),
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        os.replace(part, library)
    return library


def _link(linked):
    """A linked function as a pointer that is called alike, and what sets it."""
    arguments = ", ".join(_C_NAMES[t] for t in linked.types)
    returns, name = _C_NAMES[linked.returns], linked.name
    return (
        f"static {returns} (*{name})({arguments});\n"
        f'extern "C" void bind_{name}(void* to) {{ {name} = ({returns} (*)({arguments}))to; }}\n'
    )


@functools.cache
def _compiled(linked):
    signature = _numba_type(linked.returns)(*map(_numba_type, linked.types))
    # A GPU gives infinity where Python raises ZeroDivisionError.
    return cfunc(signature, error_model="numpy")(linked.function)


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
