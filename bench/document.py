"""The page of kernels, made of the op table: `python -m bench.document` writes docs/kernels.md."""

import inspect
import textwrap
from pathlib import Path

from bench.test_ops import counts_of, params_of, reals_of, sizes_of
from lowgpu_kernels import launch
from tests.harness import every_op

PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
SCRATCH_DEVICE = "H100"  # scratch may follow the number of SMs

HEAD = """\
# Kernels

Made of the op table by `python -m bench.document`; a test compares. Every op is a function of
`lowgpu_kernels` that takes NumPy, CuPy, torch or JAX arrays and gives back the same kind; its
docstring, by `help`, has the formula, the meaning of every argument and what is raised. An array
shown with `| None` may be left out; `out=` gives outputs to write to, `stream=` the CUDA stream.
"""


def page():
    """The whole page, as Markdown."""
    families = {}
    for op in sorted(every_op, key=str):
        families.setdefault(op.spec.__module__.split(".")[-2], []).append(op)
    families = dict(sorted(families.items()))
    dims = {
        d for op in every_op for s in [*op.inputs.values(), *op.outputs.values()] for d in s.dims()
    }
    parts = [
        HEAD,
        table(
            ("op", "computes"), ((f"[{o}](#{o})", summary(o)) for f in families.values() for o in f)
        ),
        table(("dimension", "counts"), ((d, d.meaning) for d in sorted(dims, key=str))),
    ]
    for family, ops in families.items():
        parts += [f"## {family}\n", *map(section, ops)]
    return "\n".join(parts)


def table(heading, rows):
    """A Markdown table of two columns."""
    lines = (f"| {left} | {right} |" for left, right in (heading, ("---", "---"), *rows))
    return "\n".join(lines) + "\n"


def section(op):
    """One op: its sentence, its signature, and what a caller must know."""
    source = op.spec.__module__.replace(".", "/") + ".py"
    facts = {
        "Changes": ", ".join(op.changes),
        "Scratch": scratch(op),
        "Timed at": "; ".join(op.bench),
        "Source": docstring_part(op, "Source"),
        "File": f"[{source}](../{source})",
    }
    lines = [f"### {op}", "", summary(op), "", "```text", signature(op), "```", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items() if text]
    return "\n".join(lines) + "\n"


def summary(op):
    """The first sentence of an op's docstring."""
    return " ".join(inspect.getdoc(op.spec).partition("\n\n")[0].split())


def docstring_part(op, name):
    """What a docstring says behind `name:`, to the next empty line."""
    _, found, rest = inspect.getdoc(op.spec).partition(f"\n{name}: ")
    return " ".join(rest.partition("\n\n")[0].split()) if found else ""


def signature(op):
    """The call, with element types, shapes and ranges."""
    lines = [f"{n}: {s}{' | None' if s.optional else ''}," for n, s in op.inputs.items()]
    if op.params:
        lines.append("*,")
    for name, kind in op.params.items():
        default = op.signature.parameters[name].default
        shown = "" if default is inspect.Parameter.empty else f" = {default!r}"
        lines.append(f"{name}: {kind}{shown},")
    outputs = "\n".join(f"{n}: {s}," for n, s in op.outputs.items())
    returned = f" -> (\n{textwrap.indent(outputs, '    ')}\n)" if outputs else ""
    body = textwrap.indent("\n".join(lines), "    ")
    return f"{op}(\n{body}\n){returned}"


def scratch(op):
    """Working memory on a GPU, in numbers for the first size that the op declares."""
    counts, real = counts_of(op.bench[0], "declared"), reals_of(op)[0]
    params = params_of(op, counts, real)
    named = {d.name: n for d, n in sizes_of(op, counts, params).items()}
    with launch.recording(launch.KNOWN[SCRATCH_DEVICE]):
        specs = op.scratch_specs(named, params)
    shown = ", ".join(
        f"{name} {dtype}[{', '.join(str(int(n)) for n in shape)}]"
        for name, (shape, dtype) in specs.items()
    )
    return f"{shown} at {op.bench[0]} on {SCRATCH_DEVICE}" if shown else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
