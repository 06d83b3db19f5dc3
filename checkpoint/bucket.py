"""Objects under one prefix of a bucket (S3, Google Cloud Storage, Azure), by the client obstore.

Time limits and retries are Keel's: obstore's own give a throttled bucket up after 3 s and wait 75 s for a server that
hangs. Objects are put by multipart uploads only where one request takes no more, since what a killed process leaves of
one is invisible, and billed until somebody aborts it. Credentials are the client's affair: it takes them from the
environment and from its own files, and nothing here keeps or shows them.
"""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, TypeVar
from uuid import uuid4

from configs.errors import OutageError, UserError

OLDEST_CLIENT = (0, 9, 2)
"""The first version of obstore that keeps to the prefix of its URL: 0.9.0 deletes without it, up to 0.9.1 one for Azure
lacks its first part."""
AT_ONCE = 4
"""Requests with much data at the same time."""
_PAUSE_SECONDS = 1.0
PROBE = ".probe-"
"""How the key of an object begins that is there only for a moment."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Patience:
    """How long an answer is waited for."""

    request_seconds: float
    """Time for one request, which is then repeated."""
    seconds: float
    """Time after which a request that fails is no longer repeated."""


QUICK = Patience(request_seconds=10, seconds=45)
"""What is small, and what a launch waits for."""
PATIENT = Patience(request_seconds=90, seconds=180)
"""Parts of checkpoints: four at a time arrive from 0.4 MB/s on."""


class BucketError(OSError):
    """A request to object storage has failed; it says nothing about what is stored there.

    Args: EIO, or EACCES if the same request fails again; the reason; the address.
    """

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed at another time, with nothing changed."""
        return self.errno == errno.EIO

    def for_user(self) -> UserError:
        """The same as the end of a command."""
        return (OutageError if self.may_pass else UserError)(str(self))


@contextmanager
def errors_for_user() -> Iterator[None]:
    """Make a BucketError of a block, or of a function that this decorates, the end of a command."""
    try:
        yield
    except BucketError as error:
        raise error.for_user() from None


@dataclass(frozen=True)
class Stored:
    """An object as it is now."""

    size: int
    e_tag: str
    """Differs if the object is put again with other content."""
    modified: float
    """When it was put, in seconds since the epoch by the server's clock."""


_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
"""The variables of each kind of storage that most users set; docs/buckets.md has the others."""
_MISTAKES = {
    "NoSuchBucket|bucket does not exist|ContainerNotFound": "there is no such bucket; create it, or correct the name",
    "ExpiredToken|TokenRefreshRequired|RequestExpired": "the credentials have expired; renew them in the environment",
    "InvalidAccessKeyId|SignatureDoesNotMatch|AuthFailure|InvalidToken|AuthenticationFailed|InvalidAuthentication": (
        "the credentials are not valid; correct them in the environment ({credentials})"
    ),
    "AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint|incorrectly configured region": (
        "the bucket is in another region; set AWS_REGION to it"
    ),
    "RequestTimeTooSkewed": "this host's clock is wrong; set it",
    "AccessDenied|Forbidden|PermissionDenied|necessary privileges": (
        "permission is denied; these credentials need to list and read objects there and, where Keel writes, to write "
        "and delete them"
    ),
    "169\\.254\\.169\\.254|metadata\\.google\\.internal|/latest/api/token|Unauthenticated": (
        "there are no credentials; set {credentials}, or others that docs/buckets.md names"
    ),
}
"""What the text of an error shows, and what to do; the same request fails again."""
_OUTAGES = {
    "SlowDown|503 Service": "the server is too busy (503)",
    "429 Too Many": "the server is too busy (429)",
    "kind: Timeout": "the server does not answer in time",
    "kind: Connect|error sending request|connection": "the server can't be reached, or closes the connection",
    "status code: 5": "the server fails",
}


