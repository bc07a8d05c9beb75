"""A trained policy to act with: observations in, actions out, in the arrays they came in."""

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lowgpu import checkpoint, runs
from lowgpu.checkpoint import CheckpointError
from lowgpu.hardware import choose
from lowgpu.pools import staging
from lowgpu.streams import GpuQueue
from lowgpu_kernels import act, pack_network
from lowgpu_kernels.arrays import library_of, on_stream

FEWEST_STAGED = 64  # rows of the smallest graph: a GPU takes as long for one row
MOST_STAGED = 4096  # rows that a graph is kept for; beyond, its launches cost little. Untuned.
OUTPUTS = {name: spec.dtype({}) for name, spec in act.outputs.items()}


class Policy:
    """A policy's parameters, where they are needed, and what acts with them.

    An observation on a GPU is acted on there, on its library's current stream and without waiting;
    one on the CPU is acted on by `device`, and a GPU is then waited for. Precision is that of the
    observation: bfloat16 is the fast one on a GPU, float32 the exact one.

    Args:
        network: its Network.
        parameters: float32, flat, as `network.views` says; kept as they are now.
        actions: columns of the network's output that are logits or action values.
        device: of observations on the CPU: "cpu", "cuda", or "auto", the GPU where there is one.
        seed: of the draws, in [0, 2^64).
        normalizer: {name: array} that the observations' features were made with; kept for the caller.

    Attributes:
        step: of the next draw: calls of `act` that were not greedy. Set it to repeat draws.

    Raises:
        ValueError: parameters or actions that are not the network's.
        TypeError: parameters of another element type.
        DeviceError: "cuda" where no GPU can be used.
    """

    def __init__(self, network, parameters, actions, *, device="auto", seed=0, normalizer=None):
        parameters = np.array(parameters)
        if parameters.dtype != np.float32:
            raise TypeError(f"parameters must be float32, got {parameters.dtype.name}")
        if parameters.shape != (network.parameters,):
            raise ValueError(
                f"parameters must be {network.parameters} in a row for this network, "
                f"got shape {parameters.shape}"
            )
        self.params = act.checked_params({"network": network, "actions": actions, "seed": seed})
        act.sizes_of({}, self.params)
        self.network, self.parameters = network, parameters
        self.device, self.step = choose(device).kind, 0
        self.normalizer = dict(normalizer or {})
        self._on_gpu = functools.cache(self._copy_to)
        self._staged = functools.cache(self._stage)

    @classmethod
    def of_run(cls, directory, device="auto", seed=0):
        """The policy of a run's last checkpoint.

        Args:
            directory: the run's folder.
            device, seed: as for a Policy.

        Raises:
            RunError: no such run.
            ConfigError: its config cannot be used.
            CheckpointError: no checkpoint, a damaged one, or one of another network.
        """
        settings = runs.opened(directory)
        env = runs.environment(settings)
        path = Path(directory) / runs.CHECKPOINT
        saved = checkpoint.load(path).arrays
        network, parameters = runs.network_of(settings, env), saved.get("parameters")
        if parameters is None or parameters.shape != (network.parameters,):
            raise CheckpointError(f"{path} was written with another network than its config's")
        start = "normalizer."
        normalizer = {n.removeprefix(start): a for n, a in saved.items() if n.startswith(start)}
        return cls(
            network, parameters, env.actions, device=device, seed=seed, normalizer=normalizer
        )

    def act(self, observation, greedy=True):
        """Actions for observations.

        Args:
            observation: float32 or bfloat16 [rows, network.inputs], a NumPy, CuPy, torch or JAX array
                on the CPU or a GPU.
            greedy: the likeliest action; else one is drawn, anew in every call.

        Returns:
            (action, log_probability, value) as `lowgpu_kernels.act` describes, in arrays of the
            observation's library where it lies.

        Raises:
            TypeError, ValueError: an observation that is not as described, named.
        """
        result = self._act(observation, greedy)
        self.step += not greedy
        return result

    def _act(self, observation, greedy):
        library = library_of("observation", observation)
        index = library.device("observation", observation)
        stream = library.current_stream(observation)
        view = library.buffer("observation", observation, stream, False)
        if len(view.shape) != 2 or view.shape[1] != self.network.inputs:
            raise ValueError(
                f"observation must be [rows, {self.network.inputs}], got shape {view.shape}"
            )
        made = [library.empty(view.shape[:1], d, observation, stream) for d in OUTPUTS.values()]
        if index is not None:
            self._act_there(library, index, stream, view, observation, made, greedy)
        else:
            out = [
                m if isinstance(m, np.ndarray) else library.buffer(n, m, stream, True)
                for n, m in zip(OUTPUTS, made)
            ]
            self._act_from_cpu(view, out, greedy)
        return act.result(*(library.wrap(m, stream) for m in made))

    def _act_from_cpu(self, observation, out, greedy):
        params = {**self.params, "greedy": greedy}
        if self.device == "cpu":
            clock = np.full(1, self.step, np.uint64)
            act(observation, self.parameters, None, clock, **params, out=tuple(out))
            return
        rows, size = len(observation), max(FEWEST_STAGED, 1 << (len(observation) - 1).bit_length())
        if 0 < rows <= MOST_STAGED:
            # Staging would take any type, and round it.
            act.inputs["observation"].check("observation", (rows, 0), observation.dtype, {}, {})
            results = self._staged(size, observation.dtype, greedy)(observation, self.step)
        else:
            import cupy

            results = [a.get() for a in self._act(cupy.asarray(observation), greedy)]
        for to, result in zip(out, results):
            to[...] = result

    def _act_there(self, library, index, stream, view, observation, made, greedy):
        import cupy

        parameters, image = self._on_gpu(index)
        with cupy.cuda.Device(index), on_stream(stream):
            out = [
                m
                if isinstance(m, cupy.ndarray)
                else as_cupy(library.buffer(n, m, stream, True), m, index)
                for n, m in zip(OUTPUTS, made)
            ]
            # A new array each time: calls on other streams may still read theirs.
            clock = cupy.asarray(np.full(1, self.step, np.uint64))
            act(
                as_cupy(view, observation, index),
                *(parameters, image, clock),
                **{**self.params, "greedy": greedy},
                out=tuple(out),
                stream=stream,
            )

    def _copy_to(self, index):
        """Parameters and image on a GPU."""
        import cupy

        image = pack_network(self.parameters, network=self.network)
        with cupy.cuda.Device(index):
            copies = {"parameters": cupy.empty_like(self.parameters)}
            copies["image"] = cupy.empty_like(image)
            # It waits, so any stream may read them.
            GpuQueue().write(copies, {"parameters": self.parameters, "image": image})
        return tuple(copies.values())

    def _stage(self, rows, dtype, greedy):
        import cupy

        weights = self._on_gpu(cupy.cuda.Device().id)
        return _Staged(self.network.inputs, {**self.params, "greedy": greedy}, weights, rows, dtype)


