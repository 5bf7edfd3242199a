"""AASD's numbers for its KV head and separate drafts: means over three sets (Tables 1, 2).

Its targets are LLaVA-7B and 13B of "Visual Instruction Tuning"; "1.5" appears nowhere in it. It
names neither dtype, length and temperature of the answers, nor the device that omega and delta
depend on: these are the presets' here. Its tau is 0.06 to 0.19 below 1 + gamma alpha in every line,
as ours is: a block in which the answer ends has no correction or bonus token.
"""

from __future__ import annotations

from eval.lib.drafts.published import Published, read_numbers

SETS = ("llava-bench", "coco", "scienceqa")


def published(size: str, text: str) -> tuple[Published, ...]:
    """Return the lines of a target, by columns of omega, alpha, tau and delta for blocks of 3 and
    of 5.
    """
    end = "" if size == "7b" else f"_{size}"
    columns = " ".join(
        f"{name}_gamma={gamma}" for gamma in (3, 5) for name in ("omega", "alpha", "tau", "delta")
    )
    rows = {
        name: {column.replace("_", " "): value for column, value in line.items()}
        for name, line in read_numbers(f"row {columns}\n{text.strip()}").items()
    }
    source = (
        "AASD, Tables 1 and 2, of LLaVA of 'Visual Instruction Tuning', which is not LLaVA-1.5; it "
        "says neither dtype, length and temperature nor the device; heads and drafts are by the "
        "recipes"
    )
    settings = {
        "target": f"llava-hf/llava-1.5-{size}-hf",
        "draft": (f"runs/train/ft_llava{end}/hf", f"runs/train/kv_llava15_{size}_paper/hf"),
        "sets": SETS,
        "dtype": "bfloat16",
        "temperature": 0.0,
        "max_new_tokens": 128,
    }
    places = {
        "FT-LLaMA": "runs/train/ft_llama/hf",
        "DT-LLaMA": f"runs/train/dt_llama{end}/hf",
        "DT-LLaVA": f"runs/train/dt_llava{end}/hf",
        "- projector": f"runs/train/kv_llava15_{size}_paper_noprojector/hf",
    }
    return (Published(source, settings, {1: rows}, places=places),)


LLAVA_7B = published(
    "7b",
    """
    FT-LLaMA     1.39 0.35 1.93 46.13 1.37 0.34 2.55 42.77
    DT-LLaMA     1.33 0.34 1.96 45.00 1.37 0.34 2.54 43.71
    FT-LLaVA     1.27 0.28 1.68 40.57 1.21 0.28 2.22 38.35
    DT-LLaVA     1.25 0.27 1.69 39.50 1.21 0.28 2.21 38.34
    KV head      2.02 0.62 2.72 63.59 2.06 0.62 3.92 65.02
    - projector  1.64 0.49 2.33 51.48 1.56 0.47 3.21 48.98
    """,
)
LLAVA_13B = published(
    "13b",
    """
    FT-LLaMA     1.46 0.35 1.89 46.06 1.44 0.35 2.60 45.29
    DT-LLaMA     1.44 0.34 1.87 45.20 1.44 0.35 2.61 45.66
    FT-LLaVA     1.36 0.30 1.75 42.46 1.32 0.30 2.35 42.20
    DT-LLaVA     1.35 0.29 1.71 41.83 1.31 0.29 2.37 41.64
    KV head      2.14 0.63 2.74 67.78 2.24 0.62 3.99 70.45
    - projector  1.72 0.49 2.30 54.27 1.70 0.48 3.26 53.69
    """,
)
