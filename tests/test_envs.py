"""The registry, and what the ops over an env promise beyond agreeing with their specs."""

import dataclasses

import numpy as np
import pytest
from ml_dtypes import bfloat16

from lowgpu.envs import ENVS, cartpole, make, market
from lowgpu_kernels import env_step, observe, reset
from lowgpu_kernels.ops.rollout.cpu_env import bfloat16_bits
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK
from lowgpu_kernels.ops.rollout.linked import env_links, env_macros

CLOCK = np.array([5], "u8")


def states(env, count, fill=0):
    return np.full((count, len(env.floats)), fill, "f4"), np.full(
        (count, len(env.ints)), fill, "i4"
    )


def test_an_env_is_made_by_name_with_its_options():
    assert make("market", episode=9) is market(episode=9)
    assert make("cartpole") is cartpole()
    assert {make(name).name for name in ENVS} == set(ENVS)


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="name must be one of acrobot, cartpole, market, mountain_car, got 'pong'"
    ):
        make("pong")
    with pytest.raises(TypeError, match="gravity"):
        make("cartpole", gravity=1)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(observation=0), r"observation must be in 1\.\.512, got 0"),
        (dict(observation=513), r"observation must be in 1\.\.512, got 513"),
        (dict(actions=1), r"actions must be in 2\.\.64, got 1"),
        (dict(ints=()), "at least one float and one int"),
        (dict(table_columns=22), r"table_columns must be in 0\.\.21, got 22"),
        (dict(table_row=None), "table_row and table_columns together"),
        (dict(series=()), "a table and no series"),
    ],
    ids=str,
)
def test_an_env_that_cannot_be_is_refused(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(WALK, **wrong)


@pytest.mark.parametrize("width", [48, 53, 54, 55, 60, 64])
def test_a_table_of_another_width_is_refused_with_both_numbers(width):
    env = market()
    with pytest.raises(ValueError, match=rf"needs I=56 .* got arrays with I={width}"):
        observe(*states(env, 3), np.zeros((9, width), "f4"), np.ones((2, 9), "f4"), env=env)


def test_states_and_series_of_another_env_are_refused():
    env, series = market(), np.ones((2, 9), "f4")
    with pytest.raises(ValueError, match=r"needs F=2 .* got arrays with F=4"):
        reset(*states(cartpole(), 3)[:1], states(env, 3)[1], series, CLOCK, env=env)
    with pytest.raises(ValueError, match=r"needs S=2 .* got arrays with S=3"):
        reset(*states(env, 3), np.ones((3, 9), "f4"), CLOCK, env=env)
    with pytest.raises(ValueError, match=r"series must be given: market reads series \[2, R\]"):
        reset(*states(env, 3), None, CLOCK, env=env)
    with pytest.raises(ValueError, match="table must be given: market reads table"):
        observe(*states(env, 3), None, series, env=env)
    with pytest.raises(ValueError, match="table must be left out: cartpole reads no table"):
        observe(*states(cartpole(), 3), np.zeros((9, 8), "f4"), env=cartpole())


def test_an_action_or_an_index_out_of_range_is_refused_with_its_place():
    floats, ints = states(DRIFT, 3)
    with pytest.raises(ValueError, match=r"action must be in 0\.\.1, got 2 at 1"):
        env_step(floats, ints, np.array([0, 2, 1], "i4"), None, CLOCK, env=DRIFT)
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=rf"index must be in 0\.\.2, got {wrong} at 1"):
            observe(floats, ints, index=np.array([0, wrong], "i4"), env=DRIFT)


def test_a_table_of_another_precision_is_refused():
    series = np.ones((2, 9), "f4")
    for precision, other in (("float32", bfloat16), ("bfloat16", np.float32)):
        with pytest.raises(TypeError, match=f"table must be {precision}"):
            given = np.zeros((9, WALK.width), other)
            observe(*states(WALK, 3), given, series, env=WALK, precision=precision)


def test_without_an_index_every_state_is_observed_in_order():
    floats, ints = states(DRIFT, 5)
    floats[:] = np.arange(15).reshape(5, 3)
    x = observe(floats, ints, env=DRIFT)
    np.testing.assert_array_equal(x[:, :3], floats)
    picked = observe(floats, ints, index=np.array([4, 0, 4], "i4"), env=DRIFT)
    np.testing.assert_array_equal(picked, x[[4, 0, 4]])
    with pytest.raises(ValueError):
        observe(floats, ints, env=DRIFT, out=np.empty((4, 8), "f4"))


