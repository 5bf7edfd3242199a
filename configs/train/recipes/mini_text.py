"""A text-only draft of the mini target, of the mini draft's size: pages are newlines to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from configs.models.mini import DRAFT
from configs.train import mini
from jaxspec.training.recipes import Recipe, Stage

ASSETS = Path(__file__).resolve().parents[3] / "jaxspec" / "assets" / "mini"
TARGET = str(ASSETS / "target")
PAGES = ((f"picturebook:{','.join(mini.DRAFT_KINDS)}", 1.0),)
"""What the mini draft was trained on."""

config = Recipe(
    target=TARGET,
    start=DRAFT.text_config,
    stages=(Stage("tune", replace(mini.DRAFT, frozen=()), PAGES),),
    buckets=mini.DRAFT_PAGES.buckets,
    sees=False,
    view="T",
)
