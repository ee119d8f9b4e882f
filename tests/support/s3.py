"""An S3-compatible server on the loopback interface, for a session of tests."""

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

ACCESS, SECRET = "AKIAEXAMPLEEXAMPLE77", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
BUCKET = "bucket"


@functools.cache
def endpoint() -> str:
    """Address of the server; it starts with the first call and ends with the process."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with credentials(f"http://{host}:{port}"):
        import s3fs

        s3fs.S3FileSystem().mkdir(BUCKET)
    return f"http://{host}:{port}"


@contextmanager
def credentials(address: str) -> Iterator[None]:
    """Set the environment variables with which a process reaches the server."""
    names = {
        "AWS_ACCESS_KEY_ID": ACCESS,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": address,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    from s3fs import S3FileSystem

    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    S3FileSystem.clear_instance_cache()  # of other credentials
    try:
        yield
    finally:
        S3FileSystem.clear_instance_cache()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
