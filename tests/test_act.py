"""`act` and `pack_network`, emulated: against their specs, in every shape; and compiled."""

import itertools
import re
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from bench.inference import written
from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import act, categorical, launch, mlp_forward, overlap, pack_network
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import B
from lowgpu_kernels.ops.mlp.network import Network, policy_network
from lowgpu_kernels.ops.policy.act import launch_of, policies
from lowgpu_kernels.ops.policy.act_tile import act_grid
from lowgpu_kernels.ops.policy.pack_network import image_nbytes
from tests.emulator import emulating
from tests.harness import EPS, arrays_for, run_launcher, run_numpy

H200, A100, L4 = (launch.KNOWN[n] for n in ("H200", "A100", "L4"))
ONE_SM = {on: replace(on, sms=1) for on in (H200, A100, L4)}  # few rows then take a loop
MARKET = {"network": policy_network(56, 3), "actions": 3}
OTHERS = (
    {"network": policy_network(24, 3, (72, 40, 8), "tanh"), "actions": 3},
    {"network": Network(8, ((56, 24, 2), (200, 1))), "actions": 2},
    {"network": Network(104, ((88, 13),)), "actions": 13},
)
POLICIES = (MARKET, *policies(), *OTHERS)
PRECISIONS = "float32", "bfloat16"
BATCHES = 1, 7, 63, 64, 65, 129
OUTPUTS = "action", "log_probability", "value"


def named(policy):
    return f"{policy['network'].inputs}-{policy['network'].towers}".replace(" ", "")


each_policy = pytest.mark.parametrize("policy", POLICIES, ids=named)
each_precision = pytest.mark.parametrize("precision", PRECISIONS)


def assert_order_of_grids(code):
    """Before a kernel waits for the grid in front it copies weights; the next one begins after that."""
    before, _, after = code.partition("ACQBULK")
    assert "UBLKCP" in before and "UBLKCP" not in after
    assert "PREEXIT" in after and "PREEXIT" not in before
    assert not re.search(r"\b(LDG|LDGSTS|LD|ST|STG|RED|ATOMG?|CCTL)\.", before)


def drawn(policy, batch, precision, packed=True, **given):
    """(inputs, params, sizes) of a call."""
    params = act.checked_params({**policy, "seed": 3, **given})
    sizes = act.sizes_of({B: batch}, params)
    inputs = arrays_for(act, np.random.default_rng(batch), sizes, params, precision)
    network = policy["network"]
    image = pack_network.spec(inputs["parameters"], network=network) if packed else None
    return {**inputs, "image": image}, params, sizes


def emulated(call, precision, on=ONE_SM[H200], backwards=False):
    with emulating(on, backwards):
        return run_launcher(act, *call, precision)


def assert_same_bits(one, other, rows=slice(None)):
    for name in OUTPUTS:
        assert one[name][rows].tobytes() == other[name].tobytes(), name


def fits(policy):
    return act_grid(policy["network"], 64, H200) is not None


@pytest.mark.parametrize("policy", [*filter(fits, POLICIES)], ids=named)
def test_the_kernel_of_warpgroups_agrees_with_the_spec_in_either_order_of_threads(policy):
    for batch in BATCHES if policy is MARKET else (65, 129):
        call = drawn(policy, batch, "bfloat16")
        one, other = (emulated(call, "bfloat16", backwards=b) for b in (False, True))
        assert_same_bits(one, other)
        act.verify(one, *call[:2], EPS["bfloat16"])


FEW_POLICIES = (MARKET, *policies()[1:5])  # two towers, tanh, one output, many layers, odd widths


@pytest.mark.parametrize("policy", FEW_POLICIES, ids=named)
def test_the_kernel_of_few_rows_gives_the_bits_of_the_other_in_either_order_of_threads(policy):
    inputs, params, sizes = drawn(policy, 129 if policy is MARKET else 13, "bfloat16")
    wide = emulated((inputs, params, sizes), "bfloat16")
    for rows in (1, 7, 8, 129) if policy is MARKET else (13,):
        few = {**inputs, "observation": inputs["observation"][:rows].copy()}
        for backwards in (False, True):
            got = emulated((few, params, {**sizes, B: rows}), "bfloat16", H200, backwards)
            assert_same_bits(wide, got, slice(rows))


def test_a_team_takes_many_tiles_by_turns():
    policy = policies()[1]
    call = drawn(policy, 64 * 8 + 5, "bfloat16")
    assert act_grid(policy["network"], 64 * 8 + 5, ONE_SM[H200]).grid == 1
    one, other = (emulated(call, "bfloat16", backwards=b) for b in (False, True))
    assert_same_bits(one, other)
    act.verify(one, *call[:2], EPS["bfloat16"])


