"""The look of every static page: one style sheet, light and dark, for a phone too, without scripts or requests.

Text has a contrast of at least 4.5 with what is behind it, and figures of 3 (WCAG 2.2, level AA), in both themes; a test computes
that from this sheet.
"""

from collections.abc import Iterable
from html import escape

from .figures import COLOURS
from .visible import visible_line

DARK = ("#7ab0ec", "#f0a45a", "#7fcf9f", "#e08fcf", "#a9acec", "#5fd0c4")
"""The colours of series on a dark page."""


def _variables(colours: Iterable[str]) -> str:
    return " ".join(f"--c{at}: {colour};" for at, colour in enumerate(colours))


STYLE = f"""
:root {{ color-scheme: light dark; --back: #fff; --ink: #1f2328; --aside: #57606a; --rule: #d0d7de; --trained: #d8f3dc; --edge: #2d6a4f; {_variables(COLOURS)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #16181c; --ink: #dfe2e6; --aside: #a2a9b1; --rule: #3d444d; --trained: #173d2b; --edge: #74c69d; {_variables(DARK)} }}
}}
* {{ box-sizing: border-box; }}
body {{ background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 0 auto; padding: 1em; }}
h1 {{ font-size: 1.4em; line-height: 1.25; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15em; margin: 2em 0 .5em; padding-top: .7em; border-top: 1px solid var(--rule); overflow-wrap: anywhere; }}
h3 {{ font-size: 1em; margin: 1em 0 .2em; overflow-wrap: anywhere; }}
p, li {{ overflow-wrap: anywhere; }}
p {{ margin: .4em 0; }}
nav ul {{ display: flex; flex-wrap: wrap; gap: .2em 1em; list-style: none; padding: 0; }}
a {{ color: var(--c0); }}
figure {{ margin: .8em 0; max-width: 34em; }}
figure > svg {{ width: 100%; height: auto; display: block; }}
figcaption {{ font-weight: 600; margin-bottom: .3em; }}
.key {{ display: inline-block; font-weight: normal; color: var(--aside); margin-left: .8em; }}
.key svg {{ width: .7em; height: .7em; }}
.wide {{ overflow-x: auto; margin: .8em 0; }}
table {{ border-collapse: collapse; font-size: .92em; }}
caption {{ text-align: left; font-weight: 600; padding-bottom: .3em; }}
th, td {{ text-align: left; vertical-align: top; padding: .2em .9em .2em 0; border-bottom: 1px solid var(--rule); }}
thead th {{ color: var(--aside); font-weight: normal; }}
tbody th {{ font-weight: normal; min-width: 8em; }}
td {{ overflow-wrap: anywhere; min-width: 7em; }}
td:last-child {{ min-width: 14em; }}
td.number, th.number {{ min-width: 0; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
pre {{ overflow-x: auto; background: color-mix(in srgb, var(--ink) 6%, var(--back)); padding: .6em; font-size: .85em; }}
summary {{ cursor: pointer; color: var(--c0); }}
dl {{ display: grid; grid-template-columns: 5.5em minmax(0, 1fr); margin: 0 0 1em; gap: 2px 0; }}
dt {{ color: var(--aside); font-size: .9em; }}
dd {{ margin: 0; padding: 0 .5em; border-left: 3px solid var(--rule); white-space: pre-wrap; overflow-wrap: anywhere;
  font: .88em/1.5 ui-monospace, monospace; unicode-bidi: isolate; }}
.trained {{ background: var(--trained); border-left-color: var(--edge); }}
.warning {{ border-left: 3px solid var(--c1); padding-left: .6em; }}
figure text {{ paint-order: stroke; stroke: var(--back); stroke-width: 3px; stroke-linejoin: round; }}
@media (max-width: 30em) {{ th, td {{ padding-right: .6em; }} table {{ font-size: .85em; }} dl {{ grid-template-columns: minmax(0, 1fr); }} }}
"""

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""

FOOT = "</main>\n</body>\n</html>\n"


def document(title: str, body: str, more: str = "") -> str:
    """A page: its title, its content as HTML, and styles that only it needs."""
    return f"{HEAD.format(title=escape(visible_line(title)), style=STYLE + more)}{body}{FOOT}"
