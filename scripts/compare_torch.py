"""The plain training step next to Hugging Face's LLaMA under PyTorch: the same losses, then tokens per second.

    pip install torch transformers
    python scripts/compare_torch.py [SIZE ...] [--one-core] [--rounds N] [--json FILE]

Both train the same model from the same weights on the same tokens with AdamW, in float32 on this machine's CPU, with as
many threads as each library takes. PyTorch runs eagerly, with its fused attention and its fused AdamW. The two take
turns in one process. Where other programs use the CPU too, threads that wait for each other make PyTorch look several
times slower than it is: ``--one-core`` compares CPU seconds of one thread each, which others hardly change.

The first row of a size is a matrix product alone. PyTorch's come from MKL, which on processors that are not Intel's may
reach less than half their speed: the other rows are to be read next to that one.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int, PyTree
from rich.console import Console
from rich.table import Table

try:
    import torch
    import transformers
except ImportError as missing:
    sys.exit(f"error: this comparison needs {missing.name}, not installed; run: pip install torch transformers")

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))  # run from a checkout, installed or not

import configs  # noqa: E402
from mecefo_jax.config import ModelConfig  # noqa: E402
from mecefo_jax.model import Model, init_model, loss_sum  # noqa: E402

LEARNING_RATE, _BETAS, _EPS, _WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.01
_LARGEST_LOSS_DIFFERENCE = 1e-5  # relative; both compute in float32

Part = Callable[[], object]
"""Runs one part of a step and waits for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is compared: a model and the shape of its batch."""

    model: ModelConfig
    vocab_size: int
    batch_size: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """Tokens predicted in a step."""
        return self.batch_size * self.seq_len


def sizes() -> dict[str, Size]:
    """The quickstart's microbatch, the same model on longer text, and a model whose matrix products weigh more."""
    quickstart = configs.get("quickstart")
    tiny = ModelConfig(hidden_size=128, ffn_size=344, num_layers=4, num_heads=4)
    mid = ModelConfig(hidden_size=512, ffn_size=1376, num_layers=8, num_heads=8)
    batch_size, seq_len = quickstart.train.microbatch_size, quickstart.data.seq_len
    return {
        "quickstart": Size(model=quickstart.model, vocab_size=258, batch_size=batch_size, seq_len=seq_len),
        "tiny": Size(model=tiny, vocab_size=258, batch_size=4, seq_len=256),
        "mid": Size(model=mid, vocab_size=8192, batch_size=4, seq_len=256),
    }


def main(argv: Sequence[str]) -> int:
    """Compare each size, print a table, and write the numbers as JSON if asked to."""
    known = sizes()
    parser = argparse.ArgumentParser(description="Tokens per second next to PyTorch, on CPU.")
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help=f"of {', '.join(known)}; all if none is given")
    parser.add_argument("--rounds", type=int, default=15, help="times that each part is run (default: %(default)s)")
    parser.add_argument("--one-core", action="store_true", help="CPU seconds of one thread each, on a busy machine")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where to write the numbers")
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.sizes if name not in known]:
        parser.error(f"unknown size {unknown[0]!r}; expected one of {', '.join(known)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; set it to at least 1")

    jax.config.update("jax_platforms", "cpu")
    if arguments.one_core:
        _use_one_core()
    clock = time.process_time if arguments.one_core else time.perf_counter
    results = {name: compare(known[name], arguments.rounds, clock) for name in arguments.sizes or known}
    _print_table(results, "CPU seconds of one core" if arguments.one_core else f"{os.cpu_count()} cores")
    if arguments.json:
        machine = _machine() | {"one_core": arguments.one_core}
        arguments.json.write_text(json.dumps({"machine": machine, "sizes": results}, indent=2) + "\n")
    return 0


