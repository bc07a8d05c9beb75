"""What the PyTorch peers share: running work eagerly or as one CUDA graph."""

from contextlib import contextmanager

import torch

MODES = ("eager", "graph")


class TorchWork:
    """Work queued on torch's current stream; a peer says what it is in `_work`.

    Args:
        device: "cuda" or "cpu".
        mode: "eager" calls the operators one by one; "graph" captures them once, in `warm`, and
            replays the CUDA graph.
    """

    def __init__(self, device, mode):
        if device not in ("cuda", "cpu"):
            raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if mode == "graph" and device == "cpu":
            raise ValueError("a CUDA graph needs device='cuda'; give mode='eager' on a cpu")
        self.device, self.mode = device, mode
        self._replay = None

    def warm(self):
        """Run the work until its lazy set-up is behind it, and capture the graph if asked."""
        if self.mode == "graph":
            self._replay = captured(self._work)
            self._replay()
        else:
            for _ in range(3):
                self._work()
        self.block()

    def run(self):
        """Queue the work once on torch's current stream, and return."""
        if self.mode == "eager":
            self._work()
        elif self._replay is None:
            raise RuntimeError("the graph is not captured yet; call warm() first")
        else:
            self._replay()

    def block(self):
        """Wait until the device has finished; a CPU already has."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _work(self):
        raise NotImplementedError


def captured(work, warmups=3):
    """`work` as a CUDA graph: the function that replays it.

    The work first runs on a side stream, as capture demands, so that libraries have made their
    handles and workspaces.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The default mode forbids every thread of the process to allocate during a capture, and XLA
    # has threads of its own.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


@contextmanager
def tensor_float_32():
    """Let float32 matrix products use TF32 inside, and put the setting back: it is global."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.allow_tf32 = before
