"""Configure an EAGLE-1 head, which reads its target's last hidden state, as config.json does.

EAGLE, EAGLE-2 and MSD have this layout. config.json has a Llama's entries at the top level, with
the target's class as its architecture. Two more entries are optional: `bias` for `fc`, true by
default, and `qkv_bias`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.heads.head import check_entries, check_rotary, shared_sizes
from jaxspec.config.heads.states import StateHeadConfig
from jaxspec.config.heads.target import target_hash
from jaxspec.config.schema import known_fields
from jaxspec.config.text import Biases, LlamaConfig, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading

_SPARE = 64
"""Most padding tokens by which a target's vocabulary exceeds the head's embedding."""


@dataclass(frozen=True)
class Eagle1Text(LlamaConfig):
    """Describe one Llama layer without a final norm."""

    fc_bias: bool = True
    """Whether `fc` has a bias."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    input_norm: bool = False
    """Whether a norm precedes its attention: only in MSD for Qwen2-VL and Qwen2.5-VL."""
    own_embedding: bool = True
    """Whether the head has an embedding of its own, not the target's."""
    rows: int = 0
    """Rows of that embedding; 0 means as many as tokens. The last row is for tokens past it."""

    architecture = "LlamaForCausalLMEagle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers != 1:
            raise InputError(f"EAGLE-1 head: num_hidden_layers {self.num_hidden_layers}; give 1")

    @property
    def biases(self) -> Biases:
        return Biases(qkv=self.qkv_bias)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        rope = raw.get("rope_scaling") or {}
        entries = {**raw, "model_type": cls.model_type, "tie_word_embeddings": False}
        entries |= {"rows": 0, "fc_bias": raw.get("bias")}
        if "mrope_section" in rope:  # the released code gives all three axes the token's slot
            entries["rope_scaling"] = None
        return super().from_hf(entries)

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        rows, bias = out.pop("rows"), out.pop("fc_bias")
        return out | {"vocab_size": rows or self.vocab_size, "bias": bias}


@dataclass(frozen=True)
class Eagle1Config(StateHeadConfig):
    """Describe a head whose `fc` joins a token's embedding and the target's last hidden state."""

    text_config: Eagle1Text

    title: ClassVar = "EAGLE-1 head"
    model_type: ClassVar = title
    rules: ClassVar = ("placeholder", "embedding", "unfused", "zero")

    @property
    def target_states(self) -> tuple[int, ...]:
        return ()

    @property
    def embedding_rows(self) -> int:
        text = self.text_config
        return (text.rows or text.vocab_size) if text.own_embedding else 0

    @property
    def keeps_vocabulary(self) -> bool:
        return False

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        decoder = self.text_config
        width, tokens = decoder.hidden_size, decoder.rows or decoder.vocab_size
        fits = tokens <= text.vocab_size <= tokens + _SPARE * decoder.own_embedding
        if not isinstance(text, RotaryConfig) or text.hidden_size != width or not fits:
            raise InputError(
                f"{self.title}: made for a target{self._named} of width {width} and {tokens} "
                f"tokens, but this {target.model_type} has width {text.hidden_size} and "
                f"{text.vocab_size} tokens; give the head's own target"
            )
        rows = 0 if tokens == text.vocab_size else tokens
        return replace(self, text_config=replace(decoder, vocab_size=text.vocab_size, rows=rows))

    @classmethod
    def of_target(cls, target: Any, **options: Any) -> Self:
        """Return the configuration of a new head for a target, whose embedding it reads.

        options: Fields of the head.
        """
        text = check_rotary(getattr(target, "text_config", target))
        entries = shared_sizes(text)
        if not text.rope_scaling.mrope_section:
            entries["rope_scaling"] = text.rope_scaling
        decoder = Eagle1Text(**entries, num_hidden_layers=1, fc_bias=False, own_embedding=False)
        return cls(decoder, target_hash(target), **options)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            check_entries(cls.title, raw)
            extras = known_fields(cls, raw.get("jaxspec") or {})
            return cls(Eagle1Text.from_hf(raw), extras.pop("target_hash", ""), **extras)

    def to_dict(self) -> dict[str, Any]:
        return self.text_config.to_hf() | {"jaxspec": self.extras}
