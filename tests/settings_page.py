"""All settings, as `docs/settings.md`; `python -m tests.settings_page` writes it."""

import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from tokenmill.tasks.dedup.settings import DedupSettings
from tokenmill.tasks.pack.settings import SftSettings
from tokenmill.tasks.rl.settings import RlSettings
from tokenmill.tasks.score.choice import ChoiceSettings
from tokenmill.tasks.score.settings import EmbedSettings, NllSettings
from tokenmill.tasks.select.settings import NormalizationSettings
from tokenmill.tasks.tokenize.settings import PretrainSettings
from tokenmill.tasks.train.order import OrderSettings
from tokenmill.tasks.train.settings import TrainSettings

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"

SETTINGS: dict[str, type[BaseModel]] = {
    "pretrain": PretrainSettings,
    "sft": SftSettings,
    "rl": RlSettings,
    "harmony": NormalizationSettings,
    "dedup": DedupSettings,
    "score nll": NllSettings,
    "score embed": EmbedSettings,
    "choose": ChoiceSettings,
    "order": OrderSettings,
    "train": TrainSettings,
}

HEAD = """# Settings

All settings of each command, generated from the models that check them (`python -m tests.settings_page`). They are the
same in a YAML file (`--config`), on the command line (`key=value`), and as parameters of the flow.
"""


def page() -> str:
    """The page, as Markdown."""
    return HEAD + "".join(
        f"\n## {command}\n\n| key | default | values | meaning |\n|---|---|---|---|\n{''.join(lines(model))}"
        for command, model in SETTINGS.items()
    )


def lines(model: type[BaseModel], prefix: str = "") -> list[str]:
    """A line for each field, those of models within by their path."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = [each for each in (field.annotation, *typing.get_args(field.annotation)) if is_model(each)]
        if inner:
            found += lines(inner[0], f"{prefix}{name}.")
        else:
            found.append(
                f"| `{prefix}{name}` | {default(field)} | {values(field)} | {escaped(field.description or '')} |\n"
            )
    return found


def is_model(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    return "required" if field.is_required() else "" if value is None else f"`{escaped(str(value))}`"


def values(field: FieldInfo) -> str:
    """What the field takes: its choices, or its bounds."""
    choices = [
        each
        for part in (field.annotation, *typing.get_args(field.annotation))
        for each in typing.get_args(part)
        if isinstance(each, str)
    ]
    choices += [each for each in typing.get_args(field.annotation) if isinstance(each, str)]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = [
        f"{sign} {getattr(each, key)}" for each in field.metadata for key, sign in signs.items() if hasattr(each, key)
    ]
    return ", ".join([*dict.fromkeys(f"`{escaped(each)}`" for each in choices), *bounds])


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
