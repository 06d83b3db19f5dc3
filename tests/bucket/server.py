"""One S3 server for all tests of a process, in all folders, skipped with its reason where it can't run."""

import os
import urllib.request
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.bucket.ceph import PACKAGES, Ceph
from tests.debian import Unavailable, unpacked

BUCKET = "keel"


def make_bucket() -> None:
    """Create the bucket, at the server and with the credentials that the environment names."""
    import obstore

    url = obstore.sign(obstore.store.S3Store(BUCKET), "PUT", "", timedelta(minutes=5))
    request = urllib.request.Request(url, method="PUT", data=b"", headers={"Content-Type": ""})
    urllib.request.urlopen(request).close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ceph]:
    """The server, with one empty bucket; its credentials are in this process's environment."""
    pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")
    try:
        ceph = Ceph(unpacked("ceph", *PACKAGES), tmp_path_factory.mktemp("ceph"))
    except Unavailable as error:
        pytest.skip(str(error))
    before = {name: os.environ.get(name) for name in ceph.environment}
    try:
        ceph.start()
        os.environ.update(ceph.environment)
        make_bucket()
        yield ceph
    except Unavailable as error:
        pytest.skip(str(error))
    finally:
        ceph.stop()
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