def test_networks_that_do_not_fit_a_warpgroup_are_among_the_tested():
    assert [fits(p) for p in POLICIES].count(False) == 1


@each_policy
@pytest.mark.parametrize("precision, on", (("float32", H200), ("bfloat16", A100), ("bfloat16", L4)))
def test_the_kernel_of_tiles_agrees_with_the_spec_in_either_order_of_threads(policy, precision, on):
    for batch in (1, 63, 129) if policy is MARKET else (7, 257):
        call = drawn(policy, batch, precision, packed=False)
        one, other = (emulated(call, precision, ONE_SM[on], b) for b in (False, True))
        assert_same_bits(one, other)
        act.verify(one, *call[:2], EPS[precision])


@each_policy
def test_the_packed_image_is_the_specs_to_the_byte(policy):
    network = policy["network"]
    inputs = {"parameters": drawn(policy, 1, "float32")[0]["parameters"]}
    sizes = pack_network.sizes_of({}, {"network": network})
    with emulating(H200):
        got = run_launcher(pack_network, inputs, {"network": network}, sizes)["out"]
    want = pack_network.spec(**inputs, network=network)
    assert got.tobytes() == want.tobytes() and len(got) == image_nbytes(network)


def test_an_image_holds_every_weight_once_and_zeros_and_is_read_where_given():
    call = drawn(MARKET, 65, "bfloat16")
    weights = sum(x.fan_in * x.fan_out for x in MARKET["network"].layers)
    image = call[0]["image"]
    assert np.count_nonzero(image[: -4 * (256 + 128 + 64 + 8)].view(np.uint16)) == weights
    other = {**call[0], "image": np.zeros_like(image)}
    got = emulated((other, *call[1:]), "bfloat16")
    assert (got["value"] == 0).all() and np.allclose(got["log_probability"], -np.log(3))


@pytest.mark.parametrize("packed", (True, False))
def test_a_rows_bits_depend_on_no_other_row_and_not_on_their_number(packed):
    inputs, params, sizes = drawn(MARKET, 129, "bfloat16", packed)
    whole = emulated((inputs, params, sizes), "bfloat16")
    order = np.random.default_rng(0).permutation(129)
    still = act.checked_params({**MARKET, "seed": 3, "greedy": True})
    moved = {**inputs, "observation": inputs["observation"][order]}
    assert_same_bits(
        emulated((inputs, still, sizes), "bfloat16"),
        emulated((moved, still, sizes), "bfloat16"),
        order,
    )
    for rows in (1, 64, 100):
        few = {**inputs, "observation": inputs["observation"][:rows].copy()}
        for on in (ONE_SM[H200], H200):
            got = emulated((few, params, {**sizes, B: rows}), "bfloat16", on)
            assert_same_bits(whole, got, slice(rows))


def constant(policy, heads, batch, precision):
    """A call of a network whose heads are the same for every row: its weights are zero."""
    inputs, params, sizes = drawn(policy, batch, precision)
    inputs["parameters"][:] = 0
    *_, (_, _, bias) = policy["network"].views(inputs["parameters"])
    bias[:] = heads
    inputs["image"] = pack_network.spec(inputs["parameters"], network=policy["network"])
    return inputs, params, sizes


@each_precision
def test_actions_are_drawn_as_categorical_draws_them_to_the_bit(precision):
    heads = np.float32([0.3, -1.25, 0.7, 42.5])
    inputs, params, sizes = constant(MARKET, heads, 193, precision)
    logits = np.tile(heads[:3], (193, 1))
    want = categorical(logits, inputs["clock"], seed=int(params["seed"]))
    got = emulated((inputs, params, sizes), precision)
    assert set(want.action) == {0, 1, 2}
    assert got["action"].tobytes() == want.action.tobytes()
    assert got["log_probability"].tobytes() == want.log_probability.tobytes()
    assert (got["value"] == 42.5).all()


@each_precision
@pytest.mark.parametrize("executor", ("kernel", "cpu"))
def test_without_a_column_of_its_own_the_value_is_that_of_the_action(precision, executor):
    policy = {"network": Network(8, ((16, 3),)), "actions": 3}
    inputs, params, sizes = constant(policy, np.float32([1.5, 4.25, -2]), 70, precision)
    for greedy, actions in ((True, {1}), (False, {0, 1})):
        params["greedy"] = greedy
        if executor == "cpu":
            got = run_numpy(act, inputs, params, sizes, precision)
        else:
            got = emulated((inputs, params, sizes), precision)
        assert set(got["action"]) == actions
        assert (got["value"] == np.float32([1.5, 4.25, -2])[got["action"]]).all()


