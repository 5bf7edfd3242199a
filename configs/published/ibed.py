"""Block efficiency as IbED prints it for LLaVA-1.5-7B, by what captions the images.

IbED names no dtype. Of single views and MT it prints on its four sets of several images what TABED does, which names
float16.
"""

from __future__ import annotations

from eval.lib.published import Published, read_numbers

from configs.published.tabed import CAPTIONER, SETTINGS

ONE = ("chartqa", "textvqa", "vqav2", "hallusionbench")
TWO = ("spot-the-diff", "iedit")
FIVE = ("pororosv", "vist")
AVERAGES = {"n=1": ONE, "n=2": TWO, "n=5": FIVE}
LONG = f"{CAPTIONER}:MORE_DETAILED_CAPTION"

_PLAIN = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    M           2.24    2.12    2.26  2.39           2.34          2.19  1.19     1.16 2.25 2.26 1.17
    T           2.22    2.03    2.20  2.34           2.27          2.23  2.05     2.05 2.20 2.25 2.05
    pool (144)  2.23    2.08    2.26  2.36           2.23          2.22  2.07     2.09 2.23 2.23 2.08
    pool (36)   2.17    2.01    2.21  2.32           2.20          2.23  2.05     2.06 2.18 2.21 2.05
    pool (9)    2.20    2.03    2.21  2.34           2.25          2.24  2.06     2.08 2.20 2.25 2.07
    pool (1)    2.23    2.03    2.23  2.37           2.25          2.26  2.06     2.07 2.21 2.25 2.06
    MT          2.26    2.13    2.27  2.39           2.40          2.31  1.94     1.91 2.26 2.35 1.92
    MT (1)      2.26    2.13    2.27  2.39           2.40          2.31  1.94     1.91 2.26 2.35 1.92
    MT (2)      2.26    2.13    2.29  2.39           2.40          2.29  1.76     1.69 2.27 2.34 1.73
    MT (3)      2.26    2.13    2.28  2.40           2.38          2.28  1.63     1.54 2.27 2.33 1.58
    MT (4)      2.26    2.14    2.28  2.40           2.36          2.26  1.54     1.45 2.27 2.31 1.50
""")
_SHORT = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    C           2.28    2.08    2.24  2.41           2.31          2.29  2.08     2.10 2.25 2.30 2.09
    MC          2.30    2.17    2.29  2.42           2.39          2.32  1.99     1.93 2.29 2.35 1.96
    MTC         2.29    2.15    2.28  2.41           2.41          2.30  2.08     2.06 2.28 2.35 2.07
    MTCP        2.29    2.17    2.29  2.42           2.41          2.33  1.99     1.93 2.29 2.37 1.96
    MC (1)      2.30    2.17    2.29  2.42           2.39          2.32  1.99     1.93 2.29 2.35 1.96
    MC (2)      2.30    2.17    2.30  2.41           2.39          2.31  1.80     1.71 2.29 2.35 1.75
    MC (3)      2.29    2.16    2.29  2.40           2.38          2.29  1.66     1.56 2.29 2.33 1.61
    MC (4)      2.28    2.16    2.29  2.40           2.37          2.28  1.56     1.46 2.28 2.33 1.51
    MTC (1)     2.29    2.15    2.28  2.41           2.41          2.30  2.08     2.06 2.28 2.35 2.07
    MTC (2)     2.29    2.17    2.29  2.42           2.41          2.30  1.99     1.96 2.29 2.35 1.98
    MTC (3)     2.28    2.17    2.29  2.41           2.39          2.29  1.90     1.83 2.29 2.34 1.86
    MTC (4)     2.28    2.16    2.29  2.40           2.39          2.28  1.80     1.71 2.28 2.33 1.75
    MTCP (1)    2.29    2.17    2.29  2.42           2.41          2.33  1.99     1.93 2.29 2.37 1.96
    MTCP (2)    2.28    2.17    2.29  2.41           2.40          2.31  1.90     1.81 2.29 2.35 1.85
    MTCP (3)    2.28    2.16    2.29  2.40           2.40          2.31  1.79     1.70 2.28 2.35 1.75
    MTCP (4)    2.28    2.16    2.29  2.40           2.39          2.29  1.71     1.62 2.28 2.34 1.67
""")
_LONG = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    C           2.27    2.11    2.26  2.44           2.28          2.29  2.10     2.11 2.27 2.29 2.10
    MC          2.31    2.17    2.30  2.46           2.38          2.33  1.99     1.96 2.31 2.35 1.98
    MTC         2.29    2.15    2.29  2.44           2.40          2.33  2.09     2.08 2.29 2.37 2.08
    MC (1)      2.31    2.17    2.30  2.46           2.38          2.33  1.99     1.96 2.31 2.35 1.98
    MC (2)      2.30    2.17    2.30  2.44           2.37          2.31  1.83     1.73 2.30 2.34 1.78
    MC (3)      2.28    2.16    2.30  2.43           2.37          2.29  1.68     1.58 2.29 2.33 1.63
    MC (4)      2.27    2.16    2.29  2.43           2.36          2.27  1.57     1.48 2.29 2.31 1.52
    MTC (1)     2.29    2.15    2.29  2.44           2.40          2.33  2.09     2.08 2.29 2.37 2.08
    MTC (2)     2.29    2.16    2.30  2.43           2.41          2.34  2.01     1.95 2.29 2.38 1.98
    MTC (3)     2.29    2.17    2.30  2.42           2.40          2.32  1.92     1.82 2.29 2.36 1.87
    MTC (4)     2.28    2.17    2.30  2.42           2.39          2.30  1.81     1.71 2.29 2.34 1.76
""")
_BLIP = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    C           2.23    2.02    2.23  2.40           2.28          2.27  2.12     2.10 2.22 2.27 2.11
""")
_BLIP_2 = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    C           2.25    2.07    2.23  2.37           2.30          2.29  2.09     2.12 2.23 2.29 2.10
""")
_PRETRAINED = read_numbers("""
    row         chartqa textvqa vqav2 hallusionbench spot-the-diff iedit pororosv vist n=1  n=2  n=5
    T           2.06    1.75    1.83  2.23           1.95          2.06  1.76     1.72 1.97 2.00 1.74
""")
_SETTINGS = SETTINGS | {"sets": (*ONE, *TWO, *FIVE)}

MIXTURES = (
    Published("IbED, Tables 1 to 3 and 9", _SETTINGS, {1: _PLAIN}),
    Published("IbED, Tables 2, 3, 8 and 9, captions", _SETTINGS | {"captioner": CAPTIONER}, {1: _SHORT}),
    Published("IbED, Tables 6 to 8, detailed captions", _SETTINGS | {"captioner": LONG}, {1: _LONG}),
    Published("IbED, Table 6", _SETTINGS | {"captioner": "blip:Salesforce/blip-image-captioning-base"}, {1: _BLIP}),
    Published("IbED, Table 6", _SETTINGS | {"captioner": "blip:Salesforce/blip2-opt-2.7b"}, {1: _BLIP_2}),
    Published("IbED, Table 13", _SETTINGS | {"draft": ("JackFram/llama-68m",)}, {1: _PRETRAINED}),
)
