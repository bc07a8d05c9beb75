"""check_env passes what keeps the contract and names what breaks it."""

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest

from lowgpu.envs import EnvError, cartpole, check_env, market
from lowgpu.envs.check_code import CALL, FLOAT64, check_types
from lowgpu_kernels.compile import ARCHITECTURES
from lowgpu_kernels.device import f32, i32, scalar
from lowgpu_kernels.ops.rollout.example import DRIFT, WALK

GAIN = 0.3
WEIGHTS = np.ones(4, "f4")
ROWS = 64


def series(count):
    """Positive series; the second holds the ends of two segments."""
    values = np.random.default_rng(3).uniform(1, 2, (count, ROWS)).astype("f4")
    values[1:2] = np.isin(np.arange(ROWS), (ROWS // 2, ROWS - 1))
    return values


def table(width, columns):
    values = np.zeros((ROWS, width), "f4")
    values[:, :columns] = np.random.default_rng(4).normal(size=(ROWS, columns))
    return values


def with_functions(env=DRIFT, **functions):
    return dataclasses.replace(env, **functions)


@pytest.mark.parametrize("env", [market(episode=20), cartpole(), DRIFT, WALK], ids=str)
def test_an_env_that_keeps_the_contract_passes(env):
    arrays = {}
    if env.series:
        arrays = dict(table=table(env.width, env.table_columns), series=series(len(env.series)))
    checked = check_env(env, **arrays, steps=60)
    assert checked.terminated + checked.truncated > 0
    assert checked.architectures == tuple(ARCHITECTURES.values()) and checked.disassembled
    assert check_env(env, **arrays, steps=60) == checked


def bare_literal(floats, ints, action, u, series, rows, reward):
    reward[0] = floats[0] * 0.1
    return 0


def bare_global(floats, ints, action, u, series, rows, reward):
    reward[0] = floats[0] * GAIN
    return 0


def divides_integers(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(ints[0] / i32(3))
    return 0


@scalar
def halved(x):
    return x * 0.3


def literal_in_a_helper(floats, ints, action, u, series, rows, reward):
    reward[0] = halved(floats[0])
    return 0


def compares_with_a_literal(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(1) if floats[0] > 0.1 else f32(0)
    return 0


def reads_a_global(floats, ints, action, u, series, rows, reward):
    reward[0] = floats[0] * WEIGHTS[0]
    return 0


def returns_three(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(0)
    return 3


def makes_nan(floats, ints, action, u, series, rows, reward):
    reward[0] = (floats[0] - floats[0]) / (floats[1] - floats[1])
    return 0


def loses_the_reward(floats, ints, action, u, series, rows, reward):
    floats[0] = u[0]
    return 0


def makes_the_state_infinite(floats, ints, action, u, series, rows, reward):
    floats[1] = f32(1) / (floats[0] - floats[0])
    reward[0] = f32(0)
    return 0


def writes_past_the_state(floats, ints, action, u, series, rows, reward):
    floats[3] = f32(0)
    reward[0] = f32(0)
    return 0


def writes_before_the_state(floats, ints, action, u, series, rows, reward):
    ints[-1] = i32(0)
    reward[0] = f32(0)
    return 0


def writes_past_the_reward(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(0)
    reward[1] = f32(0)
    return 0


def draws_for_itself(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(np.random.randint(1000))
    return 0


def reads_before_writing(floats, ints, action, u, series, rows, reward):
    reward[0] = f32(0) if reward[0] == reward[0] else f32(1)
    return 0


def undecorated(x):
    return x


def calls_plain_python(floats, ints, action, u, series, rows, reward):
    reward[0] = undecorated(floats[0])
    return 0


@pytest.mark.parametrize(
    "step, sentence",
    [
        (bare_literal, r"step computes in float64 at line \d+, .*: write f32\(0\.1\)"),
        (bare_global, r"step computes in float64 .*: write GAIN = f32\(0\.3\)"),
        (divides_integers, r"step computes in float64 .*int / int is float64"),
        (literal_in_a_helper, r"step computes in float64 .*: write f32\(0\.3\)"),
        (compares_with_a_literal, r"step computes in float64 .*: write f32\(0\.1\)"),
        (reads_a_global, r"step reads the global WEIGHTS, a ndarray, which compiling freezes"),
        (returns_three, r"step returns 3: return 0, TERMINATED \(1\) or TRUNCATED \(2\)"),
        (makes_nan, r"step makes reward\[0\] nan: it must be finite"),
        (loses_the_reward, r"step leaves reward\[0\] unwritten"),
        (makes_the_state_infinite, r"step makes the state field speed (inf|nan)"),
        (writes_past_the_state, r"step writes outside floats\[0\] to floats\[2\]"),
        (writes_before_the_state, r"step writes outside ints\[0\] to ints\[0\]"),
        (writes_past_the_reward, r"step writes outside reward\[0\] to reward\[0\]"),
        (draws_for_itself, r"step gives another reward\[0\] for the same state and seed"),
        (reads_before_writing, r"step gives another reward\[0\] for the same state and seed"),
        (calls_plain_python, r"step does not compile: .*undecorated"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refuses_a_step_that(step, sentence):
    with pytest.raises(EnvError, match=f"^drift: {sentence}"):
        check_env(with_functions(step=step), steps=20)


@scalar
def kept_with_a_literal(x):
    return x * 0.7


@scalar
def kept_without_one(x):
    return x * f32(0.7)


def calls_kept_with_a_literal(floats, ints, action, u, series, rows, reward):
    reward[0] = kept_with_a_literal(floats[0])
    return 0


def calls_kept_without_one(floats, ints, action, u, series, rows, reward):
    reward[0] = kept_without_one(floats[0])
    return 0


def test_a_helper_whose_code_another_process_kept_is_judged_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWGPU_CACHE", str(tmp_path))
    warm = "from tests import test_check_env as t\n"
    warm += "for f in (t.kept_with_a_literal, t.kept_without_one): f(t.f32(1))"
    subprocess.run([sys.executable, "-c", warm], check=True)
    check_types(DRIFT, "step", calls_kept_without_one)
    with pytest.raises(EnvError, match=r"float64 at line \d+, .*: write f32\(0\.7\)"):
        check_types(DRIFT, "step", calls_kept_with_a_literal)
    for helper in (kept_with_a_literal, kept_without_one):
        assert sum(helper.stats.cache_hits.values()) == 1


@scalar
def recursive(x):
    return x if x < f32(1) else recursive(x - f32(1))


@scalar
def recursive_with_a_literal(x):
    return x if x < f32(1) else recursive_with_a_literal(f32(x - 1.0))


def test_a_helper_that_calls_itself_is_read_once():
    def step(floats, ints, action, u, series, rows, reward):
        reward[0] = recursive(floats[0])
        return 0

    def literal_step(floats, ints, action, u, series, rows, reward):
        reward[0] = recursive_with_a_literal(floats[0])
        return 0

    check_types(DRIFT, "step", step)
    with pytest.raises(EnvError, match=r"write f32\(1\.0\)"):
        check_types(DRIFT, "step", literal_step)


def forgets_a_field(floats, ints, u, series, rows):
    floats[0] = u[0]
    floats[1] = u[1]
    ints[0] = i32(0)
    return 0


def forgets_the_step(floats, ints, u, series, rows):
    for i in range(3):
        floats[i] = u[i]
    return 0


@pytest.mark.parametrize("reset, field", [(forgets_a_field, "noise"), (forgets_the_step, "step")])
def test_refuses_a_reset_that_forgets(reset, field):
    with pytest.raises(EnvError, match=f"^drift: reset leaves the state field {field} unwritten$"):
        check_env(with_functions(reset=reset), steps=20)


def forgets_a_column(floats, ints, series, rows, out):
    out[0] = floats[0]
    out[2] = floats[2]
    return 0


def writes_a_pad_column(floats, ints, series, rows, out):
    for i in range(4):
        out[i] = f32(1)
    return 0


def writes_past_the_row(floats, ints, series, rows, out):
    for i in range(9):
        out[i] = f32(0)
    return 0


def changes_the_state(floats, ints, series, rows, out):
    for i in range(3):
        out[i] = floats[i]
    floats[0] = f32(0)
    return 0


@pytest.mark.parametrize(
    "observe, sentence",
    [
        (forgets_a_column, r"observe leaves out\[1\] unwritten"),
        (writes_a_pad_column, r"observe writes past out\[2\], into columns that stay zero"),
        (writes_past_the_row, r"observe writes outside out\[0\] to out\[2\]"),
        (changes_the_state, r"observe changes the state"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refuses_an_observe_that(observe, sentence):
    with pytest.raises(EnvError, match=f"^drift: {sentence}"):
        check_env(with_functions(observe=observe), steps=20)


def writes_into_the_table(floats, ints, series, rows, out):
    out[-1] = f32(7)
    out[0] = floats[0]
    out[1] = f32(0)
    return 0


def writes_to_series(floats, ints, series, rows, out):
    series[0] = f32(7)
    out[0] = floats[0]
    out[1] = f32(0)
    return 0


def reads_past_the_series(floats, ints, series, rows, out):
    out[0] = series[rows + rows + ints[0]]
    out[1] = f32(0)
    return 0


def next_row(floats, ints):
    return ints[0] + i32(1)


@pytest.mark.parametrize(
    "functions, sentence",
    [
        (dict(observe=writes_into_the_table), r"observe writes before out\[0\]"),
        (dict(observe=writes_to_series), r"one of the functions writes to series"),
        (dict(observe=reads_past_the_series), r"observe makes out\[0\] nan"),
        (dict(table_row=next_row), r"table_row returns a row outside 0\.\.63"),
    ],
    ids=lambda given: given if isinstance(given, str) else next(iter(given.values())).__name__,
)
def test_refuses_with_a_table_an_env_that(functions, sentence):
    env = with_functions(WALK, **functions)
    with pytest.raises(EnvError, match=f"^walk: {sentence}"):
        check_env(env, table(env.width, env.table_columns), series(2), steps=200)


@pytest.mark.parametrize("width", [53, 54, 55, 60])
def test_a_table_of_another_width_is_refused_with_both_numbers(width):
    with pytest.raises(EnvError, match=rf"54 columns are stored as 56; got \[64, {width}\]"):
        check_env(market(), table(width, 51), series(2))


@pytest.mark.parametrize(
    "arrays, sentence",
    [
        (dict(series=series(2)), r"table must be given: market reads table \[R, 56\]"),
        (dict(table=table(56, 51)), r"series must be given: market reads series \[2, R\]"),
        (dict(table=table(56, 51), series=series(3)), r"series are price, last; got \[3, 64\]"),
        (dict(table=table(56, 51).astype("f8"), series=series(2)), "table must be contiguous fl"),
        (dict(table=table(56, 51)[:9], series=series(2)), "table has 9 rows and series 64"),
    ],
    ids=["no table", "no series", "three series", "float64", "nine rows"],
)
def test_arrays_that_do_not_fit_are_refused(arrays, sentence):
    with pytest.raises(EnvError, match=sentence):
        check_env(market(), **arrays)


def test_arrays_the_env_does_not_read_are_refused():
    with pytest.raises(EnvError, match="series must be left out: cartpole reads no series"):
        check_env(cartpole(), series=series(2))


@pytest.mark.parametrize("wrong", [dict(on="gpu"), dict(steps=0), dict(steps=1.5)])
def test_an_option_out_of_range_is_refused_by_name(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"^{name} must be"):
        check_env(DRIFT, **wrong)


def test_a_call_left_in_machine_code_is_told_from_the_compilers_own():
    own = "/*0c50*/  CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath) ;"
    assert not CALL.search(own)
    assert CALL.search("/*0c50*/  CALL.ABS.NOINC `(env_step) ;")
    assert CALL.search(own + "\n/*0c60*/  CALL.REL.NOINC `(env_step) ;")


def test_float64_in_machine_code_is_found():
    for line in ("DFMA R2, R4, R6, R8", "F2F.F64.F32 R2, R4", "I2F.F64 R2, R4", "DSETP.GT.AND P0"):
        assert FLOAT64.search(line), line
    assert not FLOAT64.search("FADD R2, R4, R6 ; IADD3 R1, R2, R3, RZ ; F2F.BF16.F32 R1, R2")


@pytest.mark.gpu
@pytest.mark.parametrize("env", [market(episode=20), cartpole(), DRIFT, WALK], ids=str)
def test_every_step_has_the_same_bits_on_the_gpu(env):
    arrays = {}
    if env.series:
        arrays = dict(table=table(env.width, env.table_columns), series=series(len(env.series)))
    assert check_env(env, **arrays, on="cuda", steps=200).on == "cuda"


def library_exponential(floats, ints, series, rows, out):
    out[0] = f32(math.exp(floats[0]))
    out[1] = floats[1]
    out[2] = floats[2]
    return 0


@pytest.mark.gpu
def test_a_difference_between_cpu_and_gpu_is_found():
    env = with_functions(observe=library_exponential)
    with pytest.raises(EnvError, match=r"^drift: observe gives x\["):
        check_env(env, on="cuda", steps=200)
