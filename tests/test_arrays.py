"""The four array libraries on the CPU: same numbers, same library out, no copy, clear refusals."""

import numpy as np
import pytest

from lowgpu_kernels import gae
from lowgpu_kernels.arrays import stream_address


def inputs(steps=5, envs=3, seed=0):
    rng = np.random.default_rng(seed)
    reward, value = (rng.normal(size=(steps, envs)).astype("f4") for _ in range(2))
    return reward, value, rng.normal(size=envs).astype("f4"), rng.random((steps, envs)) < 0.2


def torch_arrays():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    return [torch.from_numpy(a) for a in inputs()], torch.Tensor


def jax_arrays():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    return [jax.numpy.asarray(a) for a in inputs()], jax.Array


@pytest.mark.parametrize("library", [torch_arrays, jax_arrays])
def test_the_same_library_comes_out_with_the_same_bits(library):
    arrays, kind = library()
    want, got = gae(*inputs()), gae(*arrays)
    for w, g in zip(want, got):
        assert isinstance(g, kind)
        np.testing.assert_array_equal(np.asarray(g), w)


def test_an_output_given_is_the_one_written_and_returned():
    out = tuple(np.full(shape, np.nan, "f4") for shape in ((5, 3), (5, 3), 2))
    got = gae(*inputs(), out=out)
    assert got.advantage is out[0] and got.returns is out[1] and got.moments is out[2]
    np.testing.assert_array_equal(out[0], gae(*inputs()).advantage)


def test_one_of_several_outputs_may_be_given():
    returns = np.empty((5, 3), "f4")
    got = gae(*inputs(), out=(None, returns, None))
    assert got.returns is returns and got.advantage.shape == (5, 3)


def test_torch_memory_is_shared_not_copied():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays, _ = torch_arrays()
    out = torch.full((5, 3), float("nan")), None, None
    address = out[0].data_ptr()
    gae(*arrays, out=out)
    assert out[0].data_ptr() == address and not out[0].isnan().any()


def test_a_torch_parameter_is_read_as_its_values():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays, _ = torch_arrays()
    arrays[1] = torch.nn.Parameter(arrays[1])
    np.testing.assert_array_equal(gae(*arrays).advantage.numpy(), gae(*inputs()).advantage)


def test_a_torch_view_with_strides_is_refused_by_name():
    arrays, _ = torch_arrays()
    arrays[0] = arrays[0].t().contiguous().t()
    with pytest.raises(TypeError, match=r"^reward must be C-contiguous"):
        gae(*arrays)


def test_a_jax_array_is_never_written_in_place():
    arrays, _ = jax_arrays()
    with pytest.raises(TypeError, match="advantage is written in place, which jax"):
        gae(*arrays, out=(arrays[0], arrays[1], None))


def test_a_traced_jax_array_is_refused():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    arrays, _ = jax_arrays()
    with pytest.raises(TypeError, match="reward is being traced"):
        jax.jit(lambda r: gae(r, *arrays[1:]).advantage)(arrays[0])


def test_arrays_of_two_libraries_are_refused():
    arrays, _ = torch_arrays()
    with pytest.raises(TypeError, match="reward is torch, value is numpy"):
        gae(arrays[0], *inputs()[1:])


def test_a_read_only_output_and_a_foreign_byte_order_are_refused():
    out = np.empty((5, 3), "f4"), None, None
    out[0].flags.writeable = False
    with pytest.raises(
        ValueError, match="advantage is changed by this call, and was given read-only"
    ):
        gae(*inputs(), out=out)
    reward, *rest = inputs()
    with pytest.raises(TypeError, match="reward must be in native byte order"):
        gae(reward.astype(">f4"), *rest)


def test_a_stream_makes_no_sense_on_the_cpu():
    with pytest.raises(ValueError, match="stream= with arrays on the CPU"):
        gae(*inputs(), stream=0)


def test_streams_are_read_from_every_spelling():
    class Protocol:
        def __cuda_stream__(self):
            return 0, 77

    class CuPyLike:
        ptr = 5

    class TorchLike:
        cuda_stream = 6

    assert [stream_address(s) for s in (Protocol(), CuPyLike(), TorchLike(), 8)] == [77, 5, 6, 8]
    with pytest.raises(TypeError, match="stream must be a CUDA stream or its address, got str"):
        stream_address("default")


@pytest.mark.parametrize("empty", [(0, 3), (5, 0)])
def test_an_empty_batch_gives_an_empty_result(empty):
    """Case F3, on the CPU."""
    steps, envs = empty
    got = gae(*inputs(steps, envs))
    assert got.advantage.shape == empty and got.returns.shape == empty
