"""The pairs of models and the sets of the CoS paper (its Table 1): ensembles at temperature 1, contrast at 0 and 1."""

from __future__ import annotations

from jaxspec.evaluation.config import CollaborativeEvalConfig, Pairing

_QWEN = "Qwen/Qwen2.5-{}{}-Instruct"
_ENSEMBLES = {
    "Llama, Vicuna": ("meta-llama/Llama-2-7b-hf", "lmsys/vicuna-7b-v1.5"),
    "Qwen 3B": (_QWEN.format("", "3B"), _QWEN.format("Coder-", "3B")),
    "Qwen 1.5B": (_QWEN.format("", "1.5B"), _QWEN.format("Coder-", "1.5B")),
}
_CONTRASTS = {
    "Llama-3": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B"),
    "Llama-2": ("meta-llama/Llama-2-7b-hf", "JackFram/llama-68m"),
    "OPT": ("facebook/opt-13b", "facebook/opt-125m"),
}

config = CollaborativeEvalConfig(
    pairings=(
        *(Pairing(name, pair, "weighted:0.5,0.5") for name, pair in _ENSEMBLES.items()),
        Pairing(
            "Qwen 1.5B, three", (*_ENSEMBLES["Qwen 1.5B"], _QWEN.format("Math-", "1.5B")), "weighted", 1.0, (1, 1, 1)
        ),
        *(
            Pairing(f"{name}, T={temperature:g}", pair, "contrastive:mu=0.1", temperature, (1, 5), 1)
            for name, pair in _CONTRASTS.items()
            for temperature in (0.0, 1.0)
        ),
    ),
    sets=("humaneval", "gsm8k", "mmlu", "cnn-dm"),
    # Not cnn-dm, which the paper gives one: two articles are often over the 2048 tokens of OPT and llama-68m.
    shots=("gsm8k", "mmlu"),
    limit=100,
    max_new_tokens=256,
    dtype="bfloat16",
    prompt_buckets=(256, 512, 1024, 2048, 4096),
    image_buckets=(0,),
)
