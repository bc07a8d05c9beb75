"""Double DQN beside JAX, whole iterations in one graph and in one jit, and beside PyTorch's update.

An iteration is one step of every environment into a full replay of 2^20 transitions, then one or more
updates, each of a batch drawn uniformly and followed by a soft move of the target.
"""

import numpy as np

from bench import peers
from bench.inference import BF16_FLOPS_PER_SECOND
from bench.peers import workload

CAPACITY = 1 << 20


def comparisons(comparison, graph_of, calls=50):
    """{name: () -> Comparison} for bench.versus, which gives its class and its way to a graph.

    `calls` is iterations in a call of either side; times are of an update, with its share of an iteration.
    """

    def whole(envs, batch, updates, bar):
        def rival(name):
            def make():
                options = peers.dqn_jax.VARIANTS[name]
                peer = peers.dqn_jax.DQN(envs, batch, updates, CAPACITY, **options)
                peer.warm(calls)
                return lambda: peer.run(calls)

            return make

        each = f"{updates} updates" if updates > 1 else "1 update"
        return comparison(
            f"double DQN, {envs} envs, {each} of {batch} a step, whole iterations: an update",
            lambda: graph_of(Training.on_gpu(envs, batch, updates, rounds=calls).iterations, 1),
            {f"JAX, {name}": rival(name) for name in peers.dqn_jax.VARIANTS},
            items=batch,
            unit="samples",
            bar_ratio=bar,
            floor_seconds=floor(batch + envs / (5 * updates)),
            calls=calls * updates,
        )

    def drawn(batch):
        """The update with its batch drawn and gathered, as PyTorch's does."""

        def rival(name):
            settings = peers.updates_torch.VARIANTS[name]
            return peers.repeated(lambda: peers.updates_torch.DQNUpdate(batch, **settings), calls)

        return comparison(
            f"double DQN update, batch {batch}: sample, gather, update",
            lambda: graph_of(Training.on_gpu(4096, batch, 1).learn, calls),
            {f"PyTorch graph, {name}": rival(name) for name in peers.updates_torch.VARIANTS},
            bar_ratio=1,
            floor_seconds=floor(batch),
            calls=calls,
        )

    def alone(envs, batch, updates, bar_seconds):
        def ours():
            training = Training.on_gpu(envs, batch, updates)
            training.learn(None)  # rows for the updates to work on
            training.wait()
            return graph_of(training.update, calls)

        return comparison(
            f"double DQN update alone, batch {batch}, {updates} a call",
            ours,
            {},
            bar_seconds=bar_seconds,
            floor_seconds=floor(batch),
            calls=calls * updates,
        )

    return {
        "dqn": lambda: whole(4096, 8192, 8, bar=4),
        "dqn-1": lambda: whole(4096, 8192, 1, bar=5),
        "dqn-230": lambda: whole(256, 230, 1, bar=6),
        "dqn-drawn": lambda: drawn(8192),
        "dqn-update": lambda: alone(4096, 8192, 8, 27e-6),
        "dqn-update-230": lambda: alone(256, 230, 1, 15.5e-6),
    }


def floor(rows):
    """Seconds that three passes upwards and one down take on the tensor cores."""
    return 5 * workload.FLOPS_FORWARD * rows / BF16_FLOPS_PER_SECOND


