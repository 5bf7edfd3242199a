"""The pairs of models and the sets of the CoS paper (its Table 1): ensembles at temperature 1,
contrast at 0 and 1.

Pairs with a base model (Llama-2-7b, Llama-3.2-1B, llama-68m, OPT) are asked in raw text; the
instruct models of Qwen in their chat form. The released code asks all models in raw text, with
examples of its own: `--released CLONE` asks as it does.
`naive` is what the paper calls without APF. `speculative` is our reading of its SD, naive with the
bonus token. Of CoS and SD the paper prints the better of gamma 5 and 1, of SD with three models
too. Its raw speeds (Tables 5 and 6) give the same ratios, except that Table 5 swaps GSM8K and
CNN/DM of the three Qwens, and that Table 6 repeats GSM8K's speed of plain OPT at temperature 0 for
HumanEval: that gives 0.99 and 3.34, where Table 4 has 0.97 and 3.28. Its figures are sweeps, such
as `--sweep lambda:0.1,0.5,0.9`. The paper does not say how many prompts it asks, with how many
examples, and for how many tokens: 256 tokens are its released code's.
"""

from __future__ import annotations

from eval.lib.collaborative.config import CollaborativeEvalConfig, Pairing
from eval.lib.drafts.published import Published, read_numbers

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

_SPEEDUPS = read_numbers("""
    row                           humaneval gsm8k mmlu cnn-dm
    Llama, Vicuna, speculative    1.27      1.21  1.19 1.15
    Llama, Vicuna, CoS            1.58      1.52  1.41 1.46
    Llama, Vicuna, naive          1.46      1.39  -    -
    Qwen 3B, speculative          1.13      1.06  1.09 1.08
    Qwen 3B, CoS                  1.62      1.52  1.42 1.38
    Qwen 3B, naive                1.40      1.32  -    -
    Qwen 1.5B, speculative        1.11      1.13  1.08 1.10
    Qwen 1.5B, CoS                1.56      1.46  1.34 1.35
    Qwen 1.5B, three, speculative 0.96      0.92  0.98 0.95
    Qwen 1.5B, three, CoS         1.85      1.53  1.38 1.27
    Llama-3, T=0, speculative     2.04      1.81  1.52 1.58
    Llama-3, T=0, CoS             2.23      2.00  1.77 1.61
    Llama-3, T=0, naive           1.98      1.72  -    -
    Llama-3, T=1, speculative     1.55      1.21  1.20 1.07
    Llama-3, T=1, CoS             1.65      1.44  1.31 1.18
    Llama-3, T=1, naive           1.41      1.24  -    -
    Llama-2, T=0, speculative     1.15      1.62  1.08 0.93
    Llama-2, T=0, CoS             1.26      1.65  1.68 1.30
    Llama-2, T=0, naive           1.18      1.59  -    -
    Llama-2, T=1, speculative     0.94      1.16  1.23 1.10
    Llama-2, T=1, CoS             1.15      1.20  1.37 1.11
    Llama-2, T=1, naive           0.89      1.21  -    -
    OPT, T=0, speculative         0.97      1.05  1.47 1.40
    OPT, T=0, CoS                 3.28      2.61  3.42 3.95
    OPT, T=1, speculative         1.47      1.55  2.11 1.85
    OPT, T=1, CoS                 1.69      1.76  2.16 1.85
""")

