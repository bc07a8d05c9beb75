"""Checkpoints: one safetensors file each, written whole or not at all, and trusted by nothing.

The header's metadata holds one JSON document: what the trainer says of itself, the format's
version, and the SHA-256 of every byte of the file, the digest's own 64 characters being read as
zeros. So a changed bit anywhere is found. Nothing that is read here is ever executed.
"""

import contextlib
import hashlib
import json
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load as decode
from safetensors.numpy import save as encode

FORMAT = 1
HEADER_NBYTES_MAX = 2**20
TENSORS_MAX = 256

_KEY = "lowgpu"
_NO_DIGEST = "0" * 64
_BEFORE_DIGEST = rb"{\"sha256\":\""  # as the document starts inside the header's JSON text


class CheckpointError(ValueError):
    """A file that is no checkpoint of ours, or a damaged one: one sentence that says which."""


@dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and what the trainer said of itself."""

    arrays: dict
    document: dict


def save(path, arrays, document):
    """Write a checkpoint so that the path always holds a whole one, the old or the new.

    The bytes are written to a hidden file beside it, synced, renamed over it, and the folder is
    synced.

    Args:
        path: where; the folder exists.
        arrays: NumPy arrays by name, of numbers or flags, all floats finite.
        document: anything that JSON can hold; no NaN.

    Raises:
        CheckpointError: an array holds a NaN or an infinity; nothing is written.
        OSError: the disk refused; the old file is as it was.

    Source: safetensors for the bytes; rename(2) and fsync(2) for the order.
    """
    path = Path(path)
    for name, array in arrays.items():
        _refuse_non_finite(path, name, array)
    text = json.dumps(
        {"sha256": _NO_DIGEST, "format": FORMAT, **document},
        separators=(",", ":"),
        allow_nan=False,
    )
    raw = encode({n: np.ascontiguousarray(a) for n, a in arrays.items()}, {_KEY: text})
    at = raw.index(_BEFORE_DIGEST) + len(_BEFORE_DIGEST)
    digest = hashlib.sha256(raw).hexdigest().encode()
    _replace(path, (raw[:at], digest, raw[at + len(digest) :]))


def _replace(path, parts):
    beside = path.with_name(f".{path.name}.new")
    try:
        # Opened in the user's mode; safetensors' own writer leaves 0600 and does not sync.
        with open(beside, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path, expected=None):
    """Read a checkpoint, after checking everything that can be checked.

    Args:
        path: a file written by `save`.
        expected: {name: (shape, dtype)} of every array, when it is known.

    Returns:
        The Checkpoint; its arrays can be written to.

    Raises:
        CheckpointError: no such file; a pickle, a zip or anything else that is no safetensors file;
            a header, size, name, shape, element type or digest that does not fit; a NaN.
    """
    path = Path(path)
    raw = _read(path)
    text, at = _document_of(path, raw)
    digest = bytes(raw[at : at + 64])
    raw[at : at + 64] = _NO_DIGEST.encode()
    if hashlib.sha256(raw).hexdigest().encode() != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it was written with")
    document = json.loads(text)
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {document.get('format')!r} and this version reads {FORMAT}"
        )
    arrays = {name: array.copy() for name, array in decode(bytes(raw)).items()}
    if expected is not None:
        _check_expected(path, arrays, expected)
    for name, array in arrays.items():
        _refuse_non_finite(path, name, array)
    return Checkpoint(arrays, {k: v for k, v in document.items() if k not in ("sha256", "format")})


def _read(path):
    """The bytes of the file, when their start and their number are those of a safetensors file."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{path} is no regular file")
        with open(path, "rb") as file:
            start = file.read(9)
            size = os.fstat(file.fileno()).st_size
            header_nbytes = _header_nbytes(path, start, size)
            header = file.read(header_nbytes - 1)
            payload_nbytes = _payload_nbytes(path, start[8:] + header)
            if 8 + header_nbytes + payload_nbytes != size:
                raise CheckpointError(
                    f"{path} is damaged: its header speaks of {8 + header_nbytes + payload_nbytes} "
                    f"bytes and it has {size}"
                )
            return bytearray(start + header + file.read(payload_nbytes))
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be read: {reason}") from None


def _header_nbytes(path, start, size):
    # A header's length may begin with the same two bytes; what it is of begins with a brace.
    pickled = start[:1] == b"\x80" and start[1:2] <= b"\x05" and start[8:] != b"{"
    if pickled or start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        raise CheckpointError(
            f"{path} is a {'pickle' if pickled else 'zip, as PyTorch and others save pickles in'}, "
            "and loading one can run code: convert it with safetensors where you trust it"
        )
    count = struct.unpack("<Q", start[:8])[0] if len(start) == 9 else 0
    if start[8:] != b"{" or count < 2:
        raise CheckpointError(
            f"{path} is no safetensors file; a pickle is never loaded, whatever its name"
        )
    if count > min(HEADER_NBYTES_MAX, size - 8):
        raise CheckpointError(
            f"{path} is damaged: its header has {count} bytes, and at most "
            f"{min(HEADER_NBYTES_MAX, size - 8)} are possible"
        )
    return count


def _payload_nbytes(path, header):
    """The bytes that the header's tensors take, when they lie one after the other from 0."""
    try:
        fields = json.loads(header)
        spans = sorted(tuple(v["data_offsets"]) for k, v in fields.items() if k != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is damaged: its header is no safetensors header") from None
    at = 0
    for span in spans:
        if len(span) != 2 or not all(type(n) is int for n in span):
            raise CheckpointError(f"{path} is damaged: its header is no safetensors header")
        if span[0] != at or span[1] < at:
            raise CheckpointError(f"{path} is damaged: its tensors overlap or leave gaps")
        at = span[1]
    if len(spans) > TENSORS_MAX:
        raise CheckpointError(
            f"{path} has {len(spans)} tensors, and at most {TENSORS_MAX} are read"
        )
    return at


def _document_of(path, raw):
    """The text of the document, and where its digest stands in the file."""
    count = struct.unpack("<Q", raw[:8])[0]
    header = bytes(raw[8 : 8 + count])
    try:
        text = json.loads(header)["__metadata__"][_KEY]
        document = json.loads(text)
        at = 8 + header.index(_BEFORE_DIGEST) + len(_BEFORE_DIGEST)
        found = raw[at : at + 64].decode() == document["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError):
        found = False
    if not found:
        raise CheckpointError(
            f"{path} is no checkpoint of lowgpu: its header has no digest of ours"
        )
    return text, at


def _check_expected(path, arrays, expected):
    for name in sorted(set(expected) ^ set(arrays)):
        what = "lacks" if name in expected else "has an unknown array,"
        raise CheckpointError(f"{path} {what} {name}: it belongs to another configuration")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != tuple(shape) or array.dtype != np.dtype(dtype):
            raise CheckpointError(
                f"{path}: {name} must be {np.dtype(dtype).name}{list(shape)} for this "
                f"configuration, got {array.dtype.name}{list(array.shape)}"
            )


def _refuse_non_finite(path, name, array):
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise CheckpointError(f"{path}: {name} holds a NaN or an infinity")