class Bucket:
    """The objects whose keys begin with a prefix; keys here are those after it. Every method may raise BucketError."""

    def __init__(self, url: str, quick: Patience = QUICK, patient: Patience = PATIENT) -> None:
        """`url`: as in s3://bucket/run.

        Raises:
            UserError: the client is not installed, or can't use what the environment says.
        """
        self.url = url.rstrip("/")
        try:
            import obstore
        except ImportError:
            raise UserError(f"{url} needs the package obstore: pip install 'keel[storage]'") from None
        if _numbers(obstore.__version__) < OLDEST_CLIENT:
            raise UserError(
                f"{url}: obstore {obstore.__version__} deletes or puts objects outside of the place that it was given; "
                "install a newer one: pip install -U 'keel[storage]'"
            )
        self._client = obstore
        self._quick = _store(self.url, quick)
        self._patient = _store(self.url, patient)
        self._patience = quick
        self.requests = 0
        """How many were made, a page of a listing aside."""

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """The threads that put and get much data."""
        return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="bucket")

    def get(self, key: str) -> bytes:
        """The content of an object.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._called(key, lambda: bytes(self._client.get(self._patient, key).bytes()))

    def get_range(self, key: str, start: int, stop: int) -> tuple[bytes, str]:
        """Bytes [start, stop) of an object, and the ETag of what they are of.

        Raises:
            FileNotFoundError: there is none.
        """

        def got() -> tuple[bytes, str]:
            answer = self._client.get(self._patient, key, options={"range": (start, stop)})
            return bytes(answer.bytes()), _stored(answer.meta).e_tag

        return self._called(key, got)

    def look(self, key: str) -> Stored:
        """An object, without its content.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._called(key, lambda: _stored(self._client.head(self._quick, key)))

    def put(self, key: str, content: Any) -> None:
        """Create or replace an object, at once."""
        self._called(key, lambda: self._client.put(self._patient, key, content, use_multipart=False))

    def put_parts(self, key: str, parts: Iterable[bytes], size: int, part_bytes: int) -> None:
        """Create or replace an object by a multipart upload.

        If it fails, or what reads the parts raises, the client removes what has arrived of it.

        Args:
            key: the object's.
            parts: its content, read AT_ONCE parts ahead.
            size: bytes of all of them.
            part_bytes: of each but the last.
        """
        self.delete([key])
        put = partial(self._client.put, self._patient, key, use_multipart=True)
        try:
            self._called(key, lambda: put(parts, chunk_size=part_bytes, max_concurrency=AT_ONCE))
        except FileNotFoundError:  # the upload is gone; so it is if it ended, and the answer was lost
            with suppress(FileNotFoundError):
                if self.look(key).size == size:
                    return
            raise BucketError(errno.EIO, "the server has lost the upload", f"{self.url}/{key}") from None

    def create(self, key: str, content: bytes) -> None:
        """Create an object that must not exist: of several who try, one succeeds.

        Raises:
            FileExistsError: it exists, with other content.
        """
        deadline = time.monotonic() + self._patience.seconds
        while True:
            try:
                self._called(
                    key, lambda: self._client.put(self._quick, key, content, use_multipart=False, mode="create")
                )
                return
            except FileExistsError:
                if self.get(key) != content:  # ours, if the answer to an earlier request was lost
                    raise
                return
            except BucketError as error:  # the client does not repeat a request that may have been fulfilled
                if not error.may_pass or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_SECONDS)

    def list(self, prefix: str = "") -> dict[str, int]:
        """The keys that begin with `prefix`, which ends in a slash or is empty, and the sizes of their objects."""
        return {key: stored.size for key, stored in self.objects(prefix).items()}

    def objects(self, prefix: str = "") -> dict[str, Stored]:
        """The objects whose keys begin with `prefix`, which ends in a slash or is empty."""

        def listed() -> dict[str, Stored]:
            pages = self._client.list(self._quick, prefix.rstrip("/") or None)
            return {each["path"]: _stored(each) for page in pages for each in page}

        return self._called(prefix, listed)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, of which some may not exist."""
        doomed = list(keys)
        if not doomed:
            return
        try:
            self._called(doomed[0], lambda: self._client.delete(self._quick, doomed))
        except FileNotFoundError:  # Google and Azure say that one does not exist, and the client leaves others undone
            for key in doomed:
                with suppress(FileNotFoundError):
                    self._called(key, partial(self._client.delete, self._quick, key))

    def require_usable(self) -> None:
        """Put, read, list and delete an object, so that what is wrong shows before anything is built.

        Raises:
            BucketError: what is wrong, and what to do.
        """
        key = f"{PROBE}{uuid4().hex}"
        self.create(key, b"")
        with suppress(FileNotFoundError):  # another launch, which has taken the run, has removed it
            self.get(key)
        self.list(f"{key}/")
        self.delete([key])

    def _called(self, key: str, action: Callable[[], Result]) -> Result:
        """The result of a request, or its error as one of the system's."""
        url = f"{self.url}/{key}"
        self.requests += 1
        try:
            return action()
        except (self._client.exceptions.BaseError, OSError, ValueError) as error:
            text = str(error)
            said = _without_names(text, url)
            if isinstance(error, self._client.exceptions.AlreadyExistsError):
                raise FileExistsError(errno.EEXIST, "it exists already", url) from None
            for pattern, reason in _MISTAKES.items():
                if re.search(pattern, said):
                    what = reason.format(credentials=_CREDENTIALS[self.url.partition("://")[0]])
                    raise BucketError(errno.EACCES, what + _region(text), self.url) from None
            if isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, "there is no such object", url) from None
            reasons = (reason for pattern, reason in _OUTAGES.items() if re.search(pattern, said))
            raise BucketError(errno.EIO, next(reasons, None) or _without_secrets(text), url) from None