_SPEEDS = read_numbers("""
    row                           humaneval gsm8k   mmlu    cnn-dm
    Llama, Vicuna, standard       22.617    22.054  20.459  20.782
    Llama, Vicuna, speculative    28.723    26.685  24.346  23.899
    Llama, Vicuna, CoS            35.734    33.522  28.847  30.341
    Qwen 3B, standard             49.624    49.025  47.764  46.966
    Qwen 3B, speculative          56.075    51.966  52.062  50.723
    Qwen 3B, CoS                  80.390    74.518  67.824  64.813
    Qwen 1.5B, standard           82.584    77.941  79.631  76.625
    Qwen 1.5B, speculative        91.668    88.073  86.001  84.287
    Qwen 1.5B, CoS                128.831   113.793 106.705 103.443
    Qwen 1.5B, three, standard    57.048    53.869  53.742  56.286
    Qwen 1.5B, three, speculative 55.050    51.082  52.666  51.927
    Qwen 1.5B, three, CoS         105.485   68.287  74.426  85.980
    Llama-3, T=0, standard        39.387    38.735  38.969  38.100
    Llama-3, T=0, speculative     80.349    70.110  59.233  60.198
    Llama-3, T=0, CoS             87.833    77.470  68.975  61.341
    Llama-3, T=1, standard        38.981    38.585  39.028  38.124
    Llama-3, T=1, speculative     60.421    46.688  46.834  40.793
    Llama-3, T=1, CoS             64.319    55.562  51.127  44.986
    Llama-2, T=0, standard        49.314    48.129  49.700  46.215
    Llama-2, T=0, speculative     56.711    77.969  53.676  42.980
    Llama-2, T=0, CoS             62.136    79.413  83.496  60.080
    Llama-2, T=1, standard        47.325    47.015  47.492  43.512
    Llama-2, T=1, speculative     44.486    54.537  58.415  47.863
    Llama-2, T=1, CoS             54.424    56.418  65.064  48.298
    OPT, T=0, standard            23.525    23.525  19.576  19.692
    OPT, T=0, speculative         23.211    24.701  28.776  27.568
    OPT, T=0, CoS                 78.487    61.400  66.949  77.783
    OPT, T=1, standard            23.934    23.422  19.492  19.671
    OPT, T=1, speculative         35.182    36.304  41.128  36.391
    OPT, T=1, CoS                 40.448    41.222  42.102  36.391
""")
_COLUMNS = {"whole calls": _SPEEDUPS, "tokens/s, whole calls": _SPEEDS}
_NUMBERS = {
    f"{row}, {name}": {
        column: lines[row][name] for column, lines in _COLUMNS.items() if name in lines.get(row, {})
    }
    for row in _SPEEDUPS | _SPEEDS
    for name in ("humaneval", "gsm8k", "mmlu", "cnn-dm")
}
_PAIRINGS = (
    *(
        Pairing(
            name,
            pair,
            "weighted:0.5,0.5",
            default_proposer="auto",
            chat_template="Qwen" in name,
        )
        for name, pair in _ENSEMBLES.items()
    ),
    Pairing(
        "Qwen 1.5B, three",
        (*_ENSEMBLES["Qwen 1.5B"], _QWEN.format("Math-", "1.5B")),
        "weighted",
        gammas=(1, 1, 1),
        alone=5,
    ),
    *(
        Pairing(
            f"{name}, T={temperature:g}",
            pair,
            "contrastive:mu=0.1",
            temperature,
            (1, 5),
            default_proposer=1,
            chat_template=False,
        )
        for name, pair in _CONTRASTS.items()
        for temperature in (0.0, 1.0)
    ),
)

config = CollaborativeEvalConfig(
    pairings=_PAIRINGS,
    sets=("humaneval", "gsm8k", "mmlu", "cnn-dm"),
    # Not cnn-dm, which the paper gives one: two articles are often over the 2048 tokens of OPT and
    # llama-68m.
    shots=("gsm8k", "mmlu"),
    limit=100,
    timed=8,
    repeats=3,
    max_new_tokens=256,
    dtype="bfloat16",
    prompt_buckets=(256, 512, 1024, 2048, 4096),
    image_buckets=(0,),
    published=tuple(
        Published(
            "CoS, Tables 2 to 8, on an RTX 3090 (Llama, Vicuna on an A6000), of prompts, examples "
            "and dtype that it does not name; its parallel form (WE-P, CD-P) has 0.39 to 0.82 of "
            "standard's speed; Table 5 swaps GSM8K and CNN/DM of the three Qwens, and Table 6 has "
            "GSM8K's speed of standard for HumanEval of OPT, T=0",
            {"max_new_tokens": 256, "dtype": "bfloat16"} | protocol,
            {1: {row: numbers for row, numbers in _NUMBERS.items() if numbers}},
            rows=_PAIRINGS,
        )
        for protocol in (
            {"protocol": "preset", "shots": ("gsm8k", "mmlu")},
            {"protocol": "released"},
        )
    ),
)
