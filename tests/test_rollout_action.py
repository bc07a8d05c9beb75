"""Actions of the rollout's kernel are those of draws.cuh, bit for bit."""

import ctypes
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.headers import address, compiled

COUNTS = 1, 3, 16, 17  # the last is more than registers are to hold
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
logits = st.one_of(
    st.floats(-200, 200, width=32), st.sampled_from((-math.inf, math.inf, math.nan, 0.0, -0.0))
)
rows = st.sampled_from(COUNTS).flatmap(lambda n: st.lists(logits, min_size=n, max_size=n))
units = st.integers(0, 2**24 - 1).map(lambda n: n / 2**24)


@pytest.fixture(scope="module")
def header():
    cases = "".join(
        f"case {n}: return best ? choose<{n}, true>(logits, u) : choose<{n}, false>(logits, u);\n"
        for n in COUNTS
    )
    return compiled(f"""
        #include "rollout_action.cuh"
        static Choice chosen(const float* logits, int actions, float u, int best) {{
            switch (actions) {{ {cases} }}
            return {{-2, 0.f, 0.f}};
        }}
        extern "C" int sooner(const float* logits, int actions, float u, int best, float* out) {{
            const Choice choice = chosen(logits, actions, u, best);
            *out = choice.below - log_f32(choice.total);
            return choice.action;
        }}
        extern "C" int plain(const float* logits, int actions, float u, int best, float* out) {{
            const Action a = best ? greedy(logits, actions) : categorical(logits, actions, u);
            *out = a.log_probability;
            return a.action;
        }}
    """)


@settings(deadline=None, max_examples=500)
@given(rows, units)
@example([0.0], BELOW_ONE)
@example([1.0, 1.0, 1.0], BELOW_ONE)
@example([-math.inf] * 3, 0.5)
@example([0.0, math.nan, 1.0], 0.5)
@example([0.0, math.inf, 1.0], 0.5)
@example([-200.0, 0.0, -200.0], BELOW_ONE)
def test_an_action_is_the_one_that_draws_gives(header, values, u):
    row = np.array(values, "f4")
    for best in (0, 1):
        found = []
        for function in (header.sooner, header.plain):
            out = np.empty(1, "f4")
            action = function(address(row), len(row), ctypes.c_float(u), best, address(out))
            found.append((action, out[0]))
        np.testing.assert_array_equal(*found)
