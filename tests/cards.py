"""GPUs as their makers describe them, and a CUDA runtime and an NVML that stand for a machine."""

import os
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

from lowgpu_kernels.launch import KB, Device

MB = 2**20


@dataclass(frozen=True)
class Card:
    """A GPU: vendor figures, the memory its runtime reports, and its batch sizes by the tier rule.

    `dqn` and `ppo` were worked out by hand from the memory that the card is sold with.
    """

    name: str
    capability: tuple
    sms: int
    reported_mb: int
    l2_mb: int
    memory_mhz: int
    wires: int
    gb_per_second: float
    dqn: int
    ppo: int

    @property
    def total_nbytes(self):
        return self.reported_mb * MB

    @property
    def device(self):
        """As launches are planned for it. Source: the programming guide's technical specifications."""
        block, sm, threads, blocks = {
            (7, 5): (64, 64, 1024, 16),
            (8, 0): (163, 164, 2048, 32),
            (8, 6): (99, 100, 1536, 16),
            (8, 9): (99, 100, 1536, 24),
            (9, 0): (227, 228, 2048, 32),
            (10, 0): (227, 228, 2048, 32),
            (12, 0): (99, 100, 1536, 24),
        }[self.capability]
        shared = block * KB, sm * KB
        return Device(
            self.name, self.capability, self.sms, *shared, threads, blocks, self.l2_mb * MB
        )


CARDS = [
    Card("Tesla T4", (7, 5), 40, 15110, 4, 5001, 256, 320, 1024, 256),
    Card("RTX 3050 Ti", (8, 6), 20, 3902, 2, 6001, 128, 192, 230, 64),
    Card("RTX 3060", (8, 6), 28, 12044, 3, 7501, 192, 360, 1024, 256),
    Card("RTX 3080", (8, 6), 68, 10007, 5, 9501, 320, 760, 512, 230),
    Card("RTX 3090", (8, 6), 82, 24253, 6, 9751, 384, 936, 2048, 512),
    Card("RTX 4060", (8, 9), 24, 7940, 24, 8501, 128, 272, 512, 172),
    Card("RTX 4070", (8, 9), 46, 11994, 36, 10501, 192, 504, 1024, 256),
    Card("RTX 4080", (8, 9), 76, 16072, 64, 11201, 256, 717, 1024, 256),
    Card("RTX 4090", (8, 9), 128, 24210, 72, 10501, 384, 1008, 2048, 512),
    Card("RTX 5070", (12, 0), 48, 11870, 48, 14001, 192, 672, 1024, 256),
    Card("RTX 5080", (12, 0), 84, 15880, 64, 15001, 256, 960, 1024, 256),
    Card("RTX 5090", (12, 0), 170, 32110, 96, 14001, 512, 1792, 2048, 512),
    Card("L4", (8, 9), 58, 22563, 48, 6251, 192, 300, 2048, 512),
    Card("L40S", (8, 9), 142, 45467, 96, 9001, 384, 864, 4096, 1024),
    Card("A100 40 GB", (8, 0), 108, 40326, 40, 1215, 5120, 1555, 4096, 1024),
    Card("A100 80 GB", (8, 0), 108, 81154, 40, 1593, 5120, 2039, 8192, 2048),
    Card("H100", (9, 0), 132, 81090, 50, 2619, 5120, 3350, 8192, 2048),
    Card("H200", (9, 0), 132, 143156, 60, 3201, 6144, 4900, 8192, 2048),
    Card("B200", (10, 0), 148, 182642, 126, 3996, 8192, 8000, 8192, 4096),
]
BY_NAME = {card.name: card for card in CARDS}
CONTEXT_NBYTES = 400 * MB  # that a context takes on the pretended machine


class RuntimeFailure(Exception):
    """Stands for CuPy's CUDARuntimeError."""


class NVMLFailure(Exception):
    """Stands for pynvml's NVMLError."""


def uuid_of(number):
    """The UUID of the board that NVML numbers so, without a prefix."""
    return f"{number:08x}-0000-0000-0000-000000000000"


