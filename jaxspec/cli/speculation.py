"""Define the options of a target and what drafts for it, and make their engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.cli.drafts import cached_draft
from jaxspec.cli.shared import Loading, numbers, progress, refuse_set, view_names
from jaxspec.config import ModelConfig
from jaxspec.engine.captioners import check_captioner, load_captioner
from jaxspec.engine.config import capped_gamma
from jaxspec.engine.drafts import Mixture, mixture
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.errors import InputError
from jaxspec.heads.loading import is_head, read_draft_config
from jaxspec.heads.states import ImageRule
from jaxspec.loading.models import load_draft
from jaxspec.loading.pairs import check_drafts
from jaxspec.models.int8 import Weights
from jaxspec.prompts.views import needs_captioner, parse_weights
from jaxspec.runtime import clear
from jaxspec.sharding import make_mesh


@dataclass(frozen=True, kw_only=True)
class Model(Loading):
    """Choose the target, and how to load it."""

    target: str
    """Directory in Hugging Face layout, GGUF file or hub id of a vision-language model (LLaVA-1.5,
    LLaVA-NeXT (1.6), LLaVA-OneVision, Qwen2.5-VL, Qwen3-VL, Gemma 3, Gemma 4) or a text model
    (Llama, Vicuna; Mistral; Qwen2, Qwen2.5; Qwen3; Gemma 3, Gemma 4; MiMo; OPT)."""
    revision: str | None = None
    """Branch, tag or commit of a target on the hub."""
    adapter: str | None = None
    """Directory of the target's LoRA adapter in PEFT's format; it is merged at loading."""
    model_parallel: int = 1
    """Devices to split the target over; each holds the whole draft."""


@dataclass(frozen=True)
class Drafting:
    """Choose what guesses tokens for the target to check. By default it decodes by itself."""

    draft: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Directory or hub id of a small vision-language or text model with the target's tokeniser, or
    of a head of the target: KV, EAGLE-1, MSD, ViSpec, EAGLE-3, DFlash, DSpark, MTP or a
    Gemma 4 assistant. Repeat the option for a model and a head, which then draft together. `auto`
    takes the first that `jaxspec drafts` lists for the target and the hub's cache has."""
    draft_revision: str | None = None
    """Branch, tag or commit of drafts on the hub."""
    draft_weights: Weights | None = None
    """int8 holds the layers of drafts in half the bytes of 16 bits; answers do not change."""
    gamma: Literal["auto"] | int = "auto"
    """Draft length: drafted tokens in each block, or on a tree's longest path. By default the draft
    and its length, or plain decoding, are chosen again and again by measured times, and lookup
    drafts too unless --views leaves it out; a tree has length 5."""
    views: str | None = None
    """Views of the prompt that a draft model sees, comma-separated: M (multimodal: the prompt
    itself), T (text-only), C (captions for images), P (pooled multimodal: image tokens pooled to a
    quarter), P36 (pooled to 36), the variants T-literal and T-slots; and last lookup, what followed
    the newest tokens earlier in prompt and answer. By default M, for a text model T. lookup needs
    no draft."""
    captioner: str | None = None
    """Captioner of view C: jax:DIR (any vision-language model that --target takes), florence2:ID,
    blip:ID or file:CAPTIONS.jsonl."""
    draft_images: ImageRule | None = None
    """What an EAGLE head reads at the slots of images, in place of the rule that its files or its
    id tell: placeholder, embedding (for heads trained on it), unfused (MSD), zero (MMSpec's) or
    compressed (ViSpec)."""
    weights: str | None = None
    """Weight of each view, then of a head, then of lookup, comma-separated; uniform by default."""
    weighting: str = "static"
    """How weights are learned from verified tokens: static; mt-paper and mtcp-paper (MT* and MTCP*
    as in TABED); mt-release (both as its code runs them: a grid), mtcp-release (its code's inverse
    KL); or a rule with options, as grid:window=16,measure=tvd."""
    tree: str | None = None
    """Draft a tree instead of a chain: 2 (two children per node), 2:32 (cut to 32 nodes), or
    dynamic:4:24."""
    width: int | None = None
    """Tokens that each pass of the target reads, padding included: gamma + 1 or more. In 16 bits
    the answer then equals plain decoding's at the same width, token for token. Not with --tree."""

    def config(self, most: int | None = None, **options: Any) -> EngineConfig:
        """Return the checked options of an engine.

        Args:
          most: Maximum new tokens, to which the draft length is cut with a line that says so.
          options: More fields of `EngineConfig`.
        """
        gamma = self.gamma
        if gamma != "auto":
            if gamma < 1:
                raise InputError(f"--gamma: {gamma}; give 1 or more, or give no draft")
            if most is not None and (self.draft or self.views):
                gamma = capped_gamma("--gamma", gamma, most)
        return EngineConfig(
            views=None if self.views is None else view_names(self.views),
            weights=None if self.weights is None else numbers("--weights", self.weights),
            weighting=self.weighting,
            gamma=gamma,
            tree=self.tree,
            width=self.width,
            **options,
        )


