"""An op: a NumPy function that says what is computed, and executors that compute it fast.

The NumPy function is the name users call, the public docstring and the spec. Its signature is the
only place that says shapes, element types and ranges; calls, tests, benches and docs read it.
"""

import functools
import inspect
import threading
from collections import namedtuple
from contextlib import contextmanager

import numpy as np

from lowgpu_kernels import arrays
from lowgpu_kernels.dims import REAL, Outputs, Spec

OPS = {}
# numba's workqueue layer aborts the process when two threads run parallel loops at once. Reentrant,
# so an executor may call another op.
_cpu_turn = threading.RLock()


class Op:
    """A registered op. Call it like the NumPy function it was made of, plus `out=` and `stream=`."""

    def __init__(self, spec, *, error, changes, scratch, sizes, bench, flops, examples):
        functools.update_wrapper(self, spec)
        self.spec, self.error, self.bench, self.flops = spec, error, bench, flops
        self.changes, self.scratch, self.derived = tuple(changes), dict(scratch or {}), sizes
        self.examples = examples
        self.signature = inspect.signature(spec)
        hints = self.signature.parameters
        self.inputs = {n: p.annotation for n, p in hints.items() if isinstance(p.annotation, Spec)}
        self.params = {n: p.annotation for n, p in hints.items() if n not in self.inputs}
        returned = self.signature.return_annotation
        if isinstance(returned, Spec):
            returned = Outputs(**{"out": returned})
        self.outputs = returned.specs if isinstance(returned, Outputs) else {}
        self.result = namedtuple(f"{self.__name__}_result", self.outputs)
        self.cpu = self.cuda = self.draw_inputs = self.check_values = None
        self.compare = self.verify = None
        assert all(n in self.inputs for n in self.changes)
        OPS[self.__name__] = self

    def on_cpu(self, function):
        """Register the CPU executor: (inputs, params, outputs, scratch) as NumPy arrays, in order."""
        self.cpu = function
        return function

    def on_cuda(self, function):
        """Register the launcher: the same arguments as Buffers, and the stream's address last."""
        self.cuda = function
        return function

    def draws(self, function):
        """Register the inputs tests and benches use: (rng, sizes, params) -> arrays that need care."""
        self.draw_inputs = function
        return function

    def compares(self, function):
        """Register a comparison instead of the default: (got, want, arguments, allowed) -> None."""
        self.compare = function
        return function

    def verifies(self, function):
        """Register a judgement of all outputs together: (got, inputs, params, eps) -> None, or raises.

        For an op whose outputs feed back into it, where one rounding may change what follows.
        """
        self.verify = function
        return function

    def checks(self, function):
        """Register a check of values, made on CPU arrays only: (arguments) -> None, or raises."""
        self.check_values = function
        return function

    def __repr__(self):
        return self.__name__

    def sizes_of(self, sizes, params):
        """`sizes`, with the dimensions that follow from the parameters filled in and checked."""
        if self.derived is not None:
            for dim, size in self.derived(params, sizes).items():
                if sizes.setdefault(dim, size) != size:
                    raise ValueError(
                        f"{self} needs {dim}={size} ({dim.meaning}) with {_shown(params)}, "
                        f"got arrays with {dim}={sizes[dim]}"
                    )
        return sizes

    def chosen_by(self, params):
        """Element types fixed before any array is seen: `precision` is that of the REAL arrays."""
        return {REAL.dtypes: params["precision"]} if "precision" in params else {}

    def checked_params(self, given):
        """Parameters by name, each in range and of the width its kernel takes."""
        checked = {}
        for name, kind in self.params.items():
            default = self.signature.parameters[name].default
            if name not in given and default is inspect.Parameter.empty:
                raise TypeError(f"{self} needs {name}, in {kind}")
            checked[name] = kind(name, given.get(name, default))
        return checked

    def __call__(self, *args, out=None, scratch=None, stream=None, **kwargs):
        try:
            bound = self.signature.bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{self}: {error}; it takes {self.signature}") from None
        params = self.checked_params(bound)
        given = self._given(bound, out)
        first_name, first = next(iter(given.items()))
        library = arrays.library_of(first_name, first)
        device = self._one_place(given, library, first_name)
        if device is None:
            if stream is not None:
                raise ValueError(f"{self} got stream= with arrays on the CPU")
            stream = 0
        else:
            stream = (
                library.current_stream(first) if stream is None else arrays.stream_address(stream)
            )
        sizes, chosen, views = {}, self.chosen_by(params), {}
        for name, spec in {**self.inputs, **self.outputs}.items():
            array = given.get(name)
            if array is None:
                continue
            write = name in self.outputs or name in self.changes
            if write and not library.mutable:
                raise TypeError(f"{name} is written in place, which {library.name} arrays forbid")
            view = library.buffer(name, array, stream, write)
            spec.check(name, view.shape, view.dtype, sizes, chosen)
            views[name] = view
        self.sizes_of(sizes, params)
        if device is None and self.check_values is not None:
            self.check_values(**{n: views.get(n) for n in self.inputs}, **params)
        results = {}
        for name, spec in self.outputs.items():
            if name not in given:
                made = library.empty(spec.resolve(sizes), spec.dtype(chosen), first, stream)
                results[name] = made
                views[name] = _view(library, name, made, device)
        call = (
            *(views.get(n) for n in self.inputs),
            *params.values(),
            *(views[n] for n in self.outputs),
        )
        if device is None:
            with _cpu_turn:
                self.cpu(*call, *[None] * len(self.scratch))
        else:
            with _current(device):
                # `held` keeps scratch that was allocated here alive until its kernels are queued.
                work, held = self._scratch_views(
                    scratch, library, sizes, chosen, params, first, stream, device
                )
                self.cuda(*call, *work, stream)
                del held
        if not self.outputs:
            return None
        final = self.result(
            *(given[n] if n in given else library.wrap(results[n], stream) for n in self.outputs)
        )
        return final[0] if len(final) == 1 else final

    def _given(self, bound, out):
        """Every array of the call by its name: inputs, and outputs given with `out=`."""
        given = {}
        for name, spec in self.inputs.items():
            array = bound.get(name)
            if array is None:
                if not spec.optional:
                    raise TypeError(f"{self} needs {name}, {spec}")
                continue
            given[name] = array
        if out is not None:
            if not self.outputs:
                raise TypeError(f"{self} has no output to give: it changes {self.changes}")
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != len(self.outputs):
                raise TypeError(f"out must be {len(self.outputs)} arrays, got {len(outs)}")
            given |= {n: a for n, a in zip(self.outputs, outs) if a is not None}
        return given

    def _one_place(self, given, library, first_name):
        """The device of the call, None for the CPU; refuses a mix of libraries or devices."""
        places = {}
        for name, array in given.items():
            its = arrays.library_of(name, array)
            if its is not library:
                raise TypeError(
                    f"{self} takes arrays of one library: {first_name} is {library.name}, "
                    f"{name} is {its.name}"
                )
            places[name] = its.device(name, array)
        if len(set(places.values())) > 1:
            where = ", ".join(
                f"{n} on {'the CPU' if d is None else f'GPU {d}'}" for n, d in places.items()
            )
            raise TypeError(f"{self} needs its arrays in one place: {where}")
        return places[first_name]

    def scratch_specs(self, sizes, params, real="float32"):
        """Shapes and types of the working memory of a call: {name: (shape, dtype)}.

        Args:
            sizes: by dimension name.
            params: by name.
            real: element type of the call's REAL arrays, where no `precision` says it.
        """
        real = params.get("precision", real)
        return {
            n: (make(sizes, params), real if dtype is REAL else dtype)
            for n, (dtype, make) in self.scratch.items()
        }

    def _scratch_views(self, scratch, library, sizes, chosen, params, first, stream, device):
        named = {d.name: s for d, s in sizes.items()}
        wanted = self.scratch_specs(named, params, chosen.get(REAL.dtypes, "float32"))
        if scratch is None:
            scratch = [
                library.empty(shape, np.dtype(dtype), first, stream)
                for shape, dtype in wanted.values()
            ]
        views = []
        for array, (name, (shape, dtype)) in zip(scratch, wanted.items(), strict=True):
            view = _view(library, name, array, device)
            if view.dtype != dtype or tuple(view.shape) != tuple(shape):
                raise ValueError(
                    f"scratch {name} must be {dtype}{list(shape)}, "
                    f"got {view.dtype}{list(view.shape)}"
                )
            views.append(view)
        return views, scratch


