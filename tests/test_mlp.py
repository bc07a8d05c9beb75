"""The MLP ops: gradients against differences and torch, kernels emulated and disassembled."""

from dataclasses import replace

import numpy as np
import pytest

from lowgpu_kernels import launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import B
from lowgpu_kernels.ops.mlp.examples import draw_parameters, example_networks
from lowgpu_kernels.ops.mlp.mlp_backward import mlp_backward, splits_of, weight_tiles
from lowgpu_kernels.ops.mlp.mlp_forward import mlp_forward
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.mlp.tile import ROWS, tile_nbytes, tile_rows
from tests.emulator import emulating
from tests.harness import (
    arrays_for,
    assert_agrees,
    poisoned_outputs,
    run_launcher,
    run_numpy,
)
from tests.test_compile import CALL, FLOAT64

MARKET, CARTPOLE, ONE_LAYER, DEEP, WIDE, ODD_HEADS = example_networks()
REALS = "float32", "bfloat16"
FEW_SMS = replace(launch.KNOWN["H100"], sms=4)  # so that small batches get full tiles and splits
TINY = (
    Network(8, ((8, 3), (16, 8, 1)), "tanh"),
    Network(8, ((8, 3), (16, 8, 1)), "relu"),
    Network(16, ((24, 8, 4),), "tanh"),
    Network(16, ((24, 8, 4),), "relu"),
)

each_op = pytest.mark.parametrize("op", (mlp_forward, mlp_backward), ids=str)
each_real = pytest.mark.parametrize("real", REALS)


def named(network):
    return f"{network.inputs}-{network.towers}-{network.activation}".replace(" ", "")


def drawn(op, network, batch, real, seed=0):
    """(inputs, params, sizes) of a call."""
    params = {"network": network}
    sizes = op.sizes_of({B: batch}, params)
    return arrays_for(op, np.random.default_rng(seed), sizes, params, real), params, sizes


@each_op
@each_real
@pytest.mark.parametrize("network", example_networks(), ids=named)
def test_the_cpu_agrees_with_the_spec_on_every_example_and_ragged_batch(op, real, network):
    for batch in (0, 1, 7, 31, 33, 100, 127, 129, 255, 257):
        inputs, params, sizes = drawn(op, network, batch, real, seed=batch)
        got = run_numpy(op, inputs, params, sizes, real)
        assert_agrees(op, got, inputs, params, sizes, real)


@pytest.mark.parametrize("network", TINY, ids=named)
def test_the_specs_gradient_is_the_central_difference_of_its_outputs(network):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(5, network.inputs))
    parameters = draw_parameters(rng, network).astype(np.float64)
    weight = rng.normal(size=(5, network.outputs))

    def loss(at):
        return (mlp_forward.spec(x, at, network=network)[0] * weight).sum()

    _, hidden = mlp_forward.spec(x, parameters, network=network)
    gradient = mlp_backward.spec(x, hidden, weight, parameters, network=network)
    step = 1e-6
    differences = np.zeros_like(gradient)
    for _, *tensors in network.views(np.arange(network.parameters)):
        for at in np.concatenate([t.ravel() for t in tensors]):
            ahead, behind = parameters.copy(), parameters.copy()
            ahead[at] += step
            behind[at] -= step
            differences[at] = (loss(ahead) - loss(behind)) / (2 * step)
    # Rounding: 2^-53 |loss| / step; truncation: step^2 times a third derivative of order 1 to 100.
    allowed = 2.0**-52 * np.abs(weight).sum() * 10 / step + 100 * step**2
    np.testing.assert_allclose(gradient, differences, rtol=0, atol=allowed)


