"""How an MLP kernel lays a network out: the macros of include/mlp_tile.cuh and its tile's size."""

import functools

from lowgpu_kernels.op import blocks
from lowgpu_kernels.ops.mlp.network import round_up

THREADS = 256  # MLP_THREADS: eight warps share the columns of a layer. Untuned.
ROWS = {"bfloat16": (64, 32, 16), "float32": (32, 16, 8)}  # whole fragments of rows; untuned
ITEMSIZE = {"bfloat16": 2, "float32": 4}


@functools.cache
def network_macros(network):
    """The constants of a Network for CUDA C that includes mlp_layers.cuh.

    `gradients` is the length of a row of gradients: every layer's outputs, heads among them, side by
    side, each from a multiple of 8.
    """
    rows, gradient, depth = [], 0, 0
    for layer in network.layers:
        fields = layer.fan_in, layer.fan_out, layer.weight, layer.bias, layer.column, layer.source
        numbers = ",".join(map(str, (depth, *fields, gradient, int(layer.head))))
        rows.append("{" + numbers + "}")
        gradient += round_up(layer.fan_out, 8)
        depth = 0 if layer.head else depth + 1
    return {
        "layers": ",".join(rows),
        "layers_hidden": sum(not layer.head for layer in network.layers),
        "towers": len(network.towers),
        "inputs": network.inputs,
        "hidden": network.hidden,
        "outputs": network.outputs,
        "heads": sum(widths[-1] for widths in network.towers),
        "parameters": network.parameters,
        "gradients": gradient,
        "tanh": network.activation == "tanh",
    }


def tile_macros(network, rows, precision):
    """`network_macros`, and those of include/mlp_tile.cuh for tiles of `rows` rows."""
    even, odd, own_input = _strides(network, precision)
    return {
        **network_macros(network),
        "float32": precision == "float32",
        "rows": rows,
        "tile_even": even,
        "tile_odd": odd,
        "tile_input": own_input,
        "tile_nbytes": tile_nbytes(network, rows, precision),
    }


@functools.cache
def tile_nbytes(network, rows, precision):
    """Shared memory of a tile, in bytes."""
    return rows * (sum(_strides(network, precision)) * ITEMSIZE[precision] + 4 * network.outputs)


@functools.cache
def tile_rows(network, batch, precision, on, a_row=0):
    """Rows a block takes: the most that fit on `on` and still give three quarters of its SMs a block.

    `a_row` is what the kernel needs of shared memory for each row beside the tile, in bytes. Raises
    ValueError where even the fewest do not fit.
    """
    needs = {rows: tile_nbytes(network, rows, precision) + rows * a_row for rows in ROWS[precision]}
    fitting = [rows for rows, nbytes in needs.items() if nbytes <= on.shared_per_block]
    if not fitting:
        raise ValueError(
            f"network needs {min(needs.values())} B of shared memory a block in {precision}; "
            f"{on.name} has {on.shared_per_block} B: give narrower layers"
        )
    for rows in fitting:
        if 4 * blocks(batch, rows) >= 3 * on.sms:
            return rows
    return fitting[-1]


def _strides(network, precision):
    """Elements of a row in the buffers of even layers, of odd layers and of the input alone."""
    piece = 16 // ITEMSIZE[precision]

    def stride(widths):
        return round_up(max(widths, default=0), 16) + piece

    inputs = (network.inputs,)
    one = len(network.towers) == 1
    even = stride([w for tower in network.towers for w in tower[::2]])
    odd = stride([*(w for tower in network.towers for w in tower[1::2]), *(inputs if one else ())])
    return even, odd, 0 if one else stride(inputs)
