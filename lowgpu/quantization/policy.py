"""A quantized policy to act with: observations in, actions out, in the arrays they came in."""

import functools
from pathlib import Path

import numpy as np

from lowgpu.policy import as_cupy
from lowgpu.quantization import quantized
from lowgpu.streams import GpuQueue
from lowgpu_kernels import act_int8, pack_int8
from lowgpu_kernels.arrays import library_of, on_stream

FILE = "quantized.safetensors"
OUTPUTS = {name: spec.dtype({}) for name, spec in act_int8.outputs.items()}


class QuantizedPolicy:
    """An int8 network, and what acts with it; no float32 parameters are needed.

    An observation is acted on where it lies, on a GPU on its library's current stream and without
    waiting, to the same bits on every device.

    Args:
        network, columns, arrays: as a Calibration has them.
        actions: columns of the network's output that are logits, action values or advantages.
        observation: columns of an observation.
        seed: of the draws, in [0, 2^64).
        normalizer: {name: array} that the observations' features were made with; kept for the caller.

    Attributes:
        step: of the next draw: calls of `act` that were not greedy. Set it to repeat draws.

    Raises:
        ValueError: a seed out of range; actions or arrays that are not the network's.
    """

    def __init__(self, network, columns, arrays, actions, observation, *, seed=0, normalizer=None):
        given = {"network": network, "actions": actions, "seed": seed}
        self.params = act_int8.checked_params(given)
        act_int8.sizes_of({}, self.params)
        self.network, self.columns, self.arrays = network, columns, arrays
        self.actions, self.observation, self.step = actions, observation, 0
        self.normalizer = dict(normalizer or {})
        self.image = pack_int8(*arrays, network=network)
        # Each column once, in order: rows are read as they are.
        self.gathers = not np.array_equal(columns, np.arange(observation))
        self._on_gpu = functools.cache(self._copy_to)

    @classmethod
    def load(cls, path, seed=0):
        """The policy of a quantized checkpoint.

        Args:
            path: the file, or the folder of a run that was quantized.
            seed: of the draws.

        Raises:
            CheckpointError: as `quantized.load`.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        network, columns, arrays, normalizer, document = quantized.load(path)
        shape = document["actions"], document["observation"]
        return cls(network, columns, arrays, *shape, seed=seed, normalizer=normalizer)

    def act(self, observation, greedy=True):
        """Actions for observations.

        Args:
            observation: float32 or bfloat16 [rows, columns], a NumPy, CuPy, torch or JAX array on the
                CPU or a GPU.
            greedy: the likeliest action; else one is drawn, anew in every call.

        Returns:
            (action, log_probability, value) as `lowgpu_kernels.act_int8` describes, in arrays of the
            observation's library where it lies. A row with a NaN gives -1, NaN and NaN.

        Raises:
            TypeError, ValueError: an observation that is not as described, named.
        """
        library = library_of("observation", observation)
        index = library.device("observation", observation)
        stream = library.current_stream(observation)
        view = library.buffer("observation", observation, stream, False)
        if len(view.shape) != 2 or view.shape[1] != self.observation:
            raise ValueError(
                f"observation must be [rows, {self.observation}], got shape {list(view.shape)}"
            )
        act_int8.inputs["observation"].check("observation", view.shape, view.dtype, {}, {})
        made = [library.empty(view.shape[:1], d, observation, stream) for d in OUTPUTS.values()]
        params = {**self.params, "greedy": greedy}
        if index is None:
            out = (
                m if isinstance(m, np.ndarray) else library.buffer(n, m, stream, True)
                for n, m in zip(OUTPUTS, made)
            )
            clock = np.full(1, self.step, np.uint64)
            rows = np.ascontiguousarray(view[:, self.columns]) if self.gathers else view
            act_int8(rows, self.image, clock, **params, out=tuple(out))
        else:
            self._act_there(library, index, stream, view, observation, made, params)
        self.step += not greedy
        return act_int8.result(*(library.wrap(m, stream) for m in made))

    def _act_there(self, library, index, stream, view, observation, made, params):
        import cupy

        image, columns = self._on_gpu(index)
        with cupy.cuda.Device(index), on_stream(stream):
            out = [
                m
                if isinstance(m, cupy.ndarray)
                else as_cupy(library.buffer(n, m, stream, True), m, index)
                for n, m in zip(OUTPUTS, made)
            ]
            rows = as_cupy(view, observation, index)
            if self.gathers:
                # As integers: CuPy knows no bfloat16 of its own.
                bits = rows.view(f"u{rows.itemsize}")
                rows = cupy.ascontiguousarray(bits[:, columns]).view(rows.dtype)
            # A new array each time: calls on other streams may still read theirs.
            clock = cupy.asarray(np.full(1, self.step, np.uint64))
            act_int8(rows, image, clock, **params, out=tuple(out), stream=stream)

    def _copy_to(self, index):
        """The image and the columns on a GPU; the copies have arrived, so any stream may read them."""
        import cupy

        with cupy.cuda.Device(index):
            copies = {
                "image": cupy.empty_like(self.image),
                "columns": cupy.empty_like(self.columns),
            }
            GpuQueue().write(copies, {"image": self.image, "columns": self.columns})
        return tuple(copies.values())
