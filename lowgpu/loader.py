"""Batches on a device: the next one is on its way while this one is used."""

import itertools
import math
from queue import SimpleQueue

import numpy as np

from lowgpu import hardware
from lowgpu.background import Background, FeedError
from lowgpu.batch_form import BatchForm
from lowgpu.copiers import Copiers
from lowgpu.monitor import stage
from lowgpu.pinned import PinnedPool
from lowgpu.pools import Plan, allocate
from lowgpu.streams import copies_of
from lowgpu_kernels.arrays import library_of, stream_address
from lowgpu_kernels.dims import FLAG, Int

SLOTS = 2  # on the device: one is used while the other is filled
BLOCKS = 2  # of page-locked memory: one is filled by the host while the other is copied
# Threads that fill page-locked memory, from large arrays: one carries about a fifth of what PCIe 5
# does. On a CPU the cores are the trainer's. Untuned.
COPIERS = {"cpu": 1, "cuda": 4}
LIBRARIES = {"cpu": ("numpy", "torch"), "cuda": ("cupy", "torch")}

_COUNT = Int(1, 64, int)


class DoubleBufferedLoader:
    """Batches of a source, copied into two device buffers in turn beside the work on them.

        for batch in DoubleBufferedLoader(source, library="torch"):
            train(batch["x"], batch["y"])

    A thread reads the source and fills page-locked memory; a stream of its own copies to the device.
    The consumer's stream waits for a batch's copy, the copy waits until the consumer's stream is past
    its work on what the buffer held, and page-locked memory is filled again once its copy is done.
    The host waits for none of it, only for the source.

    A batch may be used until the next is asked for, on the stream that was current in its library
    when it was given, or on `stream`. Work on other streams is the caller's to order. The source is
    read in order by one thread at a time, up to three batches ahead. An iterable is read anew by
    every loop, an iterator once. The thread has ended and every copy is done when the loop ends,
    however it ends; where the iterator is kept in a variable, use the loader in a `with` block. A
    source may fill the same arrays for every batch: they were copied when it is asked for the next.

    The thread calls the driver while the caller's may capture a graph: capture on this stream only, as
    CuPy does, or in torch with capture_error_mode="thread_local".

    On a CPU the same thread copies into the two buffers itself, which helps where the source waits
    for a disk or leaves the interpreter.

    Args:
        source: iterable of batches: dicts, tuples or lists of arrays, or arrays, in host memory. The
            first, which is read at once, says the shapes and element types of all.
        kind: "cuda", or "cpu".
        library: of the arrays given out: "cupy" or "torch", "numpy" or "torch" on a CPU; None for
            the first of them.
        stream: that the batches are used on; None for the current one of the library.
        last: of a last batch with fewer rows: "refuse" it, or "pad" it with rows of zeros, so that
            shapes never change; `rows` says how many are real.
        slots: two batches of device arrays to fill, made by the caller, who keeps them; None
            allocates them. A graph captured on fixed arrays is replayed on these.
        ahead: whether a thread reads ahead; without it a batch is read when it is asked for.
        copiers: threads that share the copying of large arrays within host memory, from 1; None for
            4, and 1 on a CPU.
        debug: whether a buffer is filled with NaN, or integers of all ones, as soon as the work on
            it is over: what is used too long shows.
        copies: the stream that copies, as CpuCopies and GpuCopies are; None makes one for `kind`.

    Attributes:
        rows: real rows of the batch that was given last; None where it is full.
        slot: 0 or 1, the buffer it is in.
        plan: the Plan of one buffer; a device holds two.

    Raises:
        TypeError, ValueError: an argument out of range; while iterating, a batch of another form.
        DeviceError: "cuda" where no GPU can be used.
        FeedError: the source failed, with the cause.
    """

    def __init__(
        self,
        source,
        *,
        kind="cuda",
        library=None,
        stream=None,
        last="refuse",
        slots=None,
        ahead=True,
        copiers=None,
        debug=False,
        copies=None,
    ):
        if kind not in LIBRARIES:
            raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
        library = LIBRARIES[kind][0] if library is None else library
        if library not in LIBRARIES[kind]:
            names = " or ".join(map(repr, LIBRARIES[kind]))
            raise ValueError(f"library must be {names} for kind {kind!r}, got {library!r}")
        self._stream = None if stream is None else stream_address(stream)
        self._source, self._begun = source, _begun(source)
        first, batches = self._begun
        self._once = batches is source
        self._form = BatchForm(first[0], last) if first else None
        self._ahead, self._debug = FLAG("ahead", ahead), FLAG("debug", debug)
        self._copiers = _COUNT("copiers", COPIERS[kind] if copiers is None else copiers)
        self.rows, self.slot, self.plan, self._running = None, None, None, None
        if self._form is None:
            return
        self.plan = Plan(self._form.declared)
        if kind == "cuda" and copies is None:
            hardware.choose("cuda")  # raises where there is none
        self._copies = copies_of(kind) if copies is None else copies
        given = _allocated(self._form, kind, library) if slots is None else list(slots)
        self._slots = [self._checked(number, slot) for number, slot in enumerate(given)]
        if len(self._slots) != SLOTS:
            raise ValueError(f"slots must be {SLOTS} batches, got {len(self._slots)}")
        self._copies.settle()
        # Whatever used this memory before must be over before the first copy into it.
        self._released = [self._copies.mark(self._address(slot)) for slot in range(SLOTS)]
        self._pool = None
        if self._copies.late:
            nbytes = max(self.plan.nbytes, 1)
            self._pool = PinnedPool(nbytes, BLOCKS, kind=kind, copies=self._copies)

    def _checked(self, number, slot):
        """The arrays of a slot as the caller sees them, and as copies are given them."""
        names = list(self._form.declared)
        if isinstance(slot, dict):
            if set(slot) != set(names):
                raise ValueError(f"slots[{number}] must hold {names}, got {list(slot)}")
            arrays = [slot[name] for name in names]
        else:
            arrays = list(slot) if isinstance(slot, (tuple, list)) else [slot]
        if len(arrays) != len(names):
            raise ValueError(f"slots[{number}] must hold {names}, got {len(arrays)} arrays")
        targets = []
        for array, (name, wanted) in zip(arrays, self._form.declared.items()):
            name = f"{name} of slots[{number}]"
            library = library_of(name, array)
            if not library.mutable:
                raise TypeError(f"{name} must be an array that can be filled again, got a JAX one")
            target = library.buffer(name, array, 0, True)
            if (target.shape, target.dtype) != (wanted.shape, wanted.dtype):
                raise ValueError(
                    f"{name} must be {wanted.dtype}{list(wanted.shape)}, got "
                    f"{target.dtype}{list(target.shape)}"
                )
            targets.append(target)
        return arrays, targets

    def _address(self, slot):
        """The stream that a slot's batch is used on."""
        if self._stream is not None:
            return self._stream
        array = self._slots[slot][0][0]
        return library_of("slots", array).current_stream(array)

    def _batches(self):
        """The batches of a new pass over the source."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return itertools.chain(*begun)
        if self._once:
            raise RuntimeError("source is an iterator and was read; give an iterable to read again")
        return iter(self._source)

    def __iter__(self):
        if self._running is not None:
            raise RuntimeError("these batches are being gone through already; close() first")
        batches = self._batches()
        if self._form is None:
            return
        self._form.again()
        self._running = _Pass(self, batches)
        try:
            for slot, rows in self._running:
                self.slot, self.rows = slot, rows
                yield self._form.built(self._slots[slot][0])
        finally:
            self.close()

    def close(self):
        """End the thread after the batch that it reads, and wait for copies under way."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


