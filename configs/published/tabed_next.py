"""Block efficiency as TABED prints it for LLaVA-NeXT, read as one tile an image (Tables 19 to
22).
"""

from __future__ import annotations

from configs.published.tabed import CAPTIONER, SETTINGS, both_turns
from eval.lib.drafts.published import read_numbers

TARGET, LARGE = "llava-hf/llava-v1.6-vicuna-7b-hf", "llava-hf/llava-v1.6-vicuna-13b-hf"

_SMALL_1 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  pororosv vist
    M            2.01        1.96   2.58 2.14   1.89  1.77       2.05          2.06 1.19     1.15
    T            1.97        1.92   2.27 2.11   1.85  2.12       2.03          2.04 1.79     1.90
    C            2.00        1.97   2.48 2.14   1.92  2.16       2.04          2.10 1.78     1.93
    P            2.00        1.90   2.41 2.11   1.87  2.05       1.97          2.04 1.78     1.92
    MT static    2.02        1.97   2.47 2.14   1.94  2.14       2.08          2.11 1.75     1.80
    MT*          2.02        1.97   2.50 2.14   1.94  2.15       2.07          2.11 1.79     1.89
    MTCP static  2.02        1.99   2.50 2.15   1.94  2.18       2.09          2.12 1.81     1.93
    MTCP*        2.03        1.99   2.52 2.15   1.94  2.19       2.08          2.13 1.82     1.95
""")
_SMALL_2 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  nq   gsm8k
    M            1.88        1.88   2.78 2.08   1.52  1.43       1.67          1.89 1.94 2.12
    T            2.05        2.09   2.84 2.45   1.76  1.83       1.93          2.14 1.99 2.17
    C            2.07        2.12   2.92 2.48   1.75  1.84       1.94          2.16 1.99 2.17
    P            2.04        1.97   2.89 2.39   1.75  1.82       1.93          2.11 1.96 2.13
    MT static    2.03        2.08   2.88 2.41   1.69  1.75       1.86          2.10 1.97 2.15
    MT*          2.04        2.10   2.88 2.42   1.71  1.78       1.87          2.11 1.97 2.15
    MTCP static  2.06        2.13   2.95 2.46   1.74  1.82       1.94          2.16 1.98 2.16
    MTCP*        2.07        2.14   2.97 2.47   1.75  1.83       1.95          2.17 1.98 2.16
""")
_MIDDLE_1 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  pororosv vist
    M            2.29        2.29   3.06 2.44   2.17  2.04       2.26          2.36 1.23     1.24
    T            2.25        2.19   2.56 2.36   2.20  2.41       2.24          2.32 1.96     2.08
    C            2.26        2.26   2.87 2.42   2.26  2.46       2.29          2.40 2.05     2.19
    P            2.29        2.23   2.94 2.42   2.27  2.49       2.32          2.42 2.08     2.20
    MT static    2.31        2.30   2.95 2.44   2.24  2.46       2.32          2.43 1.89     1.97
    MT*          2.26        2.31   3.01 2.44   2.19  2.49       2.31          2.43 1.95     2.07
    MTCP static  2.31        2.30   3.02 2.44   2.30  2.54       2.34          2.46 2.06     2.20
    MTCP*        2.31        2.31   3.06 2.45   2.31  2.54       2.33          2.47 2.07     2.22
""")
_MIDDLE_2 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  nq   gsm8k
    M            2.15        2.14   3.17 2.45   1.74  1.60       1.94          2.17 2.28 2.48
    T            2.37        2.31   3.04 2.72   2.11  2.14       2.33          2.43 2.30 2.55
    C            2.40        2.38   3.11 2.75   2.12  2.16       2.33          2.46 2.29 2.56
    P            2.39        2.35   3.25 2.76   2.08  2.13       2.33          2.47 2.29 2.51
    MT static    2.37        2.37   3.21 2.77   2.04  2.06       2.23          2.44 2.29 2.54
    MT*          2.34        2.36   3.21 2.75   2.11  2.18       2.27          2.46 2.30 2.53
    MTCP static  2.42        2.38   3.22 2.78   2.08  2.13       2.30          2.47 2.30 2.54
    MTCP*        2.42        2.39   3.22 2.79   2.09  2.14       2.31          2.48 2.30 2.54
""")
_OV_1 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  pororosv vist
    M            1.96        1.93   2.22 2.10   1.91  1.98       1.98          2.01 1.65     1.73
    T            1.99        1.91   2.02 2.10   1.86  2.24       1.99          2.02 1.81     1.86
    C            2.00        1.96   2.17 2.13   1.92  2.20       1.98          2.05 1.79     1.84
    P            1.99        1.91   2.13 2.10   1.96  2.19       2.02          2.04 1.87     1.91
    MT static    2.01        1.95   2.21 2.14   1.93  2.22       2.02          2.07 1.84     1.89
    MT*          2.01        1.96   2.23 2.13   1.96  2.27       1.99          2.08 1.83     1.88
    MTCP static  2.02        1.97   2.28 2.14   1.97  2.26       2.08          2.10 1.88     1.93
    MTCP*        2.02        1.97   2.29 2.14   1.97  2.27       2.07          2.10 1.88     1.93
