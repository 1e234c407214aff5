"""A classifier: the trunk of a trained model under a new head, read at the last token of each sequence.

It is a ``model.Model`` whose head has an output a class in place of one a token of the vocabulary. So the degraded
backward pass, the plans, the shardings and the update are those of pre-training. What is new is the loss: a function
of rows ``int32[T + 1]`` as there, but here the last column is the label of the sequence before it.

Legend: B batch, T time, D hidden size, C outputs.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PyTree

from mecefo_jax.model import ApplyBlock, Linear, Model
from mecefo_jax.padding import PAD


def make_classifier(trained: Model, num_outputs: int, seed: int) -> Model:
    """A copy of a model's trunk under a random head ``[D, C]``, float32 and without bias."""
    classifier = jax.tree.map(jnp.copy, trained)  # training donates its buffers
    rngs = nnx.Rngs(params=jax.random.key(seed))
    # A model with a tied head has none of its own, which NNX would hold to.
    classifier.head = nnx.data(Linear(classifier.config.hidden_size, num_outputs, rngs=rngs))
    return classifier


def outputs(
    model: Model,
    tokens_BT: Int[Array, "B T"],
    compute_dtype: jnp.dtype,
    apply_block: ApplyBlock | None = None,
    per_layer: PyTree = None,
) -> Float[Array, "B C"]:
    """The head of the last real token's hidden state, after the final norm, in float32.

    Attention is causal, so tokens of padding (``PAD``, on the right) change nothing.
    """
    # The head is small: all positions through it cost less than to pick one of them inside the model.
    outputs_BTC = model(tokens_BT, compute_dtype, apply_block, per_layer)
    last_B = jnp.sum(tokens_BT != PAD, axis=1) - 1
    is_last_BT = jnp.arange(tokens_BT.shape[1], dtype=last_B.dtype)[None] == last_B[:, None]
    return jnp.sum(jnp.where(is_last_BT[..., None], outputs_BTC, 0.0), axis=1)


def classification_loss(
    model: Model,
    rows_BT1: Int[Array, "B T+1"],
    compute_dtype: jnp.dtype,
    apply_block: ApplyBlock | None = None,
    per_layer: PyTree = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed negative log likelihood of the labels in nats, and the number of sequences, rows of padding left out.

    Args:
        model: a classifier.
        rows_BT1: tokens, then the class's number.
        compute_dtype, apply_block, per_layer: as those of the model.
    """
    outputs_BC = outputs(model, rows_BT1[:, :-1], compute_dtype, apply_block, per_layer)
    is_label_BC = rows_BT1[:, -1:] == jnp.arange(outputs_BC.shape[1], dtype=rows_BT1.dtype)[None]
    losses_B = jax.nn.logsumexp(outputs_BC, axis=1) - jnp.sum(jnp.where(is_label_BC, outputs_BC, 0.0), axis=1)
    return _sum_of_real(losses_B, is_real(rows_BT1))


def regression_loss(
    model: Model,
    rows_BT1: Int[Array, "B T+1"],
    compute_dtype: jnp.dtype,
    apply_block: ApplyBlock | None = None,
    per_layer: PyTree = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Summed squared error of the one output, and the number of sequences; the last column holds a float32's bits."""
    outputs_BC = outputs(model, rows_BT1[:, :-1], compute_dtype, apply_block, per_layer)
    labels_B = jax.lax.bitcast_convert_type(rows_BT1[:, -1], jnp.float32)
    return _sum_of_real(jnp.square(outputs_BC[:, 0] - labels_B), is_real(rows_BT1))


def is_real(rows_BT1: Int[Array, "B T+1"]) -> Bool[Array, "B"]:
    """Whether rows hold an example, and do not just fill up a batch."""
    return rows_BT1[:, 0] != PAD


def _sum_of_real(losses_B: Float[Array, "B"], is_real_B: Bool[Array, "B"]) -> tuple[Float[Array, ""], Int[Array, ""]]:
    return jnp.sum(jnp.where(is_real_B, losses_B, 0.0)), jnp.sum(is_real_B, dtype=jnp.int32)
