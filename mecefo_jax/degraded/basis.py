"""Bases for low-rank feed-forward gradients, kept and refreshed by an optax gradient transformation.

The optimizer's side of technique (l) of MeCeFO (arXiv 2510.16415). For each FFN kernel W it holds an orthonormal V
whose columns span the leading left singular vectors of W, or of Adam's first moment of W. A degraded microbatch
replaces the kernel's gradient ``G = x^T g`` by ``V ((x V)^T g) = V V^T G``.

Legend: D a kernel's input size, F its output size, R rank; ``layers`` any leading axes, whose matrices are
independent of each other.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from mecefo_jax.errors import ConfigError

Source = Literal["weight", "momentum"]
Method = Literal["svd", "subspace"]

# What counts is the energy ||V^T W||^2 relative to that of the best subspace of the same rank. While a [512, 1376]
# matrix drifts by a tenth between refreshes (R = 64), two iterations keep it at 0.991 for Gaussian entries, the worst
# case, and at 0.999 for singular values like i^-1/2 or i^-1; one iteration gives 0.982 and 0.998.
_REFRESH_ITERATIONS = 2
# From a random start, eight iterations reach 0.981 for Gaussian entries and 0.998 for the others.
_INIT_ITERATIONS = 8


class BasisState(NamedTuple):
    """State of ``low_rank_ffn``."""

    bases: PyTree
    """Tree of the parameters: float32 ``[..., D, R]`` with orthonormal columns for FFN kernels, None elsewhere."""
    count: Int[Array, ""]  # type: ignore[assignment]  # optax's name for it, which hides tuple.count
    """Updates seen."""
    refreshes: Int[Array, ""]
    """Updates that refreshed the bases."""
    kept: Int[Array, ""]
    """Matrices whose basis was kept because the source or the new basis was not finite, summed over refreshes."""


def low_rank_ffn(
    rank: int,
    refresh_every: int,
    *,
    ffn_mask: PyTree | Callable[[PyTree], PyTree],
    source: Source = "weight",
    method: Method = "subspace",
    project: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Maintain a basis V for each FFN kernel, and optionally project its gradient: ``G <- V V^T G``.

    ``init`` takes the bases from the weights, whatever the source, since the first moment is still zero. The updates
    number ``refresh_every``, ``2 refresh_every``, ... (counted from 1) refresh them from the tree they are given, as
    it was before the step; the new bases are in force from the next update on. An update projects with the bases it
    finds in the state, which are those that the step's degraded microbatches used.

    A matrix keeps its basis in a refresh if its source is zero, which prefers no subspace, or if the source or the
    new basis is not finite, which is counted in ``BasisState.kept``.

    Args:
        rank: columns of a basis (R); clipped to D, where the projection is the identity.
        refresh_every: updates between refreshes (tau).
        ffn_mask: True for FFN kernels ``[..., D, F]``: a tree of bools like the parameters or a prefix of it, or a
            function from parameters to such a tree, as in ``optax.masked``.
        source: ``weight`` reads the parameters; ``momentum`` reads the extra argument ``moment`` of ``update``, a
            tree like the parameters.
        method: ``svd`` (exact) or ``subspace`` (iteration from the basis in force: matrix products and a thin QR).
        project: whether the updates of FFN kernels are projected; everything else passes unchanged.

    Returns:
        The transformation, with a ``BasisState``.

    Raises:
        ConfigError: rank or refresh_every is below 1, or source or method is unknown; in ``init``, ``ffn_mask`` marks
            a leaf with fewer than two axes.
        ValueError: ``update`` is not given the tree that the source names.
    """
    _check_settings(rank, refresh_every, source, method)

    def init(params: PyTree) -> BasisState:
        starts = _random_bases(params, ffn_mask, rank)
        bases, kept = _refresh(starts, params, method, _INIT_ITERATIONS)
        return BasisState(bases, count=jnp.int32(0), refreshes=jnp.int32(0), kept=kept)

    def update(
        updates: PyTree, state: BasisState, params: PyTree | None = None, *, moment: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, BasisState]:
        del extra
        sources = params if source == "weight" else moment
        if sources is None:
            argument = "params" if source == "weight" else "moment"
            raise ValueError(f"low_rank_ffn with source={source!r} needs update(..., {argument}=...), got None")

        count = optax.safe_increment(state.count)
        is_due = count % refresh_every == 0
        bases, kept = jax.lax.cond(
            is_due,
            lambda bases: _refresh(bases, sources, method, _REFRESH_ITERATIONS),
            lambda bases: (bases, jnp.int32(0)),
            state.bases,
        )
        if project:
            updates = _project_kernels(updates, state.bases)
        return updates, BasisState(bases, count, state.refreshes + is_due.astype(jnp.int32), state.kept + kept)

    return optax.GradientTransformationExtraArgs(init, update)


