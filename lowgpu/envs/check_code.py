"""What check_env reads of an env without running it: names, types and machine code."""

import functools
import importlib.util
import linecache
import re
from types import ModuleType

import numpy as np

from lowgpu_kernels import device, launch
from lowgpu_kernels.compile import ARCHITECTURES, disassemble
from lowgpu_kernels.ops.rollout import env_step, observe, reset
from lowgpu_kernels.ops.rollout.cpu_env import compiled

FLOAT64 = re.compile(r"\b(D(?:ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w*64H?|[IF]2F\.F64\S*|F2F\.\w+\.F64)\b")
# A float32 division or root keeps the compiler's own routine for denormal operands, and a long branch
# is written as a call of a local label; neither is a function that was not inlined.
CALL = re.compile(r"\bCALL\.(?!.*(__cuda_sm\w*_f32_slowpath|\(\.L_)).*")


class EnvError(ValueError):
    """An env breaks the contract; the message says which function, and what to write instead."""


def check_globals(env, name, function, seen=()):
    """Refuse names outside the function whose value a compiled copy would not see change."""
    code = function.__code__
    cells = (c.cell_contents for c in function.__closure__ or ())
    outside = dict(zip(code.co_freevars, cells))
    outside |= {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    for called, value in outside.items():
        if hasattr(value, "py_func") and value not in seen:
            check_globals(env, name, value.py_func, (*seen, value))
        elif not (callable(value) or isinstance(value, (ModuleType, np.generic, int, float))):
            raise EnvError(
                f"{env.name}: {name} reads the global {called}, a {type(value).__name__}, which "
                "compiling freezes: make it a state field, a series or a number"
            )


def check_types(env, name, function):
    """Refuse a function that does not compile, or that numba types with a float64 operation."""
    try:
        dispatcher = compiled(function, name)
    except Exception as error:
        raise EnvError(f"{env.name}: {name} does not compile: {_said(error)}") from error
    for signature in dispatcher.nopython_signatures:
        found = _float64_in(_typed(dispatcher, signature))
        if found is not None:
            raise EnvError(f"{env.name}: {name} computes in float64 {found}")


@functools.cache
def _typed(dispatcher, signature):
    """The types that numba gives a function for a signature, or a tuple of its arguments' types.

    They come of a copy, compiled here: an overload that was kept on disk has them as text alone.
    """
    copy = type(dispatcher)(dispatcher.py_func, targetoptions=dispatcher.targetoptions)
    copy.compile(signature)
    (overload,) = copy.overloads.values()
    return overload.type_annotation


def _said(error):
    """The first line of a compiler's message that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((x for x in lines if x and not x.startswith("Failed in ")), repr(error))


def _float64_in(typed, seen=()):
    """Where a typed function computes in float64 and what to write instead, or None."""
    from numba import types
    from numba.core import ir

    assigned = [
        s for block in typed.blocks.values() for s in block.body if isinstance(s, ir.Assign)
    ]
    values = {s.target.name: s.value for s in assigned}
    for statement in assigned:
        expression = statement.value
        signature = typed.calltypes.get(expression) if isinstance(expression, ir.Expr) else None
        if signature is None:
            continue
        called = typed.typemap.get(expression.func.name) if expression.op == "call" else None
        if isinstance(called, types.NumberClass) and called.instance_type != types.float64:
            continue  # f32(0.5) is how a literal gets its width
        if isinstance(called, types.Dispatcher) and called not in seen:
            inner = _typed(called.dispatcher, tuple(signature.args))
            found = _float64_in(inner, (*seen, called))
            if found:
                return found
        if types.float64 in (*signature.args, signature.return_type):
            operands = [values.get(v.name) for v in expression.list_vars()]
            return f"at {_line(statement.loc)}: {_remedy(operands)}"
    return None


def _line(where):
    text = linecache.getline(where.filename, where.line).strip()
    return f"line {where.line}" + (f", `{text}`" if text else "")


def _remedy(operands):
    from numba.core import ir

    for operand in operands:
        if isinstance(operand, (ir.Const, ir.Global, ir.FreeVar)) and type(operand.value) is float:
            literal = repr(operand.value)
            name = "" if isinstance(operand, ir.Const) else f"{operand.name} = "
            return f"write {name}f32({literal}): a bare {literal} is float64"
    return "give its operands a width with f32(...): int / int is float64"


def _installed(*modules):
    return all(importlib.util.find_spec(m) is not None for m in modules)


def check_machine_code(env):
    """Compile for every architecture and look; returns what was compiled for, and if it was seen."""
    if device.cuda is None or launch.SIMULATED or not _installed("cuda", "cuda.core"):
        return (), False
    kernels = {
        "reset": reset.kernel_of(env),
        "step": env_step.kernel_of(env),
        "observe or table_row": observe.kernel_of(env, "float32"),
    }
    seen = True
    for architecture in ARCHITECTURES.values():
        for name, kernel in kernels.items():
            try:
                code = disassemble(kernel.binary(architecture))
            except FileNotFoundError:
                seen = False
                continue
            except Exception as error:
                raise EnvError(f"{env.name}: does not compile for a GPU: {_said(error)}") from error
            float64, call = FLOAT64.search(code), CALL.search(code)
            if float64:
                raise EnvError(
                    f"{env.name}: {name} computes in float64 on {architecture} ({float64[0]}): "
                    "write f32(0.5), a bare 0.5 is float64"
                )
            if call:
                raise EnvError(
                    f"{env.name}: {name} leaves a call in its {architecture} code ({call[0].strip()})"
                    ": write recursion as a loop, and helpers with lowgpu_kernels.device.scalar"
                )
    return tuple(ARCHITECTURES.values()), seen
