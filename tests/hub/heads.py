"""List all heads on the hub, and one of each layout."""

from __future__ import annotations

from tests.hub import block_heads, table
from tests.hub.assistants import ASSISTANTS, AssistantTwin
from tests.hub.block_heads import BlockTwin
from tests.hub.table import HeadTwin

HEADS: dict[str, HeadTwin | BlockTwin | AssistantTwin] = {
    **table.HEADS,
    **block_heads.HEADS,
    **ASSISTANTS,
}
LAYOUTS = (
    "deepseek-ai/eagle3_qwen3_8b_ttt7",
    "RedHatAI/gemma-4-31B-it-speculator.dspark",
    "AngelSlim/Qwen3-VL-2B-Instruct_eagle3",
    "Cloudriver/EAGLE-LLaVA-1.5-7B",
    "Cloudriver/MSD-Qwen2.5-VL-7B-Instruct",
    "JLKang/ViSpec-llava-v1.6-vicuna-7b-hf",
    "RedHatAI/Qwen3-8B-speculator.dflash",
    "RedHatAI/Qwen3-8B-speculator.eagle3",
    "Rayzl/qwen2.5-vl-7b-eagle3-sgl",
    "deepseek-ai/dspark_gemma4_12b_block7",
    "deepseek-ai/dspark_qwen3_8b_block7",
    "deepseek-ai/eagle3_gemma4_12b_ttt7",
    "google/gemma-4-12B-it-assistant",
    "google/gemma-4-E2B-it-assistant",
    "lucylyn/MSD-LLaVA1.5-7B",
    "z-lab/Qwen3-8B-DFlash-b16",
    "z-lab/gemma-4-31B-it-DFlash",
)
"""Heads whose layouts differ in more than sizes; the first two are tried in `make test`."""


def twin_of(name: str) -> HeadTwin | BlockTwin | AssistantTwin:
    """Return the twin of a head, which another of its layout may have too."""
    return HEADS[table.ALIKE.get(name, name)]
