"""The scalar CUDA headers compiled by the host compiler, so tests can hold them to their twins."""

import ctypes
import subprocess
import tempfile
from pathlib import Path

INCLUDE = Path(__file__).parents[1] / "lowgpu_kernels/include"


def compiled(source):
    """A shared library of C++ source that may include the headers; nothing is fused."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "headers.so"
        flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
        done = subprocess.run(
            ["g++", *flags, "-x", "c++", "-", f"-I{INCLUDE}", "-o", library],
            input=source.encode(),
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr.decode()
        return ctypes.CDLL(str(library))


def address(array):
    return ctypes.c_void_p(array.ctypes.data)
