"""Bases: which subspace, when it is refreshed, and what bad input leaves behind.

Subspaces are compared by their projectors ``V V^T``, as bases are unique up to rotation only.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mecefo_jax.degraded.basis import (
    BasisState,
    low_rank_ffn,
    project,
    subspace_iteration,
    top_left_singular_vectors,
)
from mecefo_jax.errors import ConfigError

METHODS = ("svd", "subspace")
# float32 rounding of products and QR of this size, with a margin of about ten
TOLERANCE = 1e-5


def random_matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def with_spectrum(seed: int, size: int, out: int, singular_values: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(random_matrix(seed, size, out).astype(np.float64), full_matrices=False)
    return ((u * singular_values) @ vt).astype(np.float32)


def gapped(seed: int, size: int, out: int, rank: int, gap: float = 0.1) -> np.ndarray:
    """A matrix whose subspace of the given rank is well defined: the next singular value is ``gap`` times smaller."""
    position = np.arange(min(size, out))
    return with_spectrum(seed, size, out, np.where(position < rank, 2.0 - position / position.size, gap))


def projector(v: jax.Array) -> np.ndarray:
    v64 = np.asarray(v, np.float64)
    return v64 @ np.swapaxes(v64, -1, -2)


def numpy_projector(w: np.ndarray, rank: int) -> np.ndarray:
    u, _, _ = np.linalg.svd(np.asarray(w, np.float64), full_matrices=True)
    return u[..., :rank] @ np.swapaxes(u[..., :rank], -1, -2)


def energy(v: jax.Array, w: np.ndarray) -> float:
    """``||V^T W||^2`` as a fraction of that of the best subspace of the same rank."""
    singular_values = np.linalg.svd(w, compute_uv=False)
    return float(np.linalg.norm(np.asarray(v).T @ w) ** 2 / (singular_values[: v.shape[-1]] ** 2).sum())


def assert_orthonormal(v: jax.Array) -> None:
    assert v.dtype == jnp.float32
    gram = np.swapaxes(np.asarray(v, np.float64), -1, -2) @ np.asarray(v, np.float64)
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(v.shape[-1]), gram.shape), atol=TOLERANCE)


def all_equal(left, right) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: np.array_equal(a, b), left, right)))


def example_params(seed: int = 0) -> dict:
    """Two stacked layers of kernels with a well-defined subspace of rank 4, and things that are no kernels."""
    return {
        "up": {"kernel": jnp.stack([gapped(seed, 12, 20, 4), gapped(seed + 1, 12, 20, 4)])},
        "down": {"kernel": jnp.stack([gapped(seed + 2, 20, 12, 4), gapped(seed + 3, 20, 12, 4)])},
        "query": {"kernel": jnp.asarray(random_matrix(seed + 4, 2, 12, 12))},
        "scale": jnp.ones(12),
    }


def is_ffn(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "up" in jax.tree_util.keystr(path) or "down" in jax.tree_util.keystr(path), params
    )


def zeros_like(params):
    return jax.tree.map(jnp.zeros_like, params)


# Functions of one matrix


@pytest.mark.parametrize("size, out", [(16, 40), (40, 16)])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_svd_spans_the_subspace_that_numpy_finds(size, out, rank):
    w = with_spectrum(rank, size, out, 0.8 ** np.arange(16))
    v = top_left_singular_vectors(jnp.asarray(w), rank)
    assert_orthonormal(v)
    # Perturbation theory: an error e of W turns the subspace by e / gap; the gap is at least 0.2 * 0.8^16 = 0.006.
    np.testing.assert_allclose(projector(v), numpy_projector(w, rank), atol=1e-4)


def test_singular_vectors_come_largest_first():
    w = with_spectrum(0, 10, 14, np.arange(10, 0, -1.0))
    v = top_left_singular_vectors(jnp.asarray(w), 10)
    np.testing.assert_allclose(np.linalg.norm(np.asarray(v).T @ w, axis=1), np.arange(10, 0, -1.0), rtol=1e-5)


@settings(max_examples=5, deadline=None)  # each shape is compiled
@example(size=7, out=3, rank=5, layers=[2], method="svd")  # more columns than W has left singular vectors
@example(size=7, out=3, rank=9, layers=[], method="subspace")
@given(
    size=st.integers(1, 7),
    out=st.integers(1, 7),
    rank=st.integers(1, 9),
    layers=st.lists(st.integers(1, 3), max_size=2),
    method=st.sampled_from(METHODS),
)
def test_bases_of_any_shape_and_rank_are_orthonormal_and_hold_what_they_can(size, out, rank, layers, method):
    w = random_matrix(size * out, *layers, size, out)
    v = low_rank_ffn(rank, 1, ffn_mask=True, method=method).init({"w": jnp.asarray(w)}).bases["w"]
    assert v.shape == (*layers, size, min(rank, size))
    assert_orthonormal(v)
    if rank >= min(size, out):  # nothing of W lies outside
        np.testing.assert_allclose(projector(v) @ w, w, atol=TOLERANCE * np.abs(w).max())


@pytest.mark.parametrize("size, out", [(24, 64), (64, 24)])
def test_subspace_iteration_converges_at_the_rate_of_the_gap(size, out):
    rank, gap = 6, 0.5
    w = gapped(0, size, out, rank, gap)
    exact = numpy_projector(w, rank)
    v = jnp.linalg.qr(jnp.asarray(random_matrix(1, size, rank))).Q
    errors = [np.linalg.norm(projector(subspace_iteration(jnp.asarray(w), v, n)) - exact, 2) for n in (2, 4, 20)]
    smallest_kept = 2.0 - (rank - 1) / min(size, out)
    # The tangent of the largest angle shrinks by this an iteration; its sine, which is the error, nearly so.
    assert errors[1] < 1.5 * (gap / smallest_kept) ** 4 * errors[0]
    assert errors[2] < TOLERANCE


def test_subspace_iteration_leaves_the_exact_subspace_alone():
    w = jnp.asarray(gapped(3, 18, 30, 5, gap=0.5))
    v = top_left_singular_vectors(w, 5)
    np.testing.assert_allclose(projector(subspace_iteration(w, v, 3)), projector(v), atol=TOLERANCE)


@settings(max_examples=10, deadline=None)
@given(exponent=st.integers(-100, 100))  # beyond, products of entries leave the normal float32 numbers
def test_the_scale_of_a_matrix_does_not_matter(exponent):
    w = gapped(0, 8, 12, 3)
    v = jnp.linalg.qr(jnp.asarray(random_matrix(1, 8, 3))).Q
    iterate = jax.jit(subspace_iteration, static_argnums=2)
    scaled = iterate(jnp.asarray(w * np.float32(2.0) ** exponent), v, 2)
    np.testing.assert_allclose(scaled, iterate(jnp.asarray(w), v, 2), atol=TOLERANCE)


def test_stacked_layers_equal_one_at_a_time():
    w = jnp.asarray(np.stack([gapped(i, 9, 15, 4) for i in range(6)]).reshape(2, 3, 9, 15))
    v = jnp.linalg.qr(jnp.asarray(random_matrix(9, 2, 3, 9, 4))).Q
    iterate = jax.jit(subspace_iteration, static_argnums=2)
    together = iterate(w, v, 2), top_left_singular_vectors(w, 4), project(w, v)
    for i in range(2):
        for j in range(3):
            alone = iterate(w[i, j], v[i, j], 2), top_left_singular_vectors(w[i, j], 4), project(w[i, j], v[i, j])
            for stacked, single in zip(together, alone, strict=True):
                np.testing.assert_allclose(stacked[i, j], single, atol=TOLERANCE)


def test_projection_keeps_the_span_and_removes_its_complement():
    basis, _ = np.linalg.qr(random_matrix(0, 10, 10))
    v = jnp.asarray(basis[:, :4])
    inside, outside = basis[:, :4] @ random_matrix(1, 4, 7), basis[:, 4:] @ random_matrix(2, 6, 7)
    np.testing.assert_allclose(project(jnp.asarray(inside), v), inside, atol=TOLERANCE)
    np.testing.assert_allclose(project(jnp.asarray(outside), v), 0.0, atol=TOLERANCE)


def test_projection_returns_the_dtype_of_the_gradient():
    g = jnp.asarray(random_matrix(0, 6, 8), jnp.bfloat16)
    v = jnp.linalg.qr(jnp.asarray(random_matrix(1, 6, 2))).Q
    projected = project(g, v)
    assert projected.dtype == jnp.bfloat16
    assert np.array_equal(projected, project(g.astype(jnp.float32), v).astype(jnp.bfloat16))


# The transformation: what it holds


@pytest.mark.parametrize("method", METHODS)
def test_init_finds_the_subspace_of_the_weights_of_ffn_kernels_only(method):
    params = example_params()
    state = low_rank_ffn(4, 10, ffn_mask=is_ffn, method=method).init(params)
    assert state.bases["query"]["kernel"] is None and state.bases["scale"] is None
    for name in ("up", "down"):
        v = state.bases[name]["kernel"]
        assert_orthonormal(v)
        np.testing.assert_allclose(projector(v), numpy_projector(params[name]["kernel"], 4), atol=TOLERANCE)
    assert (state.count, state.refreshes, state.kept) == (0, 0, 0)


def test_two_warm_iterations_follow_a_drifting_matrix():
    rank = 12
    w = with_spectrum(0, 64, 160, np.arange(1, 65) ** -0.5)
    tx = low_rank_ffn(rank, 1, ffn_mask=True)
    state, update = tx.init({"w": jnp.asarray(w)}), jax.jit(tx.update)
    for seed in range(1, 7):
        drift = random_matrix(seed, 64, 8) @ random_matrix(seed + 100, 8, 160)
        w = w + 0.1 * np.linalg.norm(w) / np.linalg.norm(drift) * drift
        stale = energy(state.bases["w"], w)
        params = {"w": jnp.asarray(w)}
        _, state = update(params, state, params)
        fresh = energy(state.bases["w"], w)
        assert fresh > stale and fresh > 0.99


def test_settings_out_of_range_are_refused_by_name():
    for rank in (0, -3):
        with pytest.raises(ConfigError, match=rf"basis.rank is {rank}; set it to at least 1"):
            low_rank_ffn(rank, 1, ffn_mask=True)
    with pytest.raises(ConfigError, match="basis.refresh_every is 0"):
        low_rank_ffn(1, 0, ffn_mask=True)
    with pytest.raises(ConfigError, match="basis.source is 'weights'; set it to one of weight, momentum"):
        low_rank_ffn(1, 1, ffn_mask=True, source="weights")
    with pytest.raises(ConfigError, match="basis.method is 'qr'; set it to one of svd, subspace"):
        low_rank_ffn(1, 1, ffn_mask=True, method="qr")


def test_a_mask_that_marks_a_vector_is_refused_by_path():
    with pytest.raises(ConfigError, match=r"ffn_mask marks \['scale'\] of shape \(12,\)"):
        low_rank_ffn(1, 1, ffn_mask=True).init(example_params())


@pytest.mark.parametrize(
    "mask", [is_ffn, is_ffn(example_params()), {"up": True, "down": True, "query": False, "scale": False}]
)
def test_masks_as_function_tree_and_prefix_agree(mask):
    params = example_params()
    state = low_rank_ffn(3, 1, ffn_mask=mask).init(params)
    assert all_equal(state, low_rank_ffn(3, 1, ffn_mask=is_ffn).init(params))
    assert jax.tree.structure(state.bases) == jax.tree.structure(low_rank_ffn(3, 1, ffn_mask=is_ffn).init(params).bases)


def test_nothing_marked_is_a_no_op_that_counts():
    params = example_params()
    tx = low_rank_ffn(2, 1, ffn_mask=False, project=True)
    updates, state = tx.update(params, tx.init(params), params)
    assert all_equal(updates, params)
    assert jax.tree.leaves(state.bases) == [] and state.refreshes == 1


class Linear(nnx.Module):
    """A module with ``__call__``, whose tree of bools must not be taken for a mask function."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.asarray(gapped(0, 6, 9, 2)))
        self.bias = nnx.Param(jnp.zeros(9))

    def __call__(self, x):
        return x @ self.kernel[...] + self.bias[...][None]


