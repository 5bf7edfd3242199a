"""`jaxspec drafts`: list the published drafts that are known for a target.

Claims are cited, not measured here. No hub was in reach, so that no revision is known: tests read
twins in the drafts' formats.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated

import tyro

from jaxspec.checkpoints.locating import model_name
from jaxspec.errors import InputError, nearest

LISTED = "November 2026"
"""When the list was last compared with what is published."""
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
    window: int = 0
    """Newest tokens that its sliding layers read; 0: it has none, or none is known."""

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


def _deepseek(kind: str, size: str, target: str, claim: str = _UNKNOWN) -> PublishedDraft:
    name = "DFlash (DSpark)" if kind == "dspark" else "DFlash"
    draft = f"deepseek-ai/{kind}_{size}_block7"
    return PublishedDraft(draft, target, name, claim, options="--gamma 7")


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
    _deepseek("dspark", "gemma4_12b", "google/gemma-4-12B-it"),
    _deepseek("dflash", "gemma4_12b", "google/gemma-4-12B-it"),
    PublishedDraft(
        "z-lab/gemma4-12B-it-DFlash",
        "google/gemma-4-12B-it",
        "DFlash",
        _UNKNOWN,
        options="--gamma 15",
    ),
    _eagle3("deepseek-ai/eagle3_gemma4_12b_ttt7", "google/gemma-4-12B-it", _UNKNOWN),
    _eagle3(
        "BCCard/MoAI-gemma-4-12B-it-speculator.eagle3",
        "google/gemma-4-12B-it",
        _UNKNOWN,
        "Apache-2.0",
    ),
    PublishedDraft(
        "z-lab/gemma-4-31B-it-DFlash",
        "google/gemma-4-31B-it",
        "DFlash",
        "5.62 tokens per pass (SGLang, pull request 34524)",
        options="--gamma 15",
        window=2048,
    ),
    PublishedDraft(
        "RedHatAI/gemma-4-31B-it-speculator.dspark",
        "google/gemma-4-31B-it",
        "DFlash (DSpark)",
        _UNKNOWN,
        options="--gamma 7",
        window=2048,
    ),
    PublishedDraft(
        "RedHatAI/gemma-4-31B-it-speculator.dflash",
        "google/gemma-4-31B-it",
        "DFlash",
        _UNKNOWN,
        options="--gamma 7",
    ),
    _eagle3(
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
        "google/gemma-4-31B-it",
        "2.51 to 2.95 tokens per pass (vLLM, pull request 39450)",
    ),
    _assistant("google/gemma-4-31B-it"),
    _assistant("google/gemma-4-E4B-it"),
    _assistant("google/gemma-4-E2B-it"),
    PublishedDraft(
        "rasyosef/gemma-4-E2B-it-dspark",
        "google/gemma-4-E2B-it",
        "DFlash (DSpark)",
        "2.41 tokens per pass (rasyosef, in vLLM)",
        options="--gamma 5",
    ),
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
        "z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", "DFlash", _UNKNOWN, options="--gamma 15"
    ),
    *(
        _deepseek(kind, f"qwen3_{size.lower()}", f"Qwen/Qwen3-{size}")
        for size in ("8B", "4B", "14B")
        for kind in ("dspark", "dflash")
    ),
    *(
        _eagle3(f"deepseek-ai/eagle3_qwen3_{size.lower()}_ttt7", f"Qwen/Qwen3-{size}", _UNKNOWN)
        for size in ("8B", "4B", "14B")
    ),
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
    print(f"Published drafts, as of {LISTED}; claims are their sources', not measured here.\n")
    targets = dict.fromkeys(draft.target for draft in drafts)
    for target in targets:
        print(f"{target}\n")
        for draft in (draft for draft in drafts if draft.target == target):
            window = f" with a window of {draft.window} tokens" if draft.window else ""
            facts = f"{draft.kind}{window}; claim: {draft.claim}; licence: {draft.licence}"
            print(f"  {draft.id}: {facts}")
            ids = f"--target {shlex.quote(args.target or target)} --draft {draft.id}"
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


def cached_draft(target: str, revision: str | None = None) -> Path:
    """Return the directory of a target's first listed draft that is in the hub's cache.

    Nothing is fetched.

    Raises InputError if none is in the cache, or none is known.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    drafts = [draft.id for draft in drafts_of(model_name(target))]
    for draft in drafts:
        file = try_to_load_from_cache(draft, "config.json", constants.HF_HUB_CACHE, revision)
        if isinstance(file, str) and any(Path(file).parent.glob("*model*.*")):
            return Path(file).parent
    raise InputError(
        f"draft 'auto': none of {', '.join(drafts)} is in the hub's cache; fetch one, or name it "
        "(--draft)"
    )
