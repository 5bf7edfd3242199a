"""`jaxspec export` and `jaxspec import`: write checkpoints as Hugging Face directories."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import tyro

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.formats import gguf_files, original_llava
from jaxspec.checkpoints.huggingface import SaveOptions
from jaxspec.checkpoints.locating import fetch_checkpoint, locate, model_name, published_name
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.cli.shared import progress, refuse_set
from jaxspec.config import ModelConfig
from jaxspec.errors import InputError, printable
from jaxspec.files import local_path
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Server
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.loading import is_head
from jaxspec.heads.states import ImageRule
from jaxspec.loading.pairs import SPARE_TOKENS, check_tokens, known_tokens
from jaxspec.publishing.export import Target, export
from jaxspec.publishing.model_card import Terms
from jaxspec.publishing.push import Repository, check_terms, push
from jaxspec.publishing.served_draft import draft_command
from jaxspec.runtime import human_bytes, setup_runtime

NEEDS_PUSH = "needs --push; give a repository, or leave it out"


@dataclass(frozen=True)
class ForEngines:
    """Fit a draft or a head to what will run it."""

    engine: Annotated[Server | None, tyro.conf.arg(name="for")] = None
    """Engine that an EAGLE-3, DFlash or DSpark head, or for vllm a text draft or an assistant of
    Gemma 4, is written for; the command that serves it is printed."""
    vocab_of: str | None = None
    """Directory or hub id of a target. The vocabulary is padded to its size; tokens that the source
    cannot know get no probability. For a head, the target that it is served with."""
    draft_vocabulary: int | None = None
    """Keep this many tokens of a draft's vocabulary, for jaxspec only. By default a KV head keeps
    its own, and other drafts get a full output matrix, because transformers reads nothing else."""
    draft_images: ImageRule | None = None
    """Rule for images to write into an EAGLE head's config.json; by default its own."""


@dataclass(frozen=True)
class OnHub:
    """Upload the result, and fill in its model card."""

    push: str | None = None
    """Upload the result to this repository of the hub, owner/name, which is created, private. Log
    in with `hf auth login` first. A push that was cut off goes on with the same command."""
    public: bool = False
    """Create the repository for everybody to see."""
    onto: str | None = None
    """Revision of the repository to commit onto, where somebody has changed it since the last push
    from here; its README.md stays."""
    licence: str | None = None
    """Licence for the card, an id of the hub's list or NAME=LINK; by default the source's."""
    base_model: str | None = None
    """Hub id of the model that the result was made from, for the card; by default the source's."""

    @property
    def repository(self) -> Repository | None:
        """Return the repository to push to; InputError for options of a push without one."""
        if self.push is None:
            refuse_set(self, ["public", "onto"], NEEDS_PUSH)
            return None
        return Repository(self.push, self.public, self.onto)


@dataclass(frozen=True)
class Export:
    """Write a checkpoint, or a head, with a model card as a Hugging Face directory.
    transformers 4.57 and 5 load it, except heads; vLLM and SGLang serve EAGLE-3 and DFlash heads,
    vLLM also DSpark heads, assistants of Gemma 4 and text drafts.

    $ jaxspec export runs/train/llava15_68m/hf my-draft \\
        --vocab-of llava-hf/llava-1.5-7b-hf
    $ jaxspec export runs/train/eagle3_llava15_7b/hf my-head --for vllm
    """

    draft: ForEngines
    hub: OnHub
    source: Annotated[str, tyro.conf.Positional]
    """Directory in Hugging Face layout, or hub id."""
    destination: Annotated[Path | None, tyro.conf.Positional] = None
    """Directory to write; with --push it may be left out."""
    revision: str | None = None
    """Branch, tag or commit of a source on the hub."""
    adapter: str | None = None
    """Directory of a LoRA adapter in PEFT's format, to merge into the model."""
    text_only: bool = False
    """Write only the decoder of a vision-language model, as a language model of its own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the written tensors; by default the source's."""
    overwrite: bool = False
    """Replace an existing checkpoint in one step; other files of its directory stay."""