def test_nnx_modules_serve_as_parameters_gradients_mask_and_moment():
    module = Linear()
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, module)
    tx = low_rank_ffn(2, 1, ffn_mask=mask, source="momentum", project=True)
    state = tx.init(module)
    grads = jax.grad(lambda module: (module(jnp.ones((3, 6))) ** 2).sum())(module)
    updates, state = jax.jit(tx.update)(grads, state, module, moment=grads)
    assert isinstance(state.bases, Linear) and len(jax.tree.leaves(state.bases)) == 1
    assert state.bases.kernel[...].shape == (6, 2)
    assert np.array_equal(updates.bias[...], grads.bias[...])
    assert not np.array_equal(updates.kernel[...], grads.kernel[...])


def test_the_state_of_the_7b_model_is_made_abstractly():
    params = {
        "up": jax.ShapeDtypeStruct((32, 4096, 11008), jnp.float32),
        "down": jax.ShapeDtypeStruct((32, 11008, 4096), jnp.float32),
    }
    tx = low_rank_ffn(128, 100, ffn_mask=True)
    state = jax.eval_shape(tx.init, params)
    assert state.bases["up"].shape == (32, 4096, 128) and state.bases["down"].shape == (32, 11008, 128)
    _, after = jax.eval_shape(tx.update, params, state, params)
    assert after == state


