"""Read and write EAGLE-1 heads, in the layout of EAGLE, EAGLE-2 and MSD.

| tensor                                                                | shape                 |
|-----------------------------------------------------------------------|-----------------------|
| `fc.weight`, `fc.bias`                                                | [D, 2 D], optional [D] |
| `layers.0.self_attn.{q,k,v}_proj.weight`                              | [out, D], optional bias |
| `layers.0.self_attn.o_proj.weight`, `layers.0.mlp.*_proj.weight`      | as a Llama's          |
| `layers.0.post_attention_layernorm.weight`                            | [D]                   |
| `layers.0.input_layernorm.weight`                                     | [D], MSD for Qwen     |
| `embed_tokens.weight`                                                 | optional, [V, D]      |

`fc` reads a token's embedding and, behind it, the hidden state. The target's output matrix scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.heads.kind import ExportOptions, Kind, Server, check_one_layer, renamed
from jaxspec.config import Eagle1Config
from jaxspec.errors import InputError
from jaxspec.models.vocabulary import first_tokens
from jaxspec.typing import Params

Config = TypeVar("Config", bound=Eagle1Config)


@dataclass(frozen=True)
class Eagle1Files(Kind[Config]):
    """Read heads as they are published, and write them so; only this library reads them."""

    def completed(
        self, config: Config, stored: dict[str, StoredTensor]
    ) -> tuple[Config, dict[str, StoredTensor]]:
        stored = renamed(config.title, stored, lambda name: name.removeprefix("model."))
        check_one_layer(config.title, stored)
        text = replace(
            config.text_config,
            fc_bias="fc.bias" in stored,
            qkv_bias="layers.0.self_attn.q_proj.bias" in stored,
            input_norm="layers.0.input_layernorm.weight" in stored,
            own_embedding="embed_tokens.weight" in stored,
        )
        return replace(config, text_config=text), stored

    def written(
        self,
        config: Config,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        return config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}, tensors

    def exported(
        self, config: Config, params: Params, options: ExportOptions
    ) -> tuple[Config, Params]:
        if options.server is not None:
            advice = f"which is not written for {options.server}; leave that out"
            raise InputError(f"{options.source}: an {config.title}, {advice}")
        text, name = config.text_config, options.target or config.target_name
        if options.draft_vocabulary is not None:
            vocabulary = first_tokens(
                options.source, text.draft_vocabulary, options.draft_vocabulary
            )
            text = replace(text, draft_vocabulary=vocabulary)
        return replace(config, text_config=text, target_name=name), params

    def facts(self, config: Config) -> dict[str, str]:
        return {"image rule": config.images}
