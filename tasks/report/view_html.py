"""A view as a static HTML page, which has about twice the bytes of its text."""

from tokenmill.tasks.dataset.stored import PADDING
from tokenmill.tasks.kit import html
from tokenmill.tasks.shards.publish import Output, publish_bytes
from tokenmill.tasks.storage import absolute

from .view import View
from .view_terminal import describe_pack, describe_padding, describe_sequence


def publish_html(view: View, place: str, about: str = "") -> Output:
    """Write the page to the file or object `place`; errors as in `publish`."""
    return publish_bytes(absolute(place), view_html(view, about).encode())


def view_html(view: View, about: str = "") -> str:
    """Return the page; `about` follows its title."""
    title = f"{view.path}: {view.type}, decoded with {view.tokenizer}{about}"
    return html.document(
        "view.html.jinja", title=title, view=view, padding=PADDING, describe_pack=describe_pack,
        describe_padding=describe_padding, describe_sequence=describe_sequence,
    )  # fmt: skip