@dataclass(frozen=True)
class Import:
    """Write a GGUF file of a Llama, Qwen2 or Gemma 3, dequantised, or a model in the original LLaVA
    format as a Hugging Face directory.

    $ jaxspec import model.gguf my-model
    """

    source: Annotated[str, tyro.conf.Positional]
    """The .gguf file, or the directory or hub id of a LLaVA-1.5 or 1.6 in its original format."""
    destination: Annotated[Path, tyro.conf.Positional]
    """Directory to write."""
    overwrite: bool = False
    """Replace an existing checkpoint in one step; other files of its directory stay."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of the written tensors; by default float32 for a GGUF file, which is exact for all
    its types, and a LLaVA's own."""


def run_import(args: Import) -> None:
    """Write the directory, and print a line about it."""
    setup_runtime()
    dtype = args.dtype and jnp.dtype(args.dtype)
    progress(f"importing {args.source}")
    if args.source.endswith(".gguf"):
        if not os.path.isfile(file := local_path(args.source)):
            raise InputError(f"{file}: no such file; give one that ends in .gguf")
        config: ModelConfig = gguf_files.convert(file, args.destination, dtype, args.overwrite)
    else:
        path = fetch_checkpoint(args.source)
        if not directories.is_original_llava(directories.read_raw_config(path)):
            raise InputError(
                f"{path}: in Hugging Face layout already; `jaxspec export` rewrites it"
            )
        tower = fetch_checkpoint(original_llava.tower_name(path))
        directories.check_destination(args.destination, args.overwrite, path, tower)
        config = original_llava.convert(path, tower, args.destination, dtype, args.overwrite)
    _print_export(args.destination, config)


def run(args: Export) -> None:
    """Write the directory, and print a line about it."""
    setup_runtime()
    draft, hub = args.draft, args.hub
    repository = hub.repository
    destination = args.destination or (repository and repository.folder)
    if destination is None:
        raise InputError("destination: none is given; give a directory, or --push owner/name")
    # An export in the cache is an earlier try of this push.
    overwrite = args.overwrite or args.destination is None
    source = locate(args.source, args.revision)
    terms = Terms.of(source, hub.licence, hub.base_model)
    if repository is not None:
        check_terms(source, terms)
    target = None
    if draft.vocab_of is not None:
        path = locate(draft.vocab_of)
        directories.check_destination(destination, overwrite, path)
        name = model_name(path)
        place = published_name(name) or str(path.resolve())
        target = Target(name, directories.read_config(path), place=place)
        if repository and draft.engine == "speculators" and place != published_name(name):
            raise InputError(
                f"push: {path}: a directory, where {repository.name} would look for its target; "
                "give --vocab-of its hub id"
            )
        if not is_head(source):  # a head has no tokeniser
            tokenizers = load_tokenizer(path), load_tokenizer(source)
            check_tokens(*tokenizers, grows=True)
            known, lacking = known_tokens(*tokenizers)
            target = replace(target, known=known)
            if lacking > SPARE_TOKENS:
                target = replace(target, tokenizer=path)
    progress(f"exporting {source}")
    config = export(
        source,
        destination,
        target=target,
        text_only=args.text_only,
        draft_vocabulary=draft.draft_vocabulary,
        engine=draft.engine,
        images=draft.draft_images,
        adapter=args.adapter,
        options=SaveOptions(dtype=args.dtype and jnp.dtype(args.dtype), overwrite=overwrite),
        terms=terms,
    )
    if args.destination is not None:
        _print_export(destination, config)
    if repository is not None:
        progress(f"pushing to {repository.name}")
        print(printable(str(push(destination, repository))))
    if draft.engine is None:
        return
    path = repository.name if repository else str(destination)
    if isinstance(config, HeadConfig):
        print(printable(kind_of(config).command(config, path, draft.engine)))
    else:
        assert target is not None
        print(printable(draft_command(path, target.place, config, target.config)))


def _print_export(path: Path, config: Any) -> None:
    files = list(path.glob("*.safetensors"))
    size = human_bytes(sum(file.stat().st_size for file in files))
    count = f"{len(files)} file{'s' * (len(files) > 1)}"
    print(printable(f"{path}: {config.model_type}, {size} in {count}"))