def load_engine(
    models: Model, drafting: Drafting, config: EngineConfig, check: Callable[[ModelConfig], None]
) -> tuple[Engine, list[str]]:
    """Load all models; return their engine and lines about them.

    Options are checked before any model is read.

    check: Raises InputError for options that the target cannot obey.
    """
    drafts = [_locate_draft(name, models.target, drafting) for name in drafting.draft]
    parts = mixture(config.views, [read_draft_config(path) for path in drafts])
    _check_drafts(drafting, parts)
    if parts.names:
        config.rule.first(parse_weights(config.weights, len(parts.names)), vocabulary=1)
        if not config.auto:
            config.padded(config.length + 1)
    mesh = None if models.model_parallel == 1 else make_mesh(models.model_parallel)
    path = locate(models.target, models.revision)
    check(directories.read_config(path))
    check_drafts(path, drafts)

    loading = {"dtype": models.computes_in, "tiles": models.tiles}
    progress(f"loading target {path}")
    target = LoadedModel.load(
        path, **loading, mesh=mesh, weights=models.target_weights, adapter=models.adapter
    )
    reports, loaded = [f"target: {target.report}"], []
    for name in drafts:
        progress(f"loading draft {name}")
        images_rule = drafting.draft_images if is_head(name) else None
        weights = drafting.draft_weights
        draft = load_draft(name, target, **loading, images=images_rule, weights=weights)
        loaded.append(draft)
        reports += [f"draft: {draft.report}"] if isinstance(draft, LoadedModel) else []
    captioner = None
    if drafting.captioner is not None:
        progress(f"loading captioner {drafting.captioner}")
        captioner = load_captioner(drafting.captioner, models.computes_in, share_tower_with=target)
    clear()  # a warning of the engine's has a line of its own
    return Engine(target, loaded, config, captioner), reports


OF_DRAFTS = ("captioner", "weights", "weighting", "gamma", "tree")
"""Options that need a draft."""


def _locate_draft(name: str, target: str, drafting: Drafting) -> Path:
    if name != "auto":
        return locate(name, drafting.draft_revision)
    path = cached_draft(target, drafting.draft_revision)
    progress(f"--draft auto takes {model_name(path)}")
    return path


def _check_drafts(drafting: Drafting, parts: Mixture) -> None:
    """Raise InputError for options that nothing of a mixture reads."""
    listing = ",".join(parts.names)
    if not listing:
        refuse_set(drafting, OF_DRAFTS, "needs a draft; give --draft, or leave it out")
    if not drafting.draft:
        why = "needs --draft with a hub id; give one, or leave it out"
        refuse_set(drafting, ["draft_revision"], why)
        refuse_set(drafting, ["draft_weights"], "needs --draft; give one, or leave it out")
    if parts.head is None:
        refuse_set(drafting, ["draft_images"], "needs a head; give --draft, or leave it out")
    if len(parts.names) == 1:
        why = f"{listing} drafts alone; add --draft or --views, or leave it out"
        refuse_set(drafting, ["weighting"], why)
    reads = needs_captioner(parts.views, drafting.captioner)
    if drafting.captioner is not None:
        if not reads:
            raise InputError(f"--captioner: no view of {listing} shows captions; add C to --views")
        check_captioner(drafting.captioner)
