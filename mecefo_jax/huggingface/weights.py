"""Names and layouts of weights: ours are ``[in, out]`` and stacked over layers, Hugging Face's ``[out, in]`` a layer.

Queries and keys need no permutation: both rotate the pairs ``(x[i], x[i + H/2])``.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from mecefo_jax.config import Config
from mecefo_jax.errors import DataError
from mecefo_jax.huggingface.shards import Stored
from mecefo_jax.model import Model
from mecefo_jax.trained import abstract_params

_OF_A_LAYER = {
    "input_layernorm": "blocks.norm1.scale",
    "self_attn.q_proj": "blocks.attention.query.kernel",
    "self_attn.k_proj": "blocks.attention.key.kernel",
    "self_attn.v_proj": "blocks.attention.value.kernel",
    "self_attn.o_proj": "blocks.attention.out.kernel",
    "post_attention_layernorm": "blocks.norm2.scale",
    "mlp.gate_proj": "blocks.feed_forward.gate.kernel",
    "mlp.up_proj": "blocks.feed_forward.up.kernel",
    "mlp.down_proj": "blocks.feed_forward.down.kernel",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_DERIVED = ".rotary_emb.inv_freq"  # old files hold the rotary frequencies of each layer, which follow from the base
_DTYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one of their tensors is in our parameters."""

    path: str
    layer: int | None
    shape: tuple[int, ...]
    """Theirs."""

    def of(self, stacked: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """A view of our array in their layout, through which it can be read and written."""
        ours = stacked if self.layer is None else stacked[self.layer]
        return ours.T if self.path.endswith(".kernel") else ours


def places(config: Config) -> dict[str, Place]:
    """Their names of all tensors of a model, in the order of computation; ``config.model.vocab_size`` is set."""
    shapes = {path: leaf.shape for path, leaf in leaves(abstract_params(config)).items()}
    named: dict[str, tuple[str, int | None]] = {_EMBEDDING: ("embedding", None)}
    for number in range(config.model.num_layers):
        named |= {f"model.layers.{number}.{name}.weight": (path, number) for name, path in _OF_A_LAYER.items()}
    named["model.norm.weight"] = ("final_norm.scale", None)
    if not config.model.tie_embeddings:
        named[_HEAD] = ("head.kernel", None)
    assert {path for path, _ in named.values()} == shapes.keys(), "a parameter has no name"
    found = {}
    for name, (path, layer) in named.items():
        ours = shapes[path] if layer is None else shapes[path][1:]
        found[name] = Place(path, layer, ours[::-1] if path.endswith(".kernel") else ours)
    return found


def leaves(params: Model) -> dict[str, Array]:
    """Parameters by their dotted names."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value"): leaf for path, leaf in found}


def check_stored(config: Config, stored: Mapping[str, Stored], source: str) -> None:
    """Refuse files whose tensors are not exactly those of the model.

    Raises:
        DataError: names what is missing, unexpected, of another shape, or of a dtype that is not a float of 16 or 32
            bits.
    """
    expected = places(config)
    tied_head = {_HEAD} if config.model.tie_embeddings else set()
    found = {name for name in stored if not name.endswith(_DERIVED)} - tied_head
    if missing := sorted(expected.keys() - found):
        raise DataError(f"{source}: {_listed(missing)} missing")
    if unexpected := sorted(found - expected.keys()):
        raise DataError(
            f"{source}: {_listed(unexpected)} not expected, so the model is another one than converted here"
        )
    for name in expected:
        if stored[name].shape != expected[name].shape:
            raise DataError(
                f"{source}: {name} is {list(stored[name].shape)}, but by config.json {list(expected[name].shape)}"
            )
        if stored[name].dtype not in _DTYPES:
            raise DataError(f"{source}: {name} is of dtype {stored[name].dtype}; expected one of {', '.join(_DTYPES)}")
    for name in tied_head & stored.keys():
        if not np.array_equal(stored[name].read(), stored[_EMBEDDING].read()):
            raise DataError(f"{source}: {name} is not {_EMBEDDING}, though config.json ties them")


def read_params(config: Config, stored: Mapping[str, Stored]) -> Model:
    """Our parameters, float32, of checked files; two copies of the largest parameter are held at a time."""
    abstract = abstract_params(config)
    shapes = leaves(abstract)
    arrays = {path: np.empty(leaf.shape, leaf.dtype) for path, leaf in shapes.items()}
    for name, place in places(config).items():
        place.of(arrays[place.path])[...] = stored[name].read()
    return jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(abstract), [jnp.asarray(arrays.pop(path)) for path in shapes]
    )


def tensor_reader(config: Config, params: Model, dtype: np.dtype) -> Callable[[str], Float[np.ndarray, "..."]]:
    """A function from their name to a contiguous copy of the tensor, made when it is called."""
    found, arrays = places(config), leaves(params)

    def read(name: str) -> Float[np.ndarray, "..."]:
        place = found[name]
        return np.ascontiguousarray(place.of(np.asarray(arrays[place.path])), dtype=dtype)

    return read


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
