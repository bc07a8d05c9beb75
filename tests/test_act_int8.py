"""`act_int8`, `mlp_int8` and `pack_int8`: exact on the CPU, emulated in every shape; and compiled."""

from dataclasses import replace

import numpy as np
import pytest

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import act_int8, launch, mlp_int8, pack_int8
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.device.maths import tanh_f32
from lowgpu_kernels.dims import B
from lowgpu_kernels.ops.int8.act_int8 import launch_of
from lowgpu_kernels.ops.int8.act_int8_tile import int8_grid
from lowgpu_kernels.ops.int8.pack_int8 import (
    draw_quantized,
    example_networks,
    image_nbytes,
    packed_layer,
    unpacked,
)
from lowgpu_kernels.ops.int8.quantized_network import J, quantized_sizes, quantized_views
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from tests.emulator import emulating
from tests.harness import run_launcher, run_numpy
from tests.test_act import assert_order_of_grids

H200, A100, L4 = (launch.KNOWN[n] for n in ("H200", "A100", "L4"))
ONE_SM = {on: replace(on, sms=1) for on in (H200, A100, L4)}  # few rows then take a loop
MARKET = policy_network(56, 3)
ACTOR_CRITIC = Network(8, ((32, 24, 2), (32, 1)), "tanh")
ODD = Network(104, ((40, 24, 13), (72, 1)))  # widths that fill neither steps nor rows
ALONE = Network(16, ((15,),))
NETWORKS = (MARKET, ACTOR_CRITIC, ODD, ALONE, *example_networks()[2:])


def named(network):
    return str(network.towers).replace(" ", "")


def quantized(network, seed=0, **given):
    """A quantized network's arrays by name."""
    return {**draw_quantized(np.random.default_rng(seed), network), **given}


def relu_arrays(network, seed=0):
    """The same with the zero points that calibration gives relu."""
    arrays = quantized(network, seed)
    arrays["hidden_zero"][:] = -128
    return arrays


