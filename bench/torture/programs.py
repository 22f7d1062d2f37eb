"""Programs against rendering: ids, loss and roles of random conversations, over every chat template that `trl` ships.

Conversations come in families of one shape with other texts, so that most are filled. Texts hold tags, control tokens and
their parts, blanks and stand-ins; messages have reasoning, tool calls, results and loss flags. Every case is a template with
a policy and some families. Its conversations are made into sequences by programs and by the template, piece by piece the
same, and both are encoded, array by array the same.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np
from tokenmill.tasks.chat import programs
from tokenmill.tasks.chat.check import BUNDLED, renderer_of, text_encoder
from tokenmill.tasks.chat.conversation import Conversation, Rejected
from tokenmill.tasks.chat.encoding import Batch, Filled
from tokenmill.tasks.chat.parse import conversation
from tokenmill.tasks.chat.template import ChatTemplate

from bench.torture.processes import each
from tests.chat.test_programs import POLICIES, SHIPPED, Maker
from tests.peers.templates.packages import Template
from tests.peers.templates.table import TEXTS
from tests.peers.templates.talks import talks
from tests.peers.templates.trial import Trial, base

COUNT = 250_000
"""Conversations, those that are no conversations included."""

CASE = 1_000
FAMILY = 20
ODD = (0.0, 0.02, 0.15)
"""Shares of texts that a template may treat in its own way."""

TEMPLATES = {path.stem: path for path in [*BUNDLED.glob("*.jinja"), *SHIPPED.values()]}
ARRAYS = ("ids", "loss", "offsets", "role_starts", "roles", "straddled")


def run(count: int, seed: int) -> str:
    """Compare that many conversations, and say what they were."""
    names = itertools.islice(itertools.cycle(sorted(TEMPLATES)), max(1, count // CASE))
    cases = [(name, f"{seed}-{number}") for number, name in enumerate(names)]
    counts = sum(each(compare, cases), Counter())
    templates = len({name for name, _ in cases})
    kinds = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("filled", "rendered", "rejected"))
    return f"{counts.total():,} conversations over {templates} templates ({kinds}) have the same ids, loss and roles"


@cache
def _trial(name: str) -> Trial:
    return Trial(Template("", TEMPLATES[name].read_text("utf-8")), base(TEXTS), talks())


def compare(case: tuple[str, str]) -> Counter[str]:
    """The kinds of the conversations of a case. Raises AssertionError for the first that differs."""
    name, seed = case
    programs.RENDERED_FIRST = 2
    source, trial = random.Random(seed), _trial(name)
    policy, split, special = (
        source.choice(POLICIES),
        source.choice(["auto", "auto", "never"]),
        source.choice(["literal", "allow"]),
    )
    renderer = renderer_of(ChatTemplate(trial.source, trial.variables), trial.vocabulary, policy, split, special)
    ours, theirs, counts = Batch(), Batch(), Counter[str]()
    maker = programs.Programs(renderer)
    for given in conversations(Maker(seed, source.choice(ODD))):
        made, expected = maker.sequences(given), renderer.sequences(given)
        if isinstance(made, Rejected) or isinstance(expected, Rejected):
            assert made == expected, (name, seed, given)
            counts["rejected"] += 1
            continue
        pieces = [every.segments() if isinstance(every, Filled) else every for every in made]
        assert pieces == expected, (name, seed, given)
        counts["filled" if isinstance(made[0], Filled) else "rendered"] += 1
        for every, other in zip(made, expected, strict=True):
            ours.add(every)
            theirs.add(other)
    if theirs.ends:
        encoder = text_encoder(trial.vocabulary, renderer.controls, "reference", special)
        found, wanted = ours.encode(encoder), theirs.encode(encoder)
        assert all(np.array_equal(getattr(found, array), getattr(wanted, array)) for array in ARRAYS), (name, seed)
    return counts


def conversations(maker: Maker) -> Iterator[Conversation]:
    """The conversations of a case: families of one shape."""
    for _ in range(CASE // FAMILY):
        record = maker.record()
        others = [
            {**maker.again({"messages": record["messages"]}), "tools": record.get("tools")} for _ in range(FAMILY - 1)
        ]
        for each_record in (record, *others):
            found = conversation(each_record, None, "tools")
            if isinstance(found, Conversation):
                yield found
