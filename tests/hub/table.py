"""Every model id that presets, README and docs name is in this table, with what its repository on
the hub holds, and where that was seen.

A twin has the file names, key names, shards, tokeniser form, configuration entries and dtype of its
original. Sizes are small and weights random. What no public material showed is marked `UNSEEN`:
there the layout is the one that the library's other checkpoints of that age have.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from jaxspec.heads.files import Server
from tests.hub import quantised

UNSEEN = "file list not seen"
PADDLE = "github ZHUI/paddlenlp_model_readme, {}: its list of the mirrored files"
PACKED = f"{UNSEEN}; names, packing and entries as in {{}}"
SISTER = f"{UNSEEN}; files as those of {{}}, shards by its size"
COPY = (
    "github tung2kg1/AI-Stock-Chart-Analysis, llava-1.5-7b-hf/: a copy of its text files; "
    "tokenizer.model not seen"
)
TABED = "furiosa-ai/TABED loads it in float16 as LLaVA-HF with 32064 rows of words"
OPT_KEYS = (
    "mergekit's opt.json has tensors under `decoder.`; no file list seen, .bin by the "
    "project's notes"
)

VISPEC = "config.json: github KangJialiang/ViSpec, vispec/train/{}_config.json"
MSD = (
    "config.json: github fanyunfeng-bit/MMSpec-fyf, train/msd/{}_config.json; .bin as EAGLE's heads"
)

LLAMA2 = {"max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3 = {
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "num_key_value_heads": 2,
}
JACKFRAM = {
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
QWEN = {
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "sliding_window": 131072,
    "use_sliding_window": False,
}


@dataclass(frozen=True)
class Twin:
    """Describe what one repository holds."""

    family: str
    """A file of `tests/hub/files`."""
    words: Literal[
        *("llama2", "llava", "mistral", "llama3", "qwen", "onevision", "opt", "gemma", "gemma4")
    ]
    """The kind of its tokeniser (`tests.hub.words`)."""
    source: str
    """Where its layout was seen."""
    dtype: str = "bfloat16"
    shards: int = 1
    bin: bool = False
    """Weights are distributed as PyTorch's .bin alone, and there is no tokenizer.json; what reads
    them may be missing here, see `tests.hub.build`.
    """
    chat: bool = False
    """There is a chat template."""
    seed: int = 0
    """Twins of one seed and family agree in their weights."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of the decoder's configuration in config.json."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json."""
    quantisation: dict[str, Any] = field(default_factory=dict)
    """quantization_config of config.json; the decoder's layers are stored in that format."""


def _llava(source: str, seed: int = 0, family: str = "llava", **changes: Any) -> Twin:
    generation = {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 32001,
    }
    made = {
        "dtype": "float16",
        "shards": 3,
        "chat": True,
        "generation": generation,
        "seed": seed,
    } | changes
    return Twin(family, "llava", source, **made)


def _llama3(source: str, stop: str | list[str], **changes: Any) -> Twin:
    ends = {"bos_token_id": "<|begin_of_text|>", "eos_token_id": stop}
    config = LLAMA3 | ends | changes.pop("config", {})
    return Twin("llama", "llama3", source, config=config, generation=ends, **changes)


QWEN_SAMPLING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"do_sample": True, "repetition_penalty": 1.05, "temperature": 1e-06},
    "qwen3_vl": {
        "do_sample": True,
        "repetition_penalty": 1.0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
    },
}
"""What the generation_config.json of Qwen2.5-VL and Qwen3-VL sets, besides tokens.

Qwen3-VL's: github QwenLM/Qwen3-VL, issue 1825. Qwen2.5-VL's own file is not seen: the values are
those of models that were trained from the 3B and the 7B. Its first version had top_k 1 (QwenLM/
Qwen3-VL, issue 722), and the 32B's AWQ sets tokens only (github binarrii/qwen_vl_object_detect).
"""


def _qwen(source: str, family: str = "qwen2", **changes: Any) -> Twin:
    generation = {"bos_token_id": "<|endoftext|>", "eos_token_id": ["<|im_end|>", "<|endoftext|>"]}
    generation |= QWEN_SAMPLING.get(family, {})
    return Twin(
        family, "qwen", source, **{"chat": True, "config": QWEN, "generation": generation} | changes
    )