""")
_OV_2 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  nq   gsm8k
    M            1.97        1.96   2.37 2.11   1.63  1.64       1.77          1.92 1.87 2.16
    T            2.06        2.08   2.57 2.39   1.79  1.86       1.96          2.10 1.97 2.23
    C            2.07        2.12   2.67 2.43   1.79  1.86       1.94          2.13 1.96 2.23
    P            2.04        2.09   2.62 2.44   1.78  1.85       1.93          2.11 1.94 2.23
    MT static    2.07        2.10   2.60 2.41   1.75  1.81       1.90          2.09 1.95 2.23
    MT*          2.07        2.10   2.60 2.42   1.76  1.83       1.91          2.10 1.95 2.23
    MTCP static  2.09        2.14   2.71 2.45   1.78  1.86       1.93          2.14 1.96 2.24
    MTCP*        2.09        2.14   2.69 2.46   1.79  1.86       1.93          2.14 1.96 2.24
""")
_LARGE_1 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  pororosv vist
    M            2.01        1.97   2.44 2.04   1.87  1.75       1.95          2.00 1.18     1.15
    T            1.98        1.93   2.23 2.02   1.86  2.07       1.94          2.00 1.73     1.89
    C            1.98        1.96   2.40 2.05   1.89  2.09       1.92          2.04 1.74     1.90
    P            1.97        1.91   2.35 2.02   1.87  1.98       1.87          2.00 1.74     1.90
    MT static    2.00        1.97   2.36 2.06   1.91  2.07       1.99          2.05 1.69     1.79
    MT*          2.02        1.94   2.39 2.06   1.89  2.07       1.97          2.05 1.73     1.86
    MTCP static  2.00        1.99   2.39 2.06   1.93  2.11       2.00          2.07 1.75     1.91
    MTCP*        2.01        1.99   2.40 2.06   1.93  2.11       1.99          2.07 1.75     1.93
""")
_LARGE_2 = read_numbers("""
    row          llava-bench docvqa pope mm-vet iedit magicbrush spot-the-diff avg  nq   gsm8k
    M            1.85        1.82   2.73 2.02   1.52  1.43       1.72          1.87 1.97 2.18
    T            2.00        2.03   2.70 2.31   1.77  1.81       1.98          2.09 2.01 2.22
    C            2.03        2.08   2.77 2.35   1.77  1.81       2.00          2.12 2.01 2.23
    P            2.01        1.91   2.75 2.27   1.76  1.79       1.98          2.07 1.99 2.19
    MT static    2.02        2.02   2.74 2.29   1.69  1.73       1.91          2.06 1.99 2.20
    MT*          2.01        2.01   2.79 2.30   1.74  1.78       1.95          2.08 2.00 2.22
    MTCP static  2.04        2.07   2.82 2.32   1.74  1.79       1.97          2.11 2.00 2.21
    MTCP*        2.04        2.07   2.82 2.32   1.75  1.79       1.98          2.11 2.00 2.22
""")
_NEXT = SETTINGS | {"captioner": CAPTIONER, "target": TARGET, "tiles": False}

NEXT = (
    *both_turns("TABED, Table 19", _NEXT, _SMALL_1, _SMALL_2),
    *both_turns(
        "TABED, Table 20",
        _NEXT | {"draft": ("mjbooo/lvlm160m-bf16",), "dtype": "bfloat16"},
        _MIDDLE_1,
        _MIDDLE_2,
    ),
    *both_turns(
        "TABED, Table 21, of LLaVA-OV 68M by its caption (its rows name LLaVA-1.5 160M)",
        _NEXT | {"draft": ("mjbooo/lvlm68m-ov",)},
        _OV_1,
        _OV_2,
    ),
    *both_turns("TABED, Table 22", _NEXT | {"target": LARGE}, _LARGE_1, _LARGE_2),
)
"""The paper names float16 for its times only; the 160M pair ran in bfloat16 in its released code, all
others in float16.
"""
