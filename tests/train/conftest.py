"""What most tests of training share."""

import pytest
from tokenmill.tasks.train.engine import joined

from tests.preparing_sft import chat_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return chat_vocabulary(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return str(tmp_path_factory.mktemp("store"))


@pytest.fixture
def world():
    with joined("cpu") as world:
        yield world
