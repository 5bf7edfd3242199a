"""Define DFlash's head (Chen et al. 2026, arXiv 2602.06036), which drafts a block in one pass.

Its layers are Qwen3's, or Gemma 4's full ones. They read keys and values of two kinds: of committed
tokens, made of the target's hidden states c = norm(fc(states)), which no layer changes, so that
each layer's are made once a token; and of the block. With gamma = 2 and the newest token x, a block
is x m m, and the slots of the masks m score their own tokens. In full layers all tokens of a block
see each other. Sliding layers read the newest committed tokens only, and are causal in a block
unless the file says otherwise: z-lab's head for Gemma 4 31B, whose file does not, writes 5.62
tokens per pass so and 5.27 otherwise (SGLang, pull request 34524).

DSpark's slots score the token after them: its block is x m. Its Markov head adds W2 W1[t] to the
scores of the token after t.

Two public layouts exist. z-lab's has the layers' entries of config.json at the top level, counts
target layers from 0 and names their outputs. speculators' has them under
`transformer_layer_config`, and its numbers are hidden states after so many layers. z-lab's 1 is
speculators' 2, and here 2. The tensors are named alike:

| tensor                                                          | shape                          |
|-----------------------------------------------------------------|--------------------------------|
| `fc.weight`                                                     | [D, n D] of n target states    |
| `hidden_norm.weight`, `norm.weight`                             | [D]                            |
| `layers.i.*`                                                    | as a Qwen3's or a Gemma 4's    |
| `markov_head.markov_w1.weight`, `markov_w2.weight`              | DSpark: [V, r], [words, r]     |
| `embed_tokens.weight`, `lm_head.weight`                         | optional: [V, D], [words, D]   |
| `d2t`, `t2d`                                                    | see `heads/files.py`           |

A head for a Gemma 4 reads and scores as its trainer did: z-lab's borrow the target's embedding with
its factor, and its output matrix with its cap; DeepSeek's have both matrices, factor and cap of
their own; speculators' have copies of the matrices, and neither factor nor cap.

`confidence_head.proj` (DSpark) predicts where a block should end. No score depends on it. It is
kept and written again, but blocks are not cut: a pass reads the same number of tokens either way.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.config.text import RotaryConfig
from jaxspec.heads import files
from jaxspec.heads.files import Arrays, Kind, Server, Stored
from jaxspec.heads.head import BlockAttention, Fused, KeyedHead, Prompt, Reading, Slots, cache_of
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import INIT, Dense, text_norm
from jaxspec.typing import Array, Float, Int, Params, Vectors

_UNREAD = re.compile(r"verifier_(norm|lm_head)\.|(d2t|t2d)$")
"""Tensors that no score depends on, or that the configuration holds."""


class MarkovHead(nn.Module):
    """Return what tokens add to the scores of their followers, by a matrix of low rank."""

    config: DFlashConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = nn.Embed(c.text_config.vocab_size, c.markov, embedding_init=INIT)
        self.markov_w2 = Dense(c.text_config.scored_tokens, bias=False, widens=True)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T words"]:
        return self.markov_w2(self.markov_w1(tokens)).astype(jnp.float32)


class CausalAttention(BlockAttention):
    """Attend to segments, and to the tokens of the own block up to the query's."""

    def __call__(self, x: Vectors, at: Any, cache: Any) -> tuple[Vectors, Any]:
        queries, count = at.seen.shape[-2:]
        before = jnp.tile(jnp.tri(count, dtype=bool), (queries // count, 1))
        return super().__call__(x, at.replace(seen=at.seen & before), cache)


class DFlashHead(KeyedHead):
    """Hold a head's parameters, and compute its blocks."""

    config: DFlashConfig

    in_one_pass: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    reads_before: ClassVar[bool] = False

    def setup(self) -> None:
        text = self.config.text_config
        each = [text.of_layer(layer) for layer in range(text.num_hidden_layers)]
        self.layers = [Layer(layer, self._attention(layer)) for layer in each]
        self.norm, self.hidden_norm = text_norm(text), text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if self.config.markov:
            self.markov_head = MarkovHead(self.config)

    def _attention(self, layer: RotaryConfig) -> type[BlockAttention]:
        slides = layer.sliding_window is not None
        return CausalAttention if slides and self.config.causal else BlockAttention

    def context(self, reading: Reading, prompt: Prompt) -> KVCache:
        assert reading.states is not None
        slots = prompt.rotary
        return cache_of(self.keys(reading.states[:, : slots.shape[1]], None, slots, slots, None))

    def keys(
        self, states: Fused, after: Vectors | None, slots: Slots, rotary: Slots, context: Any
    ) -> list[tuple[Array, Array]]:
        combined = self.hidden_norm(self.fc(states))
        return [layer.self_attn.keys_values(combined, rotary) for layer in self.layers]

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens add to the scores of their followers."""
        return self.markov_head(tokens)

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> dict[str, Any]:
        """Return what `Head.initial` does, with a Markov head that adds nothing at first."""
        c, text = self.config, self.config.text_config
        params = super().initial(target, key)
        if c.markov:
            params["markov_head"] = {
                "markov_w1": {"embedding": INIT(key, (text.vocab_size, c.markov), jnp.float32)},
                "markov_w2": {"weight": jnp.zeros((text.scored_tokens, c.markov))},
            }
        if c.confidence:
            proj = {"weight": jnp.zeros((1, c.confidence)), "bias": jnp.zeros(1)}
            params["confidence_head"] = {"proj": proj}
        return params


@dataclass(frozen=True)
class DFlashKind(Kind[DFlashConfig]):
    """Read heads in any public layout, and write them for the programs that serve them."""

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        return "hidden_norm.weight" in tensors or "dflash_config" in raw

    unread = ("mask_embedding.pt",)  # vLLM's, in place of the mask token's embedding

    def completed(self, config: DFlashConfig, stored: Stored) -> tuple[DFlashConfig, Stored]:
        """Complete the configuration by the optional tensors that the file has."""
        stored = files.renamed(config.title, stored, lambda name: name.removeprefix("model."))
        vocabulary = files.draft_words(config.title, stored, config.text_config)
        confidence = stored.get("confidence_head.proj.weight")
        config = replace(
            config,
            confidence=confidence.shape[-1] if confidence else 0,
            text_config=replace(config.text_config, draft_vocabulary=vocabulary),
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        return config, {name: stored[name] for name in stored if not _UNREAD.match(name)}

    def written(
        self, config: DFlashConfig, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        """Return the entries of z-lab's or of speculators' config.json, and the tensors."""
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        if config.text_config.draft_vocabulary:
            tensors = files.with_words(config.text_config, tensors)
        if server != "speculators":
            return raw, tensors
        layers = {*config.text_config.to_hf(), "layer_types"} - {"architectures"}
        elsewhere = {*layers, "architectures", "dflash_config", "target_layer_ids", "is_causal"}
        free = {} if config.causal else {"sliding_window_non_causal": True}
        inner = {name: raw[name] for name in raw if name in layers}
        if (window := config.text_config.sliding_window) is not None:
            inner["sliding_window"] = window - 1  # see `_qwen3_layers`
        kind = "dspark" if config.of_dspark else "dflash"
        return {
            "architectures": ["DSparkDraftModel" if config.of_dspark else "DFlashDraftModel"],
            "transformer_layer_config": inner,
            "aux_hidden_state_layer_ids": list(config.target_layers),
            "mask_token_id": config.mask_token,
            "tie_word_embeddings": False,
            **{name: raw[name] for name in raw if name not in elsewhere},
            **free,
            **files.speculators_entries(kind, config, architectures),
        }, tensors

    def refusal(self, config: DFlashConfig, server: Server) -> str:
        text, part = config.text_config, ""
        if server == "sglang" and config.keeps_vocabulary:
            part = "its own output matrix, vocabulary or Markov head"
        scaled = text.embed_scale != 1 or text.final_logit_softcapping is not None
        if server == "speculators" and scaled:
            part = "an embedding with a factor, or scores with a cap"
        return part and f"has {part}, which {server} does not read"

    def command(self, config: DFlashConfig, path: str, server: Server) -> str:
        target = config.target_name
        if server == "speculators":
            return f"vllm serve {shlex.quote(path)}"
        if server == "sglang":
            return files.sglang_command(target, "DFLASH", path)
        method, count = self.tag(config), config.gamma
        return files.vllm_command(target, method=method, model=path, num_speculative_tokens=count)

    def tag(self, config: DFlashConfig) -> str:
        return "dspark" if config.of_dspark else "dflash"

    def facts(self, config: DFlashConfig) -> dict[str, str]:
        layers = ", ".join(map(str, config.target_layers))
        slot = "newest token" if config.anchored else "first mask"
        facts = {
            "reads": f"the target's hidden states after layers {layers}",
            "drafts": f"{config.gamma} tokens per pass; the {slot}'s slot scores the first",
        }
        facts |= files.window_facts(config.text_config)
        facts |= {"Markov head": f"rank {config.markov}"} if config.markov else {}
        return facts | ({"confidence head": "kept, not used"} if config.confidence else {})


KIND = DFlashKind(
    config=DFlashConfig,
    module=DFlashHead,
    titles=("DFlash", "DSpark"),
    about="DFlash head: a draft of a block in one pass, from hidden states of its target",
    features=("block",),
    options=("layers", "target_layers", "markov", "mask_token", "anchored", "window"),
    names="dflash|dspark",
    axes=(
        (r"fc/weight", (None, "embed")),
        (r"markov_head/markov_w1/embedding|markov_head/markov_w2/weight", ()),
        (r"confidence_head/proj/(?:weight|bias)", ()),
    ),
)
