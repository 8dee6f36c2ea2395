"""The outer step against a reference in float64, and the account of its quantisation error (format §6.3)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ps_diloco.config import OuterSettings
from ps_diloco.outer import OuterState, outer_step

PROPERTY = settings(max_examples=80, deadline=None, derandomize=True)

Quantise = Callable[[torch.Tensor], torch.Tensor]


def _exactly(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _to_multiples(of: float) -> Quantise:
    return lambda x: torch.round(x / of) * of


def _gradients(seed: int, steps: int, elements: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(elements, dtype=torch.float64, generator=generator) for _ in range(steps)]


@PROPERTY
@given(st.integers(0, 10**6), st.integers(1, 20), st.floats(0.01, 2), st.floats(0, 0.99), st.sampled_from([None, 2.0**-3, 2.0**-10]))
def test_it_equals_nesterov_momentum_written_by_hand(seed: int, steps: int, lr: float, momentum: float, grid: float | None) -> None:
    params, state = torch.ones(7, dtype=torch.float64), OuterState.zeros(7, dtype=torch.float64)
    theta, m, e = np.ones(7), np.zeros(7), np.zeros(7)
    quantise = _exactly if grid is None else _to_multiples(grid)
    for gradient in _gradients(seed, steps):
        published = outer_step(params, state, gradient, OuterSettings(lr=lr, momentum=momentum), quantise)
        g = gradient.numpy()
        m = momentum * m + g
        x = lr * (momentum * m + g) + e
        u = x.copy() if grid is None else np.round(x / grid) * grid
        e = x - u
        theta = theta - u
        np.testing.assert_array_equal(published.numpy(), u)
        np.testing.assert_array_equal(params.numpy(), theta)
        np.testing.assert_array_equal(state.momentum.numpy(), m)
        np.testing.assert_array_equal(state.error.numpy(), e)


@PROPERTY
@given(st.integers(0, 10**6), st.integers(1, 10), st.floats(0.01, 2), st.floats(0, 0.99))
def test_it_equals_the_nesterov_sgd_of_torch(seed: int, steps: int, lr: float, momentum: float) -> None:
    """torch.optim.SGD(nesterov=True) has the same formula when dampening is 0."""
    params, state = torch.ones(7, dtype=torch.float64), OuterState.zeros(7, dtype=torch.float64)
    other = torch.ones(7, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([other], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for gradient in _gradients(seed, steps):
        outer_step(params, state, gradient, OuterSettings(lr=lr, momentum=momentum), _exactly)
        other.grad = gradient
        optimizer.step()
    torch.testing.assert_close(params, other.detach(), rtol=1e-12, atol=1e-12)


@PROPERTY
@given(
    st.lists(st.lists(st.integers(-1000, 1000), min_size=3, max_size=3), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([2.0**-2, 1.0, 8.0]),
)
def test_what_is_published_is_the_sum_of_all_updates_less_the_final_error(numbers: list[list[int]], momentum: float, grid: float) -> None:
    """Gradients are multiples of 2^-8 and mu, eta are powers of two, so that float64 rounds nothing: the account must close exactly."""
    params, state = torch.zeros(3, dtype=torch.float64), OuterState.zeros(3, dtype=torch.float64)
    published, wanted, m = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row in numbers:
        gradient = torch.tensor(row, dtype=torch.float64) * 2.0**-8
        m = momentum * m + gradient
        wanted += 0.5 * (momentum * m + gradient)
        published += outer_step(params, state, gradient, OuterSettings(lr=0.5, momentum=momentum), _to_multiples(grid))
    assert torch.equal(published, wanted - state.error)
    assert torch.equal(params, -published)
    assert state.error.abs().max().item() <= grid / 2


def test_an_update_below_the_quantisers_step_is_published_in_the_end() -> None:
    params, state = torch.zeros(1), OuterState.zeros(1)
    published = [
        outer_step(params, state, torch.tensor([0.25]), OuterSettings(lr=1.0, momentum=0.0), _to_multiples(1.0)).item() for _ in range(12)
    ]
    assert sum(published) == 3.0
    assert set(published) == {0.0, 1.0}


@PROPERTY
@given(st.integers(0, 10**6))
def test_without_momentum_at_rate_one_it_adds_the_mean_displacement(seed: int) -> None:
    (gradient,) = _gradients(seed, 1)
    params, state = torch.ones(7, dtype=torch.float64), OuterState.zeros(7, dtype=torch.float64)
    update = outer_step(params, state, gradient, OuterSettings(lr=1.0, momentum=0.0), _exactly)
    assert torch.equal(update, gradient)
    assert torch.equal(params, 1.0 - gradient)
    assert not state.error.any()


def test_known_values_of_two_steps() -> None:
    params, state = torch.tensor([1.0]), OuterState.zeros(1)
    outer = OuterSettings(lr=0.5, momentum=0.5)
    first = outer_step(params, state, torch.tensor([1.0]), outer, _exactly)
    assert (first.item(), state.momentum.item(), params.item()) == (0.75, 1.0, 0.25)
    second = outer_step(params, state, torch.tensor([0.0]), outer, _exactly)
    assert (second.item(), state.momentum.item(), params.item()) == (0.125, 0.5, 0.125)


@PROPERTY
@given(st.integers(0, 10**6), st.floats(0.01, 2), st.floats(0, 0.99))
def test_float32_rounds_every_product_before_the_sum(seed: int, lr: float, momentum: float) -> None:
    start = np.random.default_rng(seed).standard_normal((4, 33)).astype(np.float32)
    params, m, e, g = (torch.from_numpy(row.copy()) for row in start)
    state = OuterState(momentum=m, error=e)
    update = outer_step(params, state, g, OuterSettings(lr=lr, momentum=momentum), lambda x: x.bfloat16().float())
    mu, eta = np.float32(momentum), np.float32(lr)
    theta_r, m_r, e_r, g_r = start
    m_r = mu * m_r + g_r
    x_r = eta * (mu * m_r + g_r) + e_r
    u_r = torch.from_numpy(x_r.copy()).bfloat16().float().numpy()
    assert update.numpy().tobytes() == u_r.tobytes()
    assert state.momentum.numpy().tobytes() == m_r.tobytes()
    assert state.error.numpy().tobytes() == (x_r - u_r).tobytes()
    assert params.numpy().tobytes() == (theta_r - u_r).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_works_in_place_and_leaves_the_gradient(dtype: torch.dtype) -> None:
    params, state, gradient = torch.ones(3, dtype=dtype), OuterState.zeros(3, dtype=dtype), torch.full((3,), 0.5, dtype=dtype)
    places = [tensor.data_ptr() for tensor in (params, state.momentum, state.error)]
    update = outer_step(params, state, gradient, OuterSettings(), _exactly)
    assert [tensor.data_ptr() for tensor in (params, state.momentum, state.error)] == places
    assert torch.equal(gradient, torch.full((3,), 0.5, dtype=dtype))
    assert update.dtype == params.dtype == dtype


def test_readers_that_subtract_what_is_published_have_the_same_bits() -> None:
    params, state = torch.ones(7), OuterState.zeros(7)
    reader = params.clone()
    for gradient in _gradients(3, 50):
        reader -= outer_step(params, state, gradient.float(), OuterSettings(), _to_multiples(2.0**-6))
    assert torch.equal(reader, params)


def test_a_quantiser_that_returns_its_argument_leaves_no_error() -> None:
    params, state = torch.ones(3), OuterState.zeros(3)
    outer_step(params, state, torch.ones(3), OuterSettings(lr=1.0, momentum=0.0), lambda x: x)
    assert params.tolist() == [0.0, 0.0, 0.0]
    assert state.error.tolist() == [0.0, 0.0, 0.0]