@each_precision
@pytest.mark.parametrize("executor", ("kernel", "cpu"))
def test_a_row_that_is_not_a_number_has_no_action_and_leaves_the_others_alone(precision, executor):
    policy = {"network": policy_network(24, 3, (40, 16)), "actions": 3}
    call = drawn(policy, 70, precision)
    bad = {**call[0], "observation": call[0]["observation"].copy()}
    bad["observation"][[5, 66], 3] = np.nan
    if executor == "cpu":
        runs = [run_numpy(act, inputs, *call[1:], precision) for inputs in (call[0], bad)]
    else:
        runs = [emulated((inputs, *call[1:]), precision) for inputs in (call[0], bad)]
    others = np.setdiff1d(np.arange(70), (5, 66))
    assert_same_bits(runs[0], {n: a[others] for n, a in runs[1].items()}, others)
    assert (runs[1]["action"][[5, 66]] == -1).all()
    assert np.isnan([runs[1][n][[5, 66]] for n in OUTPUTS[1:]]).all()


def test_a_wrong_weight_or_draw_is_more_than_rounding_may_explain():
    call = drawn(MARKET, 129, "bfloat16")
    got = emulated(call, "bfloat16")
    for name, place in (("parameters", 56 * 256 + 256 + 5), ("observation", (64, 7))):
        other = {**call[0], name: call[0][name].copy()}
        other[name][place] += np.asarray(1, other[name].dtype)
        with pytest.raises(AssertionError):
            act.verify(got, other, call[1], EPS["bfloat16"])
    with pytest.raises(AssertionError):
        act.verify(got, call[0], {**call[1], "seed": 4}, EPS["bfloat16"])


@pytest.mark.parametrize("actions", (2, 5))
def test_actions_that_are_not_the_networks_are_refused_with_both_numbers(actions):
    inputs, params, _ = drawn(MARKET, 3, "float32")
    with pytest.raises(ValueError, match=f"heads, 4, or one fewer .* got {actions}"):
        act(**inputs, **{**params, "actions": actions})


def test_a_network_that_does_not_fit_is_refused_with_its_bytes():
    tiny = replace(L4, shared_per_block=8 * 1024)
    with pytest.raises(ValueError, match=r"network needs \d+ B of shared memory .* has 8192 B"):
        launch_of(Network(512, ((512, 512, 4),)), 3, False, 64, "bfloat16", True, tiny)


def test_a_block_has_a_second_team_when_every_sm_has_a_first():
    def chosen(batch, network=MARKET["network"], on=H200):
        grid = act_grid(network, batch, on)
        return grid and (grid.teams, grid.grid)

    assert [chosen(b) for b in (0, 1, 64, 65, 256)] == [(1, 0), (1, 1), (1, 1), (1, 2), (1, 4)]
    assert [chosen(b) for b in (8448, 8449, 1 << 20)] == [(1, 132), (2, 132), (2, 132)]
    assert chosen(64, on=A100) is None and chosen(64, on=L4) is None
    assert chosen(64, Network(56, ((256, 320, 4),))) is None  # registers
    assert chosen(64, policy_network(56, 3, shared=False)) is None  # shared memory
    assert chosen(1 << 20, Network(56, ((128,) * 7 + (4,),))) == (1, 132)


def test_what_the_launcher_runs_follows_from_the_device_the_precision_and_the_image():
    def path(precision, packed, on, batch=1 << 20):
        plan = launch_of(MARKET["network"], 3, False, batch, precision, packed, on)
        return plan[0].path, plan[1]

    tiles = "policy/act_tile", False
    assert path("bfloat16", True, H200) == ("policy/act", True)
    assert path("bfloat16", True, H200, 8 * 66) == ("policy/act_few", True)
    assert path("bfloat16", True, H200, 8 * 66 + 1) == ("policy/act", True)
    assert path("bfloat16", False, H200) == path("float32", True, H200) == tiles
    assert path("bfloat16", True, A100) == path("bfloat16", True, L4) == tiles


