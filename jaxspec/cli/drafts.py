"""`jaxspec drafts`: list the published drafts that are known for a target.

Claims are cited, not measured here. No hub was in reach: tests read twins in the drafts' formats.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated

import tyro

from jaxspec.errors import InputError, nearest

_LLAVA_7B, _LLAVA_13B = "llava-hf/llava-1.5-7b-hf", "llava-hf/llava-1.5-13b-hf"
_UNKNOWN = "not known"


@dataclass(frozen=True)
class PublishedDraft:
    """Describe a draft that can be downloaded."""

    id: str
    target: str
    kind: str
    claim: str
    """What it gains, and who says so."""
    licence: str = _UNKNOWN
    options: str = ""
    """What `generate` is given besides the ids."""

    @property
    def question(self) -> str:
        """Return a question in the command's form, about an image if the target reads images."""
        sees = any(part in self.target for part in ("-VL-", "llava", "gemma-3-4b", "gemma-4"))
        image = "--image photo.jpg " if sees else ""
        return f'{image}--prompt "{"What is unusual here?" if image else "Why is the sky blue?"}"'


def _eagle3(draft: str, target: str, claim: str, licence: str = _UNKNOWN) -> PublishedDraft:
    return PublishedDraft(draft, target, "EAGLE-3", claim, licence, "--gamma 3")


def _vispec(target: str, claim: str) -> PublishedDraft:
    draft = f"JLKang/ViSpec-{target.partition('/')[2]}"
    return PublishedDraft(draft, target, "ViSpec", f"{claim} (ViSpec)", options="--gamma 4")


def _assistant(target: str) -> PublishedDraft:
    draft = f"{target}-assistant"
    return PublishedDraft(draft, target, "assistant", _UNKNOWN, "Apache-2.0", "--gamma 3")


