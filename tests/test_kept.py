"""CPU loops kept on disk: found by another process, and never after what they were made of changed."""

import os
import subprocess
import sys
import types

import numpy as np
import pytest

from lowgpu_kernels.compile import fingerprint
from lowgpu_kernels.device import njit, scalar

FACTOR = 3


@scalar
def scaled(x):
    return x * FACTOR


def loop(x):
    total = 0.0
    for k in range(len(x)):
        total += scaled(x[k])
    return total


X = np.arange(5.0)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWGPU_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def hits(dispatcher):
    return sum(dispatcher.stats.cache_hits.values())


def test_what_was_compiled_is_found_again_with_the_same_result(folder):
    first, second = njit(loop), njit(loop)
    assert (first(X), hits(first)) == (30.0, 0)
    assert folder.stat().st_mode & 0o077 == 0  # code is read from it: nobody else may write there
    assert (second(X), hits(second)) == (30.0, 1)
    # Another type is another file.
    assert (second(X.astype("f4")), hits(second)) == (30.0, 1)
    again = njit(loop)
    assert (again(X), again(X.astype("f4")), hits(again)) == (30.0, 30.0, 2)


@pytest.mark.parametrize(
    "options", [{"boundscheck": True}, {"error_model": "numpy"}, {"nogil": True}]
)
def test_options_are_part_of_the_name(folder, options):
    njit(loop)(X)
    other, same = njit(loop, **options), njit(loop, **options)
    assert (other(X), hits(other)) == (30.0, 0)
    assert (same(X), hits(same)) == (30.0, 1)


def test_a_constant_of_a_called_function_that_changed_is_seen(folder, monkeypatch):
    assert njit(loop)(X) == 30.0
    monkeypatch.setitem(globals(), "FACTOR", 4)
    # The callee was compiled with 3 in this process; another process has none of that.
    monkeypatch.setitem(globals(), "scaled", scalar(scaled.py_func))
    changed = njit(loop)
    assert (changed(X), hits(changed)) == (40.0, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda raw: b"",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        lambda raw: b"\0" + raw[1:],
    ],
    ids=["empty", "half", "a bit flipped", "digest"],
)
def test_a_damaged_file_is_compiled_again_and_replaced(folder, spoil):
    njit(loop)(X)
    for path in folder.iterdir():
        path.write_bytes(spoil(path.read_bytes()))
    again, then = njit(loop), njit(loop)
    assert (again(X), hits(again)) == (30.0, 0)
    assert (then(X), hits(then)) == (30.0, 1)


def test_without_a_folder_to_write_to_loops_work_and_are_not_kept(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOWGPU_CACHE", str(tmp_path / "file/in"))
    for _ in range(2):
        dispatcher = njit(loop)
        assert (dispatcher(X), hits(dispatcher)) == (30.0, 0)


def test_nothing_half_written_is_left(folder):
    njit(loop)(X)
    assert {path.suffix for path in folder.iterdir()} == {".loop"}


PROGRAM = """
import numpy as np
from lowgpu_kernels import gae
from lowgpu_kernels.ops.advantage import gae as module
rng = np.random.default_rng(0)
reward, value = rng.normal(size=(2, 16, 33)).astype("f4")
out = gae(reward, value, value[0].copy(), rng.random((16, 33)) < 0.1, gamma=0.9, lam=0.9)
hits = sum(sum(f.stats.cache_hits.values()) for f in vars(module).values() if hasattr(f, "stats"))
print(hits > 0, out.advantage.tobytes().hex())
"""


def test_another_process_finds_an_ops_loop_and_gives_the_same_bits(folder):
    said = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "LOWGPU_CACHE": str(folder)},
        ).stdout.split()
        for _ in range(2)
    ]
    assert [found for found, _ in said] == ["False", "True"]
    assert said[0][1] == said[1][1]


def module_with(monkeypatch, name="tests.made_up", **values):
    module = types.ModuleType(name)
    vars(module).update(values)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(globals(), "made_up", module)
    return fingerprint(reads_a_module)


def reads_a_module(x):
    return made_up.twice(x) + made_up.OFFSET  # noqa: F821


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


def test_what_a_function_reads_of_modules_is_in_its_digest(monkeypatch):
    first = module_with(monkeypatch, twice=doubled, OFFSET=1)
    assert module_with(monkeypatch, twice=doubled, OFFSET=1) == first
    assert module_with(monkeypatch, twice=doubled, OFFSET=2) != first
    assert module_with(monkeypatch, twice=tripled, OFFSET=1) != first
    assert module_with(monkeypatch, twice=doubled, OFFSET=1, unread=5) == first


TABLE = np.arange(3)


def reads_a_table(k):
    return TABLE[k]


def test_an_array_that_a_function_reads_is_in_its_digest(monkeypatch):
    digests = {fingerprint(reads_a_table)}
    for other in (np.array([0, 1, 3]), np.arange(3.0), np.arange(3).reshape(3, 1)):
        monkeypatch.setitem(globals(), "TABLE", other)
        digests.add(fingerprint(reads_a_table))
    assert len(digests) == 4
