"""Describe a DFlash head, to and from config.json in any layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.schema import known_fields
from jaxspec.config.text import FULL, Qwen3Config, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads import config as shared
from jaxspec.heads.config import HeadConfig

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel", "Gemma4DSparkModel")
"""Names in config.json: z-lab's, and DSpark's own of both kinds of layers."""
_NEUTRAL = {"markov_head_type": "vanilla"}
"""Entries with the value for which a head computes as it does here."""
_NEEDED = {
    "block_size": "the slots of a block",
    "mask_token_id": "the token whose embedding stands for those to draft",
}
"""Entries without which a head cannot be read, and their meaning."""
_READ = frozenset(
    {
        *("rms_norm_eps", "dflash_config", "draft_vocab_size", "num_target_layers"),
        *("block_size", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal"),
        *("markov_rank", "sample_from_anchor", "target_hidden_size", "mask_token_id"),
        *("target_layer_ids", "aux_hidden_state_layer_ids", "rope_scaling", "num_anchors"),
        *("causal", "is_causal", "final_logit_softcapping"),
    }
)
_SLIDING = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Entries that say which layers slide, at the top level or within."""
_OF_HEADS = re.compile(
    "norm|scale|scaling|softcap|multiplier|neox|conv|selector|sink|gate|causal|swa|window|fc|mask"
    "|predicts"
)
"""Parts of the names of entries that may change a head's computation."""


