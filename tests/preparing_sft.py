"""A whole SFT preparation in this process, without Prefect or Dask, with a small vocabulary and a template to go with it.

The template is ChatML with reasoning and tools. It strips reasoning from earlier turns unless `keep_reasoning` says
otherwise, and marks what the assistant generates, so that `transformers` can say what is to be trained on.
"""

import json
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

from tokenmill.tasks.chat import check
from tokenmill.tasks.pack.packs import PACKS
from tokenmill.tasks.shards.store import Store

from tests.building import build_shards, plan_here, prepare_here
from tests.preparing import write_rows  # noqa: F401 - tests of rows import it from here
from tests.tokenize.small_vocabularies import BOS, EOS, byte_level_bpe

START, END = "<|im_start|>", "<|im_end|>"

CHATML = """\
{%- set turn = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set turn.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {%- if message.reasoning_content and (keep_reasoning or loop.index0 > turn.last) %}
                {{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' }}
            {%- endif %}
            {{- message.content or '' }}
            {%- for call in message.tool_calls %}
                {{- '<call>' ~ call.function.name ~ ' ' ~ call.function.arguments | tojson ~ '</call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""

UNMARKED = CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
"""The same text, and nothing that says what is generated."""

NOTHING_HELD_OUT = {"valid": 0, "test": 0}


def chat_vocabulary(folder, size=500):
    """A small byte-level BPE whose last two ids are ChatML's control tokens, and one before them EOS."""
    return byte_level_bpe(folder, size, special=(BOS, EOS, START, END))


CHOSEN = {"chat_template": CHATML, "holdout": NOTHING_HELD_OUT, "max_bad_row_fraction": 1.0}


def chosen(settings):
    """The settings of a preparation; ChatML's markers are text to the default tokenizer, which has to be allowed."""
    allowed = {} if {"tokenizer", "chat_template"} & settings.keys() else {"allow_text_markers": True}
    return CHOSEN | allowed | settings


def plan(blend, output_dir, **settings):
    """The plan of `blend` with ChatML, nothing held out, any share of bad rows, and whatever else is chosen."""
    return plan_here("sft", blend, output_dir, **chosen(settings))


def prepare(blend, output_dir, **settings):
    """Plan, build every pending shard in plan order, publish; returns the plan and the manifest."""
    return prepare_here("sft", blend, output_dir, **chosen(settings))


build = partial(build_shards, "sft")


def pack_receipts(planned):
    """The receipts of all packs in the store of a plan."""
    store = Store(planned.plan.store.place, PACKS)
    return list(store.proven(store.keys()).values())


@contextmanager
def probing_once():
    """A context in which a template is probed once however often it is planned with: that reads and writes no file."""
    known, probe = {}, check.profile_template

    def habits(template, added_tokens):
        key = template.digest, json.dumps(template.variables), json.dumps(added_tokens)
        if key not in known:
            known[key] = probe(template, added_tokens)
        return known[key]

    with patch.object(check, "profile_template", habits):
        yield
