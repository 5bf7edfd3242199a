"""Write tiny LLaVA checkpoints, with tokeniser and image processor: random weights, real files."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoints import huggingface
from jaxspec.config import Gemma4TextConfig, LlamaConfig, LlavaConfig, ModelConfig, VisionConfig
from jaxspec.heads import loading
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.making import init_head
from jaxspec.typing import Params
from tests.tiny.models import noisy, random_params

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<image>")
CHARACTERS = "\n" + string.printable[:95]
PAIR_CONTEXT = 512

CONFIG = LlavaConfig(
    LlamaConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS) + 3,  # three rows of padding
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=PAIR_CONTEXT,
    ),
    VisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    ),
    image_token_index=SPECIAL.index("<image>"),
)


def gemma4(kinds: tuple[str, ...], sliding_window: int, **changes: Any) -> Gemma4TextConfig:
    """Return Gemma 4 31B's decoder with layers of these kinds, over the vocabulary of `CONFIG`."""
    config = Gemma4TextConfig(
        vocab_size=CONFIG.text_config.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=sliding_window,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        head_dim=8,
        global_head_dim=16,
        final_logit_softcapping=30.0,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    return replace(config, **changes)


E2B: dict[str, Any] = {
    **{"attention_k_eq_v": False, "num_global_key_value_heads": None, "num_key_value_heads": 1},
    **{"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
}
"""Changes that make E2B's decoder of it, with two layers that make no keys."""


def tokenizer(characters: str = CHARACTERS) -> Any:
    """Return a tokeniser with one token a character, so that any printable text survives encoding
    and decoding.
    """
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return character_tokenizer(SPECIAL, characters, "<unk>", unk_token="<unk>", **names)


def character_tokenizer(
    special: Sequence[str], characters: str, unknown: str, **options: Any
) -> Any:
    """Return ids of special tokens, then of characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*special, *characters))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    core.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, **options)


def chat_tokenizer() -> Any:
    """Return a tokeniser with a chat template, for models that are not asked in Vicuna's form."""
    words = tokenizer()
    words.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}assistant:"
    )
    return words


def image_processor() -> Any:
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})


def save_pair(directory: Path) -> tuple[Path, Path]:
    """Write a target and a draft that looks through the same tower, as Hugging Face directories."""
    params = random_params(CONFIG)
    draft = noisy(params, 0.1) | {"vision_tower": params["vision_tower"]}
    short = replace(
        CONFIG, text_config=replace(CONFIG.text_config, max_position_embeddings=PAIR_CONTEXT // 4)
    )
    save(directory / "target", CONFIG, params)
    save(directory / "draft", short, draft)
    save_head(directory / "head", CONFIG, params)
    return directory / "target", directory / "draft"


def save_head(path: Path, target: LlavaConfig, params: Params) -> None:
    """Return a KV head that begins as the target's last layer."""
    config = KVHeadConfig.of_target(target, image_slots=1, slot_bias=True, target_name="target")
    loading.save_head(
        path, config, init_head(config, params["language_model"], jax.random.key(0)), np.float32
    )


def rewritten(
    head: Path,
    path: Path,
    change: Mapping[str, Any] | Callable[[dict[str, Any]], Any],
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """Return a copy of a head with changed entries of config.json, and with these tensors; None
    removes one.
    """
    raw = json.loads((head / "config.json").read_text())
    if callable(change):
        change(raw)
    else:
        removed = {name for name, value in change.items() if value is None}
        raw = {name: value for name, value in (raw | change).items() if name not in removed}
    stored = load_file(head / "model.safetensors") | (tensors or {})
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    kept = {name: leaf for name, leaf in stored.items() if leaf is not None}
    save_file(kept, path / "model.safetensors")
    return path


def save(path: Path, config: ModelConfig, params: Params, words: Any | None = None) -> Path:
    sees = image_processor() if isinstance(config, LlavaConfig) else None
    options = huggingface.SaveOptions(overwrite=True)
    huggingface.save(
        path, config, params, options, tokenizer=words or tokenizer(), image_processor=sees
    )
    return path
