"""The dimensions of the Temporal Fusion Transformer's ops, and inputs in range for tests and benches.

Arrays are time-major, [steps, sequences, ...], so that history and future lie one behind the other;
only what a caller brings, reals and categories, is [sequences, steps, ...].
"""

import numpy as np

from lowgpu_kernels.dims import Dim

ROWS = Dim("rows", "rows that do not depend on each other")
INPUTS = Dim("inputs", "columns of an input row")
OUTPUTS = Dim("outputs", "columns of an output row")
HIDDEN = Dim("hidden", "the transformer's width")
UNITS = Dim("units", "hidden units of a gated residual network")
GATES = Dim("gates", "twice the columns that a gate lets through, values before gates")
STEPS = Dim("steps", "time steps")
FUTURE = Dim("future", "time steps that are predicted")
SEQUENCES = Dim("sequences", "sequences of a batch")
REALS = Dim("reals", "columns of real inputs")
CATEGORIES = Dim("categories", "columns of categorical inputs")
REAL_VARIABLES = Dim("real_variables", "real variables that a selection reads")
CATEGORICAL_VARIABLES = Dim("categorical_variables", "categorical variables that a selection reads")
BOUNDS = Dim("bounds", "categorical variables and one: where each one's rows of a table begin")
TABLE = Dim("table", "rows of all categorical variables' tables")
VARIABLES = Dim("variables", "variables of a selection, real ones first")
MAPPED = Dim("mapped", "units and variables of a selection, side by side")
LSTM_GATES = Dim("lstm_gates", "four gates of every unit: input, forget, cell, output")
PROJECTED = Dim("projected", "columns of queries, all heads side by side")
SOURCES = Dim("sources", "columns of keys, all heads side by side, and of the value behind them")
VALUE = Dim("value", "columns of a head, and of the value that all heads share")

SUM = 2.0**-24  # of a rounding of float32, in which sums are formed


def weight_draw(rng, *shape):
    """Weights of a product whose results have the size of its inputs."""
    return rng.normal(size=shape) / np.sqrt(max(shape[-1], 1))


def selection_sizes(known):
    """Sizes of a selection's arrays that follow from others, or that others bound."""
    reals = min(known.get(REAL_VARIABLES, 0), known.get(REALS, 0))
    categorical = min(known.get(CATEGORICAL_VARIABLES, 0), known.get(CATEGORIES, 0))
    return {
        REAL_VARIABLES: reals,
        CATEGORICAL_VARIABLES: categorical,
        BOUNDS: categorical + 1,
        TABLE: max(known.get(TABLE, 0), categorical),
        VARIABLES: reals + categorical,
    }


def selection_draw(rng, sizes):
    """Columns, bounds and categories that fit each other, every column read once at most."""
    variables, table = sizes[CATEGORICAL_VARIABLES], sizes[TABLE]
    inner = rng.permutation(np.arange(1, table))[: max(variables - 1, 0)]
    bounds = np.sort([0, *inner, *([table] if variables else [])])
    category_columns = rng.permutation(sizes[CATEGORIES])[:variables]
    categories = np.zeros((sizes[SEQUENCES], sizes[STEPS], sizes[CATEGORIES]))
    for v, column in enumerate(category_columns):
        categories[..., column] = rng.integers(0, bounds[v + 1] - bounds[v], categories.shape[:2])
    return {
        "columns": rng.permutation(sizes[REALS])[: sizes[REAL_VARIABLES]],
        "category_columns": category_columns,
        "bounds": bounds,
        "categories": categories,
    }


def refuse_half_a_norm(name, weight, bias):
    """Raise ValueError where one of a residual's norm's arrays is given without the other."""
    if (weight is None) != (bias is None):
        raise ValueError(f"{name} needs residual_weight and residual_bias together")


def refuse_other_categories(categories, category_columns, bounds):
    """Raise ValueError where a category has no row in its variable's table."""
    for column, count in zip(category_columns, np.diff(bounds)):
        of_variable = categories[..., column]
        if of_variable.size and not 0 <= of_variable.min() <= of_variable.max() < count:
            raise ValueError(
                f"categories[..., {column}] must be in [0, {count}), got "
                f"{of_variable.min()} to {of_variable.max()}"
            )