class Training:
    """Our side: the ops of iterations over arrays that exist before the first.

    Args:
        arrays: cupy, or numpy for a test; streams are then ignored.
        envs, batch, updates: environments, rows of a minibatch, minibatches an iteration.
        rounds: iterations of a call.
        capacity: transitions of the ring, a multiple of envs.
        bars: rows of the market's table.
    """

    def __init__(self, arrays, envs, batch, updates, rounds=1, capacity=CAPACITY, bars=1_000_000):
        from lowgpu_kernels.dims import BF16, I
        from lowgpu_kernels.ops.mlp.examples import draw_parameters
        from lowgpu_kernels.ops.mlp.network import Network

        rng = np.random.default_rng(0)
        env, table, series = market(bars)
        network = Network(env.width, ((*workload.HIDDEN, workload.ACTIONS),))
        made = {"table": table.astype(BF16[I].dtype({})), "series": series}
        made |= _full_ring(rng, env, envs, capacity, bars)
        made["parameters"] = draw_parameters(rng, network)
        made["target"] = made["parameters"].copy()
        made |= {n: np.zeros(network.parameters, np.float32) for n in ("m", "v")}
        made["step"] = np.zeros(1, np.int32)
        made["clock"], made["draws"] = np.zeros(1, np.uint64), np.zeros(2, np.uint64)
        made["floats"] = np.tile(np.array([0, 1], np.float32), (envs, 1))
        made["ints"] = np.zeros((envs, 2), np.int32)
        made["ints"][:, 0] = rng.integers(bars - workload.EPISODE - 1, size=envs)
        self.arrays = arrays
        self.buffers = {n: arrays.asarray(a) for n, a in made.items()}
        self.about = {"env": env, "network": network, "precision": "bfloat16"}
        self.envs, self.batch, self.updates, self.rounds = envs, batch, updates, rounds
        self._prepare(env, network)

    @classmethod
    def on_gpu(cls, envs, batch, updates, rounds=1):
        """One on the GPU whose arrays are all there: a graph's stream is another than theirs."""
        import cupy

        made = cls(cupy, envs, batch, updates, rounds)
        made.wait()
        return made

    def wait(self):
        """Until the GPU has done what was queued on the current stream."""
        self.arrays.cuda.get_current_stream().synchronize()

    def _prepare(self, env, network):
        """Outputs and working memory of every op."""
        from lowgpu_kernels import dqn_rounds, dqn_update, replay_gather, replay_sample
        from lowgpu_kernels.dims import B, E, F, G, K, M

        settings, rows = workload.DQN, self.updates * self.batch
        fields = {F: len(env.floats), G: len(env.ints)}
        explores = settings["exploration"]
        self._drawn = {"envs": self.envs, "batch": rows, "seed": 1}
        self._learned = {**self.about, "lr": settings["lr"], "double": settings["double"]}
        self._learned |= {"delta": settings["huber"], "tau": settings["tau"]}
        self._learned["eps"] = settings["adam_eps"]
        self._gathered = {"steps": 1, "gamma": settings["gamma"]}
        self._all = {**self._learned, "rounds": self.rounds, "seed": 1, "gamma": settings["gamma"]}
        self._all |= {"epsilon_start": explores, "epsilon_end": explores}
        self._all |= {"updates": self.updates, "batch": self.batch}
        ring = {E: self.envs, K: len(self.buffers["kept_mark"]), **fields}
        self._rounds = self._memory(dqn_rounds, ring, self._all)
        self._index = self._memory(replay_sample, {B: rows}, self._drawn)
        self._rows = self._memory(replay_gather, {B: rows, **fields}, self._gathered)
        minibatches = {M: self.updates, B: self.batch, **fields}
        self._results = self._memory(dqn_update, minibatches, self._learned)
        shape = self.updates, self.batch
        self._minibatches = [a.reshape(*shape, *a.shape[1:]) for a in self._rows["out"]]

    def _memory(self, op, sizes, params):
        """`out`, and on a GPU `scratch`, of an op's calls."""
        params = op.checked_params(params)
        sizes, chosen = op.sizes_of(sizes, params), op.chosen_by(params)
        empty = self.arrays.empty
        out = tuple(empty(s.resolve(sizes), s.dtype(chosen)) for s in op.outputs.values())
        if self.arrays is np or not op.scratch:
            return {"out": out}
        wanted = op.scratch_specs({d.name: n for d, n in sizes.items()}, params)
        # Element types by name: NumPy knows bfloat16 by ml_dtypes.
        return {"out": out, "scratch": [empty(n, np.dtype(t)) for n, t in wanted.values()]}

    def _of(self, *names):
        return [self.buffers[n] for n in names]

    def iterations(self, stream=None):
        """All rounds: a step of every environment into the ring, then the updates."""
        from lowgpu_kernels import dqn_rounds

        states = self._of(
            "parameters", "target", "m", "v", "step", "floats", "ints", "clock", "head"
        )
        given = *states, *self._ring(), *self._of("draws", "table", "series")
        dqn_rounds(*given, **self._all, **self._rounds, **self._queue(stream))

    def _ring(self):
        return [a for n, a in self.buffers.items() if n.startswith("kept_")]

    def learn(self, stream=None):
        """Batches for all updates, and the updates."""
        from lowgpu_kernels import replay_gather, replay_sample

        queue = self._queue(stream)
        replay_sample(*self._of("head", "draws"), **self._drawn, **self._index, **queue)
        index = self._index["out"][0]
        replay_gather(
            index, *self._of("head"), *self._ring(), **self._gathered, **self._rows, **queue
        )
        self.update(stream)

    def update(self, stream=None):
        """The updates alone, of the batches that were gathered last."""
        from lowgpu_kernels import dqn_update

        learned = self._of("parameters", "target", "m", "v", "step")
        # Draws were uniform, so every weight is 1: the update is not given them.
        given = *learned, *self._minibatches[:-1], None, *self._of("table", "series")
        dqn_update(*given, **self._learned, **self._results, **self._queue(stream))

    def _queue(self, stream):
        return {} if stream is None else {"stream": stream}


def market(bars):
    """The peers' env, its table in float32 and its series."""
    from lowgpu.envs import make

    env = make(
        "market",
        cost=workload.COST,
        reward_scale=workload.REWARD_SCALE,
        episode=workload.EPISODE,
        episode_terminates=True,
    )
    features, price = workload.table(bars)
    table = np.zeros((bars, env.width), np.float32)
    table[:, : features.shape[1]] = features
    last = np.zeros(bars, np.float32)
    last[-1] = 1
    return env, table, np.stack([price, last])


def _full_ring(rng, env, envs, capacity, bars):
    """A full ring of market states, each followed by the next bar."""
    from lowgpu_kernels.ops.replay.ring import ring_arrays

    slots = capacity // envs
    shapes = ring_arrays(slots, envs, len(env.floats), len(env.ints))
    made = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    made["head"][:2] = 0, slots
    rows = rng.integers(bars - 1, size=(slots, envs))
    made["kept_ints"][..., 0], made["kept_next_ints"][..., 0] = rows, rows + 1
    made["kept_floats"][..., 1] = made["kept_next_floats"][..., 1] = 1
    made["kept_reward"][:] = rng.standard_normal((slots, envs), np.float32)
    made["kept_mark"][:] = rng.integers(workload.ACTIONS, size=(slots, envs)) << 2
    return made