@pytest.mark.parametrize("spec", [P("data", None), P(None, "data")])
@pytest.mark.parametrize("method", METHODS)
def test_sharded_kernels_give_the_same_subspace(spec, method):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"w": jnp.asarray(gapped(0, 16, 24, 4))}
    moved = {"w": jnp.asarray(gapped(1, 16, 24, 4))}
    tx = low_rank_ffn(4, 1, ffn_mask=True, method=method)
    sharding = NamedSharding(mesh, spec)
    state = jax.jit(tx.init)(jax.device_put(params, sharding))
    np.testing.assert_allclose(projector(state.bases["w"]), numpy_projector(params["w"], 4), atol=TOLERANCE)
    _, state = jax.jit(tx.update)(jax.device_put(moved, sharding), state, jax.device_put(moved, sharding))
    _, expected = tx.update(moved, tx.init(params), moved)
    np.testing.assert_allclose(projector(state.bases["w"]), projector(expected.bases["w"]), atol=TOLERANCE)


# The transformation: when it refreshes


def run(tx, state: BasisState, first: int, last: int) -> list[BasisState]:
    """States after the updates number ``first`` to ``last``, each given other parameters."""
    update, states = jax.jit(tx.update), []
    for number in range(first, last + 1):
        params = example_params(seed=10 * number)
        _, state = update(zeros_like(params), state, params)
        states.append(state)
    return states


