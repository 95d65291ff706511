"""Draw the badges of the README, of what pyproject.toml says: pictures of this repository, which load nothing.

- python docs/img/draw_badges.py
"""

import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
BADGES = Path(__file__).parent / "badges"
HEIGHT = 20
_LETTER, _PADDING = 6.2, 6  # of a size of 11, on average; textLength stretches what a font has otherwise
_BADGE = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" aria-label="{label}">
<title>{label}</title>
<rect width="{left}" height="{height}" fill="#4a505a"/>
<rect x="{left}" width="{right}" height="{height}" fill="#3b6fb6"/>
<g fill="#ffffff" font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">
<text x="{name_x}" y="14" textLength="{name_length}">{name}</text>
<text x="{value_x}" y="14" textLength="{value_length}">{value}</text>
</g>
</svg>
"""


def badges(project: str) -> dict[str, tuple[str, str]]:
    """Return each badge's name and what it says, by its file's name, from the text of pyproject.toml."""
    pythons = re.findall(r"Programming Language :: Python :: (3\.\d+)", project)
    return {
        "license.svg": ("license", _only(r'^license = "(.+)"', project)),
        "python.svg": ("Python", " | ".join(pythons)),
        "torch.svg": ("torch", _range(_only(r'^  "torch(\W.+)",$', project))),
        "triton.svg": ("Triton", _range(_only(r'^  "triton(\W.+)",$', project))),
    }


def drawn(name: str, value: str) -> str:
    """Return a badge as an SVG."""
    left, right = (round(_LETTER * len(text)) + 2 * _PADDING for text in (name, value))
    return _BADGE.format(
        width=left + right,
        height=HEIGHT,
        left=left,
        right=right,
        name_x=_PADDING,
        name_length=left - 2 * _PADDING,
        name=escape(name),
        value_x=left + _PADDING,
        value_length=right - 2 * _PADDING,
        value=escape(value),
        label=escape(f"{name}: {value}"),
    )


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return found


def _range(specifier: str) -> str:
    """Return the bounds of a dependency as one reads them."""
    return specifier.replace(">=", "≥ ").replace("<", "< ").replace(",", ", ")


if __name__ == "__main__":
    BADGES.mkdir(exist_ok=True)
    for file, texts in badges((ROOT / "pyproject.toml").read_text()).items():
        (BADGES / file).write_text(drawn(*texts))
