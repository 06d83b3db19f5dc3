"""Objects in Google Cloud Storage and in Azure: the same calls, answers and messages as with S3."""

import re

import pytest

obstore = pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint.bucket import Bucket, BucketError, Patience  # noqa: E402
from configs.errors import UserError  # noqa: E402
from tests.bucket.clouds import Azure, Google, Kind, Objects, served  # noqa: E402

BRIEF = Patience(request_seconds=20, seconds=1)
CLOUDS = {"gs": Google, "az": Azure}
VARIABLES = {
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


@pytest.fixture(params=CLOUDS)
def scheme(request) -> str:
    return request.param


@pytest.fixture
def objects(scheme: str, monkeypatch):
    kind: Kind = CLOUDS[scheme]
    with served(kind) as (stored, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield stored


def bucket_of(scheme: str, name: str = "keel") -> Bucket:
    return Bucket(f"{scheme}://{name}/some/run", BRIEF, BRIEF)


def test_what_is_put_is_got(scheme: str, objects: Objects):
    bucket = bucket_of(scheme)
    bucket.put("a b/%c", b"content")
    first = bucket.look("a b/%c")
    assert objects.get("some/run/a b/%c")
    assert bucket.get("a b/%c") == b"content"
    assert bucket.get_range("a b/%c", 2, 5) == (b"nte", first.e_tag)
    assert bucket.objects()["a b/%c"].e_tag == first.e_tag
    bucket.put("a b/%c", b"another")
    assert bucket.look("a b/%c").e_tag != first.e_tag
    for action in (bucket.get, bucket.look):
        with pytest.raises(FileNotFoundError, match=f"no such object: '{scheme}://keel/some/run/none'"):
            action("none")


def test_of_several_who_create_one_succeeds(scheme: str, objects: Objects):
    bucket = bucket_of(scheme)
    bucket.create("number", b"mine")
    bucket.create("number", b"mine")  # as after an answer that was lost
    with pytest.raises(FileExistsError):
        bucket.create("number", b"another's")
    assert bucket.get("number") == b"mine"


def test_a_listing_has_all_pages_of_its_folder_alone(scheme: str, objects: Objects):
    bucket = bucket_of(scheme)
    sizes = {f"folder/{number}": number for number in range(8)}
    for key, size in sizes.items():
        bucket.put(key, bytes(size))
    bucket.put("folder-of-another/1", b"")
    assert bucket.list("folder/") == sizes
    assert len(bucket.list()) == 9


def test_objects_that_are_gone_keep_no_other_from_being_deleted(scheme: str, objects: Objects):
    """Both clouds say that an object does not exist; S3 does not."""
    bucket = bucket_of(scheme)
    keys = [str(number) for number in range(30)]
    for key in keys[10:]:
        bucket.put(key, b"")
    bucket.put("kept", b"")
    bucket.delete(keys)
    assert bucket.list() == {"kept": 0}


@pytest.mark.parametrize(
    ("status", "code", "said", "may_pass"),
    [
        (403, "AccessDenied", "permission is denied", False),
        (403, "AuthorizationPermissionMismatch", "permission is denied", False),
        (403, "AuthenticationFailed", "the credentials are not valid; correct them in the environment (", False),
        (401, "InvalidAuthenticationInfo", "the credentials are not valid; correct them in the environment (", False),
        (503, "ServerBusy", "the server is too busy (503)", True),
        (429, "TooManyRequests", "the server is too busy (429)", True),
    ],
)
def test_one_message_for_each_thing_that_is_wrong(
    scheme: str, objects: Objects, status: int, code: str, said: str, may_pass: bool
):
    objects.error = (status, code)
    with pytest.raises(BucketError) as raised:
        bucket_of(scheme).require_usable()
    text = str(raised.value)
    assert said in text
    assert (VARIABLES[scheme] in text) == ("the credentials" in said)
    assert raised.value.may_pass is may_pass
    assert "AWS" not in text


@pytest.mark.parametrize("version", ["0.8.2", "0.9.0", "0.9.1"])
def test_a_client_that_leaves_its_place_is_refused(version: str, monkeypatch):
    monkeypatch.setattr(obstore, "__version__", version)
    with pytest.raises(UserError, match=f"obstore {version} deletes or puts objects outside of the place"):
        Bucket("s3://keel/some/run")


def test_deletes_keep_to_their_prefix(scheme: str, objects: Objects):
    objects.put("2", b"another's", create=False)
    objects.put("run/2", b"another's", create=False)
    bucket = bucket_of(scheme)
    bucket.put("2", b"")
    bucket.delete(["2"])
    assert objects.get("2")
    assert objects.get("run/2")
    assert not objects.get("some/run/2")


def test_a_bucket_that_does_not_exist(scheme: str, objects: Objects):
    with pytest.raises(BucketError, match=f"{scheme}://other/some/run: there is no such bucket; create it"):
        bucket_of(scheme, "other").require_usable()


@pytest.mark.parametrize(
    ("url", "environment", "said"),
    [
        ("az://keel/run", {}, "az://keel/run: Generic MicrosoftAzure error: Account must be specified; set AZURE_STOR"),
        (
            "az://keel/run",
            {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "no!"},
            "Invalid Access Key",
        ),
        (
            "gs://keel/run",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/none"},
            "No such file .*; set GOOGLE_APPLICATION_CREDEN",
        ),
        (
            "gs://keel/run",
            {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"},
            "missing field `private_key`.*; set GOOGLE_APPLICATION",
        ),
        ("s3://keel/run", {"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "AWS_ENDPOINT_URL is '127.0.0.1:9', and must be http"),
    ],
)
def test_an_environment_that_is_no_client_s(url: str, environment: dict[str, str], said: str, monkeypatch):
    """The client refuses some before any request, and panics on others."""
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        Bucket(url)
    assert re.search(said, str(raised.value))
    assert "\n" not in str(raised.value)