def test_what_an_environment_draws_does_not_depend_on_how_many_there_are():
    many, few = states(DRIFT, 1000), states(DRIFT, 7)
    for s in (many, few):
        reset(*s, None, CLOCK, env=DRIFT, seed=2)
    assert many[0][:7].tobytes() == few[0].tobytes()
    for s in (many, few):
        action = np.zeros(len(s[0]), "i4")
        env_step(*s, action, None, CLOCK, env=DRIFT, seed=2)
    assert many[0][:7].tobytes() == few[0].tobytes()


def test_seed_and_clock_change_what_is_drawn_and_the_clock_stays():
    drawn = set()
    for seed, now in ((0, 0), (0, 1), (0, 2**32), (1, 0), (2**63, 0)):
        floats, ints = states(DRIFT, 3)
        clock = np.array([now], "u8")
        reset(floats, ints, None, clock, env=DRIFT, seed=seed)
        assert clock[0] == now
        drawn.add(floats.tobytes())
    assert len(drawn) == 5


def test_a_step_does_not_reset_what_has_ended():
    floats, ints = states(DRIFT, 2)
    ints[:] = 4
    action = np.zeros(2, "i4")
    for step in (5, 6):
        assert env_step(floats, ints, action, None, CLOCK, env=DRIFT).truncated.all()
        assert (ints == step).all()


def test_every_state_and_output_is_written_and_no_batch_is_no_error():
    for env in (DRIFT, cartpole()):
        floats, ints = states(env, 0)
        reset(floats, ints, None, CLOCK, env=env)
        result = env_step(floats, ints, np.empty(0, "i4"), None, CLOCK, env=env)
        assert all(len(array) == 0 for array in result)
        assert observe(floats, ints, env=env).shape == (0, env.width)


def test_a_row_past_2_to_the_31_elements_is_found():
    env, rows = market(), 40_000_000
    # Zeros that are never touched take no memory.
    table, series = np.zeros((rows, 56), bfloat16), np.zeros((2, rows), "f4")
    table[-1, :51] = np.arange(51)
    floats, ints = states(env, 1)
    ints[0, 0] = rows - 1
    x = observe(floats, ints, table, series, env=env, precision="bfloat16")
    np.testing.assert_array_equal(x[0, :51].astype("f4"), np.arange(51))


@pytest.mark.gpu
def test_a_row_past_2_to_the_31_elements_is_found_on_a_gpu():
    import cupy

    env, rows = market(), 40_000_000
    table, series = cupy.zeros((rows, 56), "f4"), cupy.zeros((2, rows), "f4")
    table[-1, :51] = cupy.arange(51)
    floats, ints = map(cupy.asarray, states(env, 1))
    ints[0, 0] = rows - 1
    x = observe(floats, ints, table, series, env=env)
    np.testing.assert_array_equal(cupy.asnumpy(x)[0, :51], np.arange(51))


@pytest.mark.gpu
def test_a_misaligned_table_is_refused_on_a_gpu():
    import cupy

    table = cupy.zeros(9 * 24 + 1, "f4")[1:].reshape(9, 24)
    floats, ints = map(cupy.asarray, states(WALK, 3))
    with pytest.raises(ValueError, match="table must be aligned to 16 bytes"):
        observe(floats, ints, table, cupy.ones((2, 9), "f4"), env=WALK)


def test_bfloat16_rounds_to_nearest_even_like_ml_dtypes():
    edges = [0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 1]
    drawn = np.random.default_rng(0).integers(2**32, size=5000, dtype="u4")
    floats = np.concatenate([np.array(edges, "u4"), drawn]).view("f4")
    made = np.array([bfloat16_bits(x) for x in floats], "u2").view(bfloat16)
    numbers = ~np.isnan(floats)
    assert made[numbers].tobytes() == floats[numbers].astype(bfloat16).tobytes()
    assert np.isnan(made[~numbers].astype("f4")).all()


def test_what_is_linked_is_what_the_env_has():
    assert [f.name for f in env_links(WALK)][-1] == "env_table_row"
    assert [f.name for f in env_links(DRIFT)] == ["env_reset", "env_step", "env_observe"]
    assert env_links(WALK) is env_links(WALK)
    step = env_links(WALK)[1]
    assert step.prototype == (
        'extern "C" __device__ int env_step(float*, int*, int, float*, float*, int, float*);'
    )
    assert env_macros(market())["width"] == 56 and env_macros(market())["table_columns"] == 51