def _gemma3(source: str, family: str = "gemma3_text", **changes: Any) -> Twin:
    """Return a twin with the generation settings that scripts write back into Gemma 3's; no file
    seen.
    """
    generation = {
        **{"bos_token_id": 2, "cache_implementation": "hybrid", "do_sample": True},
        **{"eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": 0},
        **{"top_k": 64, "top_p": 0.95},
    }
    return Twin(family, "gemma", source, **{"chat": True, "generation": generation} | changes)


def _gemma4(family: str, entries: str, **changes: Any) -> Twin:
    """Return a twin with the generation settings that copies quote, which have 50 as a third EOS,
    and later ones the ends of image and audio as suppress_tokens; the words here have neither.
    """
    generation = {
        **{"bos_token_id": 2, "do_sample": True, "eos_token_id": ["<eos>", "<turn|>"]},
        **{"pad_token_id": 0, "temperature": 1.0, "top_k": 64, "top_p": 0.95},
    }
    source = f"names of tensors and entries: {entries}; template as llama.cpp's gemma4.jinja"
    made = {"chat": True, "generation": generation} | changes
    return Twin(family, "gemma4", f"{source}; no file list seen", **made)


@dataclass(frozen=True)
class HeadTwin:
    """Describe what the repository of an EAGLE head holds."""

    target: str
    source: str
    """Where its layout was seen."""
    dtype: str = "bfloat16"
    bin: bool = False
    feature: Literal["fused", "eagle1"] = "fused"
    """Word of `new_head` for its kind."""
    rule: str = "placeholder"
    """Its rule for images, as loading knows it."""
    layout: Server | Literal["deepseek"] = "vllm"
    """SafeAILab's, speculators' or DeepSeek's."""
    padding: int = 0
    """Tokens of its target that an EAGLE-1 head's embedding lacks."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its layer besides the usual ones."""
    config: dict[str, Any] = field(default_factory=dict)
    """Entries of config.json (`files/heads.json`), of which sizes are the twin's own."""


def _vispec(target: str, name: str, **changes: Any) -> HeadTwin:
    """Return a ViSpec head; the rule of its kind is known without an id."""
    made = {"dtype": "float16", "feature": "eagle1", "rule": "compressed"} | changes
    return HeadTwin(target, f"{UNSEEN}; {VISPEC.format(name)}", **made)


def _angelslim(target: str, name: str) -> HeadTwin:
    source = f"{UNSEEN}; config.json: github Tencent/AngelSlim, train/configs/{name}"
    return HeadTwin(target, source)


def _specjax(target: str) -> HeadTwin:
    return HeadTwin(
        target,
        "config.json and tensors: github tails-mpt/SpecJAX, specjax/models/draft/eagle3.py; no "
        "file list seen",
    )


def _msd(target: str, name: str) -> HeadTwin:
    """Return an MSD head of a LLaVA."""
    source = f"{UNSEEN}; {MSD.format(name)}"
    known = {"feature": "eagle1", "rule": "unfused", "padding": 4}
    return HeadTwin(target, source, "float16", bin=True, **known)


