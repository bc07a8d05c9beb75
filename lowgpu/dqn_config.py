"""The settings of DQN, every interval in env steps of all environments together."""

import warnings
from dataclasses import dataclass

import numpy as np

from lowgpu.section import ConfigError, Section, Widths
from lowgpu_kernels.dims import FLAG, SEED, Choice, Float, Int
from lowgpu_kernels.ops.optim.adam import BELOW_ONE

STEPS = Int(0, 2**50, np.int64)
SOME_STEPS = Int(1, 2**50, np.int64)


@dataclass(frozen=True)
class DQNConfig(Section):
    """The settings of DQN. Steps are env steps of all environments together.

    A round is `train_every` env steps and the updates after them; an iteration is `rounds` rounds,
    reported together, and on a GPU one graph.

    Args:
        total_steps: env steps to train for, rounded up to whole iterations.
        seed: of the initial parameters and of every draw in training.
        envs: environments stepped side by side.
        capacity: transitions that the replay holds, a multiple of envs.
        batch: transitions of a minibatch, drawn with replacement: there may be fewer in the replay.
        accumulate: parts of a minibatch whose gradients are added up one after another: less working
            memory of a GPU, and what is learned stays the same, bit for bit.
        learning_starts: env steps before the first update, rounded up to whole rounds.
        train_every: env steps of a round, a multiple of envs.
        updates: of a round; their minibatches are drawn before the first of them.
        rounds: of an iteration.
        target_every: env steps between two moves of the target network, which need not divide or be
            divided by train_every; 0 moves it after every update.
        tau: share of the way that the target goes; 1 copies the parameters.
        gamma: discount per step.
        n_steps: most steps of a return.
        double: choose the next action by the parameters rather than by the target.
        dueling: advantages and a value instead of action values alone.
        huber: error where the loss turns linear, in the reward's unit; 0 for the squared error.
        lr: Adam's learning rate.
        beta1, beta2, eps: Adam's other constants.
        max_norm: largest norm of a gradient; longer ones are scaled down. 0 is no limit.
        epsilon_start, epsilon_end: probability of a uniform action, at the start and from
            epsilon_steps on.
        epsilon_steps: env steps of the linear fall, rounded up to whole steps of all environments; 0
            is the end at once.
        prioritized: draw in proportion to priority instead of uniformly.
        alpha: how far priorities follow errors; 0 makes all the same.
        priority_eps: added to the size of an error, in the reward's unit.
        beta_start, beta_end: how far weights make up for uneven draws, at the start and at the end
            of the run, linear in between.
        hidden: widths of the hidden layers; multiples of 8 waste nothing.
        activation: after every hidden layer.
        precision: of network inputs and products; parameters and Adam are float32 in both.
        checkpoints: how many checkpoints a run writes, at equal distances, the last at its end.
        save_replay: whether they hold the replay. With it a resumed run goes on bit for bit; without
            it one fills the replay anew for learning_starts env steps before it learns on.

    Raises:
        ConfigError: a value of another type or outside its range; a capacity or train_every that
            envs does not divide; soft moves of the target more often than updates.

    Source: Mnih et al. 2015 (doi:10.1038/nature14236); defaults are those of CleanRL's dqn.py, whose
    loss is twice ours.
    """

    total_steps: SOME_STEPS = 500_000
    seed: SEED = 0
    envs: Int(1, 2**22) = 1
    capacity: Int(1, 2**31 - 1) = 10_000
    batch: Int(1, 2**22) = 128
    accumulate: Int(1, 1024) = 1
    learning_starts: STEPS = 10_000
    train_every: Int(1, 2**31 - 1) = 10
    updates: Int(1, 2**10) = 1
    rounds: Int(1, 2**10) = 100
    target_every: STEPS = 500
    tau: Float(0, 1, above=True) = 1.0
    gamma: Float(0, 1) = 0.99
    n_steps: Int(1, 16) = 1
    double: FLAG = False
    dueling: FLAG = False
    huber: Float(0, 1e30) = 0.0
    lr: Float(0, 1, above=True) = 2.5e-4
    beta1: Float(0, BELOW_ONE) = 0.9
    beta2: Float(0, BELOW_ONE) = 0.999
    eps: Float(0, 1, above=True) = 1e-8
    max_norm: Float(0, 1e30) = 0.0
    epsilon_start: Float(0, 1) = 1.0
    epsilon_end: Float(0, 1) = 0.05
    epsilon_steps: STEPS = 250_000
    prioritized: FLAG = False
    alpha: Float(0, 1) = 0.6
    priority_eps: Float(1e-30, 1) = 1e-6
    beta_start: Float(0, 1) = 0.4
    beta_end: Float(0, 1) = 1.0
    hidden: Widths(1) = (120, 84)
    activation: Choice("tanh", "relu") = "relu"
    precision: Choice("float32", "bfloat16") = "float32"
    checkpoints: Int(1, 2**20) = 20
    save_replay: FLAG = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("capacity", "train_every"):
            count = getattr(self, name)
            if count % self.envs:
                nearest = -(-count // self.envs) * self.envs
                raise ConfigError(
                    f"{name} must be a multiple of envs = {self.envs}, got {count}; "
                    f"{nearest} is one"
                )
        if self.tau < 1 and 0 < self.target_every < self.train_every:
            raise ConfigError(
                f"target_every must be 0, for a move after every update, or at least train_every = "
                f"{self.train_every} where tau is below 1, got {self.target_every}"
            )
        if self.updates * self.batch >= 2**31:
            raise ConfigError(
                f"updates * batch must be below 2^31, got {self.updates} * {self.batch}"
            )
        if self.iterations * self.rounds * self.updates > 2**31 - 1:
            raise ConfigError(
                f"a run has below 2^31 updates, got {self.iterations} iterations of "
                f"{self.rounds * self.updates}; give fewer total_steps or a larger train_every"
            )
        if self.learning_starts > self.total_steps:
            warnings.warn(
                f"dqn.learning_starts = {self.learning_starts} is past dqn.total_steps = "
                f"{self.total_steps}: nothing is learned",
                stacklevel=2,
            )
        if self.learning_starts > self.epsilon_steps and self.epsilon_start != self.epsilon_end:
            warnings.warn(
                f"dqn.learning_starts = {self.learning_starts} is past dqn.epsilon_steps = "
                f"{self.epsilon_steps}: when learning starts, epsilon is at its end, "
                f"{self.epsilon_end:g}",
                stacklevel=2,
            )

    @property
    def steps(self):
        """Steps of each environment in a round."""
        return self.train_every // self.envs

    @property
    def slots(self):
        """Steps of each environment that the replay holds."""
        return self.capacity // self.envs

    @property
    def iteration_steps(self):
        """Env steps of an iteration."""
        return self.train_every * self.rounds

    @property
    def samples(self):
        """Transitions that an iteration's updates draw."""
        return self.batch * self.updates * self.rounds

    @property
    def iterations(self):
        """Iterations of the run: total_steps / iteration_steps, rounded up."""
        return -(-self.total_steps // self.iteration_steps)

    @property
    def warm_rounds(self):
        """Rounds without updates: the first round that ends at or past learning_starts has some."""
        return max(-(-self.learning_starts // self.train_every) - 1, 0)

    @property
    def anneals(self):
        """Whether the exponent of importance weights changes over the run."""
        return self.prioritized and self.beta_start != self.beta_end

    def clock(self, env_steps):
        """Steps of the clock, each a step of every environment, in which env_steps are done."""
        return -(-env_steps // self.envs)
