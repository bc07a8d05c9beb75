"""What the driver is handed for a launch, and which launches of a graph begin early."""

import ctypes
import struct
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from cuda.bindings import driver

from lowgpu_kernels import act, act_int8, launch, overlap, pack_network
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.compile import NumbaKernel
from lowgpu_kernels.ops.int8.pack_int8 import image_nbytes as int8_nbytes
from lowgpu_kernels.ops.mlp.network import policy_network
from lowgpu_kernels.ops.policy.pack_network import image_nbytes
from lowgpu_kernels.packing import Packing
from lowgpu_kernels.tensor_map import TensorMap
from tests.harness import every_op
from tests.test_compile import launches_of

H200, A100 = launch.KNOWN["H200"], launch.KNOWN["A100"]
NETWORK = policy_network(56, 3)
PARAMETER_INFO = 0x17  # EIATTR_KPARAM_INFO, an entry of .nv.info


def parameters_of(cubin, entry):
    """[(offset, bytes)] of a kernel's parameters, as the machine code's file says them."""
    (at,) = struct.unpack_from("<Q", cubin, 40)
    nbytes, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * nbytes) for i in range(count)]

    def name(section):
        start = sections[names][4] + section[0]
        return cubin[start : cubin.index(b"\0", start)].decode()

    (start, size) = next(s[4:] for s in sections if name(s) == f".nv.info.{entry}")
    found, at = {}, start
    while at < start + size:
        form, kind, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form == 4:  # `value` bytes follow
            if kind == PARAMETER_INFO:
                _, ordinal, offset, packed = struct.unpack_from("<IHHI", cubin, at)
                found[ordinal] = offset, packed >> 18
            at += value
    return [found[i] for i in range(len(found))]


def read(packing, at, code="q"):
    return struct.unpack_from(code, packing.buffer, at)[0]


@pytest.mark.parametrize("op", every_op, ids=str)
def test_arguments_lie_where_the_kernel_reads_them(op):
    for made in launches_of(op, "H100", seeds=(0,)):
        numba = isinstance(made.kernel, NumbaKernel)
        packing = Packing(made.args, numba)
        with mock.patch.object(TensorMap, "encoded", lambda self: bytes(TensorMap.NBYTES)):
            packing.pack(made.args)
        binary = made.kernel.binary("sm_90a")
        places = parameters_of(binary.cubin, binary.kernel(made.kernel.entry).entry)
        assert packing.nbytes == sum(places[-1])
        i = 0
        for a, offset in zip(made.args, packing.offsets, strict=True):
            if numba and isinstance(a, Buffer):
                # Two pointers of no use, the elements and their bytes; behind it shape and strides.
                told = [read(packing, at) for at, _ in places[i : i + 5 + 2 * len(a.shape)]]
                strides = np.empty(a.shape, a.dtype).strides if a.size else told[-len(a.shape) :]
                assert told == [0, 0, a.size, a.dtype.itemsize, a.address, *a.shape, *strides]
                assert offset == places[i + 4][0]
                i += len(told)
            else:
                nbytes = TensorMap.NBYTES if isinstance(a, TensorMap) else 8
                assert places[i] == (offset, getattr(a, "itemsize", nbytes))
                i += 1
        assert i == len(places)


def test_the_driver_is_handed_one_buffer_and_its_bytes():
    seen = {}

    def take(address, *rest):
        seen["call"] = address, *rest[:9]
        named, at, sized, nbytes, end = (ctypes.c_size_t * 5).from_address(rest[9])
        assert (named, sized, end) == (1, 2, 0)  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE and _END
        seen["bytes"] = ctypes.string_at(at, ctypes.c_size_t.from_address(nbytes).value)

    a = Buffer(0x7000, (300, 64), np.dtype("int8"))
    args = (np.int32(5), None, np.float32(2), a, np.uint8(7))
    plan = launch._Plan(SimpleNamespace(address=0x99, shared=1024), args, numba=False)
    plan.driver_launch = take
    plan((3, 2, 1), (32, 1, 1), args, 0x55)
    assert seen["call"] == (0x99, 3, 2, 1, 32, 1, 1, 1024, 0x55, 0)
    # Everything lies at a multiple of its size.
    assert plan.packing.offsets == [0, 8, 16, 24, 32]
    assert seen["bytes"] == struct.pack("@i4xqf4xqB", 5, 0, 2.0, 0x7000, 7)