class _Pass:
    """One pass over the source. Slots go round: filled, ready, held by the consumer, free."""

    def __init__(self, loader, batches):
        self._loader, self._copies = loader, loader._copies
        self._free, self._held = SimpleQueue(), None
        self._copiers = Copiers(loader._copiers)
        for slot in range(SLOTS):
            self._free.put(slot)
        staged = self._staged(batches)
        self._items = staged
        if loader._ahead:
            self._items = Background(staged, SLOTS, "lowgpu-loader", self._copies.here)

    def _staged(self, batches):
        """Each batch in its slot: (slot, mark after its copy, rows)."""
        for number in itertools.count():
            try:
                with stage("read batch"):
                    batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                raise _failed(number, error) from error
            parts, rows = self._loader._form.parts(batch, number)
            slot, copied = self._sent(list(parts.values()))
            if slot is None:
                return
            yield slot, copied, rows

    def _sent(self, parts):
        """The slot that a batch goes to, None when it is to end, and the mark after its copy."""
        pool = self._loader._pool
        if pool is None:
            slot = self._free.get()
            if slot is not None:
                self._place(parts, self._loader._slots[slot][1])
            return slot, None
        with pool.take() as block:
            staged = list(self._loader.plan.views(block.memory).values())
            # Before it waits for a slot: the host's part is done while both are in use.
            self._place(parts, staged)
            slot = self._free.get()
            if slot is None:
                return slot, None
            self._copies.after(self._loader._released[slot])
            for source, target in zip(staged, self._loader._slots[slot][1]):
                if source.nbytes:
                    self._copies.copy_in(source, target)
            copied = self._copies.mark()
            block.give_back(copied)
        return slot, copied

    def _place(self, parts, targets):
        with stage("fill batch"):
            for part, target in zip(parts, targets):
                self._copiers.place(part, target)

    def __iter__(self):
        for slot, copied, rows in self._items:
            self._release()
            stream = self._loader._address(slot)
            self._copies.after(copied, stream)
            self._held = slot, stream
            yield slot, rows

    def _release(self):
        """Let the held slot be filled again, after the work queued on it so far."""
        if self._held is None:
            return
        (slot, stream), self._held = self._held, None
        released = self._copies.mark(stream)
        self._loader._released[slot] = released
        if self._loader._debug:
            self._copies.after(released)
            for target in self._loader._slots[slot][1]:
                self._copies.poison(target)
        self._free.put(slot)

    def close(self):
        try:
            self._release()
        finally:
            # Also after a fault of the device, which a mark would raise.
            self._free.put(None)
            self._items.close()
            self._copiers.close()
            self._copies.drain()


