"""All templates in `docs/chat-templates.csv`, and their summary in `.md`; `python -m tests.peers.templates.table` writes both."""

import csv
import io
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.peers.templates import packages
from tests.peers.templates.packages import SOURCES, WHEELS, Template
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Outcome, Trial, base

PAGE = Path(__file__).parents[3] / "docs" / "chat-templates.md"
TABLE = PAGE.with_suffix(".csv")
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
    return f"""# Chat templates

Of {len(rows)} chat templates in PyPI packages, **{accepted} are accepted: {accepted / ended:.1%} of the {ended} that end their answers.** The
other {len(rows) - ended} don't write anything after an answer, so a model that is trained with them never learns to stop; they are rejected.
[chat-templates.csv](chat-templates.csv) has each template with its result.

* Each template was tried with {len(talks())} conversations: {counts[0]:,} were accepted, {counts[3]:,} rejected with a reason.
* Masks: {counts[1]:,} sequences are right to the character. For {counts[2]:,}, the position of the answer is ambiguous; their words are right.
  {sum(len(outcome.wrong) for _, outcome in rows)} are wrong. The judges are unique words, `transformers`' generation prompts, and its `assistant_masks`.
* Texts are identical to the output of `transformers` {"".join(each for each in WHEELS if each.startswith("transformers")).partition("==")[2]}. {sum(len(outcome.ids) for _, outcome in rows)} sequences have different ids.

To try your own: `tokenmill sft chats.jsonl -o out --dry-run tokenizer.model=MODEL chat_template=FILE` runs the same checks.
The packages: {", ".join(f"`{each}`" for each in [*WHEELS, *SOURCES])}.
"""


def table(rows: Sequence[Row]) -> str:
    """All templates, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["template", "digest", "accepted", "right", "by words", "refused", "reason"])
    for template, outcome in rows:
        counts = [outcome.counts[name] for name in ("right", "by words", "refused")] if outcome.accepted else [""] * 3
        reason = outcome.reason.replace("\n", " ").partition("; fix the template")[0]
        accepted = "yes" if outcome.accepted else "no"
        writer.writerow([template.files[0], template.digest, accepted, *counts, reason])
    return text.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made)
        PAGE.parent.mkdir(exist_ok=True)
        rows = tried(packages.downloaded(folder), made)
        PAGE.write_text(page(rows), "utf-8")
        TABLE.write_text(table(rows), "utf-8")
