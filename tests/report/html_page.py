"""A page as a browser would read it."""

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Its elements with their attributes, its text, its tables by caption, and the text of each `dd` with its class.

    Every element that opens is closed in order.
    """

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self.tables, self.passages = [], "", {}, []
        self._open, self._cell, self._row, self._rows = [], "", [], []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag in {"caption", "td", "th"}:
            self._cell = ""
        if tag == "dd":
            self.passages.append((dict(attrs).get("class", ""), ""))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        if tag == "caption":
            self._rows = self.tables.setdefault(self._cell, [])
        elif tag in {"td", "th"}:
            self._row.append(self._cell)
        elif tag == "tr":
            self._rows.append(self._row)
            self._row = []

    def handle_data(self, data):
        self.text += data
        self._cell += data
        if self._open[-1:] == ["dd"]:
            kind, text = self.passages[-1]
            self.passages[-1] = (kind, text + data)

    @property
    def tags(self):
        return {tag for tag, _ in self.elements}

    def attributes(self, *names):
        """The values of all attributes of these names."""
        return [value for _, attributes in self.elements for name, value in attributes.items() if name in names]

    def rows(self, caption):
        """The rows of the table whose caption begins so, without its head, by their first cell."""
        (name,) = [name for name in self.tables if name.startswith(caption)]
        return {row[0]: row[1:] for row in self.tables[name][1:]}
