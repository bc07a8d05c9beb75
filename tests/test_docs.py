"""The docs say what the code does: the page of kernels is current, and the README's code runs."""

import inspect
import re
from pathlib import Path

import pytest

from bench import document
from tests.harness import every_op

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_of_kernels_is_what_the_op_table_makes():
    assert document.PAGE.read_text(encoding="utf-8") == document.page(), (
        "docs/kernels.md is out of date: run python -m bench.document"
    )


@pytest.mark.parametrize("op", every_op, ids=str)
def test_every_op_is_on_the_page_with_its_arguments_and_its_source(op):
    page = document.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"\n### {op}\n")[2].partition("\n### ")[0]
    for name in (*op.inputs, *op.params, *op.outputs):
        assert f"\n    {name}: " in section, name
    assert document.summary(op).endswith(".")
    file = Path(inspect.getsourcefile(op.spec)).name
    assert f"/{file})" in section and all(size in section for size in op.bench)


def test_the_python_of_the_readme_runs_in_order(tmp_path, monkeypatch):
    text = README.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert blocks, "README.md has no ```python block"
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks:
        # So that a traceback shows the README's own line.
        above = "\n" * text.count("\n", 0, block.start(1))
        exec(compile(above + block[1], str(README), "exec"), names)
