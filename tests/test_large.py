"""Arrays of more than 2^31 elements: the right one is read and written."""

import mmap

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu_kernels import launch, observe, replay_gather, replay_write
from lowgpu_kernels.device import i32
from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.replay.ring import ring_arrays
from lowgpu_kernels.ops.rollout.observe import THREADS, kernel_of, lanes_of
from tests.emulator import emulating

H100 = launch.KNOWN["H100"]
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which mmap does not name
LAST_ROW = 39_999_999  # times 56 columns: 2,239,999,944
SLOTS, ENVS = 2**20, 1500  # times 2 fields of a state: 3,145,728,000


def mapped(shape, dtype):
    """Zeros that take no memory before they are touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    count = int(np.prod(shape, dtype=np.int64))
    memory = mmap.mmap(-1, count * np.dtype(dtype).itemsize, flags)
    return np.frombuffer(memory, dtype).reshape(shape)


def emulated_observe(env, floats, ints, table, series):
    x = np.full((len(floats), env.width), np.nan, np.float32)
    args = floats, ints, table, series, None, i32(len(x)), i32(series.shape[1]), x
    with emulating(H100):
        rows_a_block = THREADS // lanes_of(env, "float32")
        kernel = kernel_of(env, "float32")
        launch.launch(kernel, blocks(len(x), rows_a_block), THREADS, args, 0)
    return x


@pytest.mark.parametrize("on", ("cpu", "emulated"))
def test_a_row_past_the_2_to_the_31st_element_of_the_table_is_observed(on):
    env = make("market")
    rows = LAST_ROW + 1
    table = mapped((rows, env.width), np.float32)
    series = mapped((len(env.series), rows), np.float32)
    assert LAST_ROW * env.width + 53 > 2**31
    wanted = np.arange(1, env.table_columns + 1, dtype=np.float32)
    table[LAST_ROW, : env.table_columns], series[:, LAST_ROW] = wanted, 1
    floats, ints = np.zeros((3, len(env.floats)), "f4"), np.zeros((3, len(env.ints)), "i4")
    ints[1, env.ints.index("row")] = LAST_ROW
    if on == "cpu":
        x = observe(floats, ints, table, series, env=env, precision="float32")
    else:
        x = emulated_observe(env, floats, ints, table, series)
    np.testing.assert_array_equal(x[1, : env.table_columns], wanted)
    assert not x[[0, 2], : env.table_columns].any()


def steps_of(count):
    """Steps of every environment, the last environment's with numbers of their own."""
    shape = count, ENVS
    made = {"state_floats": np.zeros((*shape, 2), "f4"), "state_ints": np.zeros((*shape, 2), "i4")}
    made |= {"action": np.zeros(shape, "i4"), "reward": np.zeros(shape, "f4")}
    made |= {"terminated": np.zeros(shape, bool), "truncated": np.zeros(shape, bool)}
    made |= {"next_floats": made["state_floats"].copy(), "next_ints": made["state_ints"].copy()}
    for k, array in enumerate(made.values()):
        numbers = np.arange(count).reshape(-1, *[1] * (array.ndim - 2))
        array[:, -1] = array.dtype == bool or numbers + k
    made["terminated"][:], made["truncated"][:-1] = False, False
    return made


@pytest.mark.parametrize("on", ("cpu", "emulated"))
def test_a_transition_past_the_2_to_the_31st_number_of_a_ring_is_written_and_gathered(on):
    ring = {n: mapped(*about) for n, about in ring_arrays(SLOTS, ENVS, 2, 2).items()}
    ring["head"][:2] = SLOTS - 3, SLOTS - 3
    steps = steps_of(3)
    index = np.array([(SLOTS - 3 + k) * ENVS + ENVS - 1 for k in range(3)], "i4")
    assert 2 * int(index[0]) > 2**31 - 1
    kept = [a for n, a in ring.items() if n != "head"]
    if on == "cpu":
        replay_write(*steps.values(), *ring.values())
        got = replay_gather(index, ring["head"], *kept, steps=1, gamma=0.5)
    else:
        with emulating(H100):
            replay_write.cuda(*steps.values(), *ring.values(), None, None, None, 0)
            shapes = (3, 2), (3, 2), (3,), (3,), (3,), (3, 2), (3, 2), (3,)
            got = [np.full(s, 77, "i4" if i in (1, 2, 6) else "f4") for i, s in enumerate(shapes)]
            params = replay_gather.checked_params({"steps": 1, "gamma": 0.5}).values()
            replay_gather.cuda(index, ring["head"], *kept, None, None, *params, *got, 0)
    assert ring["head"].tolist() == [0, SLOTS, 0]
    names = "state_floats", "state_ints", "action", "reward", None, "next_floats", "next_ints"
    for name, array in zip(names, got):
        if name is not None:
            np.testing.assert_array_equal(array, steps[name][:, -1], err_msg=name)
    np.testing.assert_array_equal(got[4], np.float32([0.5, 0.5, 0.5]))
    np.testing.assert_array_equal(got[7], np.ones(3, "f4"))