def project(g_DF: Float[Array, "*layers D F"], v_DR: Float[Array, "*layers D R"]) -> Float[Array, "*layers D F"]:
    """Project gradients orthogonally on bases: ``V V^T G``.

    Args:
        g_DF: gradients of kernels.
        v_DR: orthonormal float32 bases.

    Returns:
        The projection in the dtype of ``g_DF``, computed in full float32 on every platform.
    """
    highest = jax.lax.Precision.HIGHEST
    coordinates_RF = jnp.matmul(v_DR.mT, g_DF.astype(jnp.float32), precision=highest)
    return jnp.matmul(v_DR, coordinates_RF, precision=highest).astype(g_DF.dtype)


def top_left_singular_vectors(w_DF: Float[Array, "*layers D F"], rank: int) -> Float[Array, "*layers D R"]:
    """Return the left singular vectors of the ``R = min(rank, D)`` largest singular values, largest first.

    Beyond ``min(D, F)`` there are none left, and orthonormal vectors complete the basis.

    Args:
        w_DF: matrices of any float dtype, decomposed in float32.
        rank: vectors wanted.
    """
    rank = min(rank, w_DF.shape[-2])
    u, _, _ = jnp.linalg.svd(w_DF.astype(jnp.float32), full_matrices=rank > w_DF.shape[-1])
    return u[..., :rank]


def subspace_iteration(
    w_DF: Float[Array, "*layers D F"], v_DR: Float[Array, "*layers D R"], num_iterations: int
) -> Float[Array, "*layers D R"]:
    """Block power iteration on ``W W^T``: ``num_iterations`` times ``V <- qr(W (W^T V))``.

    The angle to the i-th singular vector shrinks by ``(s_(R+1) / s_i)^2`` an iteration. Two products of ``2 D F R``
    FLOPs and a QR of ``4 D R^2`` each; the largest temporary is ``[F, R]``.

    Args:
        w_DF: matrices of any float dtype, read in float32.
        v_DR: orthonormal float32 start.
        num_iterations: at least 0.

    Returns:
        Orthonormal columns, in their order of convergence. Directions beyond the rank of W are arbitrary.
    """
    w_DF = w_DF.astype(jnp.float32)
    # The span does not depend on the scale of W, but W W^T leaves the range of float32 for entries of 1e-20 or 1e20.
    largest = _largest_magnitude(w_DF)
    scale = jnp.where(largest < jnp.finfo(jnp.float32).tiny, 1.0, largest)

    def iterate(_: int, v_DR: Array) -> Array:
        u_FR = (w_DF.mT @ v_DR) / scale
        return jnp.linalg.qr((w_DF @ u_FR) / scale).Q

    return jax.lax.fori_loop(0, num_iterations, iterate, v_DR)


def _refresh(bases: PyTree, sources: PyTree, method: Method, num_iterations: int) -> tuple[PyTree, Int[Array, ""]]:
    """New bases of all kernels, and the number of matrices that were not finite and kept theirs."""
    old, treedef = jax.tree.flatten(bases)
    matrices = jax.tree.leaves(_map_kernels(lambda v, w: None if v is None else w, bases, sources))
    refreshed = [_refresh_kernel(w_DF, v_DR, method, num_iterations) for w_DF, v_DR in zip(matrices, old, strict=True)]
    return jax.tree.unflatten(treedef, [v for v, _ in refreshed]), sum((kept for _, kept in refreshed), jnp.int32(0))


def _refresh_kernel(
    w_DF: Float[Array, "*layers D F"], v_DR: Float[Array, "*layers D R"], method: Method, num_iterations: int
) -> tuple[Float[Array, "*layers D R"], Int[Array, ""]]:
    """The new basis of each matrix of a kernel, and how many of them were not finite and kept theirs."""
    layers = v_DR.shape[:-2]
    flat = (w_DF.reshape(-1, *w_DF.shape[-2:]), v_DR.reshape(-1, *v_DR.shape[-2:]))
    new_DR, kept = _one_by_one(lambda pair: _refresh_matrix(pair[0], pair[1], method, num_iterations), flat)
    return new_DR.reshape(*layers, *v_DR.shape[-2:]), jnp.sum(kept, dtype=jnp.int32)