_TREE = "--tree dynamic:10:30"
PUBLISHED = (
    PublishedDraft(
        "lucylyn/MSD-LLaVA1.5-7B",
        _LLAVA_7B,
        "EAGLE-1 (MSD)",
        "4.71 tokens per pass in trees (MMSpec's records)",
        options=_TREE,
    ),
    PublishedDraft(
        "mjbooo/lvlm68m",
        _LLAVA_7B,
        "draft model",
        "2.31 tokens per pass as MT* (TABED, Table 1)",
        options="--views M,T --weighting mt-paper",
    ),
    PublishedDraft(
        "Cloudriver/EAGLE-LLaVA-1.5-7B",
        _LLAVA_7B,
        "EAGLE-1",
        "1.88 tokens per pass in trees (MMSpec's records)",
        options=_TREE,
    ),
    PublishedDraft(
        "lucylyn/MSD-LLaVA1.5-13B", _LLAVA_13B, "EAGLE-1 (MSD)", _UNKNOWN, options=_TREE
    ),
    _vispec("llava-hf/llava-v1.6-vicuna-7b-hf", "2.58 times as fast"),
    _vispec("Qwen/Qwen2.5-VL-3B-Instruct", "1.87 times as fast"),
    _vispec("Qwen/Qwen2.5-VL-7B-Instruct", "1.80 times as fast"),
    PublishedDraft(
        "Cloudriver/MSD-Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "EAGLE-1 (MSD)",
        _UNKNOWN,
        options=_TREE,
    ),
    _eagle3(
        "Rayzl/qwen2.5-vl-7b-eagle3-sgl",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "1.3 times as fast (vLLM, issue 22872)",
    ),
    _eagle3(
        "AngelSlim/Qwen3-VL-2B-Instruct_eagle3",
        "Qwen/Qwen3-VL-2B-Instruct",
        "2.50 tokens per pass (AngelSlim's benchmarks)",
    ),
    _eagle3(
        "taobao-mnn/Qwen3-VL-2B-Instruct-Eagle3",
        "Qwen/Qwen3-VL-2B-Instruct",
        "1.93 tokens per pass at gamma 4 (taobao-mnn)",
        "Apache-2.0",
    ),
    _eagle3(
        "AngelSlim/Qwen3-VL-4B-Instruct_eagle3",
        "Qwen/Qwen3-VL-4B-Instruct",
        "2.41 tokens per pass (AngelSlim's benchmarks)",
    ),
    PublishedDraft(
        "google/gemma-3-270m-it",
        "google/gemma-3-4b-it",
        "draft model",
        _UNKNOWN,
        "Gemma terms of use",
        "--views T",
    ),
    _assistant("google/gemma-4-12B-it"),
    _eagle3(
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
        "google/gemma-4-31B-it",
        "2.51 to 2.95 tokens per pass (vLLM, pull request 39450)",
    ),
    _assistant("google/gemma-4-31B-it"),
    _assistant("google/gemma-4-E4B-it"),
    _assistant("google/gemma-4-E2B-it"),
    PublishedDraft(
        "z-lab/Qwen3-8B-DFlash-b16",
        "Qwen/Qwen3-8B",
        "DFlash",
        "6.1 times as fast at most (z-lab)",
        options="--gamma 15",
    ),
    PublishedDraft(
        "RedHatAI/Qwen3-8B-speculator.dflash",
        "Qwen/Qwen3-8B",
        "DFlash",
        _UNKNOWN,
        "Apache-2.0",
        "--gamma 7",
    ),
    PublishedDraft(
        "deepseek-ai/dspark_qwen3_8b_block7",
        "Qwen/Qwen3-8B",
        "DFlash (DSpark)",
        _UNKNOWN,
        options="--gamma 7",
    ),
    PublishedDraft(
        "deepseek-ai/dflash_qwen3_8b_block7",
        "Qwen/Qwen3-8B",
        "DFlash",
        _UNKNOWN,
        options="--gamma 7",
    ),
    _eagle3("deepseek-ai/eagle3_qwen3_8b_ttt7", "Qwen/Qwen3-8B", _UNKNOWN),
    *(
        _eagle3(
            f"RedHatAI/Qwen3-{size}-speculator.eagle3", f"Qwen/Qwen3-{size}", _UNKNOWN, "Apache-2.0"
        )
        for size in ("8B", "14B", "32B")
    ),
    *(
        _eagle3(
            f"thoughtworks/{target.partition('/')[2]}-Eagle3",
            target,
            f"{share} % of first tokens are accepted (SpecJAX)",
        )
        for target, share in (
            ("meta-llama/Llama-3.2-3B-Instruct", 60.6),
            ("meta-llama/Llama-3.1-8B-Instruct", 60.5),
            ("Qwen/Qwen2.5-7B-Instruct", 61.8),
            ("Qwen/Qwen2.5-14B-Instruct", 60.2),
            ("Qwen/Qwen3-8B", 60.0),
            ("Qwen/Qwen3-14B", 60.1),
            ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 61.5),
            ("deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", 65.8),
        )
    ),
)
"""The drafts that this library reads, for each target the ones with the best claims first."""


@dataclass(frozen=True)
class Drafts:
    """List the published drafts for a target: kind, claim, licence and the command.

    $ jaxspec drafts llava-hf/llava-1.5-7b-hf
    """

    target: Annotated[str, tyro.conf.Positional] = ""
    """Hub id of the target, or a directory of its name; without one, all targets are listed."""


def run(args: Drafts) -> None:
    """Print each target's drafts, each with its command."""
    drafts = drafts_of(args.target) if args.target else PUBLISHED
    targets = dict.fromkeys(draft.target for draft in drafts)
    for target in targets:
        print(f"{target}\n")
        for draft in (draft for draft in drafts if draft.target == target):
            facts = f"{draft.kind}; claim: {draft.claim}; licence: {draft.licence}"
            print(f"  {draft.id}: {facts}")
            ids = f"--target {args.target or target} --draft {draft.id}"
            print(f"    jaxspec generate {ids} {draft.options} {draft.question}\n")


def drafts_of(target: str) -> tuple[PublishedDraft, ...]:
    """Return the drafts for a target.

    Raises InputError, which names the nearest target, if none is known.
    """
    name = PurePath(target).name.lower()
    drafts = tuple(draft for draft in PUBLISHED if PurePath(draft.target).name.lower() == name)
    if not drafts:
        advice = nearest(target, sorted({draft.target for draft in PUBLISHED}))
        raise InputError(
            f"no published draft is known for {target!r}; {advice} (lookup needs no draft)"
        )
    return drafts
