"""EAGLE-3 heads as files: the layouts that vLLM, SGLang and tpu-inference load.

SafeAILab's and SpecForge's, which this library writes too:

| tensor                                                                  | shape               |
|-------------------------------------------------------------------------|---------------------|
| `fc.weight`                                                             | [D, 3 target D]     |
| `input_norm.weight`                                                     | norm_before_fc      |
| `fc_norm.{0,1,2}.weight`                                                | fc_norm             |
| `midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight` | [D]                |
| `midlayer.self_attn.{q,k,v}_proj.weight`                                | [out, 2 D]          |
| `midlayer.self_attn.o_proj.weight`, `midlayer.mlp.*_proj.weight`        | as a Llama's        |
| `norm.weight`                                                           | [D]                 |
| `midlayer.self_attn.{q,k}_norm.weight`                                  | optional (Qwen3's)  |
| `lm_head.weight`                                                        | optional, [words, D] |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 or int32 [draft words]                                      | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

speculators' layer is `layers.0` and its config.json nests the decoder.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.heads.draft_words import draft_words, with_words
from jaxspec.checkpoints.heads.kind import Kind, Server, speculators_entries
from jaxspec.config import Eagle3Config
from jaxspec.config.heads.eagle3 import SPECULATORS, counted
from jaxspec.errors import InputError
from jaxspec.typing import Params

_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_NUMBER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Eagle3Files(Kind[Eagle3Config]):
    """Read heads in either public layout, and write them for the programs that serve them."""

    def own(
        self, config: Eagle3Config, stored: dict[str, StoredTensor]
    ) -> tuple[Eagle3Config, dict[str, StoredTensor]]:
        return as_own_head(config, stored)

    def written(
        self,
        config: Eagle3Config,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        raw = eagle_config(config, str(tensors["fc.weight"].dtype), server, architectures)
        return raw, eagle_tensors(config, tensors, server)

    def exported(
        self,
        source: Path,
        config: Eagle3Config,
        params: Params,
        *,
        target: str | None,
        draft_vocabulary: int | None,
        server: Server | None,
    ) -> tuple[Eagle3Config, Params]:
        if server is not None:
            check_server(source, config, server)
        if target is not None:
            config = replace(config, target_name=target)
        if draft_vocabulary is not None:
            raise InputError(
                f"{source}: an EAGLE-3 head keeps its draft vocabulary; leave that out"
            )
        if server == "speculators" and not config.target_name:
            advice = f"which {server} needs; give vocab-of"
            raise InputError(f"{source}: does not name its target, {advice}")
        return config, params

    def facts(self, config: Eagle3Config) -> dict[str, str]:
        return {"image rule": config.images}

    def command(self, config: Eagle3Config, path: str, server: Server) -> str:
        return serve_command(config, path, server)


def as_own_head(
    config: Eagle3Config, stored: Mapping[str, StoredTensor]
) -> tuple[Eagle3Config, dict[str, StoredTensor]]:
    """Return a public head's configuration and its parameters by this library's names.

    The configuration gets the draft vocabulary of the file's `d2t`, and learns which of the
    optional tensors are stored. A head without an output matrix uses the target's.

    Raises InputError for a draft vocabulary that is not a list of the target's tokens, and for
    heads with more layers, or with states of more target layers.
    """
    stored = {_LAYER.sub("layers.0.", name.removeprefix("model.")): x for name, x in stored.items()}
    text: Any = replace(
        config.text_config,
        own_embedding="embed_tokens.weight" in stored,
        own_output="lm_head.weight" in stored,
        qk_norm="layers.0.self_attn.q_norm.weight" in stored,
    )
    depth = 1 + max((int(layer[1]) for name in stored if (layer := _NUMBER.match(name))), default=0)
    if depth > 1:
        raise InputError(f"EAGLE-3 head: has {depth} layers; give a head with one")
    if "fc.weight" in stored:
        width = math.prod(stored["fc.weight"].shape[1:])
        count, remainder = divmod(width, max(text.target_hidden_size, 1))
        if count != 3 and not remainder:
            raise InputError(f"EAGLE-3 head: reads {counted(count)} target layers; give three")
    text = replace(text, draft_vocabulary=draft_words(config.title, stored, text))
    parameters = {name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    return replace(config, text_config=text), parameters


def eagle_tensors(
    config: Eagle3Config, tensors: Mapping[str, np.ndarray], server: Server = "vllm"
) -> dict[str, np.ndarray]:
    """Return a head's tensors as an engine reads them, from those by this library's names."""
    text = config.text_config
    layer = "layers.0." if server == "speculators" else "midlayer."
    return with_words(text, {_LAYER.sub(layer, name): leaf for name, leaf in tensors.items()})


def eagle_config(
    config: Eagle3Config,
    dtype: str,
    server: Server = "vllm",
    architectures: list[str] | None = None,
) -> dict[str, Any]:
    """Return config.json as an engine reads it.

    Args:
      dtype: Name of the tensors' dtype in torch.
      architectures: The target's classes in transformers.
    """
    raw = config.to_dict() | {"torch_dtype": dtype}
    if server != "speculators":
        return raw
    outer = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    outer += ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "jaxspec", "torch_dtype")
    inner = {k: v for k, v in raw.items() if k not in (*outer, "eagle_config", "architectures")}
    target_size = inner.pop("target_hidden_size")
    return {
        "architectures": [SPECULATORS[0]],
        "transformer_layer_config": inner,
        "target_hidden_size": None if target_size == inner["hidden_size"] else target_size,
        "tie_word_embeddings": False,
        **{key: raw[key] for key in outer},
        **speculators_entries("eagle3", config, architectures),
    }


def check_server(source: Path, config: Eagle3Config, server: Server) -> None:
    """Raise InputError for a head of whose files the engine would leave a part out."""
    text = config.text_config
    lacking = ["qk_norm"]
    if server == "sglang":
        lacking += ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
    if names := [name for name in lacking if getattr(text, name)]:
        raise InputError(f"{source}: has {', '.join(names)}, which {server} does not read")
    if server == "sglang" and 0 in text.target_layers:
        raise InputError(f"{source}: reads the target's embedding, and sglang only layers' outputs")


def serve_command(config: Eagle3Config, path: str, server: Server) -> str:
    """Return the command that serves the head's target with the head."""
    target, count = config.target_name or "TARGET", min(config.gamma, 3)
    if server == "speculators":
        return f"vllm serve {path}"
    if server == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {path} "
            f"--speculative-num-steps {count} --speculative-eagle-topk 1 "
            f"--speculative-num-draft-tokens {count + 1}"
        )
    method = f'{{"method": "eagle3", "model": "{path}", "num_speculative_tokens": {count}}}'
    return f"vllm serve {target} --speculative-config '{method}'"
