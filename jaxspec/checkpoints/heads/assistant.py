"""Read and write Gemma 4's assistants, by Hugging Face's names.

| tensor                            | shape                                     |
|-----------------------------------|-------------------------------------------|
| `model.embed_tokens.weight`       | [V, D], also the output matrix            |
| `model.layers.i.*`                | Gemma 4's layers without keys and values  |
| `model.norm.weight`               | [D]                                       |
| `pre_projection.weight`           | [D, 2 B], B is the target's width         |
| `post_projection.weight`          | [B, D]                                    |
| `masked_embedding.centroids.weight` | [groups, D], with groups of tokens      |
| `masked_embedding.token_ordering` | [V], integers: the tokens group by group  |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoints.directories import read_json
from jaxspec.checkpoints.heads.kind import ExportOptions, Kind, Server, with_target
from jaxspec.config import AssistantConfig
from jaxspec.errors import InputError
from jaxspec.typing import Params


@dataclass(frozen=True)
class AssistantFiles(Kind[AssistantConfig]):
    """Read and write assistants as they are published.

    generation_config.json has the number of tokens to draft, which transformers asks for.
    """

    def read(self, path: Path, raw: dict[str, Any]) -> AssistantConfig:
        config, file = self.config.from_dict(raw), path / "generation_config.json"
        gamma = read_json(file).get("num_assistant_tokens") if file.is_file() else None
        return replace(config, gamma=gamma) if isinstance(gamma, int) else config

    def generation(self, config: AssistantConfig) -> dict[str, Any]:
        return {"num_assistant_tokens": config.gamma}

    def written(
        self,
        config: AssistantConfig,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        tensors = {
            name: leaf.astype(np.int64) if leaf.dtype == np.int32 else leaf
            for name, leaf in tensors.items()
        }
        dtype = str(tensors["pre_projection.weight"].dtype)
        return config.to_dict() | {"dtype": dtype}, tensors

    def exported(
        self, config: AssistantConfig, params: Params, options: ExportOptions
    ) -> tuple[AssistantConfig, Params]:
        if options.server is not None:
            advice = f"which is written in one layout, not for {options.server}; leave that out"
            raise InputError(f"{options.source}: a {config.title}, {advice}")
        return with_target(config, options), params
