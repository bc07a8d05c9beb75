"""numba's njit for the CPU's loops, whose machine code is kept on disk beside the GPU's kernels.

numba's own cache watches the file that a function stands in and not those of the functions it calls,
and two processes that fill it at once may mix up its entries. Here one file holds one compiled
function, and its name is a digest of everything that it was compiled from.
"""

import functools
import hashlib
import os
import pickle
import sys
import tempfile
from importlib.metadata import version

import numba
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from lowgpu_kernels.compile import cache_folder, fingerprint


def njit(function=None, **options):
    """numba's njit for functions of this package: compiled once a machine instead of once a process.

    Args:
        function: what to compile, with everything it calls in this package or in numba.
        options: of numba.njit.

    Returns:
        numba's dispatcher; without a function a decorator.
    """
    if function is None:
        return functools.partial(njit, **options)
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = _Kept(function, options)
    return dispatcher


class _Kept:
    """What a dispatcher of numba's asks before it compiles and tells afterwards."""

    cache_path = None

    def __init__(self, function, options):
        self._function, self._options = function, sorted(options.items())

    def load_overload(self, signature, context):
        """The CompileResult of a signature; None where it is not there, or damaged."""
        context.refresh()
        try:
            digest, _, data = self._path(signature, context.codegen()).read_bytes().partition(b"\n")
        except OSError:
            return None
        if hashlib.sha256(data).hexdigest().encode() != digest:
            return None
        return CompileResult._rebuild(context, *pickle.loads(data))

    def save_overload(self, signature, result):
        """Keep a CompileResult, where it can be kept; a folder that cannot be written keeps none."""
        if result.lifted or result.library.has_dynamic_globals:
            return
        path, data = self._path(signature, result.codegen), dumps(result._reduce())
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
            os.replace(file.name, path)
        except OSError:
            return

    def _path(self, signature, codegen):
        target = str(signature), codegen.magic_tuple(), self._options
        key = fingerprint(self._function), self._function.__qualname__, target, _compilers()
        return cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.loop"

    def enable(self):
        """Part of numba's protocol: it is always on."""

    def flush(self):
        """Part of numba's protocol: what was compiled from other sources has another name."""


@functools.cache
def _compilers():
    """Versions of everything that turns a function into machine code."""
    return sys.version, *map(version, ("numba", "llvmlite", "numpy"))
