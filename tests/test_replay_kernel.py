"""The replay kernels, emulated: against their specs, in either order of threads, at every tree depth."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import (
    launch,
    priority_gather,
    priority_sample,
    priority_update,
    replay_gather,
    replay_sample,
    replay_write,
)
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import cuda_c, disassemble
from lowgpu_kernels.device import f32
from lowgpu_kernels.device.philox import SAMPLE, numpy_draw
from lowgpu_kernels.dims import B, E, F, G, K, L, T
from lowgpu_kernels.ops.replay import ring, tree
from lowgpu_kernels.ops.replay.replay_write import spec_sums
from tests.emulator import emulating
from tests.harness import arrays_for, assert_agrees, params_for, run_launcher, run_numpy, sizes_for
from tests.headers import compiled

OPS = (
    priority_gather,
    priority_sample,
    priority_update,
    replay_gather,
    replay_sample,
    replay_write,
)
H100 = launch.KNOWN["H100"]
PARTS = tuple(launch.KNOWN[p] for p in ("A100", "L4", "H100"))
each_op = pytest.mark.parametrize("op", OPS, ids=str)
compiles = settings(deadline=None, max_examples=20)
word = st.integers(0, 2**32 - 1)
double_word = st.integers(0, 2**64 - 1)


def emulated(op, inputs, params, sizes):
    """What the launcher gives, the same with threads in either order."""
    runs = []
    for backwards in (False, True):
        with emulating(H100, backwards):
            runs.append(run_launcher(op, inputs, params, sizes))
    for name, array in runs[0].items():
        if array is not None:
            assert array.tobytes() == runs[1][name].tobytes(), f"{name}: who goes first?"
    return runs[0]


def call_of(op, seed, fixed, **given):
    """(inputs, params, sizes) of a call, drawn with some sizes and parameters as given."""
    rng = np.random.default_rng(seed)
    params = op.checked_params({**params_for(op, rng), **given})
    sizes = sizes_for(op, rng, params, sizes=(1, 3, 33, 129))
    free = (B, L) if op in (priority_sample, priority_update) else (B, E, K, T)
    sizes = op.sizes_of({d: n for d, n in sizes.items() if d in free} | fixed, params)
    return arrays_for(op, rng, sizes, params), params, sizes


@each_op
@pytest.mark.parametrize("seed", range(6))
def test_the_kernel_agrees_with_the_spec_in_either_order_of_threads(op, seed):
    fields = {F: 2, G: 2} if seed % 2 else {F: 9, G: 1}
    gathers = op in (priority_gather, replay_gather)
    fixed = fields if gathers or op is replay_write else {}
    given = {"steps": 1 + 3 * (seed % 3)} if gathers else {}
    call = call_of(op, seed, fixed, **given)
    assert_agrees(op, emulated(op, *call), *call)


@pytest.mark.parametrize("steps, slots, envs", [(1, 7, 1), (9, 4, 33), (5, 5, 200), (3, 64, 31)])
def test_a_write_without_a_tree_is_the_same_ring(steps, slots, envs):
    inputs, params, sizes = call_of(replay_write, 3, {T: steps, K: slots, E: envs, F: 2, G: 2})
    want = run_numpy(replay_write, inputs, params, sizes)
    bare = inputs | dict.fromkeys(("priority", "sums", "highest"))
    for got in (
        emulated(replay_write, bare, params, sizes),
        run_numpy(replay_write, bare, {}, sizes),
    ):
        for name in set(replay_write.changes) - {"priority", "sums"}:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
        assert got["priority"] is None


def test_a_write_reaches_every_level_of_a_deep_tree():
    """Two levels of sums, a head that wraps around, and slots that start within groups of leaves."""
    call = call_of(replay_write, 1, {T: 3, K: 9, E: 4099, F: 2, G: 2})
    inputs = call[0] | {"head": np.array([7, 9, 0], "i4")}
    assert len(tree.widths_of(len(inputs["priority"]))) == 2
    got = emulated(replay_write, inputs, *call[1:])
    assert_agrees(replay_write, got, inputs, *call[1:])
    np.testing.assert_array_equal(run_numpy(replay_write, inputs, *call[1:])["sums"], got["sums"])


@pytest.mark.parametrize("leaves", (32, 1024 * 32, 1024 * 32 + 32, 2**20, 2**20 + 32))
def test_trees_of_every_depth_draw_and_change_as_the_spec_says(leaves):
    """The last of these has three levels of sums, the first one entry on one level."""
    depth = len(tree.widths_of(leaves))
    assert depth == {32: 1, 2**15: 1, 2**15 + 32: 2, 2**20: 2, 2**20 + 32: 3}[leaves]
    update = call_of(priority_update, 1, {L: leaves, B: 100}, in_order=False)
    after = emulated(priority_update, *update)
    assert_agrees(priority_update, after, *update)
    inputs, params, sizes = call_of(priority_sample, 2, {L: leaves}, batch=100)
    inputs |= {name: after[name] for name in ("priority", "sums")}
    got = emulated(priority_sample, inputs, params, sizes)
    assert_agrees(priority_sample, got, inputs, params, sizes)
    assert got["index"].max() > leaves // 2


def test_a_promise_of_order_changes_no_bit():
    for seed in range(4):
        inputs, params, sizes = call_of(priority_update, seed, {}, in_order=True)
        one = emulated(priority_update, inputs, params, sizes)
        other = emulated(priority_update, inputs, params | {"in_order": False}, sizes)
        for name in one:
            assert one[name].tobytes() == other[name].tobytes()


def test_the_cpu_and_the_kernel_give_the_same_bits():
    for op in (priority_gather, priority_update, replay_gather):
        inputs, params, sizes = call_of(op, 5, {} if op is priority_update else {F: 2, G: 2})
        one, other = emulated(op, inputs, params, sizes), run_numpy(op, inputs, params, sizes)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=f"{op}.{name}")


def test_rows_past_one_for_each_block_are_drawn_in_turn():
    """More rows than the blocks that are on the GPU at once have."""
    call = call_of(priority_gather, 4, {K: 5, E: 70, F: 2, G: 2}, batch=1000)
    few = replace(H100, sms=3)
    with emulating(few, False):
        got = run_launcher(priority_gather, *call)
    assert_agrees(priority_gather, got, *call)


@pytest.fixture(scope="module")
def header():
    library = compiled("""
        #include "atomics.cuh"
        #include "philox.cuh"
        #include "priority.cuh"
        #include "replay.cuh"
        extern "C" unsigned sample_purpose() { return SAMPLE; }
        extern "C" unsigned uniform(unsigned a, unsigned b, unsigned n) { return uniform_of(a, b, n); }
        extern "C" float leaf(float x, float alpha, float eps) { return priority_of(x, alpha, eps); }
        extern "C" unsigned units(float x) { return units_of(x); }
        extern "C" float weight(float a, float b, float beta) { return weight_of(a, b, beta); }
        extern "C" unsigned long long target(unsigned row, unsigned a, unsigned b,
                                             unsigned long long stride, unsigned long long total) {
            return target_of(row, a, b, stride, total);
        }
        extern "C" unsigned long long high(unsigned long long a, unsigned long long b) {
            return high_product(a, b);
        }
        extern "C" unsigned char mark(int action, bool terminated, bool truncated) {
            return mark_of(action, terminated, truncated);
        }
        extern "C" int ahead(int slot, int head, int slots) { return steps_ahead(slot, head, slots); }
        extern "C" int level(int groups, int which) {
            const Levels<4> levels(groups);
            return which < 4 ? levels.at[which] : levels.top;
        }
    """)
    for name in ("leaf", "weight"):
        getattr(library, name).restype = ctypes.c_float
        getattr(library, name).argtypes = [ctypes.c_float] * 3
    library.units.argtypes = [ctypes.c_float]
    library.uniform.restype = library.units.restype = ctypes.c_uint32
    library.target.restype = library.high.restype = ctypes.c_uint64
    return library


@compiles
@given(word, word, st.integers(1, 2**31 - 1))
@example(2**31 + 1, 2**32 - 1, 2**31 - 1)  # the low word carries into the result
def test_a_uniform_draw_is_the_product_of_its_words(header, high, low, count):
    want = (high << 32 | low) * count >> 64
    assert ring.uniform_of(high, low, count) == want < count
    assert header.uniform(u32c(high), u32c(low), u32c(count)) == want


def u32c(value):
    return ctypes.c_uint32(value)


@compiles
@given(double_word, double_word)
def test_a_high_product_is_the_upper_half_of_the_whole_one(header, a, b):
    want = a * b >> 64
    assert tree.high_product(np.uint64(a), np.uint64(b)) == want
    assert header.high(ctypes.c_uint64(a), ctypes.c_uint64(b)) == want


@compiles
@given(word, word, st.integers(1, 2**31 - 1), st.integers(1, 2**63 - 1), st.data())
def test_a_target_lies_in_its_stratum(header, high, low, batch, total, data):
    row, stride = data.draw(st.integers(0, batch - 1)), tree.stride_of(batch)
    got = int(tree.target_of(row, high, low, stride, np.uint64(total)))
    twin = header.target(*map(u32c, (row, high, low)), *map(ctypes.c_uint64, (stride, total)))
    assert got == twin < total
    # Strata are cut to 2^-64 of the total: at most one unit a stratum, and `batch` in all.
    assert row * total // batch - batch * total // 2**64 - 1 <= got <= (row + 1) * total // batch


@compiles
@given(
    st.floats(-1e9, 1e9, width=32), st.floats(0, 1, width=32), st.sampled_from([1e-30, 1e-6, 1.0])
)
def test_priorities_and_weights_have_the_same_bits_in_cuda_c(header, error, alpha, eps):
    leaf = tree.priority_of(f32(error), f32(alpha), f32(eps))
    assert leaf == header.leaf(error, alpha, eps)
    assert tree.units_of(leaf) == header.units(leaf) == round(float(leaf) * 2**20)
    assert tree.UNIT <= leaf <= tree.LARGEST
    assert tree.weight_of(f32(tree.UNIT), leaf, f32(alpha)) == header.weight(tree.UNIT, leaf, alpha)


@compiles
@given(st.integers(0, 63), st.booleans(), st.booleans(), st.data())
def test_marks_and_distances_agree_with_cuda_c(header, action, terminated, truncated, data):
    mark = ring.mark_of(action, terminated, truncated)
    assert (
        mark
        == header.mark(action, terminated, truncated)
        == 4 * action + 2 * truncated + terminated
    )
    slots = data.draw(st.integers(1, 2**31 - 1))
    slot, head = (data.draw(st.integers(0, slots - 1)) for _ in range(2))
    want = (head - slot) % slots or slots
    assert ring.steps_ahead(slot, head, slots) == header.ahead(slot, head, slots) == want


def test_levels_lie_where_python_says(header):
    for leaves in (2**25 + 32, 2**26, 2**30):
        widths = tree.widths_of(leaves)
        assert len(widths) == 4 and sum(widths) == tree.sums_of(leaves)
        starts = [sum(widths[:k]) for k in range(4)]
        assert [header.level(leaves // 32, k) for k in range(5)] == [*starts, widths[-1]]


def test_draws_have_a_purpose_of_their_own(header):
    assert header.sample_purpose() == SAMPLE == 5
    assert len({int(numpy_draw(1, purpose, [2], 3)[0, 0]) for purpose in range(6)}) == 6


def test_a_tree_that_is_not_aligned_is_refused():
    priority, sums = (Buffer(a, (32,), np.dtype("f4")) for a in (0x7F0000000004, 0x7F0000000000))
    with launch.recording(H100), pytest.raises(ValueError, match="priority must be aligned to 16"):
        priority_sample.cuda(priority, sums, None, 1, 0, None, None, None, 0)


MARKET = {"floats": 2, "ints": 2}
TREE = {"rows": 64, "members": 8, "fan": 32, "top": 1024}
KERNELS = {
    "replay_write_kernel": ("replay_write", {"threads": 128, "prioritized": True, **MARKET}, 40),
    "replay_gather_kernel": ("replay_gather", {"threads": 64, **MARKET}, 80),
    "replay_sample_kernel": ("replay_sample", {"threads": 64}, 32),
    "priority_sample_kernel": ("priority_sample", TREE, 64),
    "priority_gather_kernel": ("priority_gather", TREE | MARKET, 128),
    "claim_kernel": ("priority_update", {"threads": 64, "in_order": False}, 32),
    "settle_kernel": ("priority_update", {"threads": 64, "in_order": True}, 32),
}


VARIANTS = {"levels": (2, 4), "steps": (1, 3, 5, 13, 16)}


@pytest.mark.parametrize("entry", KERNELS)
@pytest.mark.parametrize("on", PARTS, ids=lambda on: on.name)
def test_kernels_keep_to_registers_and_call_nothing(entry, on):
    path, macros, registers = KERNELS[entry]
    depths, windows = ([{n: k} for k in ks] for n, ks in VARIANTS.items())
    variants = windows if path == "replay_gather" else depths
    if path == "priority_gather":
        variants = [depths[k] | windows[k] for k in (0, 1)] + [depths[0] | windows[-1]]
    for variant in variants:
        binary = cuda_c(f"replay/{path}", entry, **macros, **variant).binary(on.architecture)
        resources = binary.kernel(entry)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
        assert resources.registers <= registers
        code = disassemble(binary)
        assert not FLOAT64.search(code) and not CALL.search(code)


def test_the_sums_of_a_spec_are_those_of_plain_addition():
    priority = np.random.default_rng(0).integers(2**30, size=2**15 + 64) * tree.UNIT
    sums, widths = spec_sums(priority), tree.widths_of(len(priority))
    units = [int(p * 2**20) for p in priority]
    assert sums[:3].tolist() == [sum(units[32 * i : 32 * i + 32]) for i in range(3)]
    assert sum(sums[: widths[0]].tolist()) == sum(sums[widths[0] :].tolist()) == sum(units)
