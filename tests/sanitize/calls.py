"""What compute-sanitizer watches: a call of every op, or one planted fault.

    python -m tests.sanitize.calls ops [NAME ...]
    python -m tests.sanitize.calls canary NAME

Says each call before it is made, so that a finding shows where to look, and how many there were.
"""

import itertools
import sys
from typing import NamedTuple

import numpy as np

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import cuda_c
from lowgpu_kernels.dims import Choice, Static
from lowgpu_kernels.op import OPS
from tests.harness import arrays_for, dims_of, kinds_of_real, params_for, poisoned_outputs

# Part of a warp and a little more than one, in turn, so that no two neighbouring dimensions agree.
ODD = (33, 31)
SEVERAL_TILES = 129
WHOLE_TILES = 128  # what the copy engine asks for: rows of whole 16 bytes
# Several blocks, and two splits of a batch of networks, yet short under racecheck.
LONG, SHORT = 1031, 3
CANARY_THREADS = 64


class Case(NamedTuple):
    """One call: NumPy inputs by name, and the element type of the op's REAL arrays."""

    op: object
    params: dict
    real: str
    sizes: dict
    inputs: dict

    def __str__(self):
        sizes = " ".join(f"{dim}={size}" for dim, size in self.sizes.items())
        plain = (
            f"{name}={value}"
            for name, value in self.params.items()
            if not isinstance(self.op.params[name], Static)
        )
        return f"{self.op} {self.real} {sizes} {' '.join(plain)}"


def choices_of(op):
    """Every choice of an op's parameters with every other, for each may be a kernel of its own."""
    for together in op.examples() if op.examples is not None else ({},):
        free = {}
        for name, kind in op.params.items():
            if name not in together and isinstance(kind, (Choice, Static)):
                free[name] = kind.values if isinstance(kind, Choice) else kind.examples()
        for values in itertools.product(*free.values()):
            yield together | dict(zip(free, values))


def sizes_from(op, params, sizes):
    """All sizes of a call, from `sizes` of the dimensions of its inputs."""
    return sizes | (op.derived(params, sizes) if op.derived is not None else {})


def free_dims_of(op, params):
    """Dimensions of the inputs that come out as they are given, whatever is given."""
    dims = dims_of(op)
    tried = [(size, sizes_from(op, params, dict.fromkeys(dims, size))) for size in ODD]
    return [dim for dim in dims if all(sizes[dim] == size for size, sizes in tried)]


def free_sizes_of(dims):
    """Sizes that a call may choose: odd ones, whole tiles, then each dimension long for once."""
    yield dict.fromkeys(dims, 1)
    yield {dim: ODD[place % 2] for place, dim in enumerate(dims)}
    yield dict.fromkeys(dims, SEVERAL_TILES)
    yield dict.fromkeys(dims, WHOLE_TILES)
    for long in dims:
        yield dict.fromkeys(dims, SHORT) | {long: LONG}


def drawn(op, rng, choices, free):
    """Parameters, and sizes that go with them, of a call that has something to write."""
    while True:
        params = op.checked_params(params_for(op, rng) | choices)
        sizes = sizes_from(op, params, dict.fromkeys(dims_of(op), SHORT) | free)
        if all(0 not in spec.resolve(sizes) for spec in op.outputs.values()):
            return params, sizes


def cases_of(op):
    """The calls of an op, the same every time."""
    rng = np.random.default_rng(0)
    for choices in choices_of(op):
        any_params = op.checked_params(params_for(op, rng) | choices)
        for free in free_sizes_of(free_dims_of(op, any_params)):
            params, sizes = drawn(op, rng, choices, free)
            for real in kinds_of_real(op, params):
                inputs = arrays_for(op, rng, sizes, params, real)
                yield Case(op, params, params.get("precision", real), sizes, inputs)


def call(case):
    """Make a call on the GPU and wait, so that what is found there is printed near it."""
    import cupy

    inputs = {n: None if a is None else cupy.asarray(a) for n, a in case.inputs.items()}
    outputs = poisoned_outputs(case.op, case.sizes, case.params, case.real)
    # Working memory is left to the op, which does not write to it first: initcheck sees it unwritten.
    case.op(**inputs, **case.params, out=tuple(map(cupy.asarray, outputs)) or None)
    cupy.cuda.runtime.deviceSynchronize()


def canary(name):
    """The kernel of a planted fault."""
    return cuda_c("../../tests/sanitize/canaries", name, threads=CANARY_THREADS)


def launch_canary(name, x, unwritten):
    """Queue a planted fault on the default stream."""
    launch.launch(canary(name), 1, CANARY_THREADS, (x, unwritten), 0)


def main(kind, *names):
    import cupy

    # Each array an allocation of its own, else a write past one lands in the pool's next unseen.
    cupy.cuda.set_allocator(None)
    if kind == "canary":
        x = cupy.asarray(np.ones(CANARY_THREADS, "f4"))
        unwritten = cupy.empty_like(x)
        for name in names:
            print(f"call {name}", flush=True)
            launch_canary(name, *(Buffer(a.data.ptr, a.shape, a.dtype) for a in (x, unwritten)))
        cupy.cuda.runtime.deviceSynchronize()
        return
    made = 0
    for op in [OPS[name] for name in names] or OPS.values():
        for case in cases_of(op):
            print(f"call {case}", flush=True)
            call(case)
            made += 1
    print(f"made {made} calls", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