_HEADS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": HeadTwin(
        "meta-llama/Llama-3.1-8B-Instruct",
        f"{UNSEEN}; entries as SpecForge's configurations of Llama 3, with SafeAILab's "
        "architecture",
        dtype="float16",
        bin=True,
    ),
    "thoughtworks/Qwen3-8B-Eagle3": _specjax("Qwen/Qwen3-8B"),
    "thoughtworks/Qwen2.5-7B-Instruct-Eagle3": _specjax("Qwen/Qwen2.5-7B-Instruct"),
    "thoughtworks/Llama-3.1-8B-Instruct-Eagle3": _specjax("meta-llama/Llama-3.1-8B-Instruct"),
    "deepseek-ai/eagle3_qwen3_8b_ttt7": HeadTwin(
        "Qwen/Qwen3-8B",
        "config.json and tensors: github deepseek-ai/DeepSpec, config/eagle3 and "
        "modeling/eagle3/qwen3; no file list seen",
        layout="deepseek",
        fields={"qk_norm": True, "own_embedding": True},
    ),
    "deepseek-ai/eagle3_gemma4_12b_ttt7": HeadTwin(
        "google/gemma-4-12B-it",
        "config.json and tensors: github deepseek-ai/DeepSpec, config/eagle3 and "
        "modeling/eagle3/gemma4, with what its sister with DSpark's heads copies of the target",
        layout="deepseek",
        fields={"own_embedding": True},
    ),
    "RedHatAI/Qwen3-8B-speculator.eagle3": HeadTwin(
        "Qwen/Qwen3-8B",
        "config.json: as NVIDIA's conversion to speculators 0.1 writes it; tensors by the "
        "2,044,116,968 bytes of its file; no file list seen",
        layout="speculators",
        fields={"own_embedding": True},
    ),
    "BCCard/MoAI-gemma-4-12B-it-speculator.eagle3": HeadTwin(
        "google/gemma-4-12B-it",
        "config.json: github reports quote its architecture and speculators_config; other entries "
        "as RedHatAI's for the 31B",
        layout="speculators",
    ),
    "RedHatAI/gemma-4-31B-it-speculator.eagle3": HeadTwin(
        "google/gemma-4-31B-it",
        "config.json: github MIT-RLX/rlx-models, rlx-eagle3/src/config.rs, which says that it is "
        "a part of the file; sizes of tensors in its examples",
        layout="speculators",
    ),
    "Rayzl/qwen2.5-vl-7b-eagle3-sgl": HeadTwin(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "config.json: github sgl-project/SpecForge, configs/qwen2-5-vl-7B-eagle3.json; no "
        "file list seen",
        rule="embedding",
    ),
    "lucylyn/MSD-LLaVA1.5-7B": _msd("llava-hf/llava-1.5-7b-hf", "llava_v15_7B"),
    "lucylyn/MSD-LLaVA1.5-13B": _msd("llava-hf/llava-1.5-13b-hf", "llava_v15_13B"),
    "Cloudriver/MSD-Qwen2.5-VL-7B-Instruct": HeadTwin(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "config.json: github fanyunfeng-bit/MMSpec-fyf, train/msd/qwen2vl_config.json; layer: its "
        "method/msd/ea_qwen2vl_model.py; no file list seen",
        feature="eagle1",
        rule="unfused",
        fields={"qkv_bias": True, "input_norm": True},
    ),
    "JLKang/ViSpec-llava-v1.6-vicuna-7b-hf": _vispec(
        "llava-hf/llava-v1.6-vicuna-7b-hf", "llava_1.6_7B"
    ),
    "JLKang/ViSpec-Qwen2.5-VL-3B-Instruct": _vispec(
        "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2.5_vl_3B", dtype="bfloat16", fields={"qkv_bias": True}
    ),
    "JLKang/ViSpec-Qwen2.5-VL-7B-Instruct": _vispec(
        "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5_vl_7B", dtype="bfloat16", fields={"qkv_bias": True}
    ),
    "AngelSlim/Qwen3-VL-2B-Instruct_eagle3": _angelslim(
        "Qwen/Qwen3-VL-2B-Instruct", "qwen3-vl-2b-eagle3-mrope"
    ),
    "AngelSlim/Qwen3-VL-4B-Instruct_eagle3": _angelslim(
        "Qwen/Qwen3-VL-4B-Instruct",
        "qwen3-vl-4b-eagle3, the one of two that counts slots as positions",
    ),
    "taobao-mnn/Qwen3-VL-2B-Instruct-Eagle3": HeadTwin(
        "Qwen/Qwen3-VL-2B-Instruct",
        f"{UNSEEN}; a public adapter reads it as LlamaForCausalLMEagle3 with one-dimensional "
        "positions; entries as SpecForge's configurations",
    ),
    "Cloudriver/EAGLE-LLaVA-1.5-7B": HeadTwin(
        "llava-hf/llava-1.5-7b-hf",
        f"{UNSEEN}; config.json: github fanyunfeng-bit/MMSpec-fyf, "
        "train/configs/llava1.5_7b_config.json",
        dtype="float16",
        feature="eagle1",
        rule="embedding",
    ),
}
ENTRIES = json.loads(Path(__file__).with_name("files").joinpath("heads.json").read_text())
"""Name of a head -> entries of its config.json."""
HEADS = {name: replace(head, config=ENTRIES[name]) for name, head in _HEADS.items()}
TWINS: dict[str, Twin] = {
    "llava-hf/llava-1.5-7b-hf": _llava(COPY),
    "llava-hf/llava-1.5-13b-hf": _llava(f"{UNSEEN}; as the 7B's", seed=1, shards=6),
    "mjbooo/lvlm68m": _llava(
        f"{UNSEEN}; {TABED}", shards=1, config={"max_position_embeddings": 2048}
    ),
    "mjbooo/lvlm68m-ov": _llava(
        f"{UNSEEN}; {TABED}", shards=1, config={"max_position_embeddings": 2048}, seed=1
    ),
    "mjbooo/lvlm160m-bf16": _llava(
        f"{UNSEEN}; {TABED.replace('float16', 'bfloat16')}",
        shards=1,
        dtype="bfloat16",
        config={"max_position_embeddings": 2048},
        seed=2,
    ),
    "llava-hf/llava-v1.6-vicuna-7b-hf": _llava(f"{UNSEEN}; files as 1.5's", 2, "llava_next"),
    "llava-hf/llava-v1.6-vicuna-13b-hf": _llava(
        "config.json: github haotian-liu/LLaVA issue 1378; other files as 1.5's",
        3,
        "llava_next",
        shards=6,
    ),
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": Twin(
        "llava_onevision",
        "onevision",
        UNSEEN,
        dtype="float16",
        chat=True,
        config={"tie_word_embeddings": True},
    ),
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": Twin(
        "llava_onevision", "onevision", UNSEEN, dtype="float16", shards=4, chat=True
    ),
    "lmsys/vicuna-7b-v1.5": Twin(
        *("llama", "llama2"),
        "github lm-sys/FastChat issue 209: a Vicuna-13B's .bin shards and tokenizer.model "
        "alone; not the 7B's",
        *("float16", 2, True),
        config=LLAMA2 | {"pad_token_id": 0},
        generation={"bos_token_id": 1, "eos_token_id": 2, "max_length": 4096, "pad_token_id": 0},
    ),
    "meta-llama/Llama-2-7b-hf": Twin(
        "llama", "llama2", UNSEEN, "float16", 2, config=LLAMA2, generation=LLAMA2
    ),
    "JackFram/llama-68m": Twin(
        "llama", "llama2", UNSEEN, "float32", config=JACKFRAM, generation=JACKFRAM
    ),
    "JackFram/llama-160m": Twin(
        "llama", "llama2", UNSEEN, "float32", config=JACKFRAM, generation=JACKFRAM
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _llama3(
        SISTER.format("meta-llama/Llama-3.2-1B-Instruct"),
        ["<|end_of_text|>", "<|eot_id|>"],
        shards=4,
        chat=True,
    ),
    "meta-llama/Llama-3.2-1B": _llama3(
        SISTER.format("meta-llama/Llama-3.2-1B-Instruct"),
        "<|end_of_text|>",
        config={"tie_word_embeddings": True},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": _llama3(
        PADDLE.format("meta-llama/Llama-3.2-1B-Instruct"),
        ["<|end_of_text|>", "<|eot_id|>"],
        chat=True,
        config={"tie_word_embeddings": True},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": Twin(
        *("mistral", "mistral"),
        "github vllm-project/vllm issues 4989 (with consolidated.safetensors) and 10534: "
        "files and config.json",
        shards=3,
        chat=True,
        generation={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mistralai/Mistral-7B-v0.1": Twin(
        *("mistral", "mistral"),
        f"{UNSEEN}; as v0.3's, with the window of its published config.json",
        shards=2,
        config={"sliding_window": 4096},
        generation={"bos_token_id": 1, "eos_token_id": 2},
    ),
    "Qwen/Qwen2.5-7B-Instruct": _qwen(PADDLE.format("Qwen/Qwen2.5-7B-Instruct"), shards=4),
    "Qwen/Qwen2.5-3B-Instruct": _qwen(SISTER.format("Qwen/Qwen2.5-7B-Instruct"), shards=2),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen(SISTER.format("Qwen/Qwen2.5-7B-Instruct")),
    "Qwen/Qwen2.5-Coder-3B-Instruct": _qwen(
        SISTER.format("Qwen/Qwen2.5-7B-Instruct"), shards=2, seed=1
    ),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _qwen(SISTER.format("Qwen/Qwen2.5-7B-Instruct"), seed=1),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": _qwen(SISTER.format("Qwen/Qwen2.5-7B-Instruct"), seed=2),
    "Qwen/Qwen2.5-Coder-0.5B": _qwen(
        SISTER.format("Qwen/Qwen2.5-7B-Instruct"), config=QWEN | {"tie_word_embeddings": True}
    ),
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": _qwen(
        SISTER.format("Qwen/Qwen2.5-7B-Instruct"),
        seed=1,
        # As many layers as EAGLE-3's 2, n/2 and n-3 need to be three.
        config=QWEN | {"tie_word_embeddings": True, "num_hidden_layers": 8},
    ),
    "Qwen/Qwen3-0.6B": _qwen(
        UNSEEN, "qwen3", config={"tie_word_embeddings": True, "sliding_window": None}
    ),
    "Qwen/Qwen3-8B": _qwen(UNSEEN, "qwen3", shards=5, seed=1, config={"sliding_window": None}),
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen(
        f"{PADDLE.format('Qwen/Qwen2.5-VL-3B-Instruct')}, without chat_template.json",
        "qwen2_5_vl",
        shards=2,
        config={"tie_word_embeddings": True},
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen(
        SISTER.format("Qwen/Qwen2.5-VL-3B-Instruct"), "qwen2_5_vl", shards=5, seed=1, config={}
    ),
    "Qwen/Qwen3-VL-2B-Instruct": _qwen(UNSEEN, "qwen3_vl", config={"tie_word_embeddings": True}),
    "Qwen/Qwen3-VL-4B-Instruct": _qwen(
        UNSEEN, "qwen3_vl", shards=2, seed=2, config={"tie_word_embeddings": True}
    ),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen(UNSEEN, "qwen3_vl", shards=4, seed=1, config={}),
    "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": _qwen(
        PACKED.format("AutoAWQ's packing_utils.py and gemm.py"),
        "qwen2_5_vl",
        dtype="float16",
        shards=2,
        seed=2,
        config={},
        quantisation=quantised.AWQ,
    ),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": _qwen(
        PACKED.format("GPTQModel's utils/model.py and nn_modules/qlinear"),
        dtype="float16",
        shards=2,
        seed=3,
        quantisation=quantised.GPTQ,
    ),
    "Qwen/Qwen3-VL-8B-Instruct-FP8": _qwen(
        PACKED.format("transformers' integrations/finegrained_fp8.py"),
        "qwen3_vl",
        shards=2,
        seed=2,
        config={},
        quantisation=quantised.FP8,
    ),
    "unsloth/Llama-3.2-1B-Instruct-bnb-4bit": _llama3(
        PACKED.format("bitsandbytes' functional.py, QuantState.as_dict"),
        ["<|end_of_text|>", "<|eot_id|>"],
        chat=True,
        seed=2,
        config={"tie_word_embeddings": True},
        quantisation=quantised.NF4,
    ),
    "google/gemma-3-4b-it": _gemma3(
        f"{UNSEEN}; config.json as its model card and transformers' conversion script have it",
        "gemma3",
        shards=2,
    ),
    "google/gemma-4-12B-it": _gemma4(
        "gemma4_unified",
        "transformers 5.23, models/gemma4_unified and conversion_mapping.py",
        shards=3,
    ),
    "google/gemma-4-31B-it": _gemma4(
        "gemma4",
        "transformers 5.23, models/gemma4; vision_config as public loaders check it",
        shards=2,
        seed=1,
    ),
    "google/gemma-4-E4B-it": _gemma4(
        "gemma4",
        "transformers 5.23, models/gemma4; vision_config as public loaders check it",
        seed=2,
        config={
            **{"attention_k_eq_v": False, "num_global_key_value_heads": None},
            **{"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2},
            **{"layer_types": 2 * ["sliding_attention", "full_attention"]},
            **{"num_hidden_layers": 4, "sliding_window": 512},
            "use_bidirectional_attention": None,
        },
    ),
    "google/gemma-4-E2B-it": _gemma4(
        "gemma4",
        "transformers 5.23, models/gemma4; vision_config as public loaders check it",
        seed=3,
        config={
            **{"attention_k_eq_v": False, "num_global_key_value_heads": None},
            **{"hidden_size_per_layer_input": 4, "num_kv_shared_layers": 3},
            **{"layer_types": 2 * ["sliding_attention", "sliding_attention", "full_attention"]},
            **{"num_hidden_layers": 6, "num_key_value_heads": 1, "sliding_window": 512},
            **{"use_bidirectional_attention": None, "use_double_wide_mlp": True},
        },
    ),
    "google/gemma-3-1b-it": _gemma3(SISTER.format("google/gemma-3-4b-it"), seed=1),
    "google/gemma-3-270m-it": _gemma3(SISTER.format("google/gemma-3-1b-it")),
    "facebook/opt-125m": Twin("opt", "opt", OPT_KEYS, "float16", bin=True),
    "facebook/opt-350m": Twin(
        "opt",
        "opt",
        OPT_KEYS,
        "float16",
        bin=True,
        config={"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
    "facebook/opt-13b": Twin("opt", "opt", OPT_KEYS, "float16", 3, bin=True, seed=1),
}

CAPTIONERS = {
    "florence-community/Florence-2-large-ft": (
        "florence2",
        f"{UNSEEN}; as transformers 5 saves it",
    ),
    "Salesforce/blip-image-captioning-base": (
        "blip",
        "files on huggingface.co; weights are .bin alone",
    ),
    "Salesforce/blip2-opt-2.7b": (
        "blip2",
        "files on huggingface.co; processor_config.json and image_token_index, which "
        "transformers 5 asks for, not seen",
    ),
}
"""Captioners that transformers runs in torch: a function of `tests.tiny.captioners`, and where
files were seen.
"""

ALIKE = {
    "Qwen/Qwen3-4B": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-8B",
    "Qwen/Qwen2.5-14B-Instruct": "Qwen/Qwen2.5-7B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "Qwen/Qwen2.5-7B-Instruct",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": "Qwen/Qwen2.5-7B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "z-lab/Qwen3-4B-DFlash-b16": "z-lab/Qwen3-8B-DFlash-b16",
    "deepseek-ai/dspark_qwen3_4b_block7": "deepseek-ai/dspark_qwen3_8b_block7",
    "deepseek-ai/dspark_qwen3_14b_block7": "deepseek-ai/dspark_qwen3_8b_block7",
    "deepseek-ai/dflash_qwen3_4b_block7": "deepseek-ai/dflash_qwen3_8b_block7",
    "deepseek-ai/dflash_qwen3_14b_block7": "deepseek-ai/dflash_qwen3_8b_block7",
    "deepseek-ai/eagle3_qwen3_4b_ttt7": "deepseek-ai/eagle3_qwen3_8b_ttt7",
    "deepseek-ai/eagle3_qwen3_14b_ttt7": "deepseek-ai/eagle3_qwen3_8b_ttt7",
    "RedHatAI/Qwen3-14B-speculator.eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "RedHatAI/Qwen3-32B-speculator.eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3",
    "thoughtworks/Qwen3-14B-Eagle3": "thoughtworks/Qwen3-8B-Eagle3",
    "thoughtworks/Qwen2.5-14B-Instruct-Eagle3": "thoughtworks/Qwen2.5-7B-Instruct-Eagle3",
    "thoughtworks/DeepSeek-R1-Distill-Qwen-7B-Eagle3": "thoughtworks/Qwen2.5-7B-Instruct-Eagle3",
    "thoughtworks/DeepSeek-R1-Distill-Qwen-14B-Eagle3": "thoughtworks/Qwen2.5-7B-Instruct-Eagle3",
    "thoughtworks/Llama-3.2-3B-Instruct-Eagle3": "thoughtworks/Llama-3.1-8B-Instruct-Eagle3",
}
"""Listed drafts and their targets -> the twin that is theirs too: the files differ in sizes, and in
what no head reads.
"""
