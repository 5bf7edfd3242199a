"""Write tokenisers in the forms that the hub's repositories hold them: real files, a few hundred
words.

`files(kind, path)` writes them and returns the words' ids. Llama-2's family is a sentencepiece BPE
with bytes for letters that it lacks; Llama-3, Qwen2 and OPT are byte-level BPE, as GPT-2's.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

CONTROL = {
    "llama2": ("<unk>", "<s>", "</s>"),
    "mistral": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
    "gemma": (
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        *("<start_of_turn>", "<end_of_turn>"),
    ),
    "gemma4": (
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        *("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
    ),
    "opt": ("<s>", "<pad>", "</s>", "<unk>"),
}
"""Tokens that stand before all others."""
ADDED = {
    "llava": ("<image>", "<pad>"),
    "llama3": (
        *(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|finetune_right_pad_id|>",
            "<|start_header_id|>",
        ),
        *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "qwen": (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    "onevision": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    "gemma": ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    "gemma4": ("<|image>", "<image|>", "<|image|>"),
}
"""Tokens that stand behind all others."""
_NAMED = {
    "llama2": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "llava": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "mistral": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    },
    "onevision": {
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
    },
    "opt": {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "</s>"},
    "gemma": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        **{"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "image_token": "<image_soft_token>",
    },
    "gemma4": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        **{"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    },
}
_CLASS = {
    **dict.fromkeys(("llama2", "llava", "mistral"), "LlamaTokenizer"),
    **dict.fromkeys(("qwen", "onevision"), "Qwen2Tokenizer"),
    "llama3": "PreTrainedTokenizerFast",
    "opt": "GPT2Tokenizer",
    **dict.fromkeys(("gemma", "gemma4"), "GemmaTokenizer"),
}
_GPT2_SPLIT = ((" ", "t"), (" t", "h"), (" th", "e"), ("i", "n"))
"""The merges that there are."""
_LINES = (("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"))
"""Gemmas' merges of line ends, which make one token of those around an image."""


_PROCESSORS = {"gemma": "Gemma3Processor", "gemma4": "Gemma4UnifiedProcessor"}
GEMMAS = tuple(_PROCESSORS)


def files(kind: str, path: Path, whole: bool = True, chat: str = "") -> dict[str, int]:
    """Write a tokeniser's files; return its words. Without `whole` there is no tokenizer.json."""
    space = "▁" if kind in ("llama2", "llava", "mistral", *GEMMAS) else "Ġ"
    merges = [(a.replace(" ", space), b) for a, b in _GPT2_SPLIT]
    merges += _LINES if kind in GEMMAS else ()
    pieces = space == "▁"
    control = CONTROL.get("llama2" if kind == "llava" else kind, ())
    letters = (
        [space, *"\n" * (kind in GEMMAS), *string.printable[:94]]
        if pieces
        else sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    named = [f"<0x{byte:02X}>" for byte in range(256)] if pieces else []
    words = [*control, *named, *(a + b for a, b in merges), *dict.fromkeys(letters)]
    added = ADDED.get(kind, ())
    vocabulary = {word: i for i, word in enumerate(words)}
    ids = vocabulary | {word: len(words) + i for i, word in enumerate(added)}

    special = {i: _added(word) for word, i in ids.items() if word in (*control, *added)}
    config: dict[str, Any] = {
        "tokenizer_class": _CLASS[kind],
        "added_tokens_decoder": {str(i): entry for i, entry in special.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        **_NAMED[kind],
    }
    if pieces:
        config |= {
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": kind != "llava",
            "sp_model_kwargs": {},
        }
        (path / "tokenizer.model").write_bytes(_sentencepiece(words, kind, len(control)))
    if kind == "llava":
        config |= {"processor_class": "LlavaProcessor", "padding_side": "left"}
        _write(path / "added_tokens.json", {word: ids[word] for word in added})
    if kind in GEMMAS:
        config |= {"processor_class": _PROCESSORS[kind], "sp_model_kwargs": None}
        config["extra_special_tokens"] = dict(list(_NAMED[kind].items())[-3:])
        _write(path / "added_tokens.json", {added[-1]: ids[added[-1]]})
    if kind == "mistral":
        (path / "tokenizer.model.v3").write_bytes((path / "tokenizer.model").read_bytes())
    if kind == "opt":
        config |= {"add_bos_token": True, "add_prefix_space": False, "errors": "replace"}
        config.pop("added_tokens_decoder")
    if kind in ("qwen", "onevision", "opt"):
        _write(path / "vocab.json", vocabulary)
        lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
        (path / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if whole:
        core = _core(kind, vocabulary, merges, pieces, added, ids)
        core.save(str(path / "tokenizer.json"))
    if chat:
        config["chat_template"] = chat
    _write(path / "tokenizer_config.json", config)
    _write(
        path / "special_tokens_map.json", {key: word for key, word in _NAMED[kind].items() if word}
    )
    return ids


def _added(word: str) -> dict[str, Any]:
    return {
        **{"content": word, "lstrip": False, "normalized": False, "rstrip": False},
        **{"single_word": False, "special": True},
    }


def _core(
    kind: str,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    pieces: bool,
    added: tuple[str, ...],
    ids: dict[str, int],
) -> Tokenizer:
    control, bos = CONTROL.get("llama2" if kind == "llava" else kind, ()), _NAMED[kind]["bos_token"]
    if pieces:
        model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    else:
        model = models.BPE(vocabulary, merges)
    core = Tokenizer(model)
    core.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in (*control, *added)]
    )
    if kind in GEMMAS:
        core.normalizer = normalizers.Replace(" ", "▁")
        core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    elif pieces:
        core.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        core.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            f"{bos} $A", f"{bos} $A {bos} $B", [(bos, ids[bos])]
        )
    return core


def _sentencepiece(words: list[str], kind: str, control: int) -> bytes:
    """Return a sentencepiece model's file: a BPE whose pieces are these words."""
    # a process can hold but one of its two copies
    from transformers.convert_slow_tokenizer import import_protobuf

    proto = import_protobuf()
    model = proto.ModelProto()
    pieces = proto.ModelProto.SentencePiece
    for place, word in enumerate(words):
        piece = pieces.NORMAL
        if place < control:
            piece = pieces.UNKNOWN if word == "<unk>" else pieces.CONTROL
        elif place < control + 256:
            piece = pieces.BYTE
        model.pieces.add(
            piece=word, score=float(-place) if piece == pieces.NORMAL else 0.0, type=piece
        )
    model.trainer_spec.model_type = proto.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(words)
    trainer, names = model.trainer_spec, _NAMED[kind]
    trainer.unk_id, trainer.bos_id, trainer.eos_id = (
        words.index(names[f"{name}_token"]) for name in ("unk", "bos", "eos")
    )
    trainer.pad_id = words.index("<pad>") if kind in GEMMAS else -1
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = kind not in GEMMAS
    model.normalizer_spec.remove_extra_whitespaces = False
    return model.SerializeToString()


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
