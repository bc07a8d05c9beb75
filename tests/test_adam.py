"""What Adam promises beyond agreeing with its spec."""

import io

import numba
import numpy as np
import pytest
import torch

from lowgpu_kernels import adam, launch
from lowgpu_kernels.arrays import Buffer
from lowgpu_kernels.ops.optim.adam import beta_terms, bias_correction, rate_of

EPS = 2.0**-23
F32 = np.float32


@pytest.fixture(autouse=True)
def one_thread():
    """Vectors of a few elements: threads would only wait for one another."""
    threads = numba.get_num_threads(), torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(1)
    yield
    numba.set_num_threads(threads[0])
    torch.set_num_threads(threads[1])


class State:
    """A flat vector and its Adam state, as the op takes them."""

    def __init__(self, parameters):
        self.parameters = np.array(parameters, "f4")
        self.m, self.v = np.zeros_like(self.parameters), np.zeros_like(self.parameters)
        self.step = np.zeros(1, "i4")

    def arrays(self):
        return self.parameters, self.m, self.v, self.step

    def update(self, gradient, **params):
        gradient = np.asarray(gradient, "f4")
        return adam(self.parameters, gradient, self.m, self.v, self.step, **params)

    def bits(self):
        return b"".join(a.tobytes() for a in self.arrays())


def gradients(rng, steps, count):
    """Gradients whose sizes differ by element and drift over time, as those of a network do."""
    scale = 10.0 ** rng.uniform(-4, 1, count)
    drift = 1 + np.sin(np.arange(steps) / 50)[:, None] / 2
    return (rng.normal(size=(steps, count)) * scale * drift + scale / 3).astype("f4")


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("lr, betas", [(1e-3, (0.9, 0.999)), (2.5e-4, (0.0, 0.95))])
def test_a_thousand_updates_are_those_of_torch(max_norm, lr, betas):
    rng = np.random.default_rng(3)
    start = rng.normal(size=97).astype("f4")
    state, tensor = State(start), torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = torch.optim.Adam([tensor], lr=lr, betas=betas, eps=1e-5)
    for gradient in gradients(rng, 1000, 97):
        tensor.grad = torch.from_numpy(gradient.copy())
        if max_norm:
            torch_norm = torch.nn.utils.clip_grad_norm_([tensor], max_norm)
        else:
            torch_norm = torch.linalg.vector_norm(tensor.grad)
        optimizer.step()
        norm = state.update(
            gradient, lr=lr, beta1=betas[0], beta2=betas[1], eps=1e-5, max_norm=max_norm
        )
        np.testing.assert_allclose(norm[0], torch_norm.item(), rtol=1e-5)
    torch_state = optimizer.state[tensor]
    assert state.step[0] == torch_state["step"] == 1000
    # The figure of RELIABILITY.md is relative; where a sum has crossed 0 it is to the vector's size.
    for ours, theirs in (
        (state.parameters, tensor.detach()),
        (state.m, torch_state["exp_avg"]),
        (state.v, torch_state["exp_avg_sq"]),
    ):
        np.testing.assert_allclose(
            ours, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs.numpy()).max()
        )


def test_m_and_v_hold_the_betas_as_they_were_written():
    """Case D3: 1 - float32(0.999) is off by 1.3e-5 of itself, 1 - bfloat16(0.999) is 0."""
    assert beta_terms(F32(0.999))[0] == F32(0.001)
    assert beta_terms(F32(0.9))[0] == F32(0.1)
    state = State([1.0])
    state.update([3.0], lr=0.1)
    np.testing.assert_allclose([state.m[0], state.v[0]], [0.3, 0.009], rtol=2 * EPS)
    assert abs(state.parameters[0] - 0.9) < 2 * EPS


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999])
def test_bias_correction_does_not_drift_in_ten_million_steps(beta):
    """Two roundings of t ln(beta) carry over at most one to one, and expm1 adds two more."""
    _, log_beta = beta_terms(F32(beta))
    steps = np.unique(np.geomspace(1, 1e7, 300).astype("i4"))
    got = [bias_correction(log_beta, np.int32(t - 1)) for t in steps]
    want = 1 - np.power(beta, steps.astype("f8"))
    np.testing.assert_allclose(got, want, rtol=3 * EPS)