def _failed(number, error):
    return FeedError(f"the source failed at batch {number}: {type(error).__name__}: {error}")


def _begun(source):
    """The first batch in a list, empty where there is none, and the iterator of the rest."""
    try:
        batches = iter(source)
    except TypeError:
        came = type(source).__name__
        raise TypeError(f"source must be an iterable of batches, got {came}") from None
    try:
        return list(itertools.islice(batches, 1)), batches
    except Exception as error:
        raise _failed(0, error) from error


def _allocated(form, kind, library):
    """Two batches of arrays of a library, in one allocation."""
    declared = {
        f"{number}.{slot}": wanted
        for slot in range(SLOTS)
        for number, wanted in enumerate(form.declared.values())
    }
    plan = Plan(declared)
    made = vars(allocate(plan, kind))
    if library == "torch":
        made = _torch(plan, made["slab"])
    return [[made[f"{n}.{slot}"] for n in range(len(form.declared))] for slot in range(SLOTS)]


def _torch(plan, slab):
    """torch tensors of a plan, in memory that was allocated for it."""
    import torch

    # Bytes first: not every element type has a name in DLPack.
    memory = torch.from_numpy(slab) if isinstance(slab, np.ndarray) else torch.from_dlpack(slab)
    made = {}
    for name, wanted in plan.declared.items():
        dtype = getattr(torch, np.dtype(wanted.dtype).name, None)
        if dtype is None:
            raise TypeError(f"torch has no element type {wanted.dtype} ({wanted.meaning})")
        start = plan.offsets[name]
        nbytes = math.prod(wanted.shape) * dtype.itemsize
        made[name] = memory[start : start + nbytes].view(dtype).view(wanted.shape)
    return made