@contextmanager
def _current(device):
    """Work on a GPU that need not be the current one."""
    import cupy

    if device == cupy.cuda.runtime.getDevice():
        yield
    else:
        with cupy.cuda.Device(device):
            yield


def _view(library, name, array, device):
    if isinstance(array, np.ndarray):
        return array
    if device is not None and hasattr(array, "data") and hasattr(array.data, "ptr"):  # CuPy memory
        return arrays.Buffer(array.data.ptr, array.shape, array.dtype)
    return library.buffer(name, array, 0, False)


def _shown(params):
    return ", ".join(f"{n}={v!r}" for n, v in params.items())


def op(*, error, changes=(), scratch=None, sizes=None, bench=(), flops=None, examples=None):
    """Make an op of a NumPy function.

    Args:
        error: (sizes by dimension name and parameters by name) -> allowed error, in eps of the
            element type computed in and relative to the largest value involved.
        changes: names of the inputs that are changed in place.
        scratch: working memory on a GPU: {name: (dtype or REAL, (sizes, params) -> shape)}. Its
            contents mean nothing before or after a call.
        sizes: (params, known sizes) -> {Dim: size} for dimensions that follow from parameters or
            from other dimensions.
        bench: sizes a bench times, as "T=128 E=4096".
        flops: (sizes) -> floating-point operations of a call.
        examples: () -> parameters that only make sense together, as a list of dicts by name; tests
            and benches take one of them.
    """
    return lambda spec: Op(
        spec,
        error=error,
        changes=changes,
        scratch=scratch,
        sizes=sizes,
        bench=bench,
        flops=flops,
        examples=examples,
    )


def blocks(items, threads):
    """Number of blocks of `threads` that cover `items`."""
    return -(-int(items) // threads)
