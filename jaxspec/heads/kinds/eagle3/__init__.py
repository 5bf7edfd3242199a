"""Define EAGLE-3's head (Li et al. 2025, arXiv 2503.01840), from hidden states of its target.

It has one layer, keys and values of its own, and its own output matrix. The state that it reads of
the target is `fc` of some hidden states; for a token that it drafted itself it is its own output.
The target's states are those after DeepStack's addition, as in vLLM, for which these heads are
published; those of transformers 5 and of SGLang are before it. They differ only at image slots.

Two layouts exist, which vLLM, SGLang and tpu-inference load. SafeAILab's and SpecForge's has a
Llama's entries at the top level. speculators' has them under `transformer_layer_config`.

Numbers of target layers are vLLM's: i is the hidden state after i layers, 0 the embedding. So is
`eagle_aux_hidden_state_layer_ids` at the top level. The same entry within `eagle_config` counts the
layers from 0 and names their outputs, as SGLang and ModelOpt read and write it: 1 is the hidden
state after 2 layers. So does `target_layer_ids` in DeepSeek's `Qwen3Eagle3Model` and
`Gemma4Eagle3Model`, which name five.

The tensors of the first layout:

| tensor                                                                  | shape               |
|-------------------------------------------------------------------------|---------------------|
| `fc.weight`                                                             | [D, n target D]     |
| `input_norm.weight`                                                     | norm_before_fc      |
| `fc_norm.i.weight`                                                      | fc_norm             |
| `midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight` | [D]                |
| `midlayer.self_attn.{q,k,v}_proj.weight`                                | [out, 2 D]          |
| `midlayer.self_attn.o_proj.weight`, `midlayer.mlp.*_proj.weight`        | as a Llama's        |
| `norm.weight`                                                           | [D]                 |
| `midlayer.self_attn.{q,k}_norm.weight`                                  | optional (Qwen3's)  |
| `lm_head.weight`                                                        | optional, [words, D] |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 or int32 [draft words]                                      | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

`fc` reads n states, three or as many as config.json names. speculators' and DeepSeek's layer is
`layers.0`; speculators' config.json nests the decoder. DeepSeek's layer for Gemma 4 is a full one
of the target's, whose queries and keys are made of both vectors; its embedding and its scores have
Gemma's factor and cap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxspec.errors import InputError
from jaxspec.heads import files
from jaxspec.heads.files import Arrays, Server, Stored
from jaxspec.heads.head import Fused
from jaxspec.heads.kinds import eagle1
from jaxspec.heads.kinds.eagle3 import config as layouts
from jaxspec.heads.kinds.eagle3.config import Eagle3Config, EagleConfig, GemmaEagleConfig
from jaxspec.heads.states import StateHead, StateKind
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import Dense, RMSNorm, text_norm
from jaxspec.typing import Array, Float, Vectors

_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_OUTER = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"),
    *("eagle_aux_hidden_state_layer_ids", "jaxspec", "torch_dtype"),
)
"""Entries at the top level of speculators' config.json."""


class FusedLayer(Layer):
    """Run EAGLE-3's layer, whose attention reads an embedding and a hidden state side by side."""

    config: EagleConfig | GemmaEagleConfig

    def setup(self) -> None:
        super().setup()
        self.hidden_norm = text_norm(self.config)

    def normed(self, x: Float[Array, "B T both"]) -> tuple[Array, Array]:
        embeds, hidden = jnp.split(x, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        stream = normed if self.config.norm_before_residual else hidden
        return jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1), stream


