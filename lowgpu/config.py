"""What a run is made of: frozen dataclasses with a range beside every field, presets, TOML."""

import dataclasses
import difflib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lowgpu.dqn_config import DQNConfig
from lowgpu.presets import PRESETS, preset_of
from lowgpu.quantize_config import QuantizeConfig
from lowgpu.section import DEEPEST, WIDEST, ConfigError, Section, Text, Widths
from lowgpu.stream_config import StreamConfig
from lowgpu_kernels.dims import FLAG, SEED, Choice, Float, Int

__all__ = [
    "DEEPEST",
    "PRESETS",
    "WIDEST",
    "Config",
    "ConfigError",
    "DQNConfig",
    "MarketConfig",
    "PPOConfig",
    "from_dict",
    "in_use",
    "merge",
    "nearest",
    "preset_of",
    "read_toml",
    "setting",
    "to_dict",
    "to_toml",
    "used_by",
]

EPISODES = Int(1, 2**20)


@dataclass(frozen=True)
class PPOConfig(Section):
    """The settings of PPO.

    Args:
        total_steps: env steps to train for, rounded up to whole rollouts of envs * rollout_steps.
        seed: of the initial parameters and of every draw in training.
        envs: environments stepped side by side.
        rollout_steps: steps of each environment an iteration.
        epochs: passes over a rollout.
        minibatches: parts of a pass; they divide envs * rollout_steps.
        accumulate: parts of a minibatch whose gradients are added up one after another: less working
            memory of a GPU, and what is learned stays the same, bit for bit.
        gamma: discount per step.
        lam: mixing of n-step returns in the advantage.
        clip: how far the probability ratio moves the policy's loss.
        value_clip: how far a new value moves the value's loss from the old one; 0 is no limit.
        value_weight: weight of the value's loss.
        entropy_weight: weight of the entropy bonus.
        lr: Adam's learning rate at the start.
        anneal: whether lr falls linearly to 0 over the run, once an iteration.
        beta1, beta2, eps: Adam's other constants.
        max_norm: largest norm of a gradient; longer ones are scaled down. 0 is no limit.
        hidden: widths of the hidden layers.
        activation: after every hidden layer.
        shared: one trunk for policy and value, or two networks of the same widths.
        precision: of network inputs and products; parameters and Adam are float32 in both.
        checkpoints: how many checkpoints a run writes, at equal distances, the last at its end.

    Raises:
        ConfigError: a value of another type or outside its range; minibatches that do not divide
            the rollout.

    Source: Schulman et al. 2017 (arXiv:1707.06347); names after Huang et al. 2022, "The 37
    implementation details of proximal policy optimization".
    """

    total_steps: Int(1, 2**50, np.int64) = 500_000
    seed: SEED = 0
    envs: Int(1, 2**22) = 4
    rollout_steps: Int(1, 2**16) = 128
    epochs: Int(1, 1000) = 4
    minibatches: Int(1, 2**20) = 4
    accumulate: Int(1, 1024) = 1
    gamma: Float(0, 1) = 0.99
    lam: Float(0, 1) = 0.95
    clip: Float(0, 10, above=True) = 0.2
    value_clip: Float(0, 1e30) = 0.2
    value_weight: Float(0, 1e6) = 0.5
    entropy_weight: Float(0, 1e6) = 0.01
    lr: Float(0, 1, above=True) = 2.5e-4
    anneal: FLAG = True
    beta1: Float(0, 0.999999) = 0.9
    beta2: Float(0, 0.999999) = 0.999
    eps: Float(0, 1, above=True) = 1e-5
    max_norm: Float(0, 1e30) = 0.5
    hidden: Widths() = (64, 64)
    activation: Choice("tanh", "relu") = "tanh"
    shared: FLAG = False
    precision: Choice("float32", "bfloat16") = "float32"
    checkpoints: Int(1, 2**20) = 20

    def __post_init__(self):
        super().__post_init__()
        if self.batch > 2**31 - 1:
            raise ConfigError(
                f"envs * rollout_steps must be below 2^31, got {self.envs} * {self.rollout_steps}"
            )
        if self.batch % self.minibatches:
            raise ConfigError(
                f"minibatches must divide envs * rollout_steps = {self.batch}, "
                f"got {self.minibatches}"
            )
        if self.iterations * self.updates > 2**31 - 1:
            raise ConfigError(
                f"a run has below 2^31 updates, got {self.iterations} iterations of "
                f"{self.updates}; give fewer total_steps or larger minibatches"
            )

    @property
    def batch(self):
        """Transitions of a rollout."""
        return self.envs * self.rollout_steps

    @property
    def iteration_steps(self):
        """Env steps of an iteration."""
        return self.batch

    @property
    def samples(self):
        """Transitions of an iteration to learn from."""
        return self.batch

    @property
    def minibatch(self):
        """Transitions of a minibatch."""
        return self.batch // self.minibatches

    @property
    def iterations(self):
        """Rollouts of the run: total_steps / batch, rounded up."""
        return -(-self.total_steps // self.batch)

    @property
    def updates(self):
        """Adam steps of an iteration."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class MarketConfig(Section):
    """The market environment and its data.

    Args:
        cost: paid for each unit of position changed, as a share of the position's value.
        reward_scale: what per-bar returns are multiplied by to make rewards.
        episode: bars of a training episode.
        train, validation: shares of the time span that the splits take, in this order; the rest
            is the test split.
    """

    cost: Float(0, 1) = 1e-4
    reward_scale: Float(0, 1e6, above=True) = 100.0
    episode: Int(2, 2**30) = 512
    train: Float(0, 1, above=True) = 0.7
    validation: Float(0, 1, above=True) = 0.1

    def __post_init__(self):
        super().__post_init__()
        if not self.train + self.validation < 1:
            raise ConfigError(
                "train + validation must be below 1, so that a test split is left, "
                f"got {self.train:g} + {self.validation:g}"
            )


@dataclass(frozen=True)
class CartPoleConfig(Section):
    """The cart-pole environment.

    Args:
        max_steps: steps after which an episode ends.
        limit_terminates: whether that end is a termination; it is a truncation otherwise.
        episodes: greedy episodes that an evaluation plays.
    """

    max_steps: Int(1, 2**30) = 500
    limit_terminates: FLAG = False
    episodes: EPISODES = 100


@dataclass(frozen=True)
class AcrobotConfig(CartPoleConfig):
    """The acrobot environment; arguments as the cart-pole's."""


@dataclass(frozen=True)
class MountainCarConfig(CartPoleConfig):
    """The mountain-car environment; arguments as the cart-pole's."""

    max_steps: Int(1, 2**30) = 200


@dataclass(frozen=True)
class Config(Section):
    """A run: what is trained, on what, where, and how.

    Args:
        env: name of the environment.
        algo: name of the trainer.
        device: where it runs.
        data: path of bars as CSV, or of a table on disk; empty for the built-in sample. Market only.
    """

    env: Choice("market", "cartpole", "acrobot", "mountain_car") = "market"
    algo: Choice("ppo", "dqn") = "ppo"
    device: Choice("cpu", "cuda") = "cpu"
    data: Text() = ""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    dqn: DQNConfig = field(default_factory=DQNConfig)
    market: MarketConfig = field(default_factory=MarketConfig)
    cartpole: CartPoleConfig = field(default_factory=CartPoleConfig)
    acrobot: AcrobotConfig = field(default_factory=AcrobotConfig)
    mountain_car: MountainCarConfig = field(default_factory=MountainCarConfig)
    stream: StreamConfig = field(default_factory=StreamConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)

    @property
    def trainer(self):
        """The settings of the trainer that is used."""
        return getattr(self, self.algo)

    @property
    def world(self):
        """The settings of the environment that is used."""
        return getattr(self, self.env)


def nearest(name, known):
    """A hint that names the known key nearest to a mistyped one, or lists all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"


def merge(*layers):
    """Nested dictionaries into one; what comes later wins."""
    merged = {}
    for layer in layers:
        for key, value in layer.items():
            if isinstance(value, dict) and isinstance(merged.get(key), dict):
                value = merge(merged[key], value)
            merged[key] = value
    return merged


def from_dict(values, kind=Config, where=""):
    """A checked Config of nested dictionaries, as read from TOML.

    Args:
        values: settings by name; sections are dictionaries. What is left out has its default.

    Returns:
        The Config.

    Raises:
        ConfigError: an unknown name, with the nearest known one; a value out of range.
    """
    known = {setting.name: setting.type for setting in dataclasses.fields(kind)}
    given = {}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{where}{name} is no setting; {nearest(name, list(known))}")
        section = isinstance(known[name], type) and isinstance(value, dict)
        given[name] = from_dict(value, known[name], f"{where}{name}.") if section else value
    try:
        return kind(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}{error}") from None


def to_dict(config):
    """The nested dictionaries that `from_dict` makes the same Config of."""
    return {
        name: to_dict(value) if isinstance(value, Section) else value
        for name, value in vars(config).items()
    }


def in_use(config):
    """The nested dictionaries of a Config without the sections that its run does not use."""
    asked = {"stream": config.stream.rows, "quantize": config.quantize.fine_tune}
    used = config.algo, config.env, *(name for name, value in asked.items() if value)
    return {n: v for n, v in to_dict(config).items() if not isinstance(v, dict) or n in used}


def used_by(values):
    """The sections (trainer, environment) that nested dictionaries of settings name, or the defaults."""
    named = values.get("algo"), values.get("env")
    known = list(_sections())
    return tuple(
        name if name in known else default
        for name, default in zip(named, (Config.algo, Config.env))
    )


def setting(text, used=("ppo", "market")):
    """One `name=value` of the command line as nested dictionaries.

    The name may be left without its section where only one section has it, or only one of those
    that are used. The value is TOML, or plain text where it is no TOML.

    Args:
        text: name=value.
        used: the sections that the run uses: those of its trainer and of its environment.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"a setting is name=value, got {text!r}")
    try:
        value = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        value = value.strip()
    if "." in name or name in _top_level():
        sections, _, last = name.rpartition(".")
    else:
        homes = [s for s, kind in _sections().items() if name in _names(kind)]
        if len(homes) > 1:
            homes = [home for home in homes if home in used] or homes
        if len(homes) != 1:
            everything = [n for kind in _sections().values() for n in _names(kind)]
            hint = f"write {' or '.join(f'{h}.{name}' for h in homes)}" if homes else None
            raise ConfigError(
                f"{name} is {'in several sections' if homes else 'no setting'}; "
                f"{hint or nearest(name, [*_top_level(), *everything])}"
            )
        sections, last = homes[0], name
    nested = {last: value}
    for section in reversed(sections.split(".") if sections else []):
        nested = {section: nested}
    return nested


def _names(kind):
    return [s.name for s in dataclasses.fields(kind)]


def _sections():
    return {s.name: s.type for s in dataclasses.fields(Config) if isinstance(s.type, type)}


def _top_level():
    return [s.name for s in dataclasses.fields(Config) if not isinstance(s.type, type)]


def to_toml(values):
    """Nested dictionaries of text, numbers, flags and lists as TOML that reads back equal."""
    lines = [f"{k} = {_toml(v)}" for k, v in values.items() if not isinstance(v, dict)]
    for name, section in values.items():
        if isinstance(section, dict):
            lines += ["", f"[{name}]", *(f"{k} = {_toml(v)}" for k, v in section.items())]
    return "\n".join(lines) + "\n"


def _toml(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML wants DEL escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    raise AssertionError(f"no TOML for {value!r}")


def read_toml(path):
    """Nested dictionaries of a TOML file.

    Raises:
        ConfigError: a file that cannot be read, is larger than 1 MB, or is no TOML.
    """
    try:
        raw = Path(path).read_bytes() if Path(path).stat().st_size <= 2**20 else None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    if raw is None:
        raise ConfigError(f"{path} is larger than 1 MB and is no config")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
