"""Arrays of four libraries: taken without a copy, given back in kind, queued on the right stream.

An op sees NumPy arrays on the CPU and `Buffer`s (an address, a shape, an element type) on a GPU.
"""

import math
import sys
from typing import NamedTuple

import numpy as np


class Buffer(NamedTuple):
    """C-contiguous device memory that somebody else owns."""

    address: int
    shape: tuple
    dtype: np.dtype

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.size * self.dtype.itemsize

    def __len__(self):
        return self.shape[0]

    def rows(self, start, stop):
        """The part of it that `array[start:stop]` is of a NumPy array."""
        nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return Buffer(self.address + start * nbytes, (stop - start, *self.shape[1:]), self.dtype)


class _Foreign(NamedTuple):
    """A stream's address as the CUDA stream protocol spells it."""

    address: int

    def __cuda_stream__(self):
        return 0, self.address


def on_stream(address):
    """CuPy's context of working on a stream that somebody else owns."""
    import cupy

    return cupy.cuda.Stream.from_external(_Foreign(address))


def absent(like, rank):
    """What a Numba kernel is given for an array that was left out: no elements, `like`'s type."""
    shape = (0,) * rank
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype)
    return Buffer(0, shape, like.dtype)


def _refuse_strides(name, strides):
    raise TypeError(
        f"{name} must be C-contiguous, got strides {tuple(strides)}; pass a contiguous copy"
    )


class _NumPy:
    name, mutable = "numpy", True

    def device(self, name, array):
        return None

    def buffer(self, name, array, stream, write):
        if not array.flags.c_contiguous:
            _refuse_strides(name, array.strides)
        if not array.dtype.isnative:
            raise TypeError(f"{name} must be in native byte order, got {array.dtype.str}")
        if write and not array.flags.writeable:
            raise ValueError(f"{name} is changed by this call, and was given read-only")
        return array

    def empty(self, shape, dtype, like, stream):
        return np.empty(shape, dtype)

    def wrap(self, array, stream):
        return array

    def current_stream(self, like):
        return 0


class _CuPy(_NumPy):
    name = "cupy"

    def device(self, name, array):
        return array.device.id

    def buffer(self, name, array, stream, write):
        if not array.flags.c_contiguous:
            _refuse_strides(name, array.strides)
        return Buffer(array.data.ptr, array.shape, array.dtype)

    def empty(self, shape, dtype, like, stream):
        import cupy

        with like.device, on_stream(stream):
            return cupy.empty(shape, dtype)

    def current_stream(self, like):
        import cupy

        return cupy.cuda.get_current_stream(like.device.id).ptr


class _Torch(_NumPy):
    name = "torch"

    def device(self, name, array):
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"{name} must be on the CPU or a CUDA device, is on {array.device}")
        return array.device.index if array.device.type == "cuda" else None

    def buffer(self, name, array, stream, write):
        torch = sys.modules["torch"]
        if array.layout != torch.strided or array.is_conj() or array.is_neg():
            raise TypeError(f"{name} must be a plain dense tensor, got {array.layout}")
        if not array.is_contiguous():
            _refuse_strides(name, array.stride())
        if write and array.requires_grad and array.is_leaf and torch.is_grad_enabled():
            raise ValueError(f"{name} is changed by this call and requires grad: use no_grad()")
        dtype = np.dtype(str(array.dtype).removeprefix("torch."))
        if array.device.type == "cuda":
            return Buffer(array.data_ptr(), tuple(array.shape), dtype)
        if dtype.name == "bfloat16":  # NumPy would refuse it: pass the bits
            return array.detach().view(torch.int16).numpy().view(dtype)
        return array.detach().numpy()

    def empty(self, shape, dtype, like, stream):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)

    def current_stream(self, like):
        if like.device.type == "cpu":
            return 0
        return sys.modules["torch"].cuda.current_stream(like.device).cuda_stream


class _Jax(_NumPy):
    name, mutable = "jax", False

    def device(self, name, array):
        jax = sys.modules["jax"]
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"{name} is being traced: call the op outside jit, vmap and grad")
        (device,) = array.devices()
        if device.platform not in ("cpu", "gpu", "cuda"):
            raise TypeError(f"{name} must be on the CPU or a CUDA device, is on {device}")
        return None if device.platform == "cpu" else device.local_hardware_id or 0

    def buffer(self, name, array, stream, write):
        (device,) = array.devices()
        if device.platform == "cpu":
            return np.asarray(array)
        import cupy

        # Asking for the capsule with our stream makes that stream wait for what computes the array.
        with on_stream(stream):
            taken = cupy.from_dlpack(
                array.view("uint16") if array.dtype.name == "bfloat16" else array
            )
        return Buffer(taken.data.ptr, array.shape, np.dtype(array.dtype))

    def empty(self, shape, dtype, like, stream):
        (device,) = like.devices()
        if device.platform == "cpu":
            return np.empty(shape, dtype)
        import cupy

        with on_stream(stream):
            return cupy.empty(shape, dtype)

    def wrap(self, array, stream):
        import jax

        if isinstance(array, np.ndarray):
            return jax.numpy.asarray(array)
        # JAX asks for a capsule on its own stream, which then waits for CuPy's current one: ours.
        with on_stream(stream):
            if array.dtype.name == "bfloat16":
                return jax.dlpack.from_dlpack(array.view("uint16")).view("bfloat16")
            return jax.dlpack.from_dlpack(array)

    def current_stream(self, like):
        if self.device("", like) is None:
            return 0
        import cupy

        return cupy.cuda.get_current_stream(self.device("", like)).ptr


_LIBRARIES = {"numpy": _NumPy(), "cupy": _CuPy(), "torch": _Torch(), "jax": _Jax()}
_LIBRARIES["jaxlib"] = _LIBRARIES["jax"]


def library_of(name, array):
    """The library an array belongs to. Raises TypeError for anything that is no array of the four."""
    found = _LIBRARIES.get(type(array).__module__.partition(".")[0])
    if found is None or not hasattr(array, "dtype") or not hasattr(array, "shape"):
        # A torch.nn.Parameter or a NumPy subclass of another package still is one of the four.
        for kind, module in (("ndarray", "numpy"), ("Tensor", "torch")):
            if module in sys.modules and isinstance(array, getattr(sys.modules[module], kind)):
                return _LIBRARIES[module]
        raise TypeError(
            f"{name} must be a NumPy, CuPy, torch or JAX array, got {type(array).__name__}"
        )
    return found


def stream_address(stream):
    """The cudaStream_t of an integer, a CuPy or torch stream, or anything with __cuda_stream__."""
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    for attribute in ("ptr", "cuda_stream"):
        if hasattr(stream, attribute):
            return getattr(stream, attribute)
    raise TypeError(f"stream must be a CUDA stream or its address, got {type(stream).__name__}")
