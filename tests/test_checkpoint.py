"""Checkpoints are whole, are what was written, and run no code."""

import io
import os
import pickle
import signal
import stat
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save as encode

from lowgpu import checkpoint
from lowgpu.checkpoint import CheckpointError, load, save

RNG = np.random.default_rng(0)
ARRAYS = {
    "parameters": RNG.normal(size=57).astype("f4"),
    "clock": np.array([2**64 - 1], "u8"),
    "ints": RNG.integers(-9, 9, (3, 2)).astype("i4"),
    "empty": np.zeros((0, 4), "f4"),
    "flags": np.array([True, False]),
}
DOCUMENT = {"iteration": 7, "curve": [[1.0, 0.1]], "name": 'é"\\'}


def written(folder, **changes):
    path = folder / "checkpoint.safetensors"
    save(path, ARRAYS | changes, DOCUMENT)
    return path


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    loaded = load(written(tmp_path), {n: (a.shape, a.dtype) for n, a in ARRAYS.items()})
    assert loaded.document == DOCUMENT
    assert loaded.arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded.arrays[name].dtype == array.dtype
        assert loaded.arrays[name].shape == array.shape
        assert loaded.arrays[name].tobytes() == array.tobytes()
        assert loaded.arrays[name].flags.writeable


def test_a_header_of_any_length_is_read(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    for extra in range(0, 1600, 7):
        save(path, {"a": ARRAYS["flags"]}, {"text": "x" * extra})
        assert load(path, {"a": ((2,), bool)}).document["text"] == "x" * extra


def test_equal_contents_give_equal_files(tmp_path):
    raw = written(tmp_path).read_bytes()
    assert written(tmp_path).read_bytes() == raw


def test_other_programs_can_read_the_arrays(tmp_path):
    from safetensors.numpy import load_file

    assert load_file(written(tmp_path))["parameters"].tobytes() == ARRAYS["parameters"].tobytes()


def test_the_file_has_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o022)
    try:
        assert stat.S_IMODE(written(tmp_path).stat().st_mode) == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize("start", range(8))
def test_a_flipped_bit_is_refused(tmp_path, start):
    path = written(tmp_path)
    raw = path.read_bytes()
    broken = tmp_path / "broken.safetensors"
    bits = range(start, 8 * len(raw), 8 * 3)  # together every third byte, and each bit in it
    assert len(bits) > 30
    for bit in [*range(64), *bits]:
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load(broken)


def test_a_file_cut_short_or_added_to_is_refused(tmp_path):
    raw = written(tmp_path).read_bytes()
    broken = tmp_path / "broken.safetensors"
    for changed in (*(raw[:n] for n in range(0, len(raw), 41)), raw + b"\0"):
        broken.write_bytes(changed)
        with pytest.raises(CheckpointError):
            load(broken)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_is_neither_written_nor_read(tmp_path, bad, monkeypatch):
    path = written(tmp_path)
    raw = path.read_bytes()
    broken = ARRAYS["parameters"].copy()
    broken[3] = bad
    with pytest.raises(CheckpointError, match="parameters holds a NaN"):
        written(tmp_path, parameters=broken)
    assert path.read_bytes() == raw
    with monkeypatch.context() as careless:
        careless.setattr(checkpoint, "_refuse_non_finite", lambda *_: None)
        written(tmp_path, parameters=broken)
    with pytest.raises(CheckpointError, match="parameters holds a NaN"):
        load(path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"parameters": ((58,), "f4")}, "parameters must be float32"),
        ({"parameters": ((57,), "f8")}, "parameters must be float64"),
        ({"more": ((1,), "f4")}, "lacks more"),
        ({"flags": None}, "has an unknown array, flags"),
    ],
)
def test_arrays_of_another_configuration_are_refused(tmp_path, change, message):
    wanted = {n: (a.shape, a.dtype) for n, a in ARRAYS.items()} | change
    wanted = {n: w for n, w in wanted.items() if w}
    with pytest.raises(CheckpointError, match=message):
        load(written(tmp_path), wanted)


class Toucher:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("suffix", ["pt", "pkl", "zip", "safetensors"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5, "zip"])
def test_a_pickle_is_refused_and_never_run_whatever_its_name(tmp_path, suffix, protocol):
    marker = tmp_path / "marker"
    raw = pickle.dumps(Toucher(marker), 2 if protocol == "zip" else protocol)
    if protocol == "zip":
        held = io.BytesIO()
        with zipfile.ZipFile(held, "w") as archive:
            archive.writestr("archive/data.pkl", raw)
        raw = held.getvalue()
    path = tmp_path / f"policy.{suffix}"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="pickle") as refused:
        load(path)
    assert not marker.exists()
    assert "\n" not in str(refused.value)
    pickle.loads(pickle.dumps(Toucher(marker)))  # the trap works
    assert marker.exists()


HEADERS = {
    "empty file": b"",
    "seven bytes": b"\1\0\0\0\0\0\0",
    "200 MB header": struct.pack("<Q", 200_000_000) + b"{" + b" " * 100,
    "2^63 header": struct.pack("<Q", 2**63) + b"{}",
    "not JSON": struct.pack("<Q", 8) + b"{" + b"x" * 7,
    "a list": struct.pack("<Q", 8) + b"[1,2,3] ",
    "no metadata": encode({"a": np.zeros(3, "f4")}),
    "other metadata": encode({"a": np.zeros(3, "f4")}, {"lowgpu": "{}"}),
    "deep": struct.pack("<Q", 200_006) + b'{"a":' + b"[" * 200_000 + b"}",
}
for _name, _fields in {
    "negative offsets": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    "gap": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "shape overflow": '{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}',
    "text offsets": '{"a":{"dtype":"F32","shape":[1],"data_offsets":["0","4"]}}',
    "no offsets": '{"a":{"dtype":"F32","shape":[1]}}',
    "huge payload": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,1099511627776]}}',
}.items():
    HEADERS[_name] = struct.pack("<Q", len(_fields)) + _fields.encode() + b"\0" * 8


@pytest.mark.parametrize("name", HEADERS)
def test_a_crafted_header_is_refused_quickly_and_in_little_memory(tmp_path, name):
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(HEADERS[name])
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(CheckpointError):
        load(path)
    took, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 1
    assert peak < 50e6


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no regular file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="no regular file"):
        load(tmp_path / "pipe")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = written(tmp_path)
    raw = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, flags=np.array([False]))
    assert path.read_bytes() == raw
    assert os.listdir(tmp_path) == [path.name]


SAVER = """
import sys, numpy as np
from lowgpu.checkpoint import save
path, number = sys.argv[1], 0
print("ready", flush=True)
while True:
    number += 1
    save(path, {"a": np.full(200_000, number, "f4")}, {"iteration": number})
"""


def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_file(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    delays = np.random.default_rng(1).uniform(0, 0.03, 30)
    halfway = 0
    for delay in delays:
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout.readline() == "ready\n"
        while not path.exists():
            time.sleep(0.001)
        time.sleep(delay)
        saver.send_signal(signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        loaded = load(path)
        assert (loaded.arrays["a"] == loaded.document["iteration"]).all()
        halfway += len(os.listdir(tmp_path)) > 1
    assert halfway, "no kill came in the middle of a save"
