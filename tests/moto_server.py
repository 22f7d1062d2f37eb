"""A server of S3 on loopback, which is what every `s3://` address of this process means."""

from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem


@contextmanager
def moto_here():
    """The end point of a server without a bucket."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    place = "http://{}:{}".format(*server.get_host_and_port())
    given = {"ENDPOINT_URL": place, "ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "us-east-1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**given, "EC2_METADATA_DISABLED": "true"}.items():
            environment.setenv(f"AWS_{name}", value)
        environment.delenv("AWS_PROFILE", raising=False)
        S3FileSystem.clear_instance_cache()
        yield place
        S3FileSystem.clear_instance_cache()
    server.stop()