@dataclass(frozen=True)
class DFlashText(Qwen3Config):
    """Describe layers of Qwen3, which may read and score as a target of another family does."""

    embed_scale: float = 1.0  # pyright: ignore
    final_logit_softcapping: float | None = None  # pyright: ignore

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        del out["embed_scale"]
        if self.final_logit_softcapping is None:
            del out["final_logit_softcapping"]
        return out


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """Describe a head whose one pass reads the newest token and masks, each seeing all others."""

    text_config: DFlashText | Gemma4TextConfig
    mask_token: int = 0  # pyright: ignore
    """Token whose embedding replaces those of the tokens to draft."""
    target_layers: tuple[int, ...] = ()
    """Hidden states of the target that `fc` reads: 2 is the state after two layers."""
    target_depth: int = 0
    """Layers of the target; 0 if the head's files do not say."""
    anchored: bool = False
    """Whether each slot of a block scores the token after it, the newest token's too (DSpark).
    Otherwise a mask's slot scores its own token, and a block has one slot more than drafts."""
    markov: int = 0  # pyright: ignore
    """r: rank of DSpark's Markov head, which adds a term for the token before to a token's score;
    0: none."""
    own_embedding: bool = False  # pyright: ignore
    """Whether the head has an embedding of its own, not the target's."""
    scaled: bool = True
    """Whether it reads a Gemma's embedding with the Gemma's factor, and scores by its output matrix
    with its cap, as z-lab's heads were trained; speculators' were trained without."""
    own_output: bool = False
    """Whether the head has an output matrix of its own; one with a draft vocabulary always has."""
    confidence: int = 0
    """Numbers of a slot that DSpark's confidence head reads; 0 without one."""
    causal: bool = True
    """Whether a block's token sees only those up to itself in sliding layers. In full layers it
    sees all."""

    title: ClassVar = "DFlash head"
    name: ClassVar = "dflash"
    model_type: ClassVar = title
    start_decides: ClassVar = True
    orders_vocabulary: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, vocabulary = list(self.target_layers), self.text_config.vocab_size
        if not layers or layers != sorted(set(layers)) or layers[0] < 0:
            raise InputError(f"DFlash head: reads target layers {layers}; give them in order")
        if not 0 <= self.mask_token < vocabulary:
            raise InputError(f"DFlash head: mask token {self.mask_token} of {vocabulary} tokens")

    def slots_of(self, gamma: int) -> int:
        """Return the slots of a block that drafts this many tokens."""
        return gamma + (not self.anchored)

    @property
    def of_dspark(self) -> bool:
        """Return whether the head has DSpark's form: anchored, or with a Markov head."""
        return self.anchored or self.markov > 0

    @property
    def is_gemma(self) -> bool:
        """Return whether the head's layers are Gemma 4's."""
        return isinstance(self.text_config, Gemma4TextConfig)

    @property
    def has_output(self) -> bool:
        """Return whether the head's output matrix is a parameter."""
        return self.own_output or bool(self.text_config.draft_vocabulary)

    @property
    def target_states(self) -> tuple[int, ...]:
        return self.target_layers

    @property
    def reads(self) -> tuple[Any, ...]:
        return "states", self.target_states

    @property
    def keeps_vocabulary(self) -> bool:
        return self.has_output or self.markov > 0

    @property
    def fixed(self) -> tuple[str, ...]:
        return ("confidence_head",) if self.confidence else ()

    @property
    def kept_options(self) -> dict[str, Any]:
        layers = self.text_config.num_hidden_layers
        options = {"layers": layers, "target_layers": self.target_layers, "markov": self.markov}
        return options | {"window": self.text_config.sliding_window or 0}

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        """Take the depth of the target, and how its embedding and its output matrix are scaled."""
        decoder, layers, depth = self.text_config, self.target_layers, text.num_hidden_layers
        fits = layers[-1] < depth and self.target_depth in (0, depth)
        expected = decoder.hidden_size, decoder.vocab_size
        if not fits or (text.hidden_size, text.vocab_size) != expected:
            raise self._misfit(target, *expected, f", with layers {list(layers)}")
        tied = text.tie_word_embeddings and not self.has_output and not self.own_embedding
        decoder = replace(decoder, tie_word_embeddings=tied)
        if isinstance(decoder, DFlashText) and self.scaled:
            if not self.own_embedding:
                decoder = replace(decoder, embed_scale=text.embed_scale)
            if not self.has_output and decoder.final_logit_softcapping is None:
                cap = text.final_logit_softcapping
                decoder = replace(decoder, final_logit_softcapping=cap)
        return replace(self, text_config=decoder, target_depth=depth)

    @classmethod
    def of_target(
        cls,
        target: Any,
        layers: int = 5,
        target_layers: tuple[int, ...] = (),
        mask_token: int | None = None,
        window: int = 0,
        **options: Any,
    ) -> Self:
        """Return the configuration of a new head for a target, with layers of the target's sizes.

        Rotary positions are the target's slots, also where the target has M-RoPE.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head, and by default the number of states that it reads.
          target_layers: Hidden states that it reads; () means `usual_layers`.
          mask_token: By default the last one, which padded vocabularies do not use.
          window: Newest tokens that its layers read; 0 reads all.
          options: Further fields.
        """
        text = shared.check_rotary(target)
        decoder = DFlashText(
            **shared.shared_sizes(text),
            num_hidden_layers=layers,
            tie_word_embeddings=text.tie_word_embeddings,
            rope_scaling=text.rope_scaling.one_axis,
            sliding_window=window or None,
        )
        head = cls(
            decoder,
            shared.target_hash(target),
            mask_token=text.vocab_size - 1 if mask_token is None else mask_token,
            target_layers=tuple(target_layers) or usual_layers(text.num_hidden_layers, layers),
            target_depth=text.num_hidden_layers,
            **options,
        )
        return head.for_target(target)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Read any public layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`.
        """
        with reading("DFlash head: config.json is not readable", "fetch it again"):
            entries = {**raw, **(raw.get("dflash_config") or {})}
            layers = raw.get("transformer_layer_config") or raw
            whole = {**layers, **entries}
            shared.check_entries(cls.title, whole, _NEUTRAL, _OF_HEADS, _READ)
            for key, meaning in _NEEDED.items():
                if entries.get(key) is None:
                    raise InputError(f"{cls.title}: config.json lacks {key}; add {meaning}")
            extra, spec = raw.get("jaxspec") or {}, raw.get("speculators_config") or {}
            if str(layers.get("model_type")).startswith("gemma4"):
                text = shared.gemma4_layers(cls.title, layers)
            else:
                text = _qwen3_layers(layers, entries, speculators="speculators_model_type" in raw)
            vocabulary = shared.placeholder_words(cls.title, entries, text.vocab_size)
            text = replace(text, draft_vocabulary=vocabulary)
            if "aux_hidden_state_layer_ids" in entries:
                states = entries["aux_hidden_state_layer_ids"]
            else:
                outputs = entries.get("target_layer_ids") or _outputs(
                    entries["num_target_layers"], text.num_hidden_layers
                )
                states = [layer + 1 for layer in outputs]
            markov = entries.get("markov_rank") or 0
            anchored = entries.get("sample_from_anchor")
            if anchored is None:
                anchored = _is_anchored(raw, markov)
            fields = known_fields(
                cls,
                {
                    "target_hash": extra.get("target_hash"),
                    "target_name": extra.get("target_name")
                    or (spec.get("verifier") or {}).get("name_or_path"),
                    "mask_token": entries["mask_token_id"],
                    "target_layers": states,
                    "target_depth": entries.get("num_target_layers"),
                    "anchored": anchored,
                    "scaled": "speculators_model_type" not in raw,
                    "markov": markov,
                    "gamma": entries["block_size"] - (not anchored),
                    "causal": _is_causal(text, whole),
                },
            )
            return cls(**{"text_config": text, "target_hash": ""} | fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the entries in z-lab's layout, or in DSpark's own."""
        out = self.text_config.to_hf() | {"tie_word_embeddings": False}
        out.pop("draft_vocabulary", None)
        states = {
            "mask_token_id": self.mask_token,
            "target_layer_ids": [layer - 1 for layer in self.target_layers],
        }
        dspark = self.of_dspark or self.is_gemma
        kind = states if dspark else {"dflash_config": states}
        if dspark:
            kind |= {"markov_rank": self.markov, "markov_head_type": "vanilla"}
            reads_token = {"confidence_head_with_markov": self.confidence > out["hidden_size"]}
            kind |= {"enable_confidence_head": self.confidence > 0}
            kind |= reads_token if self.confidence else {}
        kind |= {} if self.causal else {"is_causal": False}
        layer_types = {"layer_types": [FULL] * self.text_config.num_hidden_layers}
        return {
            **(layer_types | out | kind),
            "architectures": [ARCHITECTURES[dspark + self.is_gemma]],
            "block_size": self.slots_of(self.gamma),
            "num_target_layers": self.target_depth or self.target_layers[-1] + 1,
            "draft_vocab_size": self.text_config.scored_tokens,
            "sample_from_anchor": self.anchored,
            "jaxspec": {"target_hash": self.target_hash, "target_name": self.target_name},
        }


def _qwen3_layers(
    layers: Mapping[str, Any], entries: Mapping[str, Any], speculators: bool
) -> DFlashText:
    """Return the configuration of a Qwen3's layers.

    speculators: Whether its window is the number of slots before the block, as in speculators'
      files. Elsewhere the window counts the newest token too, as here.
    """
    heads = {"head_dim": layers["hidden_size"] // layers["num_attention_heads"]}
    fixed = {"model_type": Qwen3Config.model_type, "draft_vocabulary": None}
    usual = {} if layers.get("model_type") == Qwen3Config.model_type else heads
    sliding = {name: entries[name] for name in _SLIDING if name in entries}
    raw = {**usual, **layers, **fixed, **sliding}
    window, kinds = shared.windows_of(raw)
    text = DFlashText.from_hf(raw | {"use_sliding_window": window is not None})
    return replace(
        text,
        rope_scaling=text.rope_scaling.one_axis,
        tie_word_embeddings=False,
        # one as long as the context is kept, since its layers may be causal in a block
        sliding_window=None if window is None else window + speculators,
        layer_types=kinds,
    )


def _is_causal(text: RotaryConfig, entries: Mapping[str, Any]) -> bool:
    """Return whether sliding layers are causal in a block, by default true.

    Raises InputError for causal full layers.
    """
    stated = [entries.get(name) for name in ("is_causal", "causal")]
    full = text.sliding_window is None or FULL in text.layer_types
    if True in stated and full:
        raise InputError("DFlash head: is_causal true in full layers is not supported")
    if text.sliding_window is None:
        return True
    return not (False in stated or entries.get("sliding_window_non_causal"))


def _is_anchored(raw: Mapping[str, Any], markov: int) -> bool:
    """Return whether a head is anchored whose config.json does not say so.

    speculators' DSpark heads are since 0.7.0, as its classes and vLLM read files without the entry.
    Development versions of 0.7.0 that left it out trained the other form.
    """
    kind, version = raw.get("speculators_model_type"), str(raw.get("speculators_version") or "")
    if kind is not None:
        older = re.match(r"0\.[0-6]\.|0\.7\.0\.?(dev|a|b|rc)", version)
        return kind == "dspark" and not older
    names = raw.get("architectures") or ()
    return markov > 0 or any("dspark" in str(name).lower() for name in names)


def _outputs(depth: int, count: int) -> list[int]:
    """Return z-lab's numbers of the layers whose outputs a head of `count` layers reads."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def usual_layers(depth: int, count: int) -> tuple[int, ...]:
    """Return the states of a target of `depth` layers that heads of `count` layers read."""
    layers = tuple(layer + 1 for layer in _outputs(depth, count))
    if sorted(set(layers)) != list(layers) or layers[-1] >= depth:
        raise InputError(
            f"DFlash head: layers {list(layers)} of {depth}; give target_layers "
            "(--head.target-layers), in order"
        )
    return layers