def compare(size: Size, num_rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Check that both compute the same loss, then time them in turns.

    Args:
        size: what is compared.
        num_rounds: times that each part is run by each.
        clock: the time in seconds.

    Returns:
        For each of ``product`` (one feed-forward linear), ``forward``, ``gradient`` (forward and backward) and ``step``
        (with the update): ``jax_s`` and ``torch_s`` (median seconds), ``jax_tokens_per_s``, ``torch_tokens_per_s``, and
        ``ratio``, the median over the rounds of PyTorch's time over ours: above 1 where ours is faster.

    Raises:
        ArithmeticError: the losses differ.
    """
    params = init_model(size.model, size.vocab_size, seed=0)
    tokens_BT1 = np.random.default_rng(0).integers(size.vocab_size, size=(size.batch_size, size.seq_len + 1))
    theirs = hugging_face_model(params, size.model, size.vocab_size)
    check_losses(params, theirs, tokens_BT1)
    ours_parts, their_parts = jax_parts(params, tokens_BT1), torch_parts(theirs, tokens_BT1)
    return {
        part: _numbers(size, *_time_in_turns(ours_parts[part], their_parts[part], num_rounds, clock))
        for part in ours_parts
    }


def hugging_face_model(params: Model, config: ModelConfig, vocab_size: int) -> transformers.LlamaForCausalLM:
    """Hugging Face's model of the same shape, with a copy of the same weights."""
    shape = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(shape)
    weights = {name: torch.tensor(array) for name, array in hugging_face_weights(params).items()}
    if config.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True)
    return model


def hugging_face_weights(params: Model) -> dict[str, np.ndarray]:
    """A tree like the parameters under Hugging Face's names, one entry a layer; their linears are ``[out, in]``."""
    blocks = params.blocks
    attention, feed_forward = blocks.attention, blocks.feed_forward
    linears = {
        "self_attn.q_proj": attention.query,
        "self_attn.k_proj": attention.key,
        "self_attn.v_proj": attention.value,
        "self_attn.o_proj": attention.out,
        "mlp.gate_proj": feed_forward.gate,
        "mlp.up_proj": feed_forward.up,
        "mlp.down_proj": feed_forward.down,
    }
    per_layer = {name: np.asarray(linear.kernel[...]).swapaxes(1, 2) for name, linear in linears.items()}
    per_layer["input_layernorm"] = np.asarray(blocks.norm1.scale[...])
    per_layer["post_attention_layernorm"] = np.asarray(blocks.norm2.scale[...])
    weights = {
        f"model.layers.{layer}.{name}.weight": array
        for name, stacked in per_layer.items()
        for layer, array in enumerate(stacked)
    }
    weights["model.embed_tokens.weight"] = np.asarray(params.embedding[...])
    weights["model.norm.weight"] = np.asarray(params.final_norm.scale[...])
    if params.head is not None:
        weights["lm_head.weight"] = np.asarray(params.head.kernel[...]).T
    return weights


