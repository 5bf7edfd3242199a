"""Fill in `model_card.md.jinja`, the model card (README.md) of an export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.locating import REPOSITORY, model_name, published_name
from jaxspec.config import ModelConfig, text_config
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Server
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.loading import is_head, list_head
from jaxspec.models.families import family_of
from jaxspec.models.language_model import LanguageModel
from jaxspec.publishing.history import measured_tables, training_facts
from jaxspec.publishing.licences import Licence, licence_of
from jaxspec.typing import Params

HERE = "path/to/this"
"""The card's path of the checkpoint itself."""
SPECULATIVE = "speculative-decoding"
"""The hub's tag of drafts."""
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


@dataclass(frozen=True)
class Terms:
    """Name what others must know of a model before they use it.

    Fields:
      licence: Its licence; None if its source names none.
      base_model: Hub id of the model it was made from; None if that is unknown.
    """

    licence: Licence | None = None
    base_model: str | None = None

    @classmethod
    def of(cls, source: Path, licence: str | None = None, base_model: str | None = None) -> Terms:
        """Return a source's terms; arguments replace the source's.

        The base model of a head is its target.

        licence: As `Licence.parse` reads it.
        """
        if base_model and not REPOSITORY.fullmatch(base_model):
            raise InputError(f"base-model {base_model!r:.60}: no id of the hub; give owner/name")
        if not base_model:
            name = list_head(source)[0].target_name if is_head(source) else model_name(source)
            base_model = published_name(name) or None
        return cls(Licence.parse(licence) if licence else licence_of(source), base_model)


@dataclass(frozen=True)
class Exported:
    """Hold an exported model, and its differences from its source.

    Fields:
      source: Directory that it was read from.
      target: Name of the model that it drafts for, if it is a draft.
      added: Number of tokens in the vocabulary that the source does not have.
      has_template: Whether its tokeniser has a chat template.
      scored: Size of the source's draft vocabulary; 0 where it has none.
      command: Command that serves a target with it, and its limits; "" where none does.
    """

    source: Path
    config: ModelConfig
    params: Params
    target: str = ""
    added: int = 0
    has_template: bool = True
    scored: int = 0
    command: str = ""


def write_model_card(path: Path, name: str, model: Exported, terms: Terms) -> None:
    """Write the model's facts, source and purpose, and how to load and ask it."""
    config, text = model.config, text_config(model.config)
    has_vision, family = LanguageModel(config).has_vision, family_of(config.model_type)
    fate = "get no probability" if text.known_tokens else "are means"
    history = training_facts(model.source)
    facts = {
        "family": f"{family.title} (`{config.to_hf()['architectures'][0]}`)",
        "parameters": _count_parameters(model.params),
        "decoder": f"{text.num_hidden_layers} layers of width {text.hidden_size}, "
        f"{text.num_attention_heads} heads",
        "vocabulary": f"{text.vocab_size:,}"
        + (f", of which the last {model.added:,} {fate}" if model.added else ""),
        "context": f"{text.context:,} tokens",
        "made from": f"`{model_name(model.source)}`",
    }
    if model.scored:
        note = "" if text.draft_vocabulary else "; the score of others is their mean"
        facts["drafts"] = f"{model.scored:,} tokens{note}"
    if (tokens := getattr(config, "image_tokens", None)) is not None:
        facts["image tokens"] = f"{tokens} an image"
    facts |= history
    commands = [f"--target {HERE}"]
    if model.target:
        facts |= _draft_for(model.target)
        views = "" if has_vision else " --views T"
        commands.append(f"--target {path_or_id(model.target)} --draft {HERE}{views}")
    tag = "image-text-to-text" if has_vision else "text-generation"
    whole = not text.draft_vocabulary  # transformers reads no output matrix of fewer tokens
    library = "transformers" if whole else "jaxspec"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": tag}
    if model.target:
        front["tags"] = [SPECULATIVE]
    if history and terms.base_model:
        front["base_model_relation"] = "finetune"
    variables = {
        "served": model.command.splitlines()[:1],
        "tables": measured_tables(model.source),
        "has_vision": has_vision,
        "has_template": model.has_template,
        "transformers": whole,
        "draft": bool(model.target),
    }
    _write_card(path, terms, front, name=name, facts=facts, commands=commands, **variables)


