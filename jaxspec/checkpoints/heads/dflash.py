"""Read and write DFlash and DSpark heads, in the layouts that vLLM and SGLang load.

| tensor                                                          | shape                          |
|-----------------------------------------------------------------|--------------------------------|
| `fc.weight`                                                     | [D, n D] of n target states    |
| `hidden_norm.weight`, `norm.weight`                             | [D]                            |
| `layers.i.{input,post_attention}_layernorm.weight`              | [D]                            |
| `layers.i.self_attn.{q,k,v,o}_proj.weight`, `{q,k}_norm.weight` | as a Qwen3's                   |
| `layers.i.mlp.{gate,up,down}_proj.weight`                       | as a Qwen3's                   |
| `markov_head.markov_w1.weight`, `markov_w2.weight`              | DSpark: [V, r], [words, r]     |
| `embed_tokens.weight`, `lm_head.weight`                         | optional: [V, D], [words, D]   |
| `d2t`, `t2d`                                                    | see `draft_words.py`           |

speculators' config.json nests the decoder, and counts target layers as this library does; its files
have the same names, and copies of the target's embedding and output matrix. `confidence_head`
(DSpark) chooses the length of drafts; no score depends on it, and it is not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.heads.draft_words import draft_words, with_words
from jaxspec.checkpoints.heads.kind import (
    ExportOptions,
    Kind,
    Server,
    renamed,
    speculators_entries,
    with_target,
)
from jaxspec.config import DFlashConfig
from jaxspec.errors import InputError
from jaxspec.typing import Params

_UNREAD = re.compile(r"confidence_head\.|verifier_(norm|lm_head)\.|(d2t|t2d)$")
"""Tensors that no score depends on, or that the configuration holds."""


@dataclass(frozen=True)
class DFlashFiles(Kind[DFlashConfig]):
    """Read heads in any public layout, and write them for the programs that serve them."""

    unread = ("mask_embedding.pt",)  # vLLM's, in place of the mask token's embedding

    def completed(
        self, config: DFlashConfig, stored: dict[str, StoredTensor]
    ) -> tuple[DFlashConfig, dict[str, StoredTensor]]:
        stored = renamed(config.title, stored, lambda name: name.removeprefix("model."))
        vocabulary = draft_words(config.title, stored, config.text_config)
        config = replace(
            config,
            text_config=replace(config.text_config, draft_vocabulary=vocabulary),
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        return config, {name: stored[name] for name in stored if not _UNREAD.match(name)}

    def written(
        self,
        config: DFlashConfig,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        if config.text_config.draft_vocabulary:
            tensors = with_words(config.text_config, tensors)
        if server != "speculators":
            return raw, tensors
        layers = {*config.text_config.to_hf(), "layer_types"} - {"architectures"}
        placed = {*layers, "architectures", "dflash_config", "target_layer_ids"}
        kind = "dspark" if config.of_dspark else "dflash"
        return {
            "architectures": ["DSparkDraftModel" if config.of_dspark else "DFlashDraftModel"],
            "transformer_layer_config": {name: raw[name] for name in raw if name in layers},
            "aux_hidden_state_layer_ids": list(config.target_layers),
            "mask_token_id": config.mask_token,
            "tie_word_embeddings": False,
            **{name: raw[name] for name in raw if name not in placed},
            **speculators_entries(kind, config, architectures),
        }, tensors

    def exported(
        self, config: DFlashConfig, params: Params, options: ExportOptions
    ) -> tuple[DFlashConfig, Params]:
        if options.server == "sglang" and config.keeps_vocabulary:
            parts = "output matrix, vocabulary or Markov head"
            raise InputError(f"{options.source}: has its own {parts}, which sglang does not read")
        return with_target(config, options), params

    def command(self, config: DFlashConfig, path: str, server: Server) -> str:
        target, method = config.target_name or "TARGET", "dspark" if config.of_dspark else "dflash"
        if server == "speculators":
            return f"vllm serve {path}"
        if server == "sglang":
            return (
                f"python -m sglang.launch_server --model-path {target} "
                f"--speculative-algorithm DFLASH --speculative-draft-model-path {path}"
            )
        spec = f'"method": "{method}", "model": "{path}", "num_speculative_tokens": {config.gamma}'
        return f"vllm serve {target} --speculative-config '{{{spec}}}'"

    def facts(self, config: DFlashConfig) -> dict[str, str]:
        layers = ", ".join(map(str, config.target_layers))
        slot = "newest token" if config.anchored else "first mask"
        facts = {
            "reads": f"the target's hidden states after layers {layers}",
            "drafts": f"{config.gamma} tokens a pass; the {slot}'s slot scores the first",
        }
        return facts | ({"Markov head": f"rank {config.markov}"} if config.markov else {})
