"""Every op on the CPU against its spec, at odd sizes, into poisoned outputs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import (
    arrays_for,
    assert_agrees,
    every_op,
    kinds_of_real,
    params_for,
    poisoned_outputs,
    run_numpy,
    seeded,
    sizes_for,
)

each_op = pytest.mark.parametrize("op", every_op, ids=str)


def small_call(op):
    """Inputs, parameters and sizes of one small call that is right."""
    rng = np.random.default_rng(1)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params, sizes=(3,))
    return arrays_for(op, rng, sizes, params), params, sizes


@each_op
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_the_cpu_executor_agrees_with_the_spec(op, data):
    rng = seeded(data)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params)
    for real in kinds_of_real(op, params):
        inputs = arrays_for(op, rng, sizes, params, real)
        got = run_numpy(op, inputs, params, sizes, real)
        assert_agrees(op, got, inputs, params, sizes, real)


@each_op
def test_the_same_call_gives_the_same_bits(op):
    rng = np.random.default_rng(7)
    params = params_for(op, rng)
    sizes = sizes_for(op, rng, params, sizes=(33, 127))
    inputs = arrays_for(op, rng, sizes, params)
    first = run_numpy(op, inputs, params, sizes)
    second = run_numpy(op, inputs, params, sizes)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes()


@each_op
def test_a_wrong_element_type_is_refused_by_name(op):
    inputs, params, _ = small_call(op)
    name = next(n for n, a in inputs.items() if a is not None)
    inputs[name] = inputs[name].astype(np.complex128)
    with pytest.raises(TypeError, match=f"^{name} must be "):
        op(**inputs, **params)


@each_op
def test_a_strided_array_is_refused_by_name(op):
    inputs, params, _ = small_call(op)
    for name, array in inputs.items():
        if array is None or array.shape[-1] < 2:
            continue
        twice = np.repeat(array, 2, axis=-1)[..., ::2]
        with pytest.raises(TypeError, match=f"^{name} must be C-contiguous"):
            op(**{**inputs, name: twice}, **params)


@each_op
def test_a_missing_array_an_unknown_name_and_a_list_are_refused(op):
    inputs, params, _ = small_call(op)
    needed = [n for n, s in op.inputs.items() if not s.optional]
    with pytest.raises(TypeError, match=f"{op} needs {needed[-1]}"):
        op(**{n: a for n, a in inputs.items() if n != needed[-1]}, **params)
    with pytest.raises(TypeError, match="unexpected keyword"):
        op(**inputs, **params, nonsense=1)
    with pytest.raises(TypeError, match=f"{needed[0]} must be a NumPy, CuPy, torch or JAX array"):
        op(**{**inputs, needed[0]: [1.0]}, **params)


@each_op
def test_an_output_of_another_shape_is_refused(op):
    inputs, params, sizes = small_call(op)
    outs = poisoned_outputs(op, sizes, params)
    if not outs:
        with pytest.raises(TypeError, match="no output"):
            op(**inputs, **params, out=np.empty(1, "f4"))
        return
    wrong = (np.concatenate([outs[0], outs[0], outs[0][:1]]), *outs[1:])
    with pytest.raises(ValueError, match=f" must be |^{op} needs "):
        op(**inputs, **params, out=wrong)


@each_op
def test_a_parameter_out_of_range_is_refused_by_name(op):
    inputs, params, _ = small_call(op)
    for name in params:
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
            op(**inputs, **{**params, name: "no such value"})
        with pytest.raises((TypeError, ValueError), match=f"^{name} must be"):
            op(**inputs, **{**params, name: float("nan")})
