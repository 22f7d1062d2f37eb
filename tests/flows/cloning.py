"""What a clone of the repository holds that deployments need, in a folder that nothing else knows of."""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLONED = ["blends", "deployments", "prefect.yaml", "prefect.toml"]


def clone_into(folder):
    """The files of the working tree, whether they are committed or not; the folder."""
    for name in CLONED:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(REPOSITORY / name, folder / name)
    return folder
