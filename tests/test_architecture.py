"""Rules of the layout, held by reading the source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNEL_FILES = sorted((ROOT / "lowgpu_kernels").rglob("*.py"))
HOST_FILES = sorted((ROOT / "lowgpu").rglob("*.py"))
ONE_HOME = {
    "synchronize": "lowgpu/streams.py",
    "begin_capture": "lowgpu/streams.py",
    "alloc_pinned_memory": "lowgpu/pools.py",
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def attributes(path):
    return {getattr(node, "attr", None) for node in ast.walk(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda p: p.name)
def test_kernels_never_import_the_host_side(path):
    assert not [m for m in imported(path) if m == "lowgpu" or m.startswith("lowgpu.")]


@pytest.mark.parametrize("name, home", ONE_HOME.items())
def test_one_file_owns_each_device_resource(name, home):
    users = {str(p.relative_to(ROOT)) for p in KERNEL_FILES + HOST_FILES if name in attributes(p)}
    assert users <= {home}


def test_numba_cuda_is_imported_in_one_place():
    users = {
        str(p.relative_to(ROOT))
        for p in KERNEL_FILES + HOST_FILES
        if any(m.startswith("numba.cuda") for m in imported(p))
        or any(
            isinstance(n, ast.ImportFrom)
            and n.module == "numba"
            and "cuda" in [a.name for a in n.names]
            for n in ast.walk(ast.parse(p.read_text()))
        )
    }
    assert users == {"lowgpu_kernels/device/__init__.py"}


def test_heavy_libraries_are_imported_where_they_are_used_not_at_the_top():
    for path in KERNEL_FILES + HOST_FILES:
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in getattr(node, "names", [])] if isinstance(node, ast.Import) else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            tops = {n.split(".")[0] for n in names}
            assert not tops & {"cupy", "torch", "jax", "polars", "matplotlib", "pynvml"}, path


def test_files_stay_readable():
    for path in KERNEL_FILES + HOST_FILES:
        lines = path.read_text().count("\n")
        assert lines <= 400, f"{path} has grown past 400 lines"


def test_every_cuda_source_has_a_python_file_of_the_same_family():
    for source in (ROOT / "lowgpu_kernels" / "ops").rglob("*.cu"):
        used = any(f"/{source.stem}" in p.read_text() for p in source.parent.glob("*.py"))
        assert used, f"nothing launches {source}"
