"""Budgets: against linear programming, which knows whether a budget can be kept and how far its total can go."""

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenmill.tasks.blend.mix import solve
from tokenmill.tasks.blend.models import Blend
from tokenmill.tasks.errors import InputError

from tests.examples import max_examples

CLOSE = 1e-4
MARGIN = 2e-3


def blend_of(*sources, **budget):
    return Blend.model_validate({"datasets": [{"path": "/x", **source} for source in sources], **budget})


PHASES = {"phases": [{"name": "main", "share": 0.9}, {"name": "end", "share": 0.1, "mix": {"best": 0.5}}]}
ONLY_AT_THE_END = {"phases": [{"name": "main", "tokens": 60}, {"name": "end", "tokens": 40, "mix": {"best": 1}}]}
GROUPED = {"tokens": 1000, "groups": {"code": 0.4, "code/python": 0.5}}


@pytest.mark.parametrize(
    ("sources", "budget", "held", "drawn"),
    [
        ([{"name": "a", "weight": 3}, {"name": "b"}], {"tokens": 400}, {"a": 10, "b": 70}, [{"a": 300, "b": 100}]),
        ([{"name": "a", "weight": 3}, {"name": "b"}], {}, {"a": 10, "b": 70}, [{"a": 60, "b": 20}]),
        ([{"name": "a", "max_epochs": 4}, {"name": "b", "weight": 2}, {"name": "c"}], {"tokens": 1000}, {"a": 10, "b": 900, "c": 900},
         [{"a": 40, "b": 640, "c": 320}]),
        ([{"name": "a", "max_epochs": 1, "weight": 5}, {"name": "b", "max_epochs": 1}], {"tokens": 80}, {"a": 10, "b": 70},
         [{"a": 10, "b": 70}]),
        ([{"name": "web"}, {"name": "py", "group": "code/python", "share": 0.25}, {"name": "more", "group": "code/python"},
          {"name": "c", "group": "code"}], GROUPED, {"web": 1, "py": 1, "more": 1, "c": 1}, [{"web": 600, "py": 50, "more": 150, "c": 200}]),
        ([{"name": "a"}, {"name": "b"}], {"temperature": 0.5, "tokens": 300}, {"a": 100, "b": 400}, [{"a": 100, "b": 200}]),
        ([{"name": "web"}, {"name": "best", "max_epochs": 1}], {"tokens": 1000, **PHASES}, {"web": 2000, "best": 80},
         [{"web": 870, "best": 30}, {"web": 50, "best": 50}]),
        ([{"name": "web"}, {"name": "best", "weight": 0}], ONLY_AT_THE_END, {"web": 50, "best": 50}, [{"web": 60}, {"best": 40}]),
    ],
    ids=["a total", "plain weights", "a cap", "everything once", "shares within shares", "temperature", "phases", "weight 0"],
)  # fmt: skip
def test_tokens_follow_the_budget(sources, budget, held, drawn):
    """With a cap, the other datasets share what is left by weight, and phases what annealing leaves of the best data."""
    mix = solve(blend_of(*sources, **budget), held)
    close = CLOSE if any(source.get("max_epochs") == 1 for source in sources) else 1e-6
    assert [phase.drawn for phase in mix.phases] == [pytest.approx(each, rel=close) for each in drawn]


def test_limits_are_named_once_for_all_phases():
    capped = blend_of({"name": "a", "max_epochs": 4}, {"name": "b"}, tokens=1000)
    assert solve(capped, {"a": 10, "b": 900}).binding == {"a": ["max_epochs=4 of 10 tokens"]}
    blend = blend_of(
        {"name": "web"}, {"name": "py", "group": "code"}, {"name": "c"}, tokens=1000, groups={"code": 0.5},
        phases=[{"name": "main", "share": 0.9}, {"name": "end", "share": 0.1}],
    )  # fmt: skip
    assert solve(blend, dict.fromkeys(("web", "py", "c"), 1)).binding == {"py": ["share 0.5 of 'code'"]}


