"""The settings of a command in its `--help`, read from the model that checks them.

The model and what prints it are imported only for the help, so that other commands start as fast as without it.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cyclopts import Group, Parameter
from pydantic import BaseModel
from rich.console import Console, ConsoleOptions

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel

Source = Callable[[], tuple[type[BaseModel], Collection[str]]]
"""Returns the model of a command's settings, and the settings that it rejects."""


@dataclass(frozen=True)
class SettingsPanel:
    """Prints the settings of a model in place of the one argument that takes them all."""

    source: Source

    def __call__(self, console: Console, options: ConsoleOptions, panel: "HelpPanel") -> None:
        """Print the panel; see cyclopts' HelpFormatter."""
        from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel
        from tokenmill.tasks.described import describe, example_of

        settings = list(describe(*self.source()))
        entries = [
            HelpEntry(
                positive_names=(each.key,),
                description=f"{each.meaning} ({each.values})",
                required=each.required,
                default=each.default,
            )
            for each in settings
        ]
        title = f"{panel.title}, for example {example_of(settings)}"
        DefaultFormatter()(console, options, HelpPanel("parameter", title, entries=entries))


def settings_parameter(source: Source) -> Parameter:
    """The parameter for the `key=value` arguments of a command, whose help lists the settings."""
    return Parameter(group=Group("Settings, as key=value", help_formatter=SettingsPanel(source)))
