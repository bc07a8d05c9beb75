"""What the kernels of rollout and experience are tested with: both act in environments, emulated."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from lowgpu.envs import make
from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import launch
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import E, R
from lowgpu_kernels.ops.mlp.network import Network
from lowgpu_kernels.ops.rollout import acting
from lowgpu_kernels.ops.rollout.rollout_tile import rollout_tile, warpgroup_tiles
from tests.emulator import emulating
from tests.harness import EPS, arrays_for, run_launcher

H100 = launch.KNOWN["H100"]
# One SM each, so that few environments fill a block, and more take several.
WARPS, WARPGROUPS = (replace(launch.KNOWN[part], sms=1) for part in ("A100", "H100"))
MARKET = make("market", episode=2)

# What multiplies: a device and a precision.
each_way = pytest.mark.parametrize(
    "on, precision",
    ((WARPS, "float32"), (WARPS, "bfloat16"), (WARPGROUPS, "bfloat16")),
    ids=("fused multiply-adds", "warps", "warpgroups"),
)


def named(value):
    if isinstance(value, Network):
        return str(value).replace(" ", "")
    return getattr(value, "name", None)


def drawn(op, env, network, envs, steps, precision, **given):
    """(inputs, params, sizes) of a call."""
    params = {"env": env, "network": network, "steps": steps, "precision": precision, "seed": 3}
    params = op.checked_params({**params, **given})
    sizes = op.sizes_of({E: envs, R: 40}, params)
    rng = np.random.default_rng(envs)
    inputs = arrays_for(op, rng, sizes, params)
    if env is MARKET:
        inputs["series"][0] = np.exp(rng.normal(size=40) / 50)
        inputs["series"][1] = np.arange(40) % 8 == 7
        inputs["ints"][:] = np.stack([rng.integers(7, size=envs), np.zeros(envs)], 1)
        inputs["floats"][:] = 0, 1
    return inputs, params, sizes


def emulated(op, inputs, params, sizes, on, backwards=False, tile=None):
    """What the launcher gives, with the tile it chooses for the Device `on` or with another."""
    chosen = rollout_tile if tile is None else lambda *_: tile
    with emulating(on, backwards), mock.patch.object(acting, "rollout_tile", chosen):
        return run_launcher(op, inputs, params, sizes)


def assert_same_bits(one, other, what):
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), f"{name}: {what}"


def assert_right(op, got, inputs, params):
    op.verify(got, inputs, params, EPS[params["precision"]])


def assert_either_order_is_right(op, call, on):
    """What comes out, whoever goes first."""
    one, other = (emulated(op, *call, on, backwards=b) for b in (False, True))
    assert_same_bits(one, other, "who goes first?")
    assert_right(op, one, *call[:2])
    return one


def assert_kernels_fit_and_multiply(kernel_of, network, on, precision, has_table):
    """Hold the kernels of every tile to registers, shared memory and the instructions they are for."""
    tiles = {rollout_tile(network, e, precision, on) for e in (4, 4096, 8192, 16384)}
    if precision == "bfloat16":
        tiles |= set(warpgroup_tiles(network, on))
    for tile in tiles:
        kernel = kernel_of(tile)
        binary = kernel.binary(on.architecture)
        resources = binary.kernel(kernel.entry)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
        assert resources.shared + tile.nbytes <= on.shared_per_block
        held = launch.occupancy(resources, tile.threads, tile.nbytes, on).blocks_per_sm
        assert held >= tile.blocks_a_sm
        code = disassemble(binary)
        assert not FLOAT64.search(code) and not CALL.search(code)
        multiplies, groups = precision == "bfloat16", on.architecture.startswith("sm_90")
        assert ("HGMMA" in code) == (multiplies and groups)
        assert ("HMMA.16816.F32.BF16" in code) == (multiplies and not groups)
        assert ("LDGSTS" in code) == has_table
        assert ("CCTL.E.PF2" in code) == ("HGMMA" in code and has_table)
