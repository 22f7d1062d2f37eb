"""Rows that name a question of another data set are made whole: question, answer and prompt are put in.

Such a row has a `_hf_placeholder`, `{"row": …, "question_template": …}`, and its `dataset` says which table the row is
of (`tables`). The placeholder is taken out, `question` and `expected_answer` are put in, and the prompt becomes the
`input` of `responses_create_params`. All else that the row has stays, its sampling parameters, tools and metadata
included. A row without a placeholder, or with one that is null, is returned as it is.

What a template does is the style of the table:

* `dapo`: a question stands between an instruction and a reminder, each a paragraph. These are cut off, and the prefix
  or the suffix of the template (`{"prefix": …, "suffix": …}`) is put in their place. A blank line stays beside it, and
  before a question without a prefix.
* `skywork`: the question takes the place of `{question}` in the template, which is text or `{"template": text}`; where
  it is not in there, the question is asked alone.

Answers come as text, often as a JSON list of one: of a list or an object the first value is the answer. Any other text
stays the text that it is, without blanks around it, because graders compare texts: `"34"` does not become a number.

Both are as in the script that is published with the rows of Nemotron 3, down to the blank lines:
https://huggingface.co/datasets/nvidia/Nemotron-RL-Super-Training-Blends (`fill_placeholders.py`).

A row that cannot be resolved is rejected: unknown_placeholder_table, placeholder_out_of_range, malformed_placeholder,
placeholder_without_question, placeholder_without_answer, bad_request_params. Resolving takes 3 to 4 µs a row, and 0.1 µs
where there is nothing to resolve.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from tokenmill.tasks.chat.conversation import Rejected
from tokenmill.tasks.chat.json_values import kind, listed, quoted
from tokenmill.tasks.errors import nearest
from tokenmill.tasks.sources.exact_json import compact, loads

from .record import Record, Transform
from .tables import Table

PLACEHOLDER = "_hf_placeholder"
PARAMS = "responses_create_params"
MARKER = "{question}"
PARAGRAPH = "\n\n"
WRAPPED_PARAGRAPHS = 3
"""Fewer paragraphs than these cannot be a question between two others."""

Reason = Literal[
    "unknown_placeholder_table",
    "placeholder_out_of_range",
    "malformed_placeholder",
    "placeholder_without_question",
    "placeholder_without_answer",
    "bad_request_params",
]


class _UnresolvedError(ValueError):
    """Why a row cannot be resolved."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def has_placeholder(record: Mapping[str, Any]) -> bool:
    """Whether a row refers to a question elsewhere. Parquet spells a struct that is null as one full of nulls."""
    return not _says_nothing(record.get(PLACEHOLDER))


def _says_nothing(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_says_nothing, cast("dict[str, object]", value).values()))
    return value is None


def resolve_placeholders(tables: Mapping[str, Callable[[], Table]]) -> Transform:
    """A transform that resolves placeholders with `tables`, by what `dataset` says; each is called when first needed."""
    loaded: dict[str, Table] = {}

    def table(name: object) -> Table:
        if not isinstance(name, str) or name not in tables:
            raise _unknown(name, tables)
        if name not in loaded:
            loaded[name] = tables[name]()
        return loaded[name]

    def resolve(record: Record) -> Record | Rejected:
        if not has_placeholder(record):
            return record
        try:
            return _resolved(record, table(record.get("dataset")))
        except _UnresolvedError as error:
            return Rejected(error.reason, str(error))

    return resolve


def _unknown(name: object, tables: Mapping[str, object]) -> _UnresolvedError:
    tip = nearest(name if isinstance(name, str) else "", tables)
    remedy = "give resolve_placeholders a table of that name, or leave such rows out with a filter"
    return _UnresolvedError(
        "unknown_placeholder_table", f"dataset is {quoted(name)}, which is no table; {tip}; {remedy}"
    )


