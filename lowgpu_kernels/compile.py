"""Kernels to machine code, without a GPU: CUDA C and Numba functions -> LTO-IR -> cubin.

Everything is linked by nvJitLink with link-time optimisation, so a Python function called from
CUDA C is inlined into it. Contraction is off (`-fma=0`): a kernel fuses a multiply and an add
where it says fmaf and nowhere else, so scalar Python code gives the same bits on CPU and GPU.
"""

import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from lowgpu_kernels.dims import ROW

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
# Threads that compile. Measured on two cores, PPO's kernels for sm_90a: one 6.2 s, two or four 4.0 s,
# eight 4.8 s.
BUILDERS = 4
ARCHITECTURES = {(8, 0): "sm_80", (8, 9): "sm_89", (9, 0): "sm_90a"}
# numba compiles in one thread at a time. Reentrant: `_ltoir` holds it while it compiles.
_numba_turn = threading.RLock()


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel. Memory in bytes; `shared` is the static part."""

    entry: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Binary:
    """A cubin for one architecture, and what its kernels need."""

    cubin: bytes
    kernels: tuple  # of Resources

    def kernel(self, name):
        for resources in self.kernels:
            if name is None or resources.entry == name:
                return resources
        raise KeyError(f"no kernel {name} among {[k.entry for k in self.kernels]}")


@dataclass(frozen=True)
class Linked:
    """A Python function made callable from CUDA C under `name`.

    `types` are numba type strings of the arguments, such as "float32*" and "int32"; `returns` one of
    the return value or "void". The C prototype is made of the same strings, so the two cannot
    disagree: a mismatch would link silently and return garbage.
    """

    name: str
    function: object
    types: tuple
    returns: str = "void"

    @property
    def prototype(self):
        arguments = ", ".join(_C_NAMES[t] for t in self.types)
        return f'extern "C" __device__ {_C_NAMES[self.returns]} {self.name}({arguments});'


_C_NAMES = {"void": "void", "int32": "int", "uint32": "unsigned", "float32": "float"}
_C_NAMES |= {t + "*": c + "*" for t, c in _C_NAMES.items() if t != "void"}


@dataclass(frozen=True)
class CudaC:
    """A kernel of the file ops/<path>.cu with its compile-time constants and linked functions."""

    path: str
    entry: str
    macros: tuple = ()  # of (name, value)
    linked: tuple = ()  # of Linked

    def binary(self, architecture):
        return _cuda_c(self.path, self.macros, self.linked, architecture)


@dataclass(frozen=True)
class NumbaKernel:
    """A Python kernel function for argument types given as numba type strings.

    `threads` bounds the block size it may be launched with, so registers fit.
    """

    function: object
    types: tuple
    threads: int
    entry = None

    def binary(self, architecture):
        return _numba(self.function, self.types, self.threads, architecture)


@functools.cache
def cuda_c(path, entry, linked=(), **macros):
    """A CudaC whose macros are LG_<NAME>=<value>; values are ints, or text put in as it is.

    Equal arguments give the same object, so finding what is loaded for it costs no comparison.
    """
    named = {f"LG_{k.upper()}": int(v) if isinstance(v, bool) else v for k, v in macros.items()}
    return CudaC(path, entry, tuple(sorted(named.items())), tuple(linked))


def build(kernels, architecture):
    """Compile kernels side by side, as far as they are not on disk; `binary` then finds them.

    NVRTC and nvJitLink work without Python's lock. numba does not, so while one thread has it, the
    others link.

    Args:
        kernels: CudaC and NumbaKernel objects.
        architecture: such as "sm_90a".
    """
    # Every kernel of a file is in the binary of one.
    files = {replace(k, entry="") if isinstance(k, CudaC) else k: k for k in kernels}
    # Files of CUDA C first: they take the longest to link.
    first = sorted(files.values(), key=lambda kernel: not isinstance(kernel, CudaC))
    _toolkit()  # imported here, before threads do so side by side
    with ThreadPoolExecutor(BUILDERS) as threads:
        list(threads.map(lambda kernel: kernel.binary(architecture), first))


@functools.cache
def _cuda_c(path, macros, linked, architecture):
    source = (HERE / "ops" / f"{path}.cu").read_text()
    prototypes = "".join(f"{f.prototype}\n" for f in linked)
    key = ["cuda c", source, _headers(), macros, prototypes, architecture, *_toolkit()]
    key += [fingerprint(f.function) for f in linked]

    def parts():
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=f"{path}.cu",
            arch=architecture,
            std="c++17",
            relocatable_device_code=True,
            link_time_optimization=True,
            # Lambdas are device code without saying so, as toolkits before 13.1 ask.
            device_as_default_execution_space=True,
            include_path=str(INCLUDE),
            define_macro=[("LG_ROW", str(ROW)), *((n, str(v)) for n, v in macros)],
        )
        code = Program(prototypes + source, "c++", options).compile("ltoir").code
        return [(path, bytes(code)), *((f.name, _ltoir(f)) for f in linked)]

    return _cached(key, parts, architecture, "fma=0")


@functools.cache
def _numba(function, types, threads, architecture):
    key = ["numba", fingerprint(function), types, threads, architecture, *_toolkit()]

    def parts():
        return [(function.__name__, _numba_ltoir(function, types, threads))]

    return _cached(key, parts, architecture, "fma=0")


@functools.cache
def _numba_ltoir(function, types, threads):
    return _compile_numba(function, types, "void", device=False, launch_bounds=threads)


def _ltoir(linked):
    # Files that link the same function wait for the thread that compiles it.
    with _numba_turn:
        return _linked_ltoir(linked)


@functools.cache
def _linked_ltoir(linked):
    return _compile_numba(
        linked.function,
        linked.types,
        linked.returns,
        device=True,
        abi="c",
        abi_info={"abi_name": linked.name},
    )


def _compile_numba(function, types, returns, **options):
    from lowgpu_kernels.device import cuda, numba_cuda_dispatcher

    signature = _numba_type(returns)(*map(_numba_type, types))
    options.setdefault("abi", "numba")
    python = getattr(function, "py_func", function)
    with _numba_turn:
        dispatcher = numba_cuda_dispatcher()
        # Without a driver numba cannot ask which device a helper is compiled for. LTO-IR for the
        # oldest architecture links for every newer one, so say that.
        asked = dispatcher.get_current_device
        oldest = SimpleNamespace(compute_capability=(8, 0))
        dispatcher.get_current_device = lambda: oldest
        try:
            code, returned = cuda.compile(python, signature, cc=(8, 0), output="ltoir", **options)
        finally:
            dispatcher.get_current_device = asked
    assert returned == _numba_type(returns), f"{function} returns {returned}, not {returns}"
    return bytes(code)


@functools.cache
def _numba_type(name):
    """A numba type of its string: "float32", "float32*", "float32[2]" (C order, two dimensions)."""
    from numba import types

    if name.endswith("*"):
        return types.CPointer(getattr(types, name[:-1]))
    if name.endswith("]"):
        element, _, rank = name[:-1].partition("[")
        element = {"bool": "boolean"}.get(element, element)
        return types.Array(getattr(types, element), int(rank), "C")
    return getattr(types, {"bool": "boolean"}.get(name, name))


def fingerprint(function):
    """A digest of a Python function and of everything it reads: constants and other functions.

    What it reads of modules counts where they are of the function's own package.
    """
    seen, digest = set(), hashlib.sha256()
    package = function.__module__.partition(".")[0]
    own = {id(m): m for n, m in list(sys.modules.items()) if n.partition(".")[0] == package}

    def visit(value):
        if isinstance(value, ModuleType):
            return
        value = getattr(value, "py_func", value)
        if isinstance(value, (int, float, str, bytes, np.generic, type(None), tuple, np.dtype)):
            digest.update(repr((type(value).__name__, value)).encode())
        elif isinstance(value, np.ndarray):
            digest.update(repr((value.dtype, value.shape)).encode() + value.tobytes())
        elif hasattr(value, "__code__") and id(value) not in seen:
            seen.add(id(value))
            visit_code(value.__code__, value.__globals__)
            for cell in value.__closure__ or ():
                visit(cell.cell_contents)

    def visit_code(code, names):
        digest.update(code.co_code)
        for constant in code.co_consts:
            if hasattr(constant, "co_code"):
                visit_code(constant, names)
            else:
                digest.update(repr(constant).encode())
        read = [own[id(names[n])] for n in code.co_names if id(names.get(n)) in own]
        for name in code.co_names:
            digest.update(name.encode())
            for place in (names, *map(vars, read)):
                if name in place:
                    visit(place[name])

    visit(function)
    return digest.hexdigest()


def _headers():
    return [p.name + p.read_text() for p in sorted(INCLUDE.glob("*.cuh"))]


@functools.cache
def _toolkit():
    """Versions of everything that turns source into machine code."""
    from importlib.metadata import version

    from cuda.bindings import nvjitlink, nvrtc

    return (
        str(nvrtc.nvrtcVersion()[1:]),
        str(nvjitlink.version()),
        version("numba-cuda"),
        version("numba"),
        sys.version,
    )


def cache_folder():
    """Where compiled kernels are kept: LOWGPU_CACHE, else the user's cache folder."""
    chosen = os.environ.get("LOWGPU_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(home) / "lowgpu"


def _cached(key, parts, architecture, *options):
    """The Binary of `key`, from disk when it is there and whole, else built and kept."""
    digest = hashlib.sha256(repr((key, options)).encode()).hexdigest()
    path = cache_folder() / f"{digest}.kernel"
    try:
        header, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        if hashlib.sha256(cubin).hexdigest() == facts["sha256"]:
            return Binary(cubin, tuple(Resources(**k) for k in facts["kernels"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: build it again
    binary = link(parts(), architecture, *options)
    facts = {
        "sha256": hashlib.sha256(binary.cubin).hexdigest(),
        "kernels": [asdict(k) for k in binary.kernels],
    }
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(json.dumps(facts).encode() + b"\n" + binary.cubin)
    os.replace(file.name, path)
    return binary


def link(parts, architecture, *options):
    """Link LTO-IR, as [(name, bytes)], into a Binary. Raises RuntimeError with the linker's words."""
    from cuda.bindings import nvjitlink

    # Without -no-cache the linker keeps its steps where there is a driver, and says nothing of
    # registers when it finds them again.
    flags = [f"-arch={architecture}", "-lto", "-no-cache", "-Xptxas=-v", "-verbose"]
    flags += [f"-{o}" for o in options]
    handle = nvjitlink.create(len(flags), flags)
    try:
        for name, code in parts:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, code, len(code), name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise RuntimeError(f"{error}: {log.decode(errors='replace')}") from None
    finally:
        nvjitlink.destroy(handle)
    kernels = tuple(_reports(log.decode(errors="replace")))
    if not kernels:
        raise RuntimeError(f"the linker reported no kernel: {log.decode(errors='replace')}")
    return Binary(bytes(cubin), kernels)


def _reports(log):
    for part in log.split("Compiling entry function '")[1:]:

        def number(pattern, part=part):
            found = re.search(pattern, part)
            return int(found[1]) if found else 0

        yield Resources(
            entry=part.partition("'")[0],
            registers=number(r"Used (\d+) registers"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            stack=number(r"(\d+) bytes stack frame"),
            shared=number(r"(\d+) bytes smem"),
        )


def disassemble(binary):
    """SASS of a Binary, by nvdisasm. Raises FileNotFoundError when nvdisasm is not installed."""
    import shutil
    import subprocess

    tool = shutil.which("nvdisasm") or next(
        (str(folder / "nvdisasm") for folder in _wheel_folders() if (folder / "nvdisasm").exists()),
        None,
    )
    if tool is None:
        raise FileNotFoundError("nvdisasm not found; install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def _wheel_folders():
    import nvidia

    for root in nvidia.__path__:
        yield from Path(root).glob("*/bin")