class Eagle3Head(StateHead):
    """Hold an EAGLE-3 head's `fc`, norms and layer."""

    config: Eagle3Config

    layer: ClassVar[Callable[..., Any]] = FusedLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.norm = text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)
        if text.fc_norm:
            self.fc_norm = [RMSNorm(text.rms_norm_eps) for _ in range(self.config.states)]

    def combine(self, states: Fused) -> Vectors:
        """Return `fc` of the states, normed together (`norm_before_fc`), one by one
        (`fc_norm`), or as they are."""
        text = self.config.text_config
        if text.norm_before_fc:
            states = self.input_norm(states)
        if text.fc_norm:
            parts = jnp.split(states, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        return self.fc(states)

    def fuse(self, embeds: Vectors, before: Vectors, context: Any, slots: Any) -> Array:
        return jnp.concatenate([embeds, before], axis=-1)

    def closed(self, x: Vectors) -> tuple[Vectors, Vectors]:
        normed = self.norm(x)
        return normed, normed if self.config.text_config.norm_output else x


@dataclass(frozen=True)
class Eagle3Kind(StateKind[Eagle3Config]):
    """Read heads in either public layout, and write them for the programs that serve them."""

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        """Know heads by their names, by `draft_vocab_size` or by their tensors.

        Some trainers write their target's architecture and depth.
        """
        if eagle1.has_tensors(tensors):
            return False
        is_named = any("eagle3" in name for name in names)
        has_vocabulary = raw.get("draft_vocab_size") is not None
        has_norm = any(name.endswith("hidden_norm.weight") for name in tensors)
        return is_named or has_vocabulary or ("fc.weight" in tensors and has_norm)

    def completed(self, config: Eagle3Config, stored: Stored) -> tuple[Eagle3Config, Stored]:
        """Return the configuration with its draft vocabulary and the optional tensors it has.

        A head without an output matrix uses the target's.

        Raises InputError for a draft vocabulary that is not a list of the target's tokens, for
        heads with more layers, and for heads that borrow a matrix from a target of another width.
        """
        stored = files.renamed(
            config.title, stored, lambda name: _LAYER.sub("layers.0.", name.removeprefix("model."))
        )
        files.check_one_layer(config.title, stored)
        text: Any = replace(
            config.text_config,
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        width, targets = text.hidden_size, text.target_hidden_size
        if width != targets and not (text.own_embedding and text.own_output):
            raise InputError(
                f"{config.title}: width {width}, but it borrows embed_tokens or lm_head from a "
                f"target of width {targets}; give a head that has both"
            )
        if isinstance(text, EagleConfig):
            text = replace(text, qk_norm="layers.0.self_attn.q_norm.weight" in stored)
        text = replace(text, draft_vocabulary=files.draft_words(config.title, stored, text))
        parameters = {name: stored[name] for name in stored if name not in ("d2t", "t2d")}
        return replace(config, text_config=text), parameters

    def written(
        self, config: Eagle3Config, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        """Return the entries and tensors in EAGLE's layout, or in speculators'."""
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        tensors = files.with_words(config.text_config, tensors)
        if isinstance(config.text_config, GemmaEagleConfig):
            return raw, tensors
        if server != "speculators":
            return raw, {_LAYER.sub("midlayer.", name): leaf for name, leaf in tensors.items()}
        outside = (*_OUTER, "eagle_config", "architectures")
        inner = {key: value for key, value in raw.items() if key not in outside}
        target_size = inner.pop("target_hidden_size")
        return {
            "architectures": [layouts.SPECULATORS[0]],
            "transformer_layer_config": inner,
            "target_hidden_size": None if target_size == inner["hidden_size"] else target_size,
            "tie_word_embeddings": False,
            **{key: raw[key] for key in _OUTER},
            **files.speculators_entries("eagle3", config, architectures),
        }, tensors

    def refusal(self, config: Eagle3Config, server: Server) -> str:
        text, unread = config.text_config, ["qk_norm"]
        if server == "sglang":
            unread += ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
        if names := [name for name in unread if getattr(text, name)]:
            return f"has {', '.join(names)}, which {server} does not read"
        if server == "sglang" and 0 in text.target_layers:
            return "reads the target's embedding, and sglang only layers' outputs"
        return ""

    def facts(self, config: Eagle3Config) -> dict[str, str]:
        return {"image rule": config.images} | files.window_facts(config.text_config)

    def command(self, config: Eagle3Config, path: str, server: Server) -> str:
        target, count = config.target_name, min(config.gamma, 3)
        if server == "speculators":
            return f"vllm serve {shlex.quote(path)}"
        if server == "sglang":
            steps = (
                f" --speculative-num-steps {count} --speculative-eagle-topk 1"
                f" --speculative-num-draft-tokens {count + 1}"
            )
            return files.sglang_command(target, "EAGLE3", path, steps)
        return files.vllm_command(target, method="eagle3", model=path, num_speculative_tokens=count)


KIND = Eagle3Kind(
    config=Eagle3Config,
    module=Eagle3Head,
    titles=("EAGLE-3",),
    about="EAGLE-3 head: a draft that reads hidden states of its target",
    features=("fused",),
    options=("images", "layers", "target_layers", "window"),
    axes=((r"fc/weight", (None, "embed")),),
)
