"""Vocabularies that several tests of tokenizing stand on."""

import pytest

from tests.tokenize.small_vocabularies import byte_level_bpe


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("vocabularies")


@pytest.fixture(scope="session")
def small(directory):
    return byte_level_bpe(directory / "small")
