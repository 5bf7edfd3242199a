"""Build one training step: jaxspec's of heads, or SpecJAX's of an EAGLE-3 head.

Both learn from the same frozen Llama, on rows of equal length, with gamma steps of their own
output. The step of SpecJAX (github.com/tails-mpt/SpecJAX) begins a block at every token of a row;
jaxspec's at sampled anchors, of which `anchors` may be all tokens too. SpecJAX's code is read from
a clone: nothing of it is copied here. Its own loop updates the parameters outside of the compiled
step; here both are one program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.checkpoints.fitting import layouts_of
from jaxspec.config import LlamaConfig
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.making import abstract_head, new_head
from jaxspec.models.families import abstract_params
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.head_batches import Anchoring, JointBatch
from jaxspec.training.head_recipe import joint_loss
from jaxspec.training.loop.step import init_state, make_optimizer, make_step, partition


@dataclass(frozen=True)
class Shapes:
    """The sizes of a step."""

    target: LlamaConfig
    vocabulary: int
    """Tokens that the head scores."""
    batch: int
    length: int
    gamma: int
    dtype: Literal["float32", "bfloat16"]


class Step(NamedTuple):
    """A step to compile, with its first argument donated."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Shapes of the state and of what is frozen, then arrays of the batch."""
    places: int
    """Drafted tokens that the loss counts."""


HEADS: dict[str, dict[str, Any]] = {
    "KV": {"feature": "last_hidden"},
    "EAGLE-3": {"feature": "fused"},
    "DFlash": {"feature": "block", "layers": 1, "target_layers": (2,)},
}
"""Options of `new_head` by the kind's name."""


def our_step(shapes: Shapes, anchors: int, kinds: Sequence[str] = ("EAGLE-3",)) -> Step:
    """Return jaxspec's step with this many blocks a row, of one head or of several together."""
    configs: dict[str, HeadConfig] = {}
    for kind in kinds:
        config = new_head(shapes.target, gamma=shapes.gamma, **HEADS[kind])
        text = replace(config.text_config, draft_vocabulary=tuple(range(shapes.vocabulary)))
        configs[kind] = replace(config, text_config=text)
    anchored = {kind: (config, Anchoring(anchors)) for kind, config in configs.items()}
    train = TrainConfig(
        steps=100, batch=shapes.batch, frozen=("target",), dtype=shapes.dtype, warmup=1
    )
    params = {kind: abstract_head(config) for kind, config in configs.items()}
    params["target"] = abstract_params(shapes.target, jnp.dtype(shapes.dtype))
    trainable, frozen = partition(params, train.frozen)
    optimizer = make_optimizer(train, trainable, kinds)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), trainable)
    loss = joint_loss(LanguageModel(shapes.target), anchored)
    tokens = _tokens(shapes)
    rows = PromptRows(jnp.asarray(tokens), jnp.full(shapes.batch, shapes.length))
    numbers = np.arange(shapes.batch, dtype=np.uint32)
    starts = np.linspace(0, shapes.length - 1 - shapes.gamma, anchors).astype(np.int32)
    batch = JointBatch(
        ConversationBatch(rows, np.ones(tokens.shape, bool), {}, numbers),
        {
            kind: (
                np.tile(starts, (shapes.batch, 1)),
                np.zeros((shapes.batch, 0, 2), np.int32) if config.reads_spans else None,
            )
            for kind, config in configs.items()
        },
    )
    return Step(
        make_step(loss, optimizer, train),
        (state, frozen, batch),
        shapes.batch * anchors * shapes.gamma * len(kinds),
    )


def specjax_step(shapes: Shapes, clone: Path) -> Step:
    """Return SpecJAX's step.

    Raises InputError for a folder that is not a clone.
    """
    if not (clone / "specjax" / "train.py").is_file():
        raise InputError(f"clone {clone}: has no specjax/train.py; give a clone of SpecJAX")
    sys.path.insert(0, str(clone))
    llama, heads, train, optimizers = (
        import_module(f"specjax.{name}")
        for name in ("models.target.llama", "models.draft.eagle3", "train", "training.optimizer")
    )
    sizes, dtype = shapes.target, jnp.dtype(shapes.dtype)
    shared = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "head_dim": sizes.head_dim,
        "rope_theta": sizes.rope_theta,
        "rms_norm_eps": sizes.rms_norm_eps,
    }
    target = llama.LlamaConfig(
        **shared,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
    )
    head = heads.Eagle3Config(
        **shared,
        num_heads=sizes.num_attention_heads,
        num_kv_heads=sizes.num_key_value_heads,
        draft_vocab_size=shapes.vocabulary,
    )
    initial = jax.eval_shape(lambda: heads.init_eagle3_params(head, jax.random.key(0)))
    params = {  # its trainer keeps norms in float32
        name: jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if leaf.ndim == 1 else dtype)
        for name, leaf in initial.items()
    }
    gradient = train.make_train_step_ttt(llama.llama_forward, target, head, shapes.gamma)
    optimizer, _ = optimizers.build_optimizer(1e-3, 1, 100)

    def step(state: Any, frozen: Any, maps: Any, batch: Any) -> Any:
        params, moments = state
        loss, *_, grads = gradient(params, frozen, *maps, batch)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    scored = np.arange(shapes.vocabulary, dtype=np.int32)
    indices = np.full(sizes.vocab_size, -1, np.int32)
    indices[scored] = scored
    tokens = _tokens(shapes)
    batch = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
    state = params, jax.eval_shape(optimizer.init, params)
    frozen = {
        name: jax.ShapeDtypeStruct(layout.file_shape, dtype)
        for name, layout in layouts_of(sizes)[0].items()
    }
    return Step(
        step,
        (state, frozen, (scored, indices), batch),
        shapes.batch * (shapes.length - 1) * shapes.gamma,
    )


def _tokens(shapes: Shapes) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, shapes.vocabulary, (shapes.batch, shapes.length))
    return tokens.astype(np.int32)