@settings(max_examples=4, deadline=None)
@given(refresh_every=st.integers(1, 9))
def test_bases_change_in_every_tauth_update_and_in_no_other(refresh_every):
    tx = low_rank_ffn(2, refresh_every, ffn_mask=is_ffn)
    state = tx.init(example_params())
    for number, after in enumerate(run(tx, state, 1, 8), start=1):
        changed = [
            not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (after.bases, state.bases)), strict=True)
        ]
        assert changed == [number % refresh_every == 0] * 2
        assert (after.count, after.refreshes, after.kept) == (number, number // refresh_every, 0)
        state = after


def test_a_refresh_reads_the_parameters_of_its_own_update():
    tx = low_rank_ffn(4, 3, ffn_mask=is_ffn, method="svd")
    state = run(tx, tx.init(example_params()), 1, 3)[-1]
    expected = numpy_projector(example_params(seed=30)["up"]["kernel"], 4)
    np.testing.assert_allclose(projector(state.bases["up"]["kernel"]), expected, atol=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
def test_resumed_bases_equal_those_of_an_uninterrupted_run(method):
    """Refreshes are due in updates 3 and 6: killed just before one, in one, and between two."""
    tx = low_rank_ffn(2, 3, ffn_mask=is_ffn, method=method)
    states = run(tx, tx.init(example_params()), 1, 7)
    for killed_after in (2, 3, 4, 6):
        saved = jax.tree.map(np.array, states[killed_after - 1])
        resumed = run(tx, jax.tree.map(jnp.asarray, saved), killed_after + 1, 7)
        assert all(all_equal(a, b) for a, b in zip(resumed, states[killed_after:], strict=True))


def test_other_updates_do_not_pay_for_the_refresh():
    params = example_params()
    tx = low_rank_ffn(2, 5, ffn_mask=is_ffn)
    equations = jax.make_jaxpr(tx.update)(params, tx.init(params), params).eqns
    is_conditional = [equation.primitive.name == "cond" for equation in equations]
    assert sum(is_conditional) == 1
    outside = [equation for equation, skip in zip(equations, is_conditional, strict=True) if not skip]
    assert all(variable.aval.shape == () for equation in outside for variable in (*equation.invars, *equation.outvars))


# The transformation: sources, and sources that give nothing


def test_momentum_decides_the_bases_and_weights_do_not():
    params, moment = example_params(), example_params(seed=50)
    tx = low_rank_ffn(4, 1, ffn_mask=is_ffn, source="momentum", method="svd")
    _, state = tx.update(zeros_like(params), tx.init(params), params, moment=moment)
    for name in ("up", "down"):
        expected = numpy_projector(moment[name]["kernel"], 4)
        np.testing.assert_allclose(projector(state.bases[name]["kernel"]), expected, atol=TOLERANCE)


def test_a_missing_source_is_refused():
    params = example_params()
    for source, given_tree in (("momentum", "moment"), ("weight", "params")):
        tx = low_rank_ffn(2, 1, ffn_mask=is_ffn, source=source)
        with pytest.raises(ValueError, match=rf"source='{source}' needs update\(\.\.\., {given_tree}=\.\.\.\)"):
            tx.update(params, tx.init(params))


@pytest.mark.parametrize("method, source", [("svd", "momentum"), ("subspace", "weight")])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_non_finite_layer_keeps_its_basis_and_is_counted(method, bad, source):
    params = example_params()
    tx = low_rank_ffn(4, 1, ffn_mask=is_ffn, source=source, method=method)
    before = tx.init(params)
    moved = example_params(seed=50)
    moved["up"]["kernel"] = moved["up"]["kernel"].at[1, 3, 5].set(bad)  # one of two layers
    moved["down"]["kernel"] = moved["down"]["kernel"].at[:, 0, 0].set(bad)  # both
    update = jax.jit(tx.update)
    _, after = update(zeros_like(params), before, moved, moment=moved)
    assert (after.kept, after.refreshes) == (3, 1)
    old, new = before.bases["up"]["kernel"], after.bases["up"]["kernel"]
    assert np.array_equal(new[1], old[1]) and energy(new[0], moved["up"]["kernel"][0]) > 0.99
    assert np.array_equal(after.bases["down"]["kernel"], before.bases["down"]["kernel"])
    _, again = update(zeros_like(params), after, moved, moment=moved)
    assert again.kept == 6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fill, kept", [(0.0, 0), (np.nan, 1)])
def test_init_from_a_zero_or_non_finite_weight_is_orthonormal(method, fill, kept):
    state = low_rank_ffn(3, 1, ffn_mask=True, method=method).init({"w": jnp.full((7, 5), fill)})
    assert_orthonormal(state.bases["w"])
    assert state.kept == kept


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [0.0, 1e-40])
def test_a_zero_source_keeps_the_basis_uncounted(method, size):
    params = {"w": jnp.asarray(gapped(0, 8, 12, 3))}
    tx = low_rank_ffn(3, 1, ffn_mask=True, source="momentum", method=method)
    before = tx.init(params)
    _, after = tx.update(params, before, params, moment={"w": jnp.full((8, 12), size)})
    assert np.array_equal(after.bases["w"], before.bases["w"])
    assert (after.kept, after.refreshes) == (0, 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_of_rank_one_is_spanned_and_the_rest_stays_orthonormal(method):
    w = np.outer(random_matrix(0, 10), random_matrix(1, 14))
    params = {"w": jnp.asarray(w)}
    tx = low_rank_ffn(4, 1, ffn_mask=True, method=method)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
        assert_orthonormal(state.bases["w"])
        np.testing.assert_allclose(projector(state.bases["w"]) @ w, w, atol=TOLERANCE * np.abs(w).max())
    assert state.kept == 0


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_weights_are_decomposed_in_float32(method):
    w = jnp.asarray(gapped(0, 12, 20, 4), jnp.bfloat16)
    tx = low_rank_ffn(4, 1, ffn_mask=True, method=method)
    _, state = tx.update({"w": w}, tx.init({"w": w}), {"w": w})
    assert_orthonormal(state.bases["w"])
    np.testing.assert_allclose(projector(state.bases["w"]), numpy_projector(w, 4), atol=TOLERANCE)


# The transformation: projection, alone and in a chain


def test_projection_equals_the_degraded_weight_gradient_of_the_bases_in_force():
    """``V ((x V)^T g)`` in float64 from the state before the update, which is itself one that refreshes."""
    params = example_params()
    tx = low_rank_ffn(4, 1, ffn_mask=is_ffn, project=True)
    state = tx.init(params)
    v = np.asarray(state.bases["up"]["kernel"], np.float64)
    x, g = random_matrix(7, 2, 30, 12).astype(np.float64), random_matrix(8, 2, 30, 20).astype(np.float64)
    degraded = v @ (np.swapaxes(x @ v, 1, 2) @ g)
    grads = zeros_like(params)
    grads["up"]["kernel"] = jnp.asarray(np.swapaxes(x, 1, 2) @ g, jnp.float32)
    updates, after = tx.update(grads, state, example_params(seed=50))
    assert not np.array_equal(after.bases["up"]["kernel"], state.bases["up"]["kernel"])
    np.testing.assert_allclose(updates["up"]["kernel"], degraded, atol=TOLERANCE * np.abs(degraded).max())


def test_projection_leaves_other_leaves_alone_and_none_projects_nothing():
    params, grads = example_params(), example_params(seed=50)
    for is_projecting in (True, False):
        tx = low_rank_ffn(2, 1, ffn_mask=is_ffn, project=is_projecting)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert np.array_equal(updates["query"]["kernel"], grads["query"]["kernel"])
        assert np.array_equal(updates["up"]["kernel"], grads["up"]["kernel"]) is not is_projecting


@pytest.mark.parametrize("method", METHODS)
def test_full_rank_projects_to_the_gradient_itself(method):
    params, grads = example_params(), example_params(seed=50)
    tx = low_rank_ffn(1000, 1, ffn_mask=is_ffn, method=method, project=True)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE * 3), updates, grads)


