"""The model card (README.md) that is written with an export."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxspec.config import ModelConfig, text_config
from jaxspec.models import LanguageModel, family_of
from jaxspec.typing import Params

if TYPE_CHECKING:
    from jaxspec.checkpoints.export import Target


def write_model_card(
    path: Path, config: ModelConfig, params: Params, *, name: str, source: Path, target: Target | None
) -> None:
    """Writes what the model is, what it was made of and for, and how to load it."""
    text, sees = text_config(config), LanguageModel(config).sees
    kind = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    reader = "AutoProcessor" if sees else "AutoTokenizer"
    licence = licence_of(source)
    facts = {
        "family": f"{family_of(config.model_type).title or config.model_type} (`{config.to_hf()['architectures'][0]}`)",
        "parameters": f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}",
        "decoder": f"{text.num_hidden_layers} layers of width {text.hidden_size}, {text.num_attention_heads} heads",
        "vocabulary": f"{text.vocab_size:,}",
        "context": f"{text.max_position_embeddings:,} tokens",
        "made from": f"`{source.name}`",
    }
    if (tokens := getattr(config, "image_tokens", None)) is not None:
        facts["image tokens"] = f"{tokens} an image"
    if target is not None:
        facts["draft for"] = f"`{target.name}`, with its {target.vocab_size:,} tokens (added rows are means)"
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    option = "--draft path/to/this" if target is not None else "--target path/to/this"
    other = f"--target {target.name} " if target is not None else ""
    view = " --views T" if target is not None and not sees else ""
    use = ""
    if target is not None:
        use = "\n`target.generate(..., assistant_model=model)` speculates with it in transformers.\n"
        if sees:
            use += "transformers 5 does not show the images to such a draft; 4.57 and jaxspec do.\n"
    (path / "README.md").write_text(
        f"""---
library_name: transformers
license: {licence or "other"}
pipeline_tag: {"image-text-to-text" if sees else "text-generation"}
---

# {name}

| | |
|---|---|
{rows}

Licence: {f"{licence}, as its source says" if licence else "unknown; write the licence of the source here"}.

## In transformers (4.57 or 5)

```python
from transformers import {kind}, {reader}

model = {kind}.from_pretrained("path/to/this")
reader = {reader}.from_pretrained("path/to/this")
```
{use}
## In jaxspec

```sh
jaxspec generate {other}{option}{view} --prompt "..."
```
""",
        encoding="utf-8",
    )


def licence_of(source: Path) -> str | None:
    """The licence that the front matter of a directory's README.md names."""
    if not (source / "README.md").is_file():
        return None
    card = (source / "README.md").read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1] if found and found[1] != "other" else None