def observed(network, rows, seed=0, precision="float32"):
    """Observations with ties, values past the levels and a row that is not a number."""
    x = np.random.default_rng(seed).normal(size=(rows, network.inputs)) * 2
    x[rows // 2, 3], x[rows // 3] = np.inf, np.round(x[rows // 3] * 50) / 50
    if rows > 5:
        x[5, network.inputs - 1] = np.nan
    return x.astype(precision)


def by_hand(network, arrays, x):
    """The outputs of quantized_network.py's formulas, whatever an image looks like."""
    a, f4 = arrays, np.float32

    def levels(x, scale, zero):
        with np.errstate(over="ignore"):
            level = np.rint(x.astype(f4) * (f4(1) / scale)).astype(np.float64) + zero
        return np.clip(np.nan_to_num(level, nan=0), -128, 127).astype(np.int64)

    relu = network.activation == "relu"
    first = level = levels(x, a["input_scale"], a["input_zero"])
    hidden = 0
    y = np.zeros((len(x), network.outputs), f4)
    for layer, weight, bias, scale in quantized_views(network, a["weight"], a["bias"], a["scale"]):
        level = first if layer.source < 0 else level
        s = (level @ weight.astype(np.int64).T + bias).astype(f4)
        if layer.head:
            y[:, layer.column : layer.column + layer.fan_out] = s * scale
            continue
        step, zero = a["hidden_scale"][hidden], a["hidden_zero"][hidden]
        if relu:
            factor = scale * (f4(1) / step)
            level = levels(np.maximum(s * factor, 0), f4(1), zero)
        else:
            level = levels(np.array([[tanh_f32(v) for v in z] for z in s * scale], f4), step, zero)
        hidden += 1
    heads = sum(widths[-1] for widths in network.towers)
    y[np.isnan(x.astype(f4)).any(1), :heads] = np.nan
    return y


def policy_call(network, rows, precision="bfloat16", arrays=None, **given):
    """(inputs, params, sizes) of a call of act_int8."""
    heads = sum(widths[-1] for widths in network.towers)
    given = {"network": network, "actions": max(heads - 1, 1), "seed": 3, **given}
    params = act_int8.checked_params(given)
    sizes = act_int8.sizes_of({B: rows}, params)
    image = pack_int8(**(arrays or relu_arrays(network)), network=network)
    inputs = {
        "observation": observed(network, rows, rows, precision),
        "image": image,
        "clock": np.array([7], np.uint64),
    }
    return inputs, params, sizes


def outputs_call(network, rows, precision="float32", arrays=None):
    """The same of mlp_int8."""
    inputs, _, sizes = policy_call(network, rows, precision, arrays)
    del inputs["clock"]
    return inputs, mlp_int8.checked_params({"network": network}), sizes


def emulated(op, call, on, backwards=False, precision="float32"):
    with emulating(on, backwards):
        return run_launcher(op, *call, precision)


def assert_same_bits(one, other, rows=slice(None)):
    for name in one:
        assert one[name][rows].tobytes() == other[name].tobytes(), name


def assert_emulated(op, call, on, precision):
    """Hold a kernel to the CPU's bits, in either order of threads."""
    want = run_numpy(op, *call, precision)
    for backwards in (False, True):
        assert_same_bits(emulated(op, call, on, backwards, precision), want)


# The CPU


@pytest.mark.parametrize("network", NETWORKS, ids=named)
def test_the_outputs_are_those_of_the_quantized_networks_formulas_to_the_bit(network):
    for seed in range(3):
        arrays, x = quantized(network, seed), observed(network, 17, seed)
        got = mlp_int8(x, pack_int8(**arrays, network=network), network=network)
        assert got.tobytes() == by_hand(network, arrays, x).tobytes()


@pytest.mark.parametrize("network", NETWORKS, ids=named)
def test_an_image_holds_every_weight_once_and_zeros(network):
    arrays = quantized(network)
    image = pack_int8(**arrays, network=network)
    layers, *_ = unpacked(image, network)
    weights = quantized_views(network, arrays["weight"], arrays["bias"], arrays["scale"])
    for (_, weight, *_), (found, *_) in zip(weights, layers):
        assert found.tobytes() == weight.tobytes()
    nbytes = sum(packed_layer(layer).nbytes for layer in network.layers)
    assert np.count_nonzero(image[:nbytes]) == np.count_nonzero(arrays["weight"])


def test_the_markets_image_is_a_quarter_of_its_parameters():
    weights = sum(x.fan_in * x.fan_out for x in MARKET.layers)
    assert image_nbytes(MARKET) == 62_560 and 4 * weights == 222_208


def levels_of(executor, x, scale, zero, z=(0,), hidden_scale=1, hidden_zero=0, unit=0.5):
    """Levels of inputs, and of hidden units with relu less their zero point, their sums twice z.

    They are the outputs of a network whose weights are the identity, or zero where z is read.
    """
    network, eye = Network(8, ((8,), (8, 8))), np.eye(8, dtype=np.int8).reshape(-1)
    arrays = {
        "weight": np.concatenate([eye, np.zeros_like(eye), eye]),
        "bias": np.r_[np.zeros(8), np.resize(np.array(z) * 2, 8), np.full(8, -hidden_zero)],
        "scale": np.r_[np.ones(8), np.full(8, unit), np.ones(8)].astype("f4"),
        "input_scale": np.full(8, scale, "f4"),
        "input_zero": np.full(8, zero, "i4"),
        "hidden_scale": np.full(1, hidden_scale, "f4"),
        "hidden_zero": np.full(1, hidden_zero, "i4"),
    }
    arrays["bias"] = arrays["bias"].astype("i4")
    inputs, params, sizes = outputs_call(network, 1, arrays=arrays)
    inputs["observation"] = np.resize(np.float32(x), (1, 8))
    call = inputs, params, sizes
    got = run_numpy(mlp_int8, *call) if executor == "cpu" else emulated(mlp_int8, call, executor)
    return got["out"][0, : len(x)].tolist(), got["out"][0, 8 : 8 + len(z)].tolist()


each_executor = pytest.mark.parametrize(
    "executor", ("cpu", H200, A100), ids=lambda on: getattr(on, "name", on)
)


@each_executor
def test_ties_go_to_the_even_number_and_the_rest_to_the_ends(executor):
    """Case E2."""

    def levels(*given):
        return levels_of(executor, *given)[0]

    assert levels([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 1, 0) == [0, 2, 2, 0, -2, -2]
    # An odd zero point moves levels and not the choice between two of them.
    assert levels([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 1, 5) == [5, 7, 7, 5, 3, 3]
    assert levels([127.4, 127.6, 1e30, np.inf], 1, 0) == [127] * 4
    assert levels([-128.4, -129, -1e30, -np.inf], 1, 0) == [-128] * 4
    # A copy of a column reads a part of its range that lies past int8.
    assert levels([0, 300, 400, 511, 512], 1, -383) == [-128, -83, 17, 127, 127]
    # The smallest and nearly the largest scale that float32 has as normal numbers.
    assert levels([2.0**-126, -(2.0**-126)], 2.0**-126, 0) == [1, -1]
    assert levels([3e38, -3e38], 3e38, 0) == [1, -1]


@each_executor
@pytest.mark.parametrize("zero", (-128, -127, 3))
def test_a_hidden_unit_is_rectified_rounded_and_kept_to_its_levels(executor, zero):
    z = [0.5, 1.5, 2.5, 3.5, -0.5, -7, 126.5 - zero, 1000]
    want = np.clip(np.rint(np.maximum(z, 0)), 0, 127 - zero)
    assert levels_of(executor, [0], 1, 0, z, 1, zero)[1] == want.tolist()


@each_executor
@pytest.mark.parametrize("zero", (-128, -127))
def test_with_relu_what_is_between_two_products_is_rounded_once(executor, zero):
    """Rounded after the scale as well, these sums would be a level lower."""
    sums, unit, step = (
        np.float32([480, 864, 1248, 100]),
        np.float32(1110 / 4096),
        np.float32(1.40625),
    )
    want = [93, 167, 241, 19]
    assert np.rint(sums * unit * (np.float32(1) / step)).tolist() == [92, 166, 240, 19]
    assert levels_of(executor, [0], 1, 0, sums / 2, step, zero, unit)[1] == want


@each_executor
def test_sums_past_what_the_short_way_holds_are_exact(executor):
    largest = 2**22 - 0.5  # a sum of 2^23 - 1, the last of the short way
    for z in (largest, largest + 0.5, 2.0**24, 2.0**29):
        scale = 2.0 ** np.ceil(np.log2(z)) / 128
        want = np.clip(np.rint(np.float32(z) / scale), 0, 255)
        assert levels_of(executor, [0], 1, 0, [z, -z], scale, -128)[1] == [want, 0]


def test_a_known_product_of_small_odd_sizes():
    """Case E5."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (7, 10)), rng.integers(-128, 128, (10, 15))
    weight = np.zeros((15, 16), np.int8)
    weight[:, :10] = b.T
    arrays = quantized(ALONE, weight=weight.reshape(-1))
    arrays |= {"bias": np.zeros(15, "i4"), "scale": np.ones(15, "f4")}
    arrays |= {"input_scale": np.ones(16, "f4"), "input_zero": np.zeros(16, "i4")}
    x = np.pad(a, ((0, 0), (0, 6))).astype(np.float32)
    # Past the check of values: b has a -128.
    got = mlp_int8(x, pack_int8.spec(**arrays, network=ALONE), network=ALONE)
    assert got[0, :3].tolist() == [-33414, -22931, 8645] and got[:, :15].sum() == 29149


def test_a_channel_of_zeros_a_tiny_scale_and_the_largest_sum_stay_finite():
    """Cases E1 and E9."""
    network = Network(512, ((3,),))
    weight = np.zeros((3, 512), np.int8)
    weight[1:] = 127
    arrays = quantized(network, weight=weight.reshape(-1), bias=np.zeros(3, "i4"))
    arrays |= {"scale": np.float32([1, 2.0**-126, 6]), "input_zero": np.zeros(512, "i4")}
    x = np.full((1, 512), 1e9, np.float32)
    got = mlp_int8(x, pack_int8(**arrays, network=network), network=network)[0, :3]
    sums = 512 * 127 * 127
    assert got.tolist() == [0, np.float32(sums) * np.float32(2.0**-126), sums * 6]


@pytest.mark.parametrize(
    "name, value, wanted",
    (
        ("scale", 0, "normal numbers above 0, got 0.0 at 2"),
        ("scale", np.nan, "normal numbers above 0, got nan at 2"),
        ("input_scale", 1e-40, "normal numbers above 0"),
        ("hidden_scale", np.inf, "normal numbers above 0, got inf at 2"),
        ("weight", -128, "in .-127, 127., got -128 at 2: calibrate again"),
        ("hidden_zero", 128, "in .-128, 127., got 128 at 2"),
        ("scale", 3e38, "less than 2.128 of its layer's steps, got 3[.0-9]+e.38 at 2"),
        ("input_zero", 2**20 + 1, "within 2.20 of 0"),
    ),
)
def test_what_no_kernel_may_be_given_is_refused_by_name(name, value, wanted):
    arrays = quantized(MARKET)
    arrays[name][2] = value
    with pytest.raises(ValueError, match=f"^{name} must be {wanted}"):
        pack_int8(**arrays, network=MARKET)


@pytest.mark.parametrize("actions", (2, 5))
def test_actions_that_are_not_the_networks_are_refused_with_both_numbers(actions):
    inputs, params, _ = policy_call(MARKET, 3)
    with pytest.raises(ValueError, match=f"heads, 4, or one fewer .* got {actions}"):
        act_int8(**inputs, **{**params, "actions": actions})


# The kernels, emulated


@pytest.mark.parametrize("network", (MARKET, ODD), ids=named)
def test_the_packed_image_is_the_specs_to_the_byte(network):
    params = {"network": network}
    sizes = pack_int8.sizes_of({}, params)
    for seed in range(3):
        arrays = quantized(network, seed)
        if seed == 1:
            arrays["hidden_zero"][:] = -128
        want = pack_int8.spec(**arrays, network=network)
        got = emulated(pack_int8, (arrays, params, sizes), H200)["out"]
        assert got.tobytes() == want.tobytes()
    # The ends of what the short way holds.
    arrays = relu_arrays(network)
    for bias in (2**23 - 1, 2**23, -(2**30), -(2**30) - 1):
        arrays["weight"][:], arrays["bias"][:] = 0, bias
        want = pack_int8.spec(**arrays, network=network)
        assert short_way(want, network)[0] == (-(2**30) <= bias < 2**23)
        assert emulated(pack_int8, (arrays, params, sizes), H200)["out"].tobytes() == want.tobytes()


def short_way(image, network):
    """The image's word that says whether sums are small enough for the short way."""
    columns = sum(packed_layer(layer).columns for layer in network.layers)
    hidden = quantized_sizes(network)[J]
    weights = sum(packed_layer(layer).nbytes for layer in network.layers)
    at = weights + 8 * (columns + -(-network.inputs // 32) * 32 + hidden)
    return image[at : at + 4].view(np.int32)


@pytest.mark.parametrize("rows", (1, 7, 63, 64, 65, 127, 129))
def test_a_team_alone_gives_the_cpus_bits_for_any_number_of_rows(rows):
    assert int8_grid(MARKET, rows, True, 2, H200).warps == 4
    assert_emulated(act_int8, policy_call(MARKET, rows), H200, "bfloat16")


# Teams of 64 rows, the last with less to do, and of 128: a whole number of tiles, and a few rows more.
@pytest.mark.parametrize("rows, warps, groups", ((200, 12, 1), (512, 8, 2), (128 * 5 + 37, 8, 2)))
def test_teams_that_take_tiles_by_turns_give_the_cpus_bits(rows, warps, groups):
    grid = int8_grid(MARKET, rows, True, 2, ONE_SM[H200])
    assert (grid.warps, grid.groups, grid.copies_rows) == (warps, groups, True)
    for arrays in (relu_arrays(MARKET), quantized(MARKET, 4)):
        call = policy_call(MARKET, rows, arrays=arrays)
        # In each eight rows of a warp.
        call[0]["observation"][[13, 22, 30, 125], (0, 9, 31, 55)] = np.nan
        assert_emulated(act_int8, call, ONE_SM[H200], "bfloat16")


def test_two_towers_of_tanh_give_the_cpus_bits_by_warps():
    assert not int8_grid(ACTOR_CRITIC, 70, True, 4, H200).warpgroups  # its products are short
    call = policy_call(ACTOR_CRITIC, 70, "float32", quantized(ACTOR_CRITIC, 2))
    assert_emulated(act_int8, call, H200, "float32")


def test_widths_that_fill_nothing_give_the_cpus_bits_by_warpgroups():
    call = outputs_call(ODD, 70, arrays=relu_arrays(ODD, 2))
    assert_emulated(mlp_int8, call, H200, "float32")


@pytest.mark.parametrize("on, rows", ((A100, 70), (ONE_SM[L4], 700)), ids=("few", "many"))
def test_warps_give_the_cpus_bits_from_shared_memory(on, rows):
    grid = int8_grid(MARKET, rows, True, 2, on)
    assert (grid.groups, grid.warps) == ((1, 4) if rows == 70 else (2, 8))
    for arrays in (relu_arrays(MARKET), quantized(MARKET, 4)):
        assert_emulated(act_int8, policy_call(MARKET, rows, arrays=arrays), on, "bfloat16")


def test_the_short_way_of_relu_and_the_long_one_give_the_same_bits():
    for rows in range(60, 64):
        inputs, params, sizes = policy_call(MARKET, rows, arrays=relu_arrays(MARKET, rows))
        other = {**inputs, "image": inputs["image"].copy()}
        assert short_way(other["image"], MARKET)[0] == 1
        short_way(other["image"], MARKET)[0] = 0
        calls = [(x, params, sizes) for x in (inputs, other)]
        one, two = (emulated(act_int8, call, H200, precision="bfloat16") for call in calls)
        assert_same_bits(one, two)


@pytest.mark.parametrize("on", (H200, A100), ids=lambda on: on.name)
def test_a_rows_bits_depend_on_no_other_row_and_not_on_their_number(on):
    """Cases E6 and E7."""
    inputs, params, sizes = policy_call(MARKET, 129)
    whole = emulated(act_int8, (inputs, params, sizes), on, precision="bfloat16")
    for rows in (1, 64, 100):
        few = {**inputs, "observation": inputs["observation"][:rows].copy()}
        got = emulated(act_int8, (few, params, {**sizes, B: rows}), on, precision="bfloat16")
        assert_same_bits(whole, got, slice(rows))
    # What was there before, an outlier in every other row, is forgotten.
    other = {**inputs, "observation": inputs["observation"].copy()}
    other["observation"][1::2] = 1e30
    got = emulated(act_int8, (other, params, sizes), on, precision="bfloat16")
    assert_same_bits({n: a[::2] for n, a in whole.items()}, {n: a[::2] for n, a in got.items()})


@pytest.mark.parametrize("executor", ("cpu", H200), ids=("cpu", "kernel"))
def test_a_row_that_is_not_a_number_has_no_action_and_leaves_the_others_alone(executor):
    inputs, params, sizes = policy_call(MARKET, 70)
    inputs["observation"][5] = 1  # all are numbers now
    bad = {**inputs, "observation": inputs["observation"].copy()}
    bad["observation"][[5, 66], 3] = np.nan
    calls = [(x, params, sizes) for x in (inputs, bad)]
    if executor == "cpu":
        one, two = (run_numpy(act_int8, *call, "bfloat16") for call in calls)
    else:
        one, two = (emulated(act_int8, call, executor, precision="bfloat16") for call in calls)
    others = np.setdiff1d(np.arange(70), (5, 66))
    assert_same_bits(one, {n: a[others] for n, a in two.items()}, others)
    assert (one["action"] >= 0).all() and (two["action"][[5, 66]] == -1).all()
    assert np.isnan([two[n][[5, 66]] for n in ("log_probability", "value")]).all()


def test_without_a_column_of_its_own_the_value_is_that_of_the_best_action():
    network = Network(8, ((16, 3),))
    call = policy_call(network, 70, "float32", actions=3, greedy=True)
    y = mlp_int8(call[0]["observation"], call[0]["image"], network=network)[:, :3]
    got = run_numpy(act_int8, *call)
    numbers = np.arange(70) != 5
    assert (got["action"] == np.where(numbers, y.argmax(1), -1)).all()
    assert (got["value"][numbers] == y.max(1)[numbers]).all()
    assert_emulated(act_int8, call, H200, "float32")


# The launch and the machine code


def test_a_block_has_a_further_team_when_every_sm_has_one():
    def chosen(batch, on=H200, network=MARKET):
        grid = int8_grid(network, batch, True, 2, on)
        return grid.warpgroups, grid.groups, grid.warps, grid.grid

    assert [chosen(b)[2:] for b in (0, 1, 64, 65, 8448)] == [
        (4, 0),
        (4, 1),
        (4, 1),
        (4, 2),
        (4, 132),
    ]
    most = 2 * 128 * 132 - 1
    assert [chosen(b) for b in (8449, 20_000, most, most + 1, 1 << 20)] == [
        (True, 1, 8, 132),
        (True, 1, 12, 132),
        (True, 1, 12, 132),
        (True, 2, 8, 132),
        (True, 2, 8, 132),
    ]
    assert chosen(1 << 20, A100) == (False, 2, 8, 108) and chosen(1, A100) == (False, 1, 4, 1)
    assert chosen(64, network=ACTOR_CRITIC)[0] is False


def test_rows_that_shared_memory_has_no_room_for_are_read_where_they_are():
    def ways(inputs, itemsize):
        grid = int8_grid(Network(inputs, ((128, 4),)), 1 << 20, True, itemsize, H200)
        return grid.groups, grid.warps, grid.copies_rows

    assert ways(56, 2) == ways(56, 4) == (2, 8, True)
    assert ways(256, 2) == (2, 8, True) and ways(256, 4) == ways(512, 2) == (1, 12, False)


def test_a_network_that_does_not_fit_is_refused_with_its_bytes():
    with pytest.raises(ValueError, match=r"network needs \d+ B .* in int8; L4 has 101376 B: give"):
        launch_of(policy_network(56, 3, shared=False), 3, False, 64, "bfloat16", L4)


@pytest.mark.parametrize(
    "on, batch",
    ((H200, 1), (H200, 20_000), (H200, 1 << 20), (A100, 1 << 20), (L4, 1 << 20)),
    ids=lambda value: getattr(value, "name", value),
)
def test_the_kernels_keep_to_registers_and_convert_two_at_once(on, batch):
    kernel, _, _, threads, shared = launch_of(MARKET, 3, False, batch, "bfloat16", on)
    binary = kernel.binary(on.architecture)
    resources = binary.kernel(kernel.entry)
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    assert threads <= launch.fitting_threads(resources, threads, on)
    assert shared + resources.shared <= on.shared_per_block
    code = disassemble(binary)
    assert not FLOAT64.search(code) and not CALL.search(code)
    assert ("F2IP.U8.F32" in code) == (on is not A100) and "F2I.NTZ" not in code
    assert ("IGMMA" in code) == (on is H200) and ("IMMA.16832.U8.S8" in code) == (on is not H200)
    if on is H200:
        # Of the rows, which the grid in front may write, copies come after the wait for it.
        alone = code if batch == 1 else code.replace("UBLKCP", "rows").replace("rows", "UBLKCP", 5)
        assert_order_of_grids(alone)
        assert alone.count("rows") == (0 if batch == 1 else 3)
        # One wait for each run of columns of both loops: the compiler has put none between products.
        assert code.count("WARPGROUP.DEPBAR") == 2 * {1: 5, 20_000: 8, 1 << 20: 12}[batch]
