"""Let transformers make a GGUF file's tokeniser, with the vocabulary of the file."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from jaxspec.errors import InputError

_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot"}
"""transformers' name of a special token -> the one in `tokenizer.ggml.NAME_token_id`."""
_BOS_BY_DEFAULT = ("llama", "llama-bpe", "llama3", "llama-v3")
"""Tokenisers that put BOS in front of texts unless their file says otherwise."""
_LIKE_GPT2 = (None, "default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "smollm")
"""Values of `tokenizer.ggml.pre` of texts that are cut into words as GPT-2 does, or nearly."""
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that are matched whole in a text."""


def special_ids(entries: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the special tokens that the file names, by role, such as bos."""
    names = {role: f"tokenizer.ggml.{entry}_token_id" for role, entry in _ROLES.items()}
    return {role: entries[name] for role, name in names.items() if name in entries}


def gguf_tokenizer(entries: dict[str, Any]) -> Any:
    """Return the tokeniser of a file's metadata, with its chat template."""
    from tokenizers import pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens, ids = entries["tokenizer.ggml.tokens"], special_ids(entries)
    metadata = {name.removeprefix("tokenizer."): value for name, value in entries.items()}
    if entries["general.architecture"] == "gemma3":  # whose runs of spaces are stored as they are
        metadata["ggml.tokens"] = ["▁" * len(t) if t and not t.strip(" ") else t for t in tokens]
    kinds = metadata["ggml.model"], metadata.get("ggml.pre")
    backend = _within_vocabulary(
        _as_transformers(entries["general.architecture"], metadata), metadata
    )
    splitter = backend.pre_tokenizer
    cuts_words = isinstance(splitter, pre_tokenizers.ByteLevel) and splitter.use_regex
    if cuts_words and kinds[1] not in _LIKE_GPT2:
        raise InputError(
            f"tokenizer.ggml.pre {kinds[1]!r:.40}: transformers {version('transformers')} does not "
            "know how it cuts texts into words; install a newer one, or take safetensors"
        )
    if "smollm" in kinds:  # transformers does not know that it splits off each digit
        digits = pre_tokenizers.Digits(individual_digits=True)
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    # None is written too: where a role is missing, Qwen2Tokenizer adds <|endoftext|> for it.
    roles = ("bos", "eos", "unk", "pad")
    special = {f"{role}_token": tokens[ids[role]] if role in ids else None for role in roles}
    begins = metadata.get("ggml.add_bos_token", any(kind in _BOS_BY_DEFAULT for kind in kinds))
    if begins and "bos" in ids:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            [bos, "$A"], [bos, "$A", "$B"], [(bos, ids["bos"])]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = entries.get("tokenizer.chat_template")
    return tokenizer


def _as_transformers(architecture: str, metadata: dict[str, Any]) -> Any:
    """Return transformers' tokeniser of the entries: it normalises, splits and decodes texts."""
    # It moved from `ggml` to `gguf`, which needed torch before it came.
    paths = (f"transformers.integrations.{name}" for name in ("ggml", "gguf"))
    modules = map(import_module, filter(find_spec, paths))
    converter = next(module for module in modules if hasattr(module, "GGUF_TOKENIZER_MAPPING"))
    names = converter.GGUF_TOKENIZER_MAPPING["tokenizer"]
    renamed = {key: metadata[name] for name, key in names.items() if name in metadata}
    return converter.convert_gguf_tokenizer(architecture, renamed)[0]


def _within_vocabulary(backend: Any, metadata: dict[str, Any]) -> Any:
    """Return the tokeniser with the tokens of the file and no others.

    transformers adds its own defaults: a byte-level vocabulary without <|endoftext|> gains an id
    behind its last, which the model has no embedding for.
    """
    from tokenizers import AddedToken, Tokenizer

    tokens = metadata["ggml.tokens"]
    state = json.loads(backend.to_str())
    state["model"]["vocab"] = {token: i for i, token in enumerate(tokens)}
    state["added_tokens"], state["post_processor"] = [], None
    backend = Tokenizer.from_str(json.dumps(state))
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, metadata.get("ggml.token_type", []))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    return backend