def _store(url: str, patience: Patience) -> Any:
    """The client's store at a place.

    Raises:
        UserError: what the environment says of it is incomplete or wrong.
    """
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if url.startswith("s3:") else ():  # the client panics on these
        if not re.fullmatch(r"https?://[^\s/]+\S*|", value := os.environ.get(name, "")):
            raise UserError(f"{url}: {name} is {value!r}, and must be http://HOST:PORT or https://HOST")
    backoff = {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2}
    retries: Any = {"max_retries": 1000, "retry_timeout": timedelta(seconds=patience.seconds), "backoff": backoff}
    client: Any = {"timeout": timedelta(seconds=patience.request_seconds), "connect_timeout": timedelta(seconds=5)}
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true":  # the client asks only when it is given no options
        client["allow_http"] = True
    try:
        return from_url(url, client_options=client, retry_config=retries)
    except (BaseError, OSError, ValueError) as error:
        variables = _CREDENTIALS[url.partition("://")[0]]
        reason = _without_secrets(str(error))
        raise UserError(f"{url}: {reason}; set {variables}, or others that docs/buckets.md names") from None


def _stored(meta: Any) -> Stored:
    return Stored(meta["size"], (meta["e_tag"] or "").strip('"'), meta["last_modified"].timestamp())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _without_names(text: str, url: str) -> str:
    """The text of an error without the object's name, whose words are no reason: s3://bucket/run/Forbidden-500."""
    without_paths = re.sub(r"(https?://[^/\s]+)/(?!latest/api/token)\S*", r"\1", text)
    name = url.partition("://")[2].partition("/")[2].strip("/")
    return without_paths.replace(name, "") if name else without_paths


def _region(text: str) -> str:
    found = re.search("<Region>([a-z0-9-]+)</Region>", text)
    return f" ({found[1]})" if found else ""


def _without_secrets(text: str) -> str:
    """The first line of an error, without the value of any variable that may hold a credential."""
    line = text.splitlines()[0][:300] if text else "it has failed"
    for name, value in os.environ.items():
        if value and re.search("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL", name):
            line = line.replace(value, "***")
    return line