def test_a_tensor_map_is_handed_over_by_its_address_at_a_multiple_of_64():
    """In one buffer it is an illegal instruction."""
    args = (np.int32(5), TensorMap(Buffer(0x7000, (300, 64), np.dtype("int8")), 128), np.uint8(7))
    plan, seen = launch._Plan(SimpleNamespace(address=1, shared=0), args, numba=False), []

    def take(*call):
        five, of_map, seven = (ctypes.c_size_t * 3).from_address(call[9])
        seen.append((five, of_map, seven, call[10], ctypes.string_at(of_map, 128)))

    plan.driver_launch = take
    with mock.patch.object(TensorMap, "encoded", lambda self: bytes(range(128))):
        plan((1, 1, 1), (32, 1, 1), args, 0)
    ((five, of_map, seven, extra, held),) = seen
    assert plan.packing.offsets == [0, 64, 192] and (of_map - five, seven - five) == (64, 192)
    assert held == bytes(range(128)) and extra == 0


def test_a_cooperative_launch_is_handed_the_address_of_every_argument():
    args = (np.int32(5), Buffer(0x7000, (3,), np.dtype("f4")), np.uint64(9))
    plan = launch._Plan(SimpleNamespace(address=1, shared=0), args, False, cooperative=True)
    seen = []

    def take(*call):
        seen.extend((ctypes.c_size_t * 3).from_address(call[9]))
        seen.append(len(call))

    plan.driver_launch = take
    plan((1, 1, 1), (32, 1, 1), args, 0)
    *pointers, count = seen
    assert count == 10
    assert [ctypes.c_int64.from_address(p).value for p in pointers[1:]] == [0x7000, 9]
    assert ctypes.c_int32.from_address(pointers[0]).value == 5


class Capture:
    """Streams that are being captured, in the driver's place: nodes are numbered as they come."""

    def __init__(self):
        self.number, self.nodes, self.count, self.early = 7, {}, 0, []
        self.refusal = 0

    def add(self, stream=5):
        """Work of anybody on a stream."""
        self.nodes[stream] = [0x9000 + self.count]
        self.count += 1

    def capturing(self, stream):
        # Asked of the legacy stream while another is captured, the driver answers with an error.
        assert stream not in (0, 1)
        return stream in (5, 6)

    def info(self, stream, status, capture, graph, nodes, edges, count):
        assert status and edges and not graph
        found = self.nodes.get(stream, [])
        self.held = (ctypes.c_size_t * len(found))(*found)
        ctypes.c_uint64.from_address(capture).value = self.number
        ctypes.c_size_t.from_address(nodes).value = ctypes.addressof(self.held)
        ctypes.c_size_t.from_address(count).value = len(found)
        return self.refusal

    def plain(self, *call):
        self.early.append(False)
        self.add(call[8])

    def extended(self, config, function, pointers, extra):
        assert function == 0x99 and pointers == 0 and extra
        assert config.numAttrs == 1 and config.attrs[0].value.programmaticStreamSerializationAllowed
        dims = config.gridDimX, config.blockDimX, config.sharedMemBytes
        assert dims[0] >= 1 and dims[1] == 128 and dims[2] > 0
        self.early.append(True)
        self.add(int(config.hStream))
        return (driver.CUresult(0),)


@pytest.fixture
def capture(monkeypatch):
    from cupy.cuda import runtime
    from cupy_backends.cuda.api import driver as cupy_driver

    made = Capture()

    info = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 7)(made.info)

    def loaded(kernel, index, shared):
        return SimpleNamespace(address=0x99, shared=shared)

    for where, name, value in (
        (runtime, "streamIsCapturing", made.capturing),
        (cupy_driver, "launchKernel", made.plain),
        (overlap, "_library", lambda: SimpleNamespace(cuStreamGetCaptureInfo_v3=info)),
        (driver, "cuLaunchKernelEx", made.extended),
        (launch, "_loaded", loaded),
        (launch, "_current_device", lambda: 0),
        (launch, "device", lambda: H200),
        (launch, "_PLANS", {}),
        (overlap, "_front", None),
    ):
        monkeypatch.setattr(where, name, value)
    return made


