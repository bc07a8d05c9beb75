"""An env's functions as CUDA C calls them, and what every op over an env checks."""

import functools

from lowgpu_kernels.compile import Linked

# Argument types of the four functions, in the order of docs/architecture.md. All return int32.
TYPES = {
    "reset": ("float32*", "int32*", "float32*", "float32*", "int32"),
    "step": ("float32*", "int32*", "int32", "float32*", "float32*", "int32", "float32*"),
    "observe": ("float32*", "int32*", "float32*", "int32", "float32*"),
    "table_row": ("float32*", "int32*"),
}


def env_functions(env):
    """The functions an env has, by name, as plain Python."""
    named = {name: getattr(env, name) for name in TYPES}
    return {n: getattr(f, "py_func", f) for n, f in named.items() if f is not None}


@functools.cache
def env_links(env):
    """The env's functions to link into CUDA C that includes env.cuh, which calls them."""
    return tuple(
        Linked(f"env_{name}", function, TYPES[name], "int32")
        for name, function in env_functions(env).items()
    )


def env_macros(env):
    """Sizes of an env for `compile.cuda_c`: env.cuh reads them as LG_<NAME>."""
    return {
        "floats": len(env.floats),
        "ints": len(env.ints),
        "observation": env.observation,
        "width": env.width,
        "actions": env.actions,
        "table_columns": env.table_columns,
    }


def require(env, **given):
    """Refuse a table or series the env needs and did not get, or got and does not read."""
    needs = {"table": env.table_columns > 0, "series": len(env.series) > 0}
    for name, array in given.items():
        if needs[name] and array is None:
            shape = f"[R, {env.width}]" if name == "table" else f"[{len(env.series)}, R]"
            raise ValueError(f"{name} must be given: {env.name} reads {name} {shape}")
        if not needs[name] and array is not None:
            raise ValueError(f"{name} must be left out: {env.name} reads no {name}")


def rows_of(series):
    """What the env functions get as `rows`."""
    return 0 if series is None else series.shape[1]
