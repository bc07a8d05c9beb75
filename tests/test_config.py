"""Settings: every wrong one is refused by name, and TOML reads back what was written."""

import dataclasses
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowgpu.config import (
    PRESETS,
    Config,
    ConfigError,
    PPOConfig,
    from_dict,
    in_use,
    merge,
    preset_of,
    read_toml,
    setting,
    to_dict,
    to_toml,
    used_by,
)

REFUSED = [
    ("lrr=3", "did you mean 'lr'"),
    ("ppo.entropy_wieght=3", "did you mean 'entropy_weight'"),
    ("zzzzzz=1", "known are env, algo"),
    ("markt.cost=1", "did you mean 'market'"),
    ("lr=0", "ppo.lr must be in (0, 1]"),
    ("lr=nan", "ppo.lr must be in (0, 1]"),
    ("lr=fast", "ppo.lr must be a number"),
    ("envs=true", "ppo.envs must be an integer"),
    ("envs=4.0", "ppo.envs must be an integer"),
    ("envs=0", "ppo.envs must be in [1"),
    ("seed=-1", "ppo.seed must be in [0"),
    ("gamma=1.5", "ppo.gamma must be in [0, 1], got 1.5"),
    ("anneal=1", "ppo.anneal must be one of False, True"),
    ("hidden=64", "ppo.hidden must be a list"),
    ("hidden=[]", "ppo.hidden must be a list"),
    ("hidden=[60]", "multiples of 8"),
    ("hidden=[true]", "multiples of 8"),
    ("activation=gelu", "ppo.activation must be one of 'tanh', 'relu'"),
    ("precision=float16", "ppo.precision must be one of"),
    ("minibatches=3", "ppo.minibatches must divide envs * rollout_steps = 512, got 3"),
    ("total_steps=0", "ppo.total_steps must be in [1"),
    ("market.train=0.95", "market.train + validation must be below 1"),
    ("cartpole.max_steps=0", "cartpole.max_steps must be in [1"),
    ("max_steps=0", "write cartpole.max_steps or acrobot.max_steps or mountain_car.max_steps"),
    ("dqn.capacity=0", "dqn.capacity must be in [1"),
    ("dqn.hidden=[0]", "dqn.hidden must be a list of 1 to 7 whole numbers in [1, 512]"),
    ("algo=sac", "algo must be one of 'ppo', 'dqn', got 'sac'"),
    ("env=pong", "env must be one of 'market', 'cartpole', 'acrobot', 'mountain_car', got 'pong'"),
    ("device=tpu", "device must be one of 'cpu', 'cuda'"),
    ("data=3", "data must be text"),
    ("envs", "a setting is name=value"),
    ("=3", "a setting is name=value"),
]


@pytest.mark.parametrize("text, message", REFUSED, ids=[text for text, _ in REFUSED])
def test_a_wrong_setting_is_refused_by_name(text, message):
    with pytest.raises(ConfigError) as refused:
        from_dict(setting(text))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_section_that_is_no_table_is_refused():
    with pytest.raises(ConfigError, match="ppo must be a table"):
        from_dict({"ppo": 3})


def test_a_rollout_or_a_run_too_long_for_its_counters_is_refused():
    with pytest.raises(ConfigError, match="below 2\\^31"):
        PPOConfig(envs=2**20, rollout_steps=2**12, minibatches=1)
    with pytest.raises(ConfigError, match="below 2\\^31 updates"):
        PPOConfig(total_steps=2**40)


@pytest.mark.parametrize("algo", ["ppo", "dqn"])
@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_every_preset_is_a_config_that_toml_keeps(preset, algo):
    env, device = preset
    named = {"env": env, "device": device, "algo": algo}
    config = from_dict(merge(preset_of(env, algo, device), named))
    assert from_dict(tomllib.loads(to_toml(to_dict(config)))) == config
    kept = tomllib.loads(to_toml(in_use(config)))
    assert from_dict(kept) == config
    assert {name for name, value in kept.items() if isinstance(value, dict)} == {algo, env}


def test_a_bare_name_is_the_setting_of_the_sections_in_use():
    assert setting("seed=3", ("dqn", "cartpole")) == {"dqn": {"seed": 3}}
    assert setting("seed=3", ("ppo", "cartpole")) == {"ppo": {"seed": 3}}
    assert setting("max_steps=9", ("ppo", "acrobot")) == {"acrobot": {"max_steps": 9}}
    # A name that one section has needs no help.
    assert setting("capacity=9", ("ppo", "market")) == {"dqn": {"capacity": 9}}


@pytest.mark.parametrize("values", [{}, {"algo": "sac", "env": ["market"]}, {"algo": 3}])
def test_sections_that_are_not_named_are_the_defaults(values):
    assert used_by(values) == ("ppo", "market")


def test_the_cartpole_preset_is_the_published_one():
    config = from_dict(merge(PRESETS["cartpole", "cpu"], {"env": "cartpole"}))
    assert dataclasses.replace(config.ppo, checkpoints=1) == PPOConfig(
        total_steps=500_000,
        seed=0,
        envs=4,
        rollout_steps=128,
        epochs=4,
        minibatches=4,
        gamma=0.99,
        lam=0.95,
        clip=0.2,
        value_clip=0.2,
        value_weight=0.5,
        entropy_weight=0.01,
        lr=2.5e-4,
        anneal=True,
        beta1=0.9,
        beta2=0.999,
        eps=1e-5,
        max_norm=0.5,
        hidden=(64, 64),
        activation="tanh",
        shared=False,
        precision="float32",
        checkpoints=1,
    )
    assert config.cartpole.limit_terminates


def test_steps_are_rounded_up_to_whole_rollouts():
    assert [PPOConfig(total_steps=n).iterations for n in (1, 512, 513)] == [1, 1, 2]


def test_what_is_said_later_wins():
    layers = {"ppo": {"lr": 1e-3, "envs": 8}}, {"ppo": {"lr": 1e-4}}, setting("lr=1e-5")
    ppo = from_dict(merge(*layers)).ppo
    assert (ppo.lr, ppo.envs) == (1e-5, 8)


def test_a_setting_is_toml_or_plain_text():
    assert setting("hidden=[8, 16]") == {"ppo": {"hidden": [8, 16]}}
    assert setting("activation = relu") == {"ppo": {"activation": "relu"}}
    assert setting('data="a b.csv"') == {"data": "a b.csv"}
    assert setting("market.cost=0") == {"market": {"cost": 0}}


_VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.integers(0, 9)),
)
_NAMES = st.text("abcxyz_", min_size=1)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_NAMES, st.one_of(_VALUES, st.dictionaries(_NAMES, _VALUES))))
def test_toml_reads_back_equal(values):
    again = tomllib.loads(to_toml(values))
    assert again == values


@pytest.mark.parametrize(
    "raw, message", [(b"a = [", "no TOML"), (b"\xff", "no TOML"), (b"#" * 2**21, "larger")]
)
def test_a_file_that_is_no_config_is_refused(tmp_path, raw, message):
    path = tmp_path / "config.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=message):
        read_toml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_toml(tmp_path / "none.toml")


def test_a_config_keeps_the_number_that_was_written():
    assert from_dict({"ppo": {"lr": 0.1, "gamma": 1}}).ppo.lr == 0.1
    assert isinstance(Config().ppo.envs, int)