def test_a_chain_passes_the_moment_on_and_trains():
    """Momentum bases in front of Adam, with Adam's own moment handed in: the loss of a regression falls."""
    params = {"w": jnp.asarray(random_matrix(0, 6, 4))}
    x, target = jnp.asarray(random_matrix(1, 32, 6)), jnp.asarray(random_matrix(2, 32, 4))
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        low_rank_ffn(3, 2, ffn_mask=True, source="momentum", project=True),
        optax.adam(0.05),
    )

    def loss(params):
        return ((x @ params["w"] - target) ** 2).mean()

    @jax.jit
    def step(params, state):
        moment = state[2][0].mu
        updates, state = tx.update(jax.grad(loss)(params), state, params, moment=moment)
        return optax.apply_updates(params, updates), state, moment

    state, first = tx.init(params), loss(params)
    for _ in range(20):
        previous = state[1].bases["w"]
        with jax.numpy_dtype_promotion("standard"):  # optax.adam raises beta to an integer power
            params, state, moment = step(params, state)
    assert loss(params) < 0.9 * first
    assert (state[1].count, state[1].refreshes, state[1].kept) == (20, 10, 0)
    expected = subspace_iteration(moment["w"], previous, 2)
    np.testing.assert_allclose(projector(state[1].bases["w"]), projector(expected), atol=1e-4)
