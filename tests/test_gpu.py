"""Every op on a GPU: against its spec, twice for the same bits, from four libraries, in a graph."""

import gc
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowgpu_kernels import gae, launch
from lowgpu_kernels.arrays import Buffer
from tests.harness import (
    arrays_for,
    assert_agrees,
    every_op,
    kinds_of_real,
    params_for,
    poisoned_outputs,
    seeded,
    sizes_for,
)

pytestmark = pytest.mark.gpu
each_op = pytest.mark.parametrize("op", every_op, ids=str)


def to_gpu(array):
    import cupy

    return None if array is None else cupy.asarray(array)


def run_gpu(op, inputs, params, sizes, real="float32", stream=None):
    """The public call on CuPy arrays into poisoned outputs: {name: NumPy array}."""
    given = {n: to_gpu(a) for n, a in inputs.items()}
    outs = tuple(map(to_gpu, poisoned_outputs(op, sizes, params, real)))
    op(**given, **params, out=outs or None, stream=stream)
    results = dict(zip(op.outputs, outs)) | {n: given[n] for n in op.changes}
    return {n: a.get() for n, a in results.items()}


@each_op
@given(data=st.data())
@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
def test_the_kernel_agrees_with_the_spec(op, data):
    rng = seeded(data)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params)
    for real in kinds_of_real(op, params):
        inputs = arrays_for(op, rng, sizes, params, real)
        assert_agrees(op, run_gpu(op, inputs, params, sizes, real), inputs, params, sizes, real)


@each_op
@pytest.mark.parametrize("seed", range(3))
def test_the_same_call_gives_the_same_bits(op, seed):
    rng = np.random.default_rng(seed)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params, sizes=(129, 257), most=400_000)
    for real in kinds_of_real(op, params):
        inputs = arrays_for(op, rng, sizes, params, real)
        first = run_gpu(op, inputs, params, sizes, real)
        for _ in range(3):
            again = run_gpu(op, inputs, params, sizes, real)
            for name in first:
                assert first[name].tobytes() == again[name].tobytes(), name


@each_op
def test_a_captured_call_replays_to_the_same_bits(op):
    import cupy

    rng = np.random.default_rng(5)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params, sizes=(33, 127))
    inputs = arrays_for(op, rng, sizes, params)
    want = run_gpu(op, inputs, params, sizes)
    given = {n: to_gpu(a) for n, a in inputs.items()}
    outs = tuple(map(to_gpu, poisoned_outputs(op, sizes, params)))
    named = {d.name: s for d, s in sizes.items()}
    work = [cupy.empty(shape, dtype) for shape, dtype in op.scratch_specs(named, params).values()]
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    op(**given, **params, out=outs or None, scratch=work, stream=stream)
    graph = stream.end_capture()
    for name in op.changes:
        given[name].set(inputs[name])
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    results = dict(zip(op.outputs, outs)) | {n: given[n] for n in op.changes}
    for name, array in results.items():
        assert array.get().tobytes() == want[name].tobytes(), name


def small_inputs(steps=64, envs=33, seed=0):
    rng = np.random.default_rng(seed)
    reward, value = (rng.normal(size=(steps, envs)).astype("f4") for _ in range(2))
    return reward, value, rng.normal(size=envs).astype("f4"), rng.random((steps, envs)) < 0.2


def torch_on_gpu():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return [torch.from_numpy(a).cuda() for a in small_inputs()], torch.Tensor


def jax_on_gpu():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    return [jax.device_put(a, jax.devices("gpu")[0]) for a in small_inputs()], jax.Array


def cupy_on_gpu():
    import cupy

    return [cupy.asarray(a) for a in small_inputs()], cupy.ndarray


@pytest.mark.parametrize("library", [cupy_on_gpu, torch_on_gpu, jax_on_gpu])
def test_the_same_library_comes_out_on_the_gpu(library):
    arrays, kind = library()
    got = gae(*arrays)
    want = gae(*small_inputs())
    for w, g in zip(want, got):
        assert isinstance(g, kind)
        found = g.get() if hasattr(g, "get") else np.asarray(g.cpu() if hasattr(g, "cpu") else g)
        np.testing.assert_allclose(found, w, atol=2e-5)