class Machine:
    """Boards in NVML's order, of which CUDA sees those that CUDA_VISIBLE_DEVICES names.

    Args:
        cards: Cards, or (Card, slice) for a MIG slice of one, whose memory is `slice` eighths.
        board_uuid: whether CUDA gives a slice the UUID of its board.
        fails: NVML's functions that the devices do not support.
    """

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVMLError = NVMLFailure

    def __init__(self, *cards, board_uuid=False, fails=()):
        self.cards = [card if isinstance(card, tuple) else (card, None) for card in cards]
        self.board_uuid, self.fails = board_uuid, fails
        self.opened, self.most_open, self.context = 0, 0, False

    def install(self, monkeypatch):
        """Make it the machine that CuPy and cuda-core speak of."""
        import sys

        cuda, core = ModuleType("cupy.cuda"), ModuleType("cuda.core")
        cuda.runtime = self.runtime()
        core.Device = lambda index: SimpleNamespace(uuid=self.cuda_uuid(index))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
        monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
        monkeypatch.setitem(sys.modules, "cuda.core", core)
        monkeypatch.setitem(sys.modules, "pynvml", self)
        monkeypatch.setattr("lowgpu.hardware.installed", lambda name: "1.0")
        return self

    def visible(self):
        """NVML's numbers in CUDA's order."""
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if given is None:
            return list(range(len(self.cards)))
        prefixed = [f"GPU-{uuid_of(number)}" for number in range(len(self.cards))]
        wanted = [part for part in given.split(",") if part]
        return [prefixed.index(w) if w in prefixed else int(w) for w in wanted]

    def at(self, index):
        return self.cards[self.visible()[index]]

    def cuda_uuid(self, index):
        number = self.visible()[index]
        slice_ = self.cards[number][1] is not None and not self.board_uuid
        return uuid_of(number + 100 if slice_ else number)

    def runtime(self):
        def properties(index):
            card, eighths = self.at(index)
            device = card.device
            return {
                "name": f"NVIDIA {card.name}{' MIG 1g' if eighths else ''}".encode(),
                "major": card.capability[0],
                "minor": card.capability[1],
                "multiProcessorCount": card.sms,
                "totalGlobalMem": self.memory(card, eighths),
                "sharedMemPerBlockOptin": device.shared_per_block,
                "sharedMemPerMultiprocessor": device.shared_per_sm,
                "l2CacheSize": device.l2_bytes,
            }

        def memory():
            self.context = True
            total = self.memory(*self.at(0))
            return total - CONTEXT_NBYTES, total

        return SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            getDeviceCount=lambda: len(self.visible()),
            getDevice=lambda: 0,
            getDeviceProperties=properties,
            memGetInfo=memory,
            driverGetVersion=lambda: 13000,
        )

    @staticmethod
    def memory(card, eighths):
        return card.total_nbytes * (eighths or 8) // 8

    def nvmlInit(self):
        self.opened += 1
        self.most_open = max(self.most_open, self.opened)

    def nvmlShutdown(self):
        self.opened -= 1

    def _supported(self, name):
        if name in self.fails:
            raise NVMLFailure("Not Supported")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert self.opened, "NVML was not started"
        for number, (card, eighths) in enumerate(self.cards):
            if uuid == f"GPU-{uuid_of(number)}":
                return card, None
            if eighths and uuid == f"MIG-{uuid_of(number + 100)}":
                return card, eighths
        raise NVMLFailure("Not Found")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return handle[0], None

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._supported("nvmlDeviceGetMemoryInfo")
        total = self.memory(*handle)
        return SimpleNamespace(total=total, free=total - CONTEXT_NBYTES * self.context)

    def nvmlDeviceGetMaxClockInfo(self, handle, clock):
        self._supported("nvmlDeviceGetMaxClockInfo")
        card, eighths = handle
        assert eighths is None, "NVML gives the clocks of boards only"
        return 1980 if clock == self.NVML_CLOCK_SM else card.memory_mhz

    def nvmlDeviceGetMemoryBusWidth(self, handle):
        self._supported("nvmlDeviceGetMemoryBusWidth")
        assert handle[1] is None, "NVML gives the bus of boards only"
        return handle[0].wires

    def nvmlSystemGetDriverVersion(self):
        return "580.1"
