"""All settings, as `docs/settings.md`; `python -m tests.settings_page` writes it."""

from collections.abc import Collection
from pathlib import Path

from pydantic import BaseModel
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

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

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
them too.
"""


def page() -> str:
    """The page, as Markdown."""
    return HEAD + "".join(
        f"\n## {command}\n\n| key | default | values | meaning |\n|---|---|---|---|\n{''.join(map(line, describe(model, refused(command))))}"
        for command, model in SETTINGS.items()
    )


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
    PAGE.write_text(page(), "utf-8")
