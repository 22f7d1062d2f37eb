"""A view as a static HTML page: no scripts, no requests, light or dark by system preference.

All text passes `visible` and `html.escape`, and the page's content security policy blocks everything else. A page has about
twice the bytes of its text.
"""

from collections.abc import Iterator
from html import escape

from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .style import document
from .view import Pack, Passage, SubSequence, View
from .view_rows import PADDING
from .view_text import describe_pack, describe_padding, describe_sequence
from .visible import visible, visible_line

STYLE = """
main { font-size: .95em; }
h1, h2, h3 { font-size: 1em; margin: 1.5em 0 0; }
h3 { border-top: 1px solid var(--rule); padding-top: .5em; margin-top: 1em; }
p { color: var(--aside); }
.document1 { background: color-mix(in srgb, #f59e0b 22%, var(--back)); border-left-color: #f59e0b; }
.document2 { background: color-mix(in srgb, #d946ef 18%, var(--back)); border-left-color: #d946ef; }
.document3 { background: color-mix(in srgb, #3b82f6 20%, var(--back)); border-left-color: #3b82f6; }
.padding { color: var(--aside); font-style: italic; }
"""

DOCUMENT_COLOURS = 4
"""The colours of trained text, by the number of the document in its row."""

LEGEND = """<dl>
<dt>role</dt><dd class="trained">trained on</dd>
<dt>role</dt><dd>not trained on; ↵ is a line break, \\u202e and ␛ are codes without a shape</dd>
</dl>
"""


def publish_html(view: View, place: str, about: str = "") -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    return publish_bytes(absolute(place), view_html(view, about).encode())


def view_html(view: View, about: str = "") -> str:
    """The page; `about` follows its title."""
    title = f"{view.path}: {view.type}, decoded with {view.tokenizer}{about}"
    body = "".join(line for pack in view.packs for line in _pack(pack))
    return document("tokenmill view", f"<h1>{_line(title)}</h1>\n{LEGEND}{body}", STYLE)


def _pack(pack: Pack) -> Iterator[str]:
    yield f"<section>\n<h2>{_line(describe_pack(pack))}</h2>\n"
    for sequence in pack.sequences:
        yield from _sequence(sequence, pack.count)
    yield "</section>\n"


def _sequence(sequence: SubSequence, count: int) -> Iterator[str]:
    yield f"<h3>{_line(sequence.document)} ({sequence.number + 1} of {count})</h3>\n"
    yield f"<p>{_line(describe_sequence(sequence))}</p>\n<dl>\n"
    colour = sequence.number % DOCUMENT_COLOURS
    trained = f"trained document{colour}" if colour else "trained"
    yield from (_passage(passage, trained) for passage in sequence.passages)
    yield "</dl>\n"


def _passage(passage: Passage, trained: str) -> str:
    label = f"<dt>{escape(passage.role)}</dt>"
    if passage.role == PADDING:
        return f'{label}<dd class="padding">{describe_padding(passage)}</dd>\n'
    kind = f' class="{trained}"' if passage.trained else ""
    return f"{label}<dd{kind}>{escape(visible(passage.text))}</dd>\n"


def _line(text: str) -> str:
    return escape(visible_line(text))
