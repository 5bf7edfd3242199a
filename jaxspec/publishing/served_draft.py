"""Check text drafts that vLLM serves (`"method": "draft_model"`).

vLLM hands a text draft the target's expanded token ids: an image is its placeholder, once for each
of its slots (view T-slots). Longer rows than the draft's context are decoded without it.
"""

from __future__ import annotations

from pathlib import Path

from jaxspec.config import LvlmConfig, ModelConfig, RotaryConfig, text_config
from jaxspec.errors import InputError
from jaxspec.heads.files import vllm_command

LAST_REFUSING = "0.20.2"
"""Newest version of vLLM that refuses drafts for targets with images."""


def check_served(source: Path, config: ModelConfig, engine: str, padded: bool) -> None:
    """Raise InputError for a draft that the engine refuses.

    Args:
      padded: Whether the vocabulary is padded to the size of a target's.
    """
    if engine != "vllm":
        raise InputError(f"{source}: not a draft head; a draft model is written only for vllm")
    if isinstance(config, LvlmConfig):
        raise InputError(f"{source}: vLLM shows drafts no images; give a text model or --text-only")
    scaling = config.rope_scaling if isinstance(config, RotaryConfig) else None
    if scaling is not None and scaling.mrope_section:
        raise InputError(f"{source}: vLLM takes no draft with M-RoPE; give another")
    if not padded:
        raise InputError(
            f"{source}: vLLM takes a draft with the vocabulary size of its target; give vocab-of, "
            "and no draft-vocabulary"
        )


def draft_command(path: str, target: str, config: ModelConfig, served: ModelConfig) -> str:
    """Return the command that serves a target with a text draft, and its limits."""
    lines = [vllm_command(target, method="draft_model", model=path, num_speculative_tokens=3)]
    context, whole = (text_config(model).context for model in (config, served))
    if context < whole:
        lines.append(f"Rows longer than {context} of the target's {whole} tokens get no draft.")
    if isinstance(served, LvlmConfig):
        lines.append(
            f"vLLM {LAST_REFUSING} and older refuse drafts for a target with images. Newer ones "
            "show them as view T-slots does."
        )
    return "\n".join(lines)
