"""Draw settings at random, each against plain decoding: no greedy answer may differ in a token.

A table measures the settings that somebody thought of. Here views, rule of the weights, block
length or `auto`, tree, batch, placement on 1, 2 or 4 devices and how two models write together are
drawn, so that combinations are tried which nobody thought of. Prompts are the picture book's, with
0 to 5 images, and texts of odd characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.decoding.drafting.rules import PRESETS, RULES
from jaxspec.engine.engine import CollaborationConfig, Engine, EngineConfig, LoadedModel, Request
from jaxspec.loading.models import LoadedDraft
from jaxspec.prompts.captions import Captioner
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.sharding import make_mesh
from picturebook import SYNTHETIC_SETS, test_set
from tests import tiny

VIEWS = ("M", "T", "C", "P", "P4", "T-literal", "head", "lookup")
TREES = ("2", "2:9", "3:12", "dynamic:2:8", "dynamic:3:12")
DEVICES = (1, 1, 2, 4)
"""Devices that the target is split over; half the settings run on one."""
COMBINATIONS = (
    "weighted",
    "weighted:0.7,0.3",
    "contrastive:mu=0.1",
    "contrastive:beta=0.5",
    "logits:1.5,-0.5",
)
SHOWN = (("M", "T"), ("T", "M"), ("M", "P"))
"""How two models that write together are shown images."""
ODD = (
    " ",
    "?",
    "\n\n\n",
    "ÄÖÜ ß",
    "数 字",
    "a" * 60,
    "<s> </s>",
    "USER: ASSISTANT:",
    "1 + 1 = 2 = ",
    "\u200b\u202e.",
)


@dataclass(frozen=True)
class Setting:
    """Hold how one run decodes."""

    engine: EngineConfig
    devices: int = 1
    head: bool = False
    """Whether a head drafts, behind the views."""
    together: CollaborationConfig | None = None
    """Two models that write together, in place of a draft."""

    def told(self) -> dict[str, Any]:
        """Return what tells the setting from others, for records."""
        told = {"devices": self.devices, "kind": "collaborative" if self.together else "draft"}
        told |= asdict(self.together or self.engine)
        return told | ({"views": (*told["views"], "head")} if self.head else {})


def draw_setting(rng: np.random.Generator, sizes: Any) -> Setting:
    """Draw a setting; `sizes` are the buckets, the same for all, so that few programs are
    compiled.
    """

    def chance(share: float) -> bool:
        return bool(rng.random() < share)

    def one(choices: Sequence[Any]) -> Any:
        return choices[int(rng.integers(len(choices)))]

    batch = int(rng.integers(1, 25))
    if chance(0.2):
        gammas = (int(rng.integers(1, 5)), int(rng.integers(1, 5)))
        method = one(("alternating", "naive", "speculative"))
        together = CollaborationConfig(
            combination=one(COMBINATIONS),
            method=method,
            gammas=gammas,
            default_proposer=int(rng.integers(2)),
            views=one(SHOWN),
            batch_size=batch,
            **sizes,
        )
        return Setting(EngineConfig(), together=together)
    views = tuple(sorted(rng.choice(VIEWS, rng.integers(1, 5), replace=False), key=VIEWS.index))
    weights = tuple(rng.dirichlet(np.ones(len(views))).tolist()) if chance(0.3) else None
    tree = None if chance(0.6) else one(TREES)
    config = EngineConfig(
        views=tuple(str(view) for view in views if view != "head"),
        weights=weights,
        weighting=one(("static", *PRESETS, *RULES)),
        gamma="auto" if tree is None and chance(0.5) else int(rng.integers(1, 8)),
        tree=tree,
        batch_size=batch,
        trace=chance(0.2),
        **sizes,
    )
    return Setting(config, one(DEVICES), "head" in views)


def draw_prompts(rng: np.random.Generator, encoder: PromptEncoder, count: int) -> list[Request]:
    """Draw requests of 1 to 32 new tokens: questions of all test sets, and one in eight of odd
    characters.
    """
    samples = [sample for name in SYNTHETIC_SETS for sample in test_set(name, 100)]
    requests = []
    for i in range(count):
        sample = samples[rng.integers(len(samples))]
        if i % 8 == 0:
            text = "".join(rng.choice(ODD, rng.integers(1, 4)))
            prompt = encoder.prompt(text, sample.images[:1] if rng.random() < 0.5 else ())
        else:
            prompt = encoder.prompt(sample.turns[0][0], sample.images)
        requests.append(Request(prompt, int(rng.integers(1, 33)) if rng.random() < 0.3 else 32))
    return requests


def try_settings(
    target: LoadedModel,
    drafts: Sequence[LoadedDraft],
    captioner: Captioner,
    settings: int,
    prompts: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yield a record a setting: how many of the prompts' greedy answers are those of plain
    decoding.

    Models that write together are held to `standard` decoding of the same combination: all models
    read every token.
    """
    rng = np.random.default_rng(seed)
    sizes: Any = {"prompt_buckets": (256,), "image_buckets": (5,), "new_buckets": (32,)}
    requests = draw_prompts(rng, Engine(target).encoder, prompts)
    expected = tiny.tokens(
        Engine(target, None, EngineConfig(batch_size=8, **sizes)).generate(requests)
    )
    placed = {n: tiny.split(target, make_mesh(n)) if n > 1 else target for n in set(DEVICES)}
    for number in tqdm(range(settings), unit="setting", desc="random settings"):
        setting = draw_setting(rng, sizes)
        reference = expected
        if setting.together is None:
            draft, head = drafts
            drafted = any(view != "lookup" for view in setting.engine.views or ())
            mixed = [draft] * drafted + [head] * setting.head
            engine: Any = Engine(placed[setting.devices], mixed, setting.engine, captioner)
        else:
            # shown the prompt in two ways; the draft's context is too short for these
            models = [target, target]
            engine = Engine(models, config=setting.together)
            standard = replace(setting.together, method="standard", gammas=None, batch_size=8)
            reference = tiny.tokens(Engine(models, config=standard).generate(requests))
        apart = [
            i
            for i, (want, got) in enumerate(
                zip(reference, tiny.tokens(engine.generate(requests)), strict=True)
            )
            if want != got
        ]
        yield {
            "setting": number,
            **setting.told(),
            "pairs": prompts,
            "identical": prompts - len(apart),
            "apart": apart,
        }