def test_a_constant_gradient_moves_float32_parameters_by_the_rate_each_step():
    """Case D2: bfloat16 parameters would stay at 1."""
    state = State([1.0])
    for _ in range(100):
        state.update([0.25], lr=6e-4)
    assert f"{state.parameters[0]:.4f}" == "0.9400"


def test_each_tensor_has_its_own_step():
    """Case D4: the second tensor has no gradient on the second step."""
    rng = np.random.default_rng(5)
    starts = [rng.normal(size=3).astype("f4") for _ in range(2)]
    states = [State(start) for start in starts]
    tensors = [torch.nn.Parameter(torch.from_numpy(s.copy())) for s in starts]
    optimizer = torch.optim.Adam(tensors, lr=0.05)
    for step in range(4):
        for k in range(2):
            gradient = rng.normal(size=3).astype("f4")
            frozen = k == 1 and step == 1
            tensors[k].grad = None if frozen else torch.from_numpy(gradient)
            if not frozen:
                states[k].update(gradient, lr=0.05)
        optimizer.step()
    assert [int(s.step[0]) for s in states] == [4, 3]
    for state, tensor in zip(states, tensors):
        np.testing.assert_allclose(state.parameters, tensor.detach(), rtol=1e-6)


def test_the_rate_falls_linearly_in_stairs_to_zero_and_stays_there():
    rng = np.random.default_rng(6)
    start = rng.normal(size=5)
    state, parameters, m, v = State(start), start.astype("f4").astype("f8"), 0.0, 0.0
    for step, gradient in enumerate(gradients(rng, 30, 5)):
        rate = 0.01 * max(0.0, 1 - (step // 4) * 4 / 20)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.astype("f8") ** 2
        mean, square = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.999 ** (step + 1))
        parameters = parameters - rate * mean / (np.sqrt(square) + 1e-8)
        before = state.parameters.copy()
        state.update(gradient, lr=0.01, decay_updates=20, decay_every=4)
        np.testing.assert_allclose(state.parameters, parameters, rtol=1e-5)
        assert np.array_equal(before, state.parameters) == (step >= 20)


@pytest.mark.parametrize(
    "done, every, rate",
    [(0, 1, 1.0), (999_999, 1, 1e-6), (999_999, 10, 1e-5), (1_000_000, 1, 0), (2**31 - 1, 7, 0)],
)
def test_the_end_of_a_long_schedule_keeps_its_digits(done, every, rate):
    got = rate_of(F32(1), np.int32(done), np.int32(1_000_000), np.int32(every))
    assert got == F32(rate)


def test_the_norm_is_that_before_clipping_and_the_gradient_is_left_alone():
    state, gradient = State([1.0, 1.0]), np.array([3.0, 4.0], "f4")
    norm = state.update(gradient, lr=0.1, max_norm=1.0)
    assert norm[0] == 5
    np.testing.assert_array_equal(gradient, [3, 4])
    np.testing.assert_allclose(state.m, [0.06, 0.08], rtol=1e-6)
    unclipped, loose = State([1.0, 1.0]), State([1.0, 1.0])
    unclipped.update(gradient, lr=0.1)
    loose.update(gradient, lr=0.1, max_norm=100.0)
    assert unclipped.bits() == loose.bits()


def test_a_tiny_gradient_is_clipped_by_the_formula_of_torch():
    """The 1e-6 added to the norm counts here: the factor is 1e-6 / 1.5e-6."""
    gradient = np.array([3e-7, 4e-7], "f4")
    tensor = torch.nn.Parameter(torch.zeros(2))
    tensor.grad = torch.from_numpy(gradient.copy())
    torch.nn.utils.clip_grad_norm_([tensor], 1e-6)
    state = State([0.0, 0.0])
    state.update(gradient, lr=0.1, beta1=0.0, max_norm=1e-6)
    np.testing.assert_allclose(state.m, tensor.grad, rtol=4 * EPS)
    np.testing.assert_allclose(state.m, [2e-7, 8e-7 / 3], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_norm_that_is_not_finite_changes_nothing_and_comes_out(bad):
    state = State([1.0, 2.0, 3.0])
    state.update([0.1, 0.2, 0.3], lr=0.1)
    before = state.bits()
    norm = state.update([0.1, bad, 0.3], lr=0.1, max_norm=1.0)
    assert not np.isfinite(norm[0])
    assert state.bits() == before
    state.update([0.1, 0.2, 0.3], lr=0.1)
    assert state.step[0] == 2 and state.bits() != before


def test_elements_without_a_gradient_stay_zero():
    state = State(np.zeros(11))
    gradient = np.zeros(11, "f4")
    gradient[::2] = 1
    for _ in range(5):
        state.update(gradient, lr=0.1, max_norm=0.5)
    for array in (state.parameters, state.m, state.v):
        assert not array[1::2].any() and array[::2].all()


def test_an_empty_vector_has_norm_zero_and_counts_the_step():
    state = State([])
    assert state.update([], lr=0.1)[0] == 0 and state.step[0] == 1


def test_ten_updates_saved_and_ten_more_are_twenty():
    rng = np.random.default_rng(8)
    start, all_gradients = rng.normal(size=33), gradients(rng, 20, 33)
    params = dict(lr=0.01, max_norm=0.5, decay_updates=20)
    whole, first = State(start), State(start)
    for gradient in all_gradients:
        whole.update(gradient, **params)
    for gradient in all_gradients[:10]:
        first.update(gradient, **params)
    file = io.BytesIO()
    np.savez(file, *first.arrays())
    file.seek(0)
    resumed = State(start)
    with np.load(file) as saved:
        resumed.parameters, resumed.m, resumed.v, resumed.step = (saved[k] for k in saved)
    for gradient in all_gradients[10:]:
        resumed.update(gradient, **params)
    assert resumed.bits() == whole.bits()


def test_the_number_of_threads_does_not_change_the_bits():
    rng = np.random.default_rng(9)
    start, all_gradients = rng.normal(size=5003), gradients(rng, 3, 5003)
    found = set()
    for count in {1, numba.config.NUMBA_NUM_THREADS}:
        numba.set_num_threads(count)
        state = State(start)
        norms = [state.update(g, lr=0.01, max_norm=1.0).tobytes() for g in all_gradients]
        found.add(state.bits() + b"".join(norms))
    assert len(found) == 1


def test_a_negative_step_is_refused():
    state = State([1.0])
    state.step[0] = -1
    with pytest.raises(ValueError, match=r"^step must be 0 or more"):
        state.update([1.0], lr=0.1)


@pytest.mark.parametrize("count", [0, 1, 57_288, 262_144, 262_145, 16_777_216])
def test_both_launches_have_one_grid_that_no_device_changes(count):
    def buffer(count, dtype):
        return Buffer(0x7F0000000000, (count,), np.dtype(dtype))

    grids = set()
    for part in ("A100", "L4", "H100"):
        params = adam.checked_params({"lr": 0.1})
        vectors = [buffer(count, "f4")] * 4
        work = adam.scratch_specs({"P": count}, params)
        scratch = [buffer(shape[0], dtype) for shape, dtype in work.values()]
        with launch.recording(launch.KNOWN[part]) as made:
            adam.cuda(*vectors, buffer(1, "i4"), *params.values(), buffer(1, "f4"), *scratch, 0)
        assert len(made) == 2
        grids |= {m.grid for m in made}
        assert made[0].grid[0] == work["partials"][0][0]
    assert len(grids) == 1
