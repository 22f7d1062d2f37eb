"""A newcomer's first hour: the commands of README and of the tutorials, in a new virtual environment and a new HOME.

    python -m bench.first_hour

Commands that install use the package index; all others run on a host without a network, which needs root. README's data are
elsewhere, so files of the same names stand in for them, and the default tokenizer for the one of the Hub. Prints a line for each
page with its seconds; a command that fails, or prints something else than its page shows, ends the hour.

Slurm, Docker and Kubernetes aren't needed. The page about Slurm is followed on this machine, without `NEED_SLURM`. Its profile, and
the commands and files of the page about containers, are only checked: options by the commands' parsers, YAML by its schema.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.child import ROOT
from tests import test_deployments_folder
from tests.flows.terminals import Terminal, lonely_host, started
from tests.flows.test_readme import blocks
from tests.flows.test_tutorials import STAYS, follow

PAGES = ["start.md", "tutorial-pretrain.md", "tutorial-sft.md", "tutorial-rl.md", "tutorial-nightly.md"]
"""Pages that need no more than README installs."""

NEED_SLURM = ['$ sinfo --format "%P %c %m %l"\nPARTITION CPUS MEMORY TIMELIMIT\n…\n', " --cluster slurm.yaml"]

CHECKS = [
    test_deployments_folder.test_the_profile_of_the_tutorial_makes_a_job_that_ends_in_time,
    test_deployments_folder.test_commands_of_the_tutorial_about_compose_fit_the_file,
    test_deployments_folder.test_commands_of_the_tutorial_about_kubernetes_fit_the_manifests,
]

STAND_INS = {
    "/data/web/": "web/",
    "s3://bucket/code/*.jsonl.zst": "code/*.jsonl",
    "hf://nvidia/Nemotron-CC-Math-v1": "math/",
    "tokenizer.model=Qwen/Qwen3-0.6B": "tokenizer.model=o200k_harmony",
    "/data/": "./",
}
"""What README names, and what is here."""

SCRIPT = """texts = ["Rye bread keeps for weeks."] * 20
"""


def main() -> int:
    """Follow README and each tutorial."""
    with tempfile.TemporaryDirectory() as made, lonely_host() as host:
        folder, began = Path(made), time.monotonic()
        clone = cloned(folder / "tokenmill")
        readme = standing_in((clone / "README.md").read_text("utf-8"))
        programs = install(readme, clone, folder)
        path = f"{programs}:{os.environ['PATH']}"
        began = report("README: install", began)
        use(readme, Terminal(host, clone, folder / "home", COLUMNS="250", PATH=path))
        began = report("README: prepare and serve", began)
        for page, without in {**dict.fromkeys(PAGES, ()), "tutorial-slurm.md": NEED_SLURM}.items():
            work = folder / page
            work.mkdir()
            follow(page, host, work, without, PATH=path)
            began = report(page, began)
        for check in CHECKS:
            check()
        report("Slurm and containers: checks", began)
    return 0


def report(what: str, began: float) -> float:
    """Print the seconds since `began`; the time now."""
    now = time.monotonic()
    print(f"{what:30} {now - began:6.0f} s", flush=True)
    return now


def cloned(folder: Path) -> Path:
    """The files of the working tree that git knows or doesn't ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def standing_in(text: str) -> str:
    """README with names of data that are here."""
    for name, ours in STAND_INS.items():
        text = text.replace(name, ours)
    return text


def install(readme: str, clone: Path, folder: Path) -> Path:
    """Run the commands that install, one after the other in one shell as they share its environment; the folder of programs."""
    (folder / "home").mkdir()
    lines = next(lines for lines in blocks(readme) if any("venv" in line for line in lines))
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    outer = os.pathsep.join(
        place for place in os.environ["PATH"].split(os.pathsep) if Path(place) != Path(sys.executable).parent
    )
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=clone,
        env=environment | {"HOME": str(folder / "home"), "PATH": outer},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{lines}\n{done.stdout}{done.stderr}"
    return clone / ".venv/bin"


def use(readme: str, terminal: Terminal) -> None:
    """Prepare README's blend, run its script, and run a deployment on a server."""
    for name, field in {"web": "text", "code": "content", "math": "text"}.items():
        (terminal.folder / name).mkdir()
        rows = [{field: {"text": f"{name} {n}"} if name == "code" else f"{name} row {n}"} for n in range(40)]
        (terminal.folder / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (blend,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    (terminal.folder / "blend.json").write_text(blend.replace(', "subset": "4plus"', ""))
    (script,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (terminal.folder / "script.py").write_text(SCRIPT + script)
    prepare, serve = (lines for lines in blocks(readme) if lines[0].startswith(("tokenmill plan", "prefect server")))
    with ExitStack() as stack:
        for line in [*prepare, "rm -rf out && python script.py", *serve]:
            if STAYS.match(line):
                command, log = terminal.keep_running(line)
                started(terminal, line, stack.enter_context(command), log)
            else:
                terminal.run(line)


if __name__ == "__main__":
    sys.exit(main())