def jax_parts(params: Model, tokens_BT1: Int[np.ndarray, "B T+1"]) -> dict[str, Part]:
    """Our step and its parts: one jitted program on one device, which donates the state."""
    optimizer = optax.adamw(LEARNING_RATE, *_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY)
    tokens = jnp.asarray(tokens_BT1, jnp.int32)

    def step(params: Model, opt_state: PyTree, tokens: jax.Array) -> tuple[Model, PyTree, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    w_DF = params.blocks.feed_forward.gate.kernel[...][0]
    x_TD = jnp.ones((tokens[:, 1:].size, w_DF.shape[0]))
    product, forward, gradient = jax.jit(jnp.matmul), jax.jit(mean_loss), jax.jit(jax.value_and_grad(mean_loss))
    jitted_step = jax.jit(step, donate_argnums=(0, 1))
    state = jax.tree.map(jnp.copy, (params, optimizer.init(params)))

    def run_step() -> object:
        nonlocal state
        *state, loss = jitted_step(*state, tokens)
        return jax.block_until_ready((state, loss))

    return {
        "product": lambda: jax.block_until_ready(product(x_TD, w_DF)),
        "forward": lambda: jax.block_until_ready(forward(params, tokens)),
        "gradient": lambda: jax.block_until_ready(gradient(params, tokens)),
        "step": run_step,
    }


def torch_parts(model: transformers.LlamaForCausalLM, tokens_BT1: Int[np.ndarray, "B T+1"]) -> dict[str, Part]:
    """PyTorch's step and its parts."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=_BETAS, eps=_EPS, weight_decay=_WEIGHT_DECAY, fused=True
    )
    tokens = torch.tensor(tokens_BT1, dtype=torch.int64)
    linear = model.model.layers[0].mlp.gate_proj
    x_TD = torch.ones(tokens[:, 1:].numel(), linear.in_features)

    def product() -> object:
        with torch.no_grad():
            return linear(x_TD)

    def forward() -> object:
        with torch.no_grad():
            return torch_mean_loss(model, tokens)

    def gradient() -> object:
        optimizer.zero_grad(set_to_none=True)
        return torch_mean_loss(model, tokens).backward()

    def step() -> object:
        gradient()
        return optimizer.step()

    return {"product": product, "forward": forward, "gradient": gradient, "step": step}


def mean_loss(params: Model, tokens_BT1: Int[jax.Array, "B T+1"]) -> jax.Array:
    """Our loss in nats a token, computed in float32."""
    total, count = loss_sum(params, tokens_BT1, jnp.dtype(jnp.float32))
    return total / count.astype(jnp.float32)


def torch_mean_loss(model: transformers.LlamaForCausalLM, tokens_BT1: torch.Tensor) -> torch.Tensor:
    """Their loss in nats a token."""
    logits_BTV = model(input_ids=tokens_BT1[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT1[:, 1:].flatten())


def check_losses(params: Model, theirs: transformers.LlamaForCausalLM, tokens_BT1: Int[np.ndarray, "B T+1"]) -> None:
    """Raise ArithmeticError unless both compute the same loss to float32 rounding."""
    ours_loss = float(jax.jit(mean_loss)(params, jnp.asarray(tokens_BT1, jnp.int32)))
    with torch.no_grad():
        their_loss = float(torch_mean_loss(theirs, torch.tensor(tokens_BT1, dtype=torch.int64)))
    if not abs(ours_loss - their_loss) <= _LARGEST_LOSS_DIFFERENCE * abs(their_loss):
        raise ArithmeticError(f"the losses differ, so their times mean nothing: ours {ours_loss}, theirs {their_loss}")


def _numbers(size: Size, ours_s: Sequence[float], theirs_s: Sequence[float]) -> dict[str, float]:
    return {
        "jax_s": statistics.median(ours_s),
        "torch_s": statistics.median(theirs_s),
        "jax_tokens_per_s": size.tokens / statistics.median(ours_s),
        "torch_tokens_per_s": size.tokens / statistics.median(theirs_s),
        "ratio": statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True)),
    }


def _time_in_turns(
    first: Part, second: Part, num_rounds: int, clock: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Seconds of each run of the two, after two runs to warm up; who goes first alternates."""
    times: dict[Part, list[float]] = {first: [], second: []}
    for round_number in range(-2, num_rounds):
        for part in (first, second) if round_number % 2 else (second, first):
            start = clock()
            part()
            if round_number >= 0:
                times[part].append(clock() - start)
    return times[first], times[second]


def _use_one_core() -> None:
    """Must come before JAX starts its threads, whose number it takes from the cores it may use."""
    if not hasattr(os, "sched_setaffinity"):
        sys.exit("error: --one-core needs Linux; leave it out here")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)


def _machine() -> dict[str, object]:
    return {
        "processor": platform.processor() or platform.machine(),
        "torch_threads": torch.get_num_threads(),
        "jax": jax.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _print_table(results: dict[str, dict[str, dict[str, float]]], resources: str) -> None:
    table = Table("size", "part", title=f"Tokens per second on CPU, float32, {resources}")
    for column in ("ours", "PyTorch", "ours / PyTorch"):
        table.add_column(column, justify="right")
    for name, parts in results.items():
        for part, numbers in parts.items():
            speeds = (f"{numbers[key]:,.0f}" for key in ("jax_tokens_per_s", "torch_tokens_per_s"))
            table.add_row(name, part, *speeds, f"{numbers['ratio']:.2f}", end_section=part == "step")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