@pytest.mark.parametrize("network", (MARKET, CARTPOLE, *TINY), ids=named)
def test_outputs_and_gradient_are_those_of_torch(network):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    x = rng.normal(size=(33, network.inputs)).astype("f4")
    parameters = draw_parameters(rng, network)
    grad_y = rng.normal(size=(33, network.outputs)).astype("f4")
    y, hidden = mlp_forward(x, parameters, network=network)
    gradient = mlp_backward(x, hidden, grad_y, parameters, network=network)

    flat = torch.tensor(parameters, dtype=torch.float64, requires_grad=True)
    activation = torch.tanh if network.activation == "tanh" else torch.relu
    heads, inputs = [], torch.tensor(x, dtype=torch.float64)
    rows = inputs
    for layer in network.layers:
        weight = flat[layer.weight : layer.weight + layer.fan_out * layer.fan_in]
        bias = flat[layer.bias : layer.bias + layer.fan_out]
        rows = rows @ weight.view(layer.fan_out, layer.fan_in).T + bias
        if layer.head:
            heads.append(rows)
            rows = inputs
        else:
            rows = activation(rows)
    wanted = torch.cat(heads, 1)
    wanted.backward(torch.tensor(grad_y[:, : wanted.shape[1]], dtype=torch.float64))
    # Float32 against float64, relative to the largest; the project's figure for gradients is 1e-4.
    for got, want in ((y[:, : wanted.shape[1]], wanted.detach()), (gradient, flat.grad)):
        want = want.numpy()
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_head_of_one_column_is_a_dot_product_and_its_gradient_the_rows():
    network = Network(8, ((1,),))
    x = np.arange(16, dtype="f4").reshape(2, 8)
    parameters = np.zeros(network.parameters, "f4")
    parameters[:9] = [1, 0, 0, 0, 0, 0, 0, -1, 0.5]
    y, hidden = mlp_forward(x, parameters, network=network)
    np.testing.assert_array_equal(y, [[-6.5] + [0] * 7] * 2)
    np.testing.assert_array_equal(hidden, np.zeros((2, 8)))
    grad_y = np.full((2, 8), np.nan, "f4")
    grad_y[:, 0] = 2, -1
    gradient = mlp_backward(x, hidden, grad_y, parameters, network=network)
    np.testing.assert_array_equal(gradient, [*(2 * x[0] - x[1]), 1] + [0] * 7)


@each_real
def test_an_empty_batch_gives_no_rows_and_a_zero_gradient(real):
    inputs, params, sizes = drawn(mlp_backward, CARTPOLE, 0, real)
    assert not run_numpy(mlp_backward, inputs, params, sizes, real)["gradient"].any()
    inputs, params, _ = drawn(mlp_forward, CARTPOLE, 0, real)
    y, hidden = mlp_forward(**inputs, **params)
    assert (y.shape, hidden.shape) == ((0, 8), (0, 256))


def test_arrays_of_another_network_are_refused_with_both_sizes():
    inputs, _, _ = drawn(mlp_forward, CARTPOLE, 3, "float32")
    with pytest.raises(ValueError, match=r"needs I=56 .* got arrays with I=8"):
        mlp_forward(**inputs, network=MARKET)


def test_a_lost_input_column_is_more_than_rounding_may_explain():
    for real in REALS:
        inputs, params, sizes = drawn(mlp_forward, MARKET, 33, real)
        short = {**inputs, "x": inputs["x"].copy()}
        short["x"][:, 40] = 0
        got = run_numpy(mlp_forward, short, params, sizes, real)
        with pytest.raises(AssertionError, match="elements are wrong"):
            assert_agrees(mlp_forward, got, inputs, params, sizes, real)


# What a GPU would run, on the host: g++ compiles the kernels, emulator.h does their PTX.

EMULATED = (
    (MARKET, "bfloat16", 70),
    (CARTPOLE, "float32", 257),
    (CARTPOLE, "bfloat16", 33),
    (ONE_LAYER, "bfloat16", 257),
    (DEEP, "bfloat16", 257),
    (ODD_HEADS, "float32", 7),
    (WIDE, "bfloat16", 7),
)


@each_op
@pytest.mark.parametrize(
    "network, real, batch", EMULATED, ids=lambda v: named(v) if v in example_networks() else str(v)
)
def test_the_kernels_agree_with_the_spec_in_either_order_of_threads(op, network, real, batch):
    inputs, params, sizes = drawn(op, network, batch, real)
    runs = []
    for backwards in (False, True):
        with emulating(FEW_SMS, backwards):
            runs.append(run_launcher(op, inputs, params, sizes, real))
    assert_agrees(op, runs[0], inputs, params, sizes, real)
    for name, first in runs[0].items():
        assert first.tobytes() == runs[1][name].tobytes(), f"{name} depends on who goes first"


def test_one_of_the_emulated_calls_splits_the_batch():
    assert [splits_of(n, batch, FEW_SMS) for n, _, batch in EMULATED] == [1, 1, 1, 2, 1, 1, 1]


