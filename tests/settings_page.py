"""What is generated from the models: settings, keys of blends, their schema, and `__init__.pyi`; `python -m tests.settings_page` writes it."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel
from tokenmill.tasks.blend.models import Blend, DataSource, Phase
from tokenmill.tasks.dedup.settings import DedupSettings
from tokenmill.tasks.described import Described, describe
from tokenmill.tasks.filter.settings import FilterSettings
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.score.choice import ChoiceSettings
from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.shards.kinds import KINDS, preparation
from tokenmill.tasks.tokenize.settings import PretrainSettings
from tokenmill.tasks.train.settings import OrderSettings, TrainSettings

from tests import python_api

ROOT = Path(__file__).parents[1]

SETTINGS: dict[str, type[BaseModel]] = {
    "pretrain": PretrainSettings,
    "sft": SftSettings,
    "rl": RlSettings,
    "harmony": NormalizationSettings,
    "dedup": DedupSettings,
    "filter": FilterSettings,
    "score nll": NllSettings,
    "score embed": EmbedSettings,
    "choose": ChoiceSettings,
    "order": OrderSettings,
    "train": TrainSettings,
}

HEAD = """# Settings

All settings of each command, generated from the models that check them (`python -m tests.settings_page`). They are the
same in a YAML file (`--config`), on the command line (`key=value`), and as parameters of the flow. `--help` lists
them too. Settings of more than one command are listed once, under [Shared settings](#shared-settings).
"""

PREPARATIONS = [kind.command for kind in KINDS.values()]


BLEND_HEAD = """# Blend

A blend is a JSON file: datasets and weights, and a [budget](budgets.md) if you like. Other keys are errors, with the nearest known
key. Keys that begin with `_` are comments. Relative paths are relative to the file.

```json
{
  "$schema": "/path/to/tokenmill/blends/schema/blend.json",
  "datasets": [
    {"name": "web",  "path": "/data/web/", "weight": 3, "where": "language == 'en'"},
    {"name": "code", "path": "hf://org/code", "subset": "python", "text_field": "content", "max_epochs": 4}
  ],
  "tokens": 1000000000
}
```

With `$schema`, an editor completes and checks keys. The schema is generated from the models that read blends (`python -m
tests.settings_page`, which writes this page too), and installed with the package.

List `datasets`, of which shares are held out, or `train`, `valid` and `test`, of which nothing is.
"""


def blend_page() -> str:
    """The keys of blends, as Markdown."""
    parts = {"Keys of a blend": Blend, "Keys of a dataset": DataSource, "Keys of a phase": Phase}
    return BLEND_HEAD + "".join(
        f"\n## {title}\n\n{TABLE}\n{RULE}\n{''.join(map(line, describe(model)))}" for title, model in parts.items()
    )


def schema() -> str:
    """The JSON schema of blends."""
    return (
        json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **Blend.model_json_schema()}, indent=1)
        + "\n"
    )


def generated() -> Mapping[Path, str]:
    """The content of each file that is generated."""
    return {
        ROOT / "docs/settings.md": page(),
        ROOT / "docs/blend.md": blend_page(),
        ROOT / "blends/schema/blend.json": schema(),
        python_api.STUB: python_api.stub(),
    }


def page() -> str:
    """The page, as Markdown: each line once, under the command that has it, or under the shared settings."""
    lines = {command: list(map(line, describe(model, refused(command)))) for command, model in SETTINGS.items()}
    takers: dict[str, list[str]] = {}
    for command, each in lines.items():
        for setting in each:
            takers.setdefault(setting, []).append(command)
    shared = "".join(
        f"{setting.rstrip()} {', '.join(commands).replace(', '.join(PREPARATIONS), 'all that prepare data')} |\n"
        for setting, commands in takers.items()
        if len(commands) > 1
    )
    own = {
        command: "".join(setting for setting in each if len(takers[setting]) == 1) for command, each in lines.items()
    }
    return f"{HEAD}\n## Shared settings\n\n{TABLE} commands |\n{RULE}---|\n{shared}" + "".join(
        f"\n## {command}\n\n{TABLE}\n{RULE}\n{rows}" for command, rows in own.items()
    )


TABLE, RULE = "| key | default | values | meaning |", "|---|---|---|---|"


def refused(command: str) -> Collection[str]:
    """The settings that a command inherits and does not take."""
    return next((preparation(name).hidden for name, kind in KINDS.items() if kind.command == command), ())


def line(setting: Described) -> str:
    """A line of the table."""
    default = "required" if setting.required else "" if setting.default is None else f"`{escaped(setting.default)}`"
    return f"| `{setting.key}` | {default} | {escaped(setting.values)} | {escaped(setting.meaning)} |\n"


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