def write_head_card(
    path: Path,
    config: HeadConfig,
    params: Params,
    name: str,
    source: Path,
    terms: Terms,
    target: ModelConfig | None = None,
    engine: Server | None = None,
) -> None:
    """Write a head's facts, its target, its training, and the commands that draft with it.

    Args:
      target: The target's configuration; without it the hub's cache may have it.
      engine: Program that its files are written for, if one was chosen.
    """
    text = config.text_config
    kind = kind_of(config)
    facts = {
        "family": kind.about,
        "parameters": _count_parameters(params),
        "decoder": f"{text.num_hidden_layers} layer{'s' * (text.num_hidden_layers > 1)} "
        f"of width {text.hidden_size}",
        "trained for": f"blocks of {config.gamma} drafted tokens",
        "made from": f"`{model_name(source)}`",
    }
    facts |= _draft_for(config.target_name, config.target_hash)
    if text.draft_vocabulary:
        facts["drafts"] = f"{len(text.draft_vocabulary):,} of {text.vocab_size:,} tokens"
    facts |= kind.facts(config) | training_facts(source)
    commands = [f"--target {path_or_id(config.target_name)} --draft {HERE}"]
    variables = {
        "has_vision": _target_has_vision(config, target),
        "has_template": True,
        "served": list(serving_commands(config, engine)),
        "tables": measured_tables(source),
        "note": kind.note,
    }
    front: dict[str, Any] = {"library_name": "jaxspec", "tags": [SPECULATIVE, kind.tag(config)]}
    if engine == "speculators":
        front["tags"].append(engine)
    if terms.base_model:  # it computes only with the weights of its target
        front["base_model_relation"] = "adapter"
    _write_card(path, terms, front, name=name, facts=facts, commands=commands, **variables)


def serving_commands(config: HeadConfig, engine: Server | None) -> Iterator[str]:
    """Yield the commands that serve a head's target with it, of every engine that reads its files.

    speculators' layout is one of its own; another is vLLM's and SGLang's.
    """
    kind = kind_of(config)
    published = replace(config, target_name=path_or_id(config.target_name))
    engines: tuple[Server, ...] = (
        ("speculators",) if engine == "speculators" else ("vllm", "sglang")
    )
    for server in engines:
        command = "" if kind.refusal(config, server) else kind.command(published, HERE, server)
        if command:
            yield command


def _target_has_vision(config: HeadConfig, target: ModelConfig | None) -> bool:
    """Return whether a head's target reads images, as far as is known here."""
    from huggingface_hub import try_to_load_from_cache

    reads = getattr(config, "image_tokens", 0) > 0
    if reads or getattr(config, "images", "placeholder") != "placeholder":
        return True
    if target is None and REPOSITORY.fullmatch(config.target_name):
        file = try_to_load_from_cache(config.target_name, "config.json")
        with suppress(InputError):
            target = read_config(Path(file).parent) if isinstance(file, str) else None
    return target is not None and LanguageModel(target).has_vision


def _write_card(path: Path, terms: Terms, front: dict[str, Any], **variables: Any) -> None:
    """Write the card with this front matter and these variables of the template."""
    from huggingface_hub import ModelCard, ModelCardData

    front |= terms.licence.front if terms.licence else {}
    data = ModelCardData(base_model=terms.base_model, **front)
    variables["licence"] = terms.licence
    card = ModelCard.from_template(data, template_path=str(_TEMPLATE), **variables)
    (path / "README.md").write_text(str(card).rstrip() + "\n", encoding="utf-8")


def _count_parameters(params: Params) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}"


def _draft_for(name: str, digest: str = "") -> dict[str, str]:
    """Return the fact about a draft's target; none where only a directory's name is known."""
    published = published_name(name)
    facts = [f"`{published}`"] if published else []
    facts += [f"a target of configuration {digest}, which loading checks"] if digest else []
    return {"draft for": ": ".join(facts)} if facts else {}


def path_or_id(name: str) -> str:
    """Return a model as a command's argument: its hub id, or the path of its directory."""
    return published_name(name) or f"path/to/{Path(name).name or 'its/target'}"
