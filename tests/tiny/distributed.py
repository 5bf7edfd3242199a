"""Checkpoints in the very forms that the hub's older models have: .bin weights, tokenisers without a tokenizer.json."""

from __future__ import annotations

import io
import json
import string
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VICUNA = {
    "_name_or_path": "vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 44,
    "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "pad_token_id": 0, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.31.0", "use_cache": True,
    "vocab_size": 352,
}  # fmt: skip
"""config.json of lmsys/vicuna-7b-v1.5 in its entries, with small sizes."""
OPT = {
    "_name_or_path": "opt-13b", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
    "activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
    "do_layer_norm_before": True, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 44, "hidden_size": 32,
    "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt",
    "num_attention_heads": 4, "num_hidden_layers": 2, "output_projection": True, "pad_token_id": 1, "prefix": "</s>",
    "torch_dtype": "float16", "transformers_version": "4.21.0.dev0", "use_cache": True, "vocab_size": 272,
    "word_embed_proj_dim": 32,
}  # fmt: skip
"""The same of facebook/opt-13b."""
_MERGES = ("t h", "th e", "Ġ the", "i n")


def write_bin(path: Path, tensors: Mapping[str, Any], shards: int = 1) -> None:
    """Write torch's tensors as pytorch_model.bin, or as shards with an index, as torch 1.6 to 2.0 did."""
    path.mkdir(exist_ok=True)
    if shards == 1:
        _save_as_of_old(dict(tensors), path / "pytorch_model.bin")
        return
    where = {name: f"pytorch_model-{i * shards // len(tensors) + 1:05d}-of-{shards:05d}.bin" for i, name in
             enumerate(tensors)}  # fmt: skip
    for file in set(where.values()):
        _save_as_of_old({name: tensor for name, tensor in tensors.items() if where[name] == file}, path / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2))


def _save_as_of_old(tensors: dict[str, Any], file: Path) -> None:
    """Save with torch, and leave out the records that later versions added."""
    import torch

    whole = io.BytesIO()
    torch.save(tensors, whole)
    with zipfile.ZipFile(whole) as found, zipfile.ZipFile(file, "w") as old:
        for name in found.namelist():
            record = name.partition("/")[2]
            if record in ("data.pkl", "version") or record.startswith("data/"):
                old.writestr(f"archive/{record}", found.read(name))


def write_sentencepiece(path: Path, added: tuple[str, ...] = ()) -> None:
    """Write Llama's tokeniser as sentencepiece has it: pieces, bytes to fall back on, and no tokenizer.json.

    `added` are tokens behind its own, as LLaVA's <image>.
    """
    from transformers.convert_slow_tokenizer import import_protobuf

    model: Any = import_protobuf().ModelProto()

    def add(words: Any, kind: int) -> None:
        for word in words:
            piece = model.pieces.add()
            piece.piece, piece.score, piece.type = word, float(-len(model.pieces)), kind

    add(["<unk>"], 2)
    add(["<s>", "</s>"], 3)
    add([f"<0x{i:02X}>" for i in range(256)], 6)
    add(["▁w", "he", "▁t", "▁the", "in", *("▁" + string.ascii_letters + string.digits + ":.,?!")], 1)
    spec, normal = model.trainer_spec, model.normalizer_spec
    spec.model_type, spec.byte_fallback, spec.vocab_size = 2, True, len(model.pieces)
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 0, 1, 2, -1
    normal.name, normal.add_dummy_prefix, normal.remove_extra_whitespaces = "identity", True, False
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model.SerializeToString())
    marks = {name: _token(text) for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"), ("unk_token", "<unk>"))}
    config = {
        **{name: {"__type": "AddedToken", **mark} for name, mark in marks.items()},
        **{"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False, "legacy": False},
        **{"model_max_length": 4096, "pad_token": None, "padding_side": "right", "sp_model_kwargs": {}},
        "tokenizer_class": "LlamaTokenizer",
    }
    if added:
        ids = {text: len(model.pieces) + i for i, text in enumerate(added)}
        config["added_tokens_decoder"] = {str(number): _token(text, special=True) for text, number in ids.items()}
        (path / "added_tokens.json").write_text(json.dumps(ids))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps(marks | {"pad_token": "<unk>"}))


def write_bpe(path: Path, family: str) -> None:
    """Write the tokeniser of "opt" or "qwen2" as vocab.json and merges.txt, and no tokenizer.json."""
    letters = [chr(code) for code in _byte_letters()]
    first = ["<s>", "<pad>", "</s>", "<unk>"] if family == "opt" else []
    words = [*first, *letters, *(merge.replace(" ", "") for merge in _MERGES)]
    if family == "opt":
        end = {"__type": "AddedToken", **_token("</s>", normalized=True)}
        config = {
            **{"errors": "replace", "unk_token": end, "bos_token": end, "eos_token": end},
            **{"pad_token": {"__type": "AddedToken", **_token("<pad>", normalized=True)}, "add_prefix_space": False},
            **{"add_bos_token": True, "special_tokens_map_file": None, "name_or_path": "patrickvonplaten/opt-30b"},
            "tokenizer_class": "GPT2Tokenizer",
        }
    else:
        marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
        added = {str(len(words) + i): _token(text, special=True) for i, text in enumerate(marks)}
        config = {
            **{"add_prefix_space": False, "added_tokens_decoder": added, "additional_special_tokens": marks[1:]},
            **{"bos_token": None, "eos_token": marks[2], "pad_token": marks[0], "unk_token": None},
            **{"errors": "replace", "model_max_length": 32768, "split_special_tokens": False},
            "tokenizer_class": "Qwen2Tokenizer",
        }
    path.mkdir(exist_ok=True)
    (path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *_MERGES, ""]))
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _token(text: str, *, normalized: bool = False, **more: bool) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False, **more}


def _byte_letters() -> list[int]:
    """Return the code of GPT-2's letter of each byte: its own where that prints, else one from 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [byte if byte in printing else next(others) for byte in range(256)]