def _refresh_matrix(
    w_DF: Float[Array, "D F"], v_DR: Float[Array, "D R"], method: Method, num_iterations: int
) -> tuple[Float[Array, "D R"], Int[Array, ""]]:
    """The new basis where it is finite and the matrix is not zero, else the old one."""
    w_DF = w_DF.astype(jnp.float32)
    largest = _largest_magnitude(w_DF)
    if method == "svd":
        # LAPACK leaves the outcome open for NaN and infinity, so they are never passed on.
        new_DR = top_left_singular_vectors(jnp.where(jnp.isfinite(largest), w_DF, 0.0), v_DR.shape[-1])
    else:
        new_DR = subspace_iteration(w_DF, v_DR, num_iterations)
    is_finite = jnp.isfinite(largest) & jnp.isfinite(new_DR).all(keepdims=True)
    is_nonzero = largest >= jnp.finfo(jnp.float32).tiny  # accelerators flush what is smaller to zero
    return jnp.where(is_finite & is_nonzero, new_DR, v_DR), jnp.sum(~is_finite, dtype=jnp.int32)


def _one_by_one(function: Callable[[Any], Any], stacked: Any) -> Any:
    """Map over the leading axis without batching.

    XLA's CPU backend spreads a batched QR or SVD over the threads that it runs on. Where several devices of a process
    refresh at once, all of these threads wait for each other (jaxlib 0.10.2), for ever.
    """
    return jax.lax.map(function, stacked)


def _largest_magnitude(w_DF: Float[Array, "*layers D F"]) -> Float[Array, "*layers 1 1"]:
    """The largest absolute entry of each matrix; NaN or infinite if any entry is."""
    return jnp.max(jnp.abs(w_DF), axis=(-2, -1), keepdims=True)


def _random_bases(params: PyTree, ffn_mask: PyTree | Callable[[PyTree], PyTree], rank: int) -> PyTree:
    """Random orthonormal starts for the marked kernels, None elsewhere; the same ones in every run."""

    def start(path: tuple, leaf: Array, is_kernel: bool) -> Array | None:
        if not is_kernel:
            return None
        if len(leaf.shape) < 2:
            where = jax.tree_util.keystr(path)
            raise ConfigError(f"ffn_mask marks {where} of shape {leaf.shape}: mark kernels [..., in, out] only")
        *layers, size, _ = leaf.shape
        gaussian = jax.random.normal(jax.random.key(0), (*layers, size, min(rank, size)), jnp.float32)
        bases = _one_by_one(lambda matrix: jnp.linalg.qr(matrix).Q, gaussian.reshape(-1, *gaussian.shape[-2:]))
        return bases.reshape(gaussian.shape)

    if not jax.tree.leaves(params):  # as when optax looks for the places of parameters in the state
        return params
    # A module may define __call__ and still be a tree of bools, so only a leaf counts as a function.
    is_function = callable(ffn_mask) and jax.tree_util.all_leaves([ffn_mask])
    mask = jax.tree.broadcast(ffn_mask(params) if is_function else ffn_mask, params)
    return jax.tree_util.tree_map_with_path(start, params, mask)


def _project_kernels(updates: PyTree, bases: PyTree) -> PyTree:
    """Project the updates of FFN kernels; leave the others."""
    return _map_kernels(lambda v, g: g if v is None else project(g, v), bases, updates)


def _map_kernels(function: Callable[[Array | None, Array], Array | None], bases: PyTree, tree: PyTree) -> PyTree:
    """Map over a tree of the parameters together with each leaf's basis, None where it has none."""
    return jax.tree.map(function, bases, tree, is_leaf=lambda node: node is None)


def _check_settings(rank: int, refresh_every: int, source: str, method: str) -> None:
    for name, number in (("rank", rank), ("refresh_every", refresh_every)):
        if number < 1:
            raise ConfigError(f"basis.{name} is {number}; set it to at least 1")
    for name, choice, choices in (("source", source, get_args(Source)), ("method", method, get_args(Method))):
        if choice not in choices:
            raise ConfigError(f"basis.{name} is {choice!r}; set it to one of {', '.join(choices)}")
