"""Which arrays of a transformer are int8, and what stands beside them.

An int8 weight has a scale for each of its rows: what a 1 of its sums is worth. Beside it stands how many
levels a 1 of what it multiplies is, unless that is a hidden state, of which 127 are.
"""

from lowgpu.tft.layout import Array

TABULATED = "history", "future"  # selections whose variables' networks become tables
NUMBER = Array((1,), other="number")


def int8_products(shape):
    """{int8 weight: name of the levels of what it multiplies, or None} of a TFTShape."""
    found = {}
    for layer in range(shape.layers):
        # A layer above the first is given the levels that the one below made.
        found[f"lstm.{layer}.input"] = f"lstm.{layer}.levels" if layer == 0 else None
        found[f"lstm.{layer}.recurrent"] = None
    found["lstm.gate.gate"] = None
    for name in ("enrichment", "feed_forward"):
        found |= {f"{name}.first": f"{name}.levels", f"{name}.gate": f"{name}.unit_levels"}
    found |= {f"attention.{n}": "attention.levels" for n in ("query", "source")}
    return found | {"output.gate.gate": "output.gate.levels"}


def int8_arrays(shape):
    """{name: Array} of a transformer in int8: as `shape.arrays()`, with scales, levels and spreads."""
    found, products = shape.arrays(), int8_products(shape)
    for name, levels in products.items():
        weight = found[name]
        found[name] = Array(weight.shape, other="int8")
        found[f"{name}_scale"] = Array(weight.shape[:-1])
        if levels is not None:
            found[levels] = NUMBER
    found |= {f"lstm.{layer}.first_levels": NUMBER for layer in range(shape.layers)}
    for name in TABULATED:
        found[f"{name}.spread"] = Array((len(getattr(shape, name).reals),))
    return found
