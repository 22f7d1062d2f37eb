"""What several tests of shards stand on: a small vocabulary, and a bucket."""

import contextlib

import boto3
import pytest
from s3fs import S3FileSystem

from tests.flaky_storage import moto_here
from tests.tokenize.small_vocabularies import byte_level_bpe


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    return byte_level_bpe(tmp_path_factory.mktemp("vocabulary"), size=400)


@pytest.fixture(scope="package")
def s3():
    with moto_here() as place:
        yield place


@pytest.fixture
def bucket(s3, monkeypatch):
    """A client of an empty bucket, which is not the one that our stores go through; uploads in parts of 5 MiB, the least that S3 takes."""
    monkeypatch.setattr(S3FileSystem, "default_block_size", 5 << 20)
    S3FileSystem.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="shards")
    yield client
    with contextlib.suppress(client.exceptions.NoSuchBucket):
        for found in client.list_objects_v2(Bucket="shards").get("Contents", []):
            client.delete_object(Bucket="shards", Key=found["Key"])
        client.delete_bucket(Bucket="shards")
    S3FileSystem.clear_instance_cache()