def test_a_ramp_is_a_staircase_between_its_neighbors():
    phases = [
        {"name": "first", "tokens": 100, "mix": {"a": 1}}, {"name": "between", "tokens": 300, "ramp": 3},
        {"name": "last", "tokens": 100, "mix": {"b": 1}},
    ]  # fmt: skip
    mix = solve(blend_of({"name": "a"}, {"name": "b"}, phases=phases), {"a": 1, "b": 1})
    assert [phase.name for phase in mix.phases] == ["first", "between-1", "between-2", "between-3", "last"]
    shares = [phase.drawn.get("b", 0) / phase.tokens for phase in mix.phases]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("sources", "budget", "held", "words"),
    [
        ([{"name": "a", "max_epochs": 2}, {"name": "b", "max_epochs": 1}], {"tokens": 100}, {"a": 10, "b": 40},
         ["'a': max_epochs=2 of 10 tokens", "at most 59 tokens in all"]),
        ([{"name": "a", "max_epochs": 2, "share": 0.5}, {"name": "b"}], {"tokens": 100}, {"a": 10, "b": 40},
         ["'a': max_epochs=2 of 10 tokens", "share 0.5 of 'a'", "at most 39 tokens in all"]),
        ([{"name": "a", "min_epochs": 3}, {"name": "b", "min_epochs": 1}], {"tokens": 60}, {"a": 10, "b": 40},
         ["'a': min_epochs=3", "at least 71 tokens in all"]),
        ([{"name": "a", "share": 0.5}, {"name": "b", "share": 0.4}], {"tokens": 60}, {"a": 10, "b": 40},
         ["a, b add up to 0.9", "make them add up to 1"]),
        ([{"name": "a", "share": 0.5}, {"name": "b"}], {"tokens": 60}, {"a": 0, "b": 40}, ["'a': doesn't have tokens"]),
        ([{"name": "a", "tokens": 50}, {"name": "b", "tokens": 20}], {"tokens": 60}, {"a": 10, "b": 40},
         ["'a': tokens=50", "'b': tokens=20", "at least 71"]),
        ([{"name": "a"}, {"name": "b", "max_epochs": 1}],
         {"tokens": 1000, "phases": [{"name": "p", "share": 0.75}, {"name": "q", "share": 0.25, "mix": {"b": 0.8}}]},
         {"a": 900, "b": 100}, ["'b': max_epochs=1 of 100", "share 0.8 of 'b' in phase 'q'", "at most 499 tokens"]),
        ([{"name": "a", "max_epochs": 1, "share": 0.5}, {"name": "b", "max_epochs": 1, "share": 0.25}, {"name": "c"}],
         {"tokens": 1000}, {"a": 10, "b": 4, "c": 4}, ["'b': max_epochs=1 of 4 tokens", "share 0.25 of 'b'", "at most 15 tokens"]),
    ],
)  # fmt: skip
def test_impossible_budgets_are_rejected_with_reason(sources, budget, held, words):
    with pytest.raises(InputError) as error:
        solve(blend_of(*sources, **budget), held)
    for word in words:
        assert word in str(error.value)


@st.composite
def budgets(draw):
    """Random budgets of one to three phases, as a blend, the tokens held, and the rows of a linear program."""
    count = draw(st.integers(1, 5))
    held = {f"d{n}": draw(st.integers(1, 1000)) for n in range(count)}
    sources = [
        {
            "name": name,
            **({"max_epochs": draw(st.sampled_from([0.5, 1, 2, 4]))} if draw(st.booleans()) else {}),
            **({"min_epochs": draw(st.sampled_from([0.1, 0.25, 0.5]))} if draw(st.integers(0, 3)) == 0 else {}),
            **({"group": draw(st.sampled_from(["g", "g/h"]))} if draw(st.integers(0, 2)) == 0 else {}),
            **({"share": draw(st.sampled_from([0.1, 0.25]))} if draw(st.integers(0, 3)) == 0 else
               {"weight": draw(st.sampled_from([0.5, 1.0, 3.0]))}),
        }
        for name in held
    ]  # fmt: skip
    in_group = any(source.get("group") for source in sources)
    groups = {"groups": {"g": draw(st.sampled_from([0.2, 0.5]))}} if in_group and draw(st.booleans()) else {}
    total = max(1, round(sum(held.values()) * draw(st.sampled_from([0.2, 0.7, 1, 1.5, 3]))))
    phases = {}
    if draw(st.booleans()):
        mix = {draw(st.sampled_from(sorted(held))): draw(st.sampled_from([0.3, 0.6]))}
        phases = {"phases": [{"name": "p", "share": 0.75}, {"name": "q", "share": 0.25, "mix": mix}]}
    return sources, {"tokens": total, **groups, **phases}, held


