"""What the demo says at its end is there."""

import io
import re

from rich.console import Console
from tokenmill.tasks.report.demo import print_next_steps

from tests.preparing import prepare, write_lines


def test_the_files_that_the_demo_names_exist(tmp_path):
    source, shown = write_lines(tmp_path / "a.jsonl", ["some text"] * 100), io.StringIO()
    prepare({"datasets": [{"name": "a", "path": str(source)}]}, tmp_path / "prepared")
    print_next_steps("prepared", "blend.json", Console(file=shown, width=80))
    (pattern,) = re.findall(r"prepared/shards/\S*\*\S*?(?=,)", shown.getvalue())
    assert list(tmp_path.glob(pattern))
