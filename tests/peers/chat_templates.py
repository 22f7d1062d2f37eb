"""Chat templates of models, word for word as `trl` ships them to recognize a model by, and ChatML as countless small models have it."""

from importlib.metadata import distribution
from pathlib import Path

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""The plain format: every message in its own block, no tools, no reasoning."""


def template(name: str) -> str:
    """A model's own chat template, as `trl` ships it."""
    return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja"))).read_text("utf-8")
