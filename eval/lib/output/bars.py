"""Draw horizontal bars as an SVG file that follows its reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, ROW = 600, 27
LEFT, RIGHT = 258, 548
"""Where bars start, and where the longest interval ends; its value follows."""
COLOURS = ("own", "other")
STYLE = """\
text{font:15px system-ui,sans-serif;fill:#1f2328}.end{text-anchor:end}
.title{font-size:17px;font-weight:600}.head{font-weight:600}
.value{font-weight:600}.note{font-size:14px;fill:#59636e}
.own{fill:#2463c2}.other{fill:#9198a1}.page{fill:#fff;stroke:#d1d9e0}
path{fill:none;stroke:#1f2328;stroke-width:1.3}.unit{stroke:#59636e;stroke-dasharray:3 3}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.note{fill:#9198a1}.own{fill:#4c8dff}
.other{fill:#656c76}.page{fill:#0d1117;stroke:#3d444d}path{stroke:#f0f6fc}.unit{stroke:#9198a1}}"""


@dataclass(frozen=True)
class Bar:
    """Hold a value with its interval."""

    name: str
    value: float
    low: float
    high: float


def bars_svg(title: str, groups: Mapping[str, Sequence[Bar]], unit: str) -> str:
    """Return groups of bars, each with a heading and a dotted line at 1.

    Args:
      title: What the bars show, with its unit.
      groups: Bars by heading, in the colours of `COLOURS`.
      unit: Label of the dotted line at 1.
    """
    scale = (RIGHT - LEFT - 40) / max(bar.high for bars in groups.values() for bar in bars)
    unit_x, y = LEFT + scale, 34
    parts = [f'<text x="20" y="{y}" class="title">{escape(title)}</text>']
    y += 6
    for colour, (heading, bars) in zip(COLOURS, groups.items(), strict=True):
        y += ROW
        parts.append(f'<text x="20" y="{y}" class="head">{escape(heading)}</text>')
        for bar in bars:
            y += ROW
            end, low, high = (LEFT + scale * x for x in (bar.value, bar.low, bar.high))
            parts += [
                f'<text x="{LEFT - 10}" y="{y}" class="end">{escape(bar.name)}</text>',
                f'<rect x="{LEFT}" y="{y - 14}" width="{end - LEFT:.1f}" height="18" rx="2" '
                f'class="{colour}"/>',
                f'<path d="M{low:.1f} {y - 5}H{high:.1f}"/>',
                f'<text x="{high + 9:.1f}" y="{y}" class="value">{bar.value:.2f}</text>',
            ]
        parts.append(f'<path d="M{unit_x:.1f} {y - ROW * len(bars) + 9}V{y + 9}" class="unit"/>')
        y += 10
    height = y + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{STYLE}</style>",
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8" class="page"/>',
            *parts,
            f'<text x="{unit_x:.1f}" y="{y + 18}" class="note" text-anchor="middle">'
            f"{escape(unit)}</text>",
            "</svg>\n",
        ]
    )