def as_cupy(buffer, owner, index):
    """A CuPy array over memory of another library's array."""
    import cupy

    memory = cupy.cuda.UnownedMemory(buffer.address, buffer.nbytes, owner, index)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(buffer.shape, buffer.dtype, memptr=pointer)


@dataclass(frozen=True)
class _Slab:
    """Arrays one after another in page-locked memory, and in the same order on a GPU."""

    host: np.ndarray
    device: object

    @classmethod
    def of(cls, nbytes):
        import cupy

        return cls(staging(nbytes, np.uint8, "cuda"), cupy.empty(nbytes, np.uint8))

    def parts(self, start, count, dtype):
        """`count` elements from byte `start`, as (host, device) arrays."""
        end = start + count * np.dtype(dtype).itemsize
        return tuple(a[start:end].view(dtype) for a in (self.host, self.device))


class _Staged:
    """One graph: rows to the GPU, and an `act` there."""

    def __init__(self, inputs, params, weights, rows, dtype):
        from cupy.cuda import runtime

        given = _Slab.of(16 + rows * inputs * dtype.itemsize)
        taken = _Slab.of(sum(rows * d.itemsize for d in OUTPUTS.values()))
        self.clock, clock = given.parts(0, 1, np.uint64)
        self.rows, observation = (
            a.reshape(rows, -1) for a in given.parts(16, rows * inputs, dtype)
        )
        parts = [taken.parts(i * 4 * rows, rows, d) for i, d in enumerate(OUTPUTS.values())]
        self.results, out = zip(*parts)
        self.queue, self.taken = GpuQueue(), taken

        def work():
            stream, (host, device) = self.queue.stream, (given.host, given.device)
            to_gpu = host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice
            runtime.memcpyAsync(device.data.ptr, *to_gpu, stream.ptr)
            act(observation, *weights, clock, **params, out=out, stream=stream)

        self.work = work  # the graph's arrays live as long as this does
        self.run = self.queue.repeatable(work, {})

    def __call__(self, observation, step):
        self.clock[0] = step
        self.rows[: len(observation)] = observation
        self.run()
        arrived = self.queue.copy_out(self.taken.device, self.taken.host)
        arrived()  # the results are read next
        return [result[: len(observation)] for result in self.results]