def _resolved(record: Record, table: Table) -> Record:
    """The row made whole; `record` itself is left as it is."""
    placeholder = record[PLACEHOLDER]
    if not isinstance(placeholder, dict):
        raise _malformed(PLACEHOLDER, placeholder, "an object with row and question_template")
    placeholder = cast("dict[str, Any]", placeholder)
    question, answer = _row(placeholder.get("row"), table)
    asked = (_dapo if table.style == "dapo" else _skywork)(question, placeholder.get("question_template"))
    resolved = dict(record)
    del resolved[PLACEHOLDER]
    resolved["question"] = asked if table.style == "dapo" else question
    resolved["expected_answer"] = answer
    resolved[PARAMS] = {**_params(record), "input": [{"role": "user", "content": asked}]}
    return resolved


def _row(number: object, table: Table) -> tuple[str, Any]:
    """Question and answer of a row of the table."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise _malformed(f"{PLACEHOLDER}.row", number, "the number of a row of the table")
    found = table.row(number)
    if found is None:
        raise _UnresolvedError(
            "placeholder_out_of_range",
            f"{PLACEHOLDER}.row is {number}, and the table has {len(table)} rows, numbered from 0; "
            "take the table, and the revision of it, that the row was made with",
        )
    question, text = found
    if question is None:
        raise _empty("placeholder_without_question", number, "question")
    answer = None if text is None else _answer(text)
    if answer in (None, "", [], {}):
        raise _empty("placeholder_without_answer", number, "answer")
    return question, answer


def _malformed(field: str, value: object, wanted: str) -> _UnresolvedError:
    return _UnresolvedError("malformed_placeholder", f"{field} is {kind(value)}; make it {wanted}")


def _empty(reason: Reason, number: int, what: str) -> _UnresolvedError:
    remedy = "take the table that the row was made with, or leave the row out"
    return _UnresolvedError(reason, f"row {number} of the table has no {what}; {remedy}")


def _answer(text: str) -> Any:  # noqa: ANN401 - JSON may be anything
    """The first value of a JSON list or object; any other answer is the text that it is."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        return text
    try:
        value = loads(text)
        compact(value)
    except (TypeError, ValueError):
        return text
    values = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else value
    return values[0] if values else None


def _dapo(question: str, template: object) -> str:
    """The question between the prefix and the suffix of the template, without what stood around it."""
    if template is None:
        return question
    if not isinstance(template, dict):
        raise _malformed(f"{PLACEHOLDER}.question_template", template, "an object with prefix or suffix")
    template = cast("dict[str, Any]", template)
    prefix, suffix = _text(template, "prefix"), _text(template, "suffix")
    if prefix is suffix is None:
        _require_empty(template, "prefix or suffix")
    paragraphs = question.split(PARAGRAPH)
    inner = PARAGRAPH.join(paragraphs[1:-1]) if len(paragraphs) >= WRAPPED_PARAGRAPHS else question
    if not prefix and not suffix:
        return inner
    before = f"{prefix or ''}{PARAGRAPH}"
    return f"{before}{inner}{PARAGRAPH}{suffix}" if suffix else f"{before}{inner}"


def _skywork(question: str, template: object) -> str:
    """The template with the question in the place of its marker."""
    text = template
    if isinstance(template, dict):
        template = cast("dict[str, Any]", template)
        text = _text(template, "template")
        if text is None:
            _require_empty(template, "template")
    if text is not None and not isinstance(text, str):
        raise _malformed(f"{PLACEHOLDER}.question_template", text, f"a text with {MARKER}")
    return text.replace(MARKER, question) if text and MARKER in text else question


def _text(template: Mapping[str, Any], name: str) -> str | None:
    value = template.get(name)
    if value is not None and not isinstance(value, str):
        raise _malformed(f"{PLACEHOLDER}.question_template.{name}", value, "text")
    return value


def _require_empty(template: Mapping[str, Any], wanted: str) -> None:
    """Raises unless a template that has none of what is wanted has nothing else either."""
    if not _says_nothing(template):
        detail = f"{PLACEHOLDER}.question_template has {listed(template)} instead of {wanted}"
        raise _UnresolvedError("malformed_placeholder", f"{detail}; check the style of the table")


def _params(record: Record) -> dict[str, Any]:
    """The parameters of the request that the row has already."""
    params = record.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        raise _UnresolvedError("bad_request_params", f"{PARAMS} is {kind(params)}; make it an object, or leave it out")
    return cast("dict[str, Any]", params or {})