IMAGE, OUT = 0x100000, 0x900000


def queue(stream=5, image=IMAGE, out=OUT, int8=False, batch=4):
    """One call of a policy's launcher, on arrays that lie nowhere."""
    f4, observation = np.dtype("f4"), Buffer(0x800000, (batch, 56), np.dtype("bfloat16"))
    clock = Buffer(0x700000, (1,), np.dtype("u8"))
    nbytes = int8_nbytes(NETWORK) if int8 else image_nbytes(NETWORK)
    packed = Buffer(image, (nbytes,), np.dtype("u1"))
    weights = (packed,) if int8 else (Buffer(0x600000, (NETWORK.parameters,), f4), packed)
    outs = [
        Buffer(out + i * 4 * batch, (batch,), np.dtype(d)) for i, d in enumerate(("i4", "f4", "f4"))
    ]
    given = NETWORK, np.int32(3), np.uint64(0), np.bool_(False)
    (act_int8 if int8 else act).cuda(observation, *weights, clock, *given, *outs, stream)


@pytest.mark.parametrize("int8", (False, True), ids=("bfloat16", "int8"))
def test_a_policys_call_begins_early_behind_another_in_the_same_capture(capture, int8):
    for _ in range(3):
        queue(int8=int8)
    queue(int8=int8, image=0x200000)
    queue(int8=not int8)
    assert capture.early == [False, True, True, True, True]


def test_a_call_waits_for_all_of_what_is_not_known_to_leave_its_weights_alone(capture):
    queue()
    capture.add()  # somebody's kernel, copy or host function
    queue()
    queue()
    assert capture.early == [False, False, True]
    f4, u1 = np.dtype("f4"), np.dtype("u1")
    parameters = Buffer(0x600000, (NETWORK.parameters,), f4)
    pack_network.cuda(parameters, NETWORK, Buffer(IMAGE, (image_nbytes(NETWORK),), u1), 5)
    queue()
    assert capture.early[3:] == [False, False]


def test_a_call_that_joins_streams_waits_for_all(capture):
    queue()
    capture.nodes[5] += [0x9999]
    queue()
    assert capture.early == [False, False]


def test_calls_on_other_streams_and_in_other_captures_are_not_in_front(capture):
    queue(5)
    queue(6)
    queue(5)
    capture.number, capture.count = 8, capture.count - 1
    capture.add(5)  # another graph's node at the same address
    queue(5)
    assert capture.early == [False] * 4


def test_a_call_whose_weights_the_one_in_front_was_given_to_write_waits_for_all(capture):
    last = IMAGE + image_nbytes(NETWORK) - 4
    for out, early in ((last, False), (last + 4, True), (IMAGE - 48, True), (IMAGE - 47, False)):
        queue(image=0x400000, out=out)
        queue()
        assert capture.early[-1] is early
        capture.add()


@pytest.mark.parametrize("stream", (0, 1, 9))
def test_outside_a_capture_calls_are_launched_as_ever(capture, stream):
    queue(stream)
    queue(stream)
    assert capture.early == [False, False]


def test_what_the_driver_refuses_is_an_error_with_its_name(capture, monkeypatch):
    queue()
    status = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (status,))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE while a launch was captured"):
        queue()
    capture.refusal = 901  # the capture has been invalidated
    with pytest.raises(RuntimeError, match="CUDA_ERROR_STREAM_CAPTURE_INVALIDATED while a launch"):
        queue()


@pytest.mark.parametrize("on, waits", ((H200, True), (A100, False)), ids=("H200", "A100"))
def test_only_kernels_that_wait_have_an_early_array(monkeypatch, on, waits):
    early = []
    monkeypatch.setattr(launch, "device", lambda: on)
    monkeypatch.setattr(launch, "launch", lambda *_, early=None: given(early))
    given = early.append
    queue(int8=True)
    queue()
    assert [e and e.address for e in early] == ([IMAGE, IMAGE] if waits else [None, None])
