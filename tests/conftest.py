"""Tests keep their caches to themselves: a folder of the session stands in for the user's."""

import os
import shutil
import tempfile


def pytest_configure(config):
    config.own_cache = tempfile.mkdtemp(prefix="tokenmill-cache-")
    os.environ["XDG_CACHE_HOME"] = config.own_cache


def pytest_unconfigure(config):
    shutil.rmtree(config.own_cache, ignore_errors=True)