def test_a_side_stream_of_torch_is_honoured():
    """Case F7: the op is queued behind what the producer's stream is still computing."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = [torch.from_numpy(a).cuda() for a in small_inputs(128, 256)]
    want = gae(*arrays).advantage.cpu()
    big = torch.randn(2048, 2048, device="cuda") / 45
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(100):
        with torch.cuda.stream(side):
            x = big
            for _ in range(20):
                x = x @ big
            reward = arrays[0] + 0 * x[0, 0].clamp(-1, 1)
            got = gae(reward, *arrays[1:]).advantage
            found = got.cpu()
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


def test_a_stream_given_by_hand_is_the_one_used():
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    arrays = [cupy.asarray(a) for a in small_inputs()]
    cupy.cuda.runtime.deviceSynchronize()
    got = gae(*arrays, stream=stream).advantage
    stream.synchronize()
    np.testing.assert_array_equal(got.get(), gae(*arrays).advantage.get())


def test_bfloat16_of_torch_is_understood():
    """Case F6."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from lowgpu_kernels import mlp_forward
    from lowgpu_kernels.ops.mlp.network import policy_network

    network = policy_network(56, 3)
    rng = np.random.default_rng(0)
    parameters = torch.tensor(0.1 * rng.normal(size=network.parameters), dtype=torch.float32).cuda()
    x = torch.randn(100, 56, device="cuda", dtype=torch.bfloat16)
    wide = mlp_forward(x.float(), parameters, network=network).y
    narrow = mlp_forward(x, torch.nn.Parameter(parameters), network=network)
    assert narrow.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.y, wide, rtol=0.03, atol=0.03 * float(wide.abs().max()))


def test_strides_on_the_gpu_are_refused():
    """Case F4."""
    import cupy

    reward, *rest = [cupy.asarray(a) for a in small_inputs(64, 32)]
    for twisted in (reward.T.copy().T, cupy.repeat(reward, 2, axis=0)[::2]):
        with pytest.raises(TypeError, match="reward must be C-contiguous"):
            gae(twisted, *rest)


def test_an_array_left_on_the_cpu_is_refused_by_name():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays, _ = torch_on_gpu()
    with pytest.raises(TypeError, match="value on the CPU"):
        gae(arrays[0], arrays[1].cpu(), *arrays[2:])
    assert torch.cuda.is_available()


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
def test_an_empty_batch_gives_an_empty_result_and_moments_of_zero(shape):
    """Case F3."""
    import cupy

    got = gae(*(cupy.asarray(a) for a in small_inputs(*shape)))
    assert got.advantage.shape == shape
    assert got.moments.get().tolist() == [0, 0]


def test_a_launch_costs_little_host_time():
    """At most 10 us a launch: the median of many, each kernel far cheaper than its launch."""
    import cupy

    rng = np.random.default_rng(0)
    from lowgpu_kernels.ops.advantage.gae import THREADS, gae_kernel

    held = [cupy.asarray(rng.normal(size=64).astype("f4")) for _ in range(4)]
    held += [cupy.zeros(64, "u1"), cupy.zeros((1, 3), "f4")]
    *buffers, flags, partials = [Buffer(a.data.ptr, a.shape, a.dtype) for a in held]
    args = (
        *buffers[:2],
        Buffer(buffers[0].address, (32,), buffers[0].dtype),
        flags,
        Buffer(0, (0,), flags.dtype),
        Buffer(0, (0,), buffers[0].dtype),
        np.float32(0.9),
        np.float32(0.9),
        np.int32(2),
        *buffers[2:],
        partials,
    )
    bare = gae_kernel[1, THREADS, 0]
    seconds = []
    gc.disable()  # as timeit does
    try:
        for i in range(2000):
            if i % 200 == 0:  # a full queue would make the launch wait for the kernel
                cupy.cuda.runtime.deviceSynchronize()
            start = time.perf_counter()
            bare(*args)
            seconds.append(time.perf_counter() - start)
    finally:
        gc.enable()
    median = float(np.median(seconds))
    print(f"host time of a launch with 12 arguments, 9 of them arrays: {median * 1e6:.2f} us")
    assert median <= 10e-6


def test_importing_makes_no_context_so_a_fork_may_use_cuda():
    """Case S7."""
    code = """
import os, time
start = time.perf_counter()
import lowgpu, lowgpu_kernels
assert time.perf_counter() - start < 2
child = os.fork()
if child == 0:
    import cupy
    os._exit(0 if int(cupy.arange(4).sum()) == 6 else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_known_device_figures_are_those_the_runtime_reports():
    found = launch.device()
    if found.name.removeprefix("NVIDIA ") not in launch.KNOWN:
        pytest.skip(f"no vendor figures for {found.name}")
    known = launch.KNOWN[found.name.removeprefix("NVIDIA ")]
    assert (found.capability, found.sms, found.shared_per_block, found.shared_per_sm) == (
        known.capability,
        known.sms,
        known.shared_per_block,
        known.shared_per_sm,
    )
    assert (found.threads_per_sm, found.blocks_per_sm) == (
        known.threads_per_sm,
        known.blocks_per_sm,
    )
