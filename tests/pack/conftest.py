"""A small vocabulary with ChatML's control tokens, for a file of tests."""

import pytest

from tests.preparing_sft import chat_vocabulary


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return chat_vocabulary(tmp_path_factory.mktemp("vocabulary"))