def test_a_kernels_row_depends_on_no_other_row():
    inputs, params, sizes = drawn(mlp_forward, CARTPOLE, 257, "float32")
    order = np.random.default_rng(1).permutation(257)
    with emulating(FEW_SMS):
        whole = run_launcher(mlp_forward, inputs, params, sizes)
        moved = run_launcher(mlp_forward, {**inputs, "x": inputs["x"][order]}, params, sizes)
    for name in whole:
        assert whole[name][order].tobytes() == moved[name].tobytes()


@each_real
def test_an_empty_batch_on_a_device_launches_only_what_writes_the_zero_gradient(real):
    inputs, params, sizes = drawn(mlp_backward, CARTPOLE, 0, real)
    with emulating(FEW_SMS):
        got = run_launcher(mlp_backward, inputs, params, sizes, real)
    assert not got["gradient"].any()
    assert [m.kernel.entry for m in recorded(mlp_backward, CARTPOLE, 0, real, FEW_SMS)] == [
        "mlp_backward_weights"
    ]
    assert not recorded(mlp_forward, CARTPOLE, 0, real, FEW_SMS)


# What a GPU would run, compiled for it.


def recorded(op, network, batch, real, on):
    """The launches a call makes on the Device `on`, an empty grid being none."""
    params = {"network": network}
    sizes = op.sizes_of({B: batch}, params)

    def buffer(array):
        return Buffer(1 << 40, array.shape, array.dtype)

    inputs, _, _ = drawn(op, network, batch, real)
    with launch.recording(on) as made:
        named_sizes = {d.name: n for d, n in sizes.items()}
        work = [
            Buffer(1 << 41, shape, np.dtype(dtype))
            for shape, dtype in op.scratch_specs(named_sizes, params, real).values()
        ]
        outputs = map(buffer, poisoned_outputs(op, sizes, params, real))
        op.cuda(*map(buffer, inputs.values()), network, *outputs, *work, 0)
    return made


@each_op
@each_real
@pytest.mark.parametrize("part", ("A100", "L4", "H100"))
@pytest.mark.parametrize("network, batch", ((MARKET, 16384), (CARTPOLE, 100)), ids=str)
def test_kernels_keep_to_registers_and_use_the_units_they_are_written_for(
    op, real, part, network, batch
):
    on = launch.KNOWN[part]
    made = recorded(op, network, batch, real, on)
    for launched in made:
        resources = launched.resources(on)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
        assert resources.shared + launched.shared <= on.shared_per_block
        assert launched.block[0] <= launch.fitting_threads(resources, launched.block[0], on)
    binary = made[0].kernel.binary(on.architecture)
    code = disassemble(binary)
    assert not FLOAT64.search(code)
    assert not CALL.search(code)
    assert ("HMMA.16816.F32.BF16" in code) == (real == "bfloat16")
    assert "HMMA.1688.F32.TF32" not in code
    assert "LDGSTS" in code
    assert ("LDSM" in code) == (real == "bfloat16")


@each_real
@pytest.mark.parametrize("on", launch.KNOWN.values(), ids=lambda d: d.name)
def test_the_widest_networks_fit_every_known_device(real, on):
    for network in (
        Network(512, ((512,) * 8,)),
        Network(512, ((512, 512, 256), (512, 512, 256)), "tanh"),
    ):
        for batch in (1, 4096, 1 << 20):
            rows = tile_rows(network, batch, real, on)
            assert tile_nbytes(network, rows, real) <= on.shared_per_block


@each_real
def test_a_device_with_too_little_shared_memory_is_refused_by_name(real):
    tiny = replace(launch.KNOWN["L4"], name="Tiny", shared_per_block=16 * 1024)
    with pytest.raises(
        ValueError, match=r"network needs .* B of shared memory .* Tiny has 16384 B"
    ):
        tile_rows(Network(512, ((512, 512, 1),)), 64, real, tiny)


def test_tiles_take_fewer_rows_where_the_batch_is_too_small_for_the_chip():
    h100 = launch.KNOWN["H100"]
    taken = [tile_rows(MARKET, batch, "bfloat16", h100) for batch in (64, 4096, 65536)]
    assert taken == [16, 32, 64]
    assert all(rows in ROWS["bfloat16"] for rows in taken)


def test_weight_gradients_fill_the_chip_about_twice_once_the_batch_allows():
    h100 = launch.KNOWN["H100"]
    assert weight_tiles(MARKET) == 15
    assert [splits_of(MARKET, batch, h100) for batch in (1, 255, 1024, 65536)] == [1, 1, 8, 17]
