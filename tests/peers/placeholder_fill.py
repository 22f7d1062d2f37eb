"""Someone else's way to fill placeholders: one row at a time, from Python lists, with `json` alone.

It says what a filled row is in the plainest words there are, for comparison: a table is read whole with
`pyarrow.parquet.read_table`, its questions and answers are looked up as nested lists and dicts, and a row is filled
without a word about what may be wrong with it.
"""

import contextlib
import copy
import json
import re

import pyarrow.parquet as pq


def read_rows(*paths):
    """The rows of the files, one after the other, as dicts."""
    return [row for path in paths for row in pq.read_table(path).to_pylist()]


def fill(record, rows, style):
    """The record with its question, or the record itself where it has no placeholder."""
    placeholder = record.get("_hf_placeholder")
    if placeholder is None:
        return record
    source = rows[placeholder["row"]]
    question = source["prompt"][0]["content"]
    template = placeholder.get("question_template")
    full = {"dapo": dapo, "skywork": skywork}[style](question, template)

    filled = copy.deepcopy(record)
    filled.pop("_hf_placeholder")
    filled["question"] = full if style == "dapo" else question
    filled["expected_answer"] = first_value(source["reward_model"]["ground_truth"])
    params = filled.get("responses_create_params")
    if params is None:
        params = {}
    params["input"] = [{"role": "user", "content": full}]
    filled["responses_create_params"] = params
    return filled


def dapo(question, template):
    if template is None:
        return question
    parts = re.split("\n\n", question)
    if len(parts) > 2:
        parts.pop()
        parts.pop(0)
    between = "\n\n" + "\n\n".join(parts) + "\n\n"
    prefix, suffix = template.get("prefix"), template.get("suffix")
    if not prefix and not suffix:
        return between[2:-2]
    full = (prefix or "") + between + (suffix or "")
    return full if suffix else full[:-2]


def skywork(question, template):
    if isinstance(template, dict):
        template = template.get("template")
    if template is None or "{question}" not in template:
        return question
    return question.join(template.split("{question}"))


def first_value(answer):
    if isinstance(answer, str):
        answer = answer.strip()
        if answer[:1] not in ("[", "{"):
            return answer
        try:
            answer = json.loads(answer)
        except json.JSONDecodeError:
            return answer
    if isinstance(answer, list):
        return answer[0]
    if isinstance(answer, dict):
        return next(iter(answer.values()))
    return answer


def fill_question(record, tables):
    """The record with the question that its `_hf_question_placeholder` names, from `{(dataset, split): rows}`."""
    filled = copy.deepcopy(record)
    placeholder = filled.pop("_hf_question_placeholder")
    source = tables[placeholder["dataset"], placeholder["split"]][int(placeholder["row"])]
    bare = source["prompt"][0]["content"]
    if placeholder["dataset"] == "BytedTsinghua-SIA/DAPO-Math-17k":
        bare = re.sub(r"(?s)^.*?of the form Answer: \$Answer \(without quotes\) where \$Answer is the answer to the problem\.", "", bare, count=1)  # fmt: skip
        bare = re.sub(r'(?s)(.*)Remember to put your answer on its own line after "Answer:"\..*', r"\1", bare, count=1)
    ends = ["lead", "trail"] if placeholder.get("mode") == "canonical" else ["prefix", "suffix"]
    question = placeholder.get(ends[0], "") + bare.strip() + placeholder.get(ends[1], "")
    answer = source["reward_model"]["ground_truth"].strip()
    if re.fullmatch(r"(?s)\[.*\]|\{.*\}", answer):
        with contextlib.suppress(json.JSONDecodeError):
            answer = json.loads(answer)
    answer = str(answer[0] if isinstance(answer, list) and answer else answer)

    filled |= {"question": question, "expected_answer": answer}
    filled["responses_create_params"]["input"][0]["content"] = question
    for each in filled.get("matched_sources", []):
        if "expected_answer" in each:
            each["expected_answer"] = answer
    return filled