@pytest.mark.parametrize(
    "policy, batch",
    [(MARKET, 8448), *itertools.product(filter(fits, POLICIES), (1, 1 << 20))],
    ids=lambda value: named(value) if isinstance(value, dict) else value,
)
def test_the_kernels_of_warpgroups_keep_to_registers(policy, batch):
    plan = launch_of(*policy.values(), False, batch, "bfloat16", True, H200)
    kernel, _, _, threads, shared = plan
    binary = kernel.binary(H200.architecture)
    resources = binary.kernel(kernel.entry)
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    assert threads <= launch.fitting_threads(resources, threads, H200)
    assert shared + resources.shared <= H200.shared_per_block
    code = disassemble(binary)
    assert not FLOAT64.search(code) and not CALL.search(code)
    few = kernel.path == "policy/act_few"
    assert few == (batch == 1)
    assert "HGMMA" in code and "UBLKCP" in code and ("LDGSTS" in code) != few
    assert_order_of_grids(code)
    if policy is MARKET:
        # One wait for each run of 128 columns or fewer, or for each layer: the compiler has put none
        # between products.
        assert code.count("WARPGROUP.DEPBAR") == (4 if few else 5)


@each_precision
@pytest.mark.parametrize("on", (A100, L4, H200), ids=lambda on: on.name)
def test_the_kernel_of_tiles_keeps_to_registers(on, precision):
    for batch in (1, 4096, 1 << 20):
        plan = launch_of(*MARKET.values(), False, batch, precision, False, on)
        kernel, *_, shared = plan
        binary = kernel.binary(on.architecture)
        resources = binary.kernel(kernel.entry)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
        assert shared + resources.shared <= on.shared_per_block
        code = disassemble(binary)
        assert not FLOAT64.search(code) and not CALL.search(code)
        assert ("HMMA.16816.F32.BF16" in code) == (precision == "bfloat16")


def test_inference_writes_a_seventy_seventh_of_what_a_forward_pass_for_training_does():
    training = written(mlp_forward, 1 << 20)
    assert training == (4 * 8 + 2 * (256 + 128 + 64)) << 20
    assert written(act, 1 << 20, actions=3) == (4 + 4 + 4) << 20
    assert training // written(act, 1 << 20, actions=3) == 77


def on_the_gpu(call):
    """{name: array} of a call's inputs, and what else `act` takes."""
    import cupy

    inputs, params, _ = call
    params = {n: v.item() if isinstance(v, np.generic) else v for n, v in params.items()}
    return {n: cupy.asarray(a) for n, a in inputs.items()}, params


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [*filter(fits, POLICIES)], ids=named)
def test_on_the_gpu_both_kernels_of_warpgroups_give_a_row_the_same_bits(policy):
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("only compute capability 9.0 has both kernels")
    arrays, params = on_the_gpu(drawn(policy, 4096, "bfloat16"))
    wide = act(**arrays, **params)
    for rows in (1, 7, 8, 65, 1000):
        few = act(**{**arrays, "observation": arrays["observation"][:rows].copy()}, **params)
        for one, other in zip(few, wide):
            assert one.get().tobytes() == other[:rows].get().tobytes(), rows


@pytest.mark.gpu
@pytest.mark.parametrize("batch", (1, 256, 4096))
def test_calls_that_begin_early_in_a_graph_act_by_the_weights_of_their_place_in_it(batch):
    """Weights are packed again between runs of calls, and each run sees its own."""
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("launches overlap on compute capability 9.0")
    arrays, params = on_the_gpu(drawn(MARKET, batch, "bfloat16"))
    others = [cupy.asarray(drawn(MARKET, n, "bfloat16")[0]["parameters"]) for n in (2, 3, 4, 5)]
    image, network = arrays.pop("image"), params["network"]
    runs, calls, want = 40, 5, []
    outs = [[cupy.full(batch, -9, d) for d in ("i4", "f4", "f4")] for _ in range(runs * calls)]
    for parameters in others:
        packed = pack_network(parameters, network=network)
        want += [[a.get() for a in act(**arrays, image=packed, **params)]]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with mock.patch.object(overlap, "_launch_early", wraps=overlap._launch_early) as early:
        stream.begin_capture()
        for run in range(runs):
            pack_network(others[run % 4], network=network, out=image, stream=stream)
            for call in range(calls):
                out = tuple(outs[run * calls + call])
                act(**arrays, image=image, **params, out=out, stream=stream)
        graph = stream.end_capture()
    assert early.call_count == runs * (calls - 1)
    for _ in range(3):
        graph.launch(stream)
        stream.synchronize()
        for i, out in enumerate(outs):
            for got, wanted in zip(out, want[i // calls % 4]):
                assert got.get().tobytes() == wanted.tobytes(), i
                got.fill(-9)
        cupy.cuda.get_current_stream().synchronize()