def program(blend, held, total):  # noqa: C901 - one limit after the other
    """The budget as rows of equalities and inequalities on the tokens of each phase and dataset."""
    sources, phases = blend.datasets, blend.phases or [None]
    size = len(sources)
    lengths = [total * (phase.share if phase else 1) for phase in phases]
    equal, to, most, bound = [], [], [], []

    def row(cells):
        found = np.zeros(size * len(phases))
        for place, value in cells:
            found[place] += value
        return found

    def members(name):
        return [n for n, s in enumerate(sources) if s.name == name or f"{s.group or ''}/".startswith(f"{name}/")]

    for p, phase in enumerate(phases):
        equal.append(row((p * size + n, 1) for n in range(size)))
        to.append(lengths[p])
        mix = phase.mix if phase else None
        shares = {s.name: (s.share, s.group or "") for s in sources if s.share} | {
            name: (share, name.rpartition("/")[0]) for name, share in (blend.groups or {}).items()
        }
        if mix is not None:
            shares = {name: each for name, each in shares.items() if each[1]} | {n: (s, None) for n, s in mix.items()}
        for name, (share, parent) in shares.items():
            cells = [(p * size + n, 1) for n in members(name)]
            if parent:
                cells += [(p * size + n, -share) for n in members(parent)]
            equal.append(row(cells))
            to.append(0 if parent else share * lengths[p])
    for n, source in enumerate(sources):
        column = row((p * size + n, 1) for p in range(len(phases)))
        if source.max_epochs:
            most.append(column)
            bound.append(source.max_epochs * held[source.name])
        if source.min_epochs:
            most.append(-column)
            bound.append(-source.min_epochs * held[source.name])
    return equal, to, most, bound


def fillable(blend):
    """Whether shares that leave something leave it to a dataset or group; a linear program would leave such a group empty."""
    groups = {each for s in blend.datasets if s.group for each in (s.group, s.group.partition("/")[0])}
    nodes = {s.name: (s.share, s.group or "") for s in blend.datasets} | {
        name: ((blend.groups or {}).get(name), name.rpartition("/")[0]) for name in groups
    }  # fmt: skip
    parents = {parent for _, parent in nodes.values()} - ({""} if blend.phases else set())
    shares = [[share for share, of in nodes.values() if of == parent] for parent in parents]
    return all(None in own or abs(sum(own) - 1) < 1e-9 for own in shares)


def slack(blend, held, total):
    """How far, as a part of the total, the limits would have to give way: 0 if the budget can be kept."""
    from scipy.optimize import linprog  # noqa: PLC0415 - takes half a second to import

    equal, to, most, bound = program(blend, held, total)
    size = len(equal[0])
    rows = [[*each, -1.0] for each in most] + [[*each, -1.0] for each in equal] + [[*(-each), -1.0] for each in equal]
    limits = [*bound, *to, *(-value for value in to)]
    found = linprog([0] * size + [1], A_ub=rows, b_ub=limits, bounds=[(0, None)] * (size + 1), method="highs")
    return found.fun / total


def check_nearest(message, blend, held, total):
    """The total that a refusal offers can be kept; between it and the one asked for, none can."""
    offered = re.search(r"at (?:most|least) ([\d,]+) tokens", message)
    nearest = int(offered[1].replace(",", "")) if offered else 0
    if nearest > 500:  # below, whole tokens are too coarse
        assert slack(blend, held, nearest) < MARGIN
        closer = np.copysign(max(2.0, 0.02 * abs(total - nearest)), total - nearest)  # offers are whole tokens
        assert slack(blend, held, nearest + closer) > 1e-9


@max_examples(40)
@given(budgets())
def test_random_budgets_match_linear_programming(budget):
    sources, keys, held = budget
    blend = blend_of(*sources, **keys)
    assume(fillable(blend))
    needed = slack(blend, held, keys["tokens"])
    assume(needed < 1e-9 or needed > MARGIN)
    if needed > MARGIN:
        with pytest.raises(InputError) as error:
            solve(blend, held)
        check_nearest(str(error.value), blend, held, keys["tokens"])
        return
    mix = solve(blend, held)
    tokens = np.array([[phase.drawn.get(name, 0.0) for name in held] for phase in mix.phases]).ravel()
    equal, to, most, bound = program(blend, held, keys["tokens"])
    assert np.abs(np.array(equal) @ tokens - to).max() <= CLOSE * keys["tokens"]
    assert not most or (np.array(most) @ tokens - bound).max() <= CLOSE * keys["tokens"]
