"""What the updates of PPO and of DQN are held to alike."""

from lowgpu.envs.check_code import CALL, FLOAT64
from lowgpu_kernels import launch
from lowgpu_kernels.compile import disassemble
from lowgpu_kernels.dims import M
from lowgpu_kernels.ops.ppo.grid_update import THREADS as GRID_THREADS
from lowgpu_kernels.ops.ppo.update_launch import part
from lowgpu_kernels.ops.ppo.update_tile import THREADS


def assert_same_bits(one, other, what):
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), f"{name}: {what}"


def lone_updates(op, run, whole, call, rows, results):
    """What lone updates give, one after another: right, and in the end what one call of all gave.

    Args:
        run: (inputs, params, sizes) -> what a call gives and changes, by name.
        whole: what `run` gave for `call`.
        rows: inputs of which an update has a part.
        results: outputs of which it gives one.
    """
    inputs, params, sizes = call
    lone, sizes, made = dict(inputs), {**sizes, M: 1}, []
    for k in range(len(whole["norm"])):
        lone |= {n: part(inputs[n], k) for n in rows}
        made.append(run(lone, params, sizes))
        op.verify(made[-1], lone, params, None)
        lone |= {n: made[-1][n] for n in op.changes}
        for name in results:
            assert made[-1][name].tobytes() == whole[name][k : k + 1].tobytes(), name
    for name in (*op.changes, "gradient"):
        assert made[-1][name].tobytes() == whole[name].tobytes(), name
    return made


def assert_tiles_fit(kernels, entry, tile, precision, on):
    """Hold the kernels of an update of three launches to registers, shared memory and tensor cores."""
    for kernel in kernels:
        binary = kernel.binary(on.architecture)
        resources = binary.kernel(kernel.entry)
        assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    tiles = binary.kernel(entry)
    assert tiles.shared + tile.nbytes <= on.shared_per_block
    held = launch.occupancy(tiles, THREADS, tile.nbytes, on).blocks_per_sm
    assert held >= tile.blocks_a_sm
    code = disassemble(binary)
    assert not FLOAT64.search(code) and not CALL.search(code)
    assert ("HMMA.16816.F32.BF16" in code) == (precision == "bfloat16")
    assert ("LDSM" in code) == (precision == "bfloat16")
    assert "LDGSTS" in code


def assert_whole_fits(kernel, whole, on):
    """Hold the kernel of all updates to registers and shared memory, and its products to overlapping."""
    binary = kernel.binary(on.architecture)
    resources = binary.kernel(kernel.entry)
    assert resources.spill_stores + resources.spill_loads + resources.stack == 0
    assert resources.shared == 0 and whole.nbytes <= on.shared_per_block
    assert launch.occupancy(resources, GRID_THREADS, whole.nbytes, on).blocks_per_sm == 1
    code = disassemble(binary)
    assert not FLOAT64.search(code) and "UBLKCP" in code
    # Products that ptxas makes wait for one another have a wait each.
    products, waits = code.count("HGMMA"), code.count("WARPGROUP.DEPBAR")
    assert products > 50 and waits * 5 < products
