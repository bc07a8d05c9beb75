"""Every kernel of every op, compiled as its launcher would launch it on three GPUs. Needs no GPU."""

import functools

import numpy as np
import pytest

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import compile as lg_compile
from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import NumbaKernel
from tests.harness import (
    arrays_for,
    every_op,
    kinds_of_real,
    params_for,
    poisoned_outputs,
    sizes_for,
)

PARTS = ("A100", "L4", "H100")
# Bytes of register spill a kernel may have, by entry name; every other kernel has none.
SPILL_BUDGET = {}


def as_buffer(array):
    """Where an array would lie on a GPU: never read, so the address may be any."""
    return None if array is None else Buffer(0x7F0000000000, array.shape, array.dtype)


def launches_of(op, part, seeds=(0, 1, 2, 3)):
    """Every launch an op makes over a few random parameters and sizes, on a known part."""
    made = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        params = params_for(op, rng)
        sizes = sizes_for(op, rng, params, sizes=(33, 127, 257), most=1 << 20)
        for real in kinds_of_real(op, params):
            inputs = arrays_for(op, rng, sizes, params, real)
            outs = poisoned_outputs(op, sizes, params, real)
            with launch.recording(launch.KNOWN[part]) as record:
                named = {d.name: s for d, s in sizes.items()}
                work = [
                    Buffer(0x7E0000000000, shape, np.dtype(dtype))
                    for shape, dtype in op.scratch_specs(named, params, real).values()
                ]
                op.cuda(
                    *map(as_buffer, inputs.values()),
                    *params.values(),
                    *map(as_buffer, outs),
                    *work,
                    0,
                )
            made += record
    return made


@functools.cache
def sass(kernel, architecture):
    return lg_compile.disassemble(kernel.binary(architecture))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("op", every_op, ids=str)
def test_kernels_fit_the_device_and_use_no_float64_no_spills_and_no_calls(op, part):
    on = launch.KNOWN[part]
    made = launches_of(op, part)
    assert made, f"{op} launches nothing"
    for launched in made:
        resources = launched.resources(on)
        name = getattr(launched.kernel, "path", None) or launched.kernel.function.__name__
        threads = int(np.prod(launched.block))
        assert threads % 32 == 0 and threads <= on.threads_per_block, name
        assert threads <= launch.fitting_threads(resources, threads, on), f"{name}: registers"
        assert resources.shared + launched.shared <= on.shared_per_block, f"{name}: shared memory"
        assert launch.occupancy(resources, threads, launched.shared, on).blocks_per_sm >= 1
        spilled = resources.spill_stores + resources.spill_loads
        assert spilled <= SPILL_BUDGET.get(name, 0), f"{name} spills {spilled} B"
        code = sass(launched.kernel, on.architecture)
        assert not FLOAT64.search(code), f"{name} computes in float64: a bare float literal?"
        assert not CALL.search(code), f"{name} has a call left in it: a function not inlined?"
        if isinstance(launched.kernel, NumbaKernel):
            assert threads <= launched.kernel.threads, f"{name} is launched past its bound"


def test_a_float64_literal_is_found():
    def doubling(x):
        from_the_end = x.shape[0] - 1
        x[from_the_end] = x[from_the_end] * 1.1

    kernel = NumbaKernel(doubling, ("float32[1]",), 32)
    assert FLOAT64.search(lg_compile.disassemble(kernel.binary("sm_90a")))


def test_a_header_edit_makes_another_binary(tmp_path, monkeypatch):
    include = tmp_path / "include"
    include.mkdir()
    for header in lg_compile.INCLUDE.glob("*.cuh"):
        (include / header.name).write_bytes(header.read_bytes())
    monkeypatch.setattr(lg_compile, "INCLUDE", include)
    before = lg_compile._headers()
    (include / "added.cuh").write_text("#pragma once\n")
    assert lg_compile._headers() != before


def test_a_changed_constant_or_helper_makes_another_fingerprint():
    def helper(x):
        return x + 1

    def make(constant, called):
        def function(x):
            return called(x) * constant

        return function

    def other(x):
        return x + 2

    same = lg_compile.fingerprint(make(np.float32(2), helper))
    assert same == lg_compile.fingerprint(make(np.float32(2), helper))
    assert same != lg_compile.fingerprint(make(np.float32(3), helper))
    assert same != lg_compile.fingerprint(make(np.float32(2), other))


def test_a_damaged_cache_entry_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWGPU_CACHE", str(tmp_path))

    def touch(x):
        x[0] = np.float32(1)

    def built():
        lg_compile._numba.cache_clear()
        return lg_compile._numba(touch, ("float32[1]",), 32, "sm_80")

    first = built()
    (entry,) = tmp_path.glob("*.kernel")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-20] + b"x" * 20)
    assert built() == first
    assert entry.read_bytes() == whole
    entry.write_bytes(b"")
    assert built() == first


def test_a_linked_function_has_the_prototype_of_its_types():
    linked = lg_compile.Linked("f", abs, ("float32*", "int32", "uint32", "float32"), "int32")
    assert linked.prototype == 'extern "C" __device__ int f(float*, int, unsigned, float);'


def test_an_architecture_without_bf16_is_refused():
    old = launch.Device("T4", (7, 5), 40, 64 * 1024, 64 * 1024, 1024, 16, 4 << 20)
    with pytest.raises(RuntimeError, match=r"T4 has compute capability 7\.5; .* 8\.0"):
        _ = old.architecture


def test_occupancy_is_the_guides_arithmetic():
    def resources(registers, shared):
        return lg_compile.Resources("k", registers, 0, 0, 0, shared)

    h100 = launch.KNOWN["H100"]
    full = launch.occupancy(resources(32, 0), 256, 0, h100)
    assert (full.blocks_per_sm, full.fraction) == (8, 1.0)
    tight = launch.occupancy(resources(128, 0), 256, 0, h100)
    assert (tight.blocks_per_sm, tight.limit) == (2, "registers")
    wide = launch.occupancy(resources(32, 0), 256, 100 * 1024, h100)
    assert (wide.blocks_per_sm, wide.limit) == (2, "shared memory")
    assert launch.fitting_threads(resources(128, 0), 1024, h100) == 512
    assert launch.fitting_threads(resources(32, 0), 1024, h100) == 1024
