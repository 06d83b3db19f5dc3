"""The part of two clouds' protocols that Keel uses, from their references, served from memory.

No server of either can be run on a machine without an account. What a real one adds (tokens, signatures, throttling) is
the client's affair; status codes, error bodies, preconditions, pages and batches are those of the references.
"""

import json
import re
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

PAGE = 3
"""Objects on a page of a listing, so that a few objects take several pages."""


class Stored(NamedTuple):
    """An object."""

    content: bytes
    e_tag: str
    modified: datetime


class Objects:
    """What is stored."""

    error: tuple[int, str] | None = None
    """The status and code of the answer to every request; None: the right one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: dict[str, Stored] = {}
        self._puts = 0
        self.parts: dict[str, dict[str, bytes]] = {}
        """Of each upload that has not come to its end, what has arrived."""
        self.uploads = 0
        """How many uploads in parts were made."""
        self.answers_lost = 0
        """To how many requests that end an upload the answer is 503, although they are fulfilled."""
        self.uploads_lost = False
        """Whether all uploads are gone when they should end."""

    def put(self, key: str, content: bytes, create: bool) -> Stored | None:
        """Put an object; None if it must not exist, and does."""
        with self._lock:
            if create and key in self._stored:
                return None
            self._puts += 1
            self._stored[key] = Stored(content, f"0x{self._puts:X}", datetime.now(UTC))
            return self._stored[key]

    def put_part(self, upload: str, name: str, content: bytes) -> None:
        with self._lock:
            self.parts.setdefault(upload, {})[name] = content

    def complete(self, upload: str, key: str, names: list[str]) -> Stored:
        """Put an object, of these parts in this order."""
        parts = self.parts.pop(upload)
        self.uploads += 1
        put = self.put(key, b"".join(parts[name] for name in names), create=False)
        assert put
        return put

    def get(self, key: str) -> Stored | None:
        return self._stored.get(key)

    def delete(self, key: str) -> bool:
        """Delete an object; whether there was one."""
        with self._lock:
            return self._stored.pop(key, None) is not None

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, Stored]], str]:
        """The next objects with this prefix, and the last key if there are more."""
        with self._lock:
            found = sorted(item for item in self._stored.items() if item[0].startswith(prefix) and item[0] > after)
        return found[:PAGE], found[PAGE - 1][0] if len(found) > PAGE else ""


class _Server(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: ClassVar[Objects]
    container: ClassVar[str]
    """What the path of each request begins with."""
    creates: ClassVar[tuple[str, str]]
    """The header of a PUT that must not replace an object."""
    exists: ClassVar[tuple[int, str]]
    no_object: ClassVar[str]
    no_container: ClassVar[str]

    def handle_request(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        url = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        path = unquote(url.path)
        if self.objects.error:
            self.fail(*self.objects.error)
        elif path == self.container:
            self.on_container()
        elif path.startswith(f"{self.container}/"):
            self.on_object(path.removeprefix(f"{self.container}/"))
        else:
            self.fail(404, self.no_container)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def on_container(self) -> None:
        raise NotImplementedError

    def on_object(self, key: str) -> None:
        if self.command == "PUT":
            name, value = self.creates
            put = self.objects.put(key, self.body, create=self.headers.get(name) == value)
            if put:
                self.answer(201, headers=self.described(put))
            else:
                self.fail(*self.exists)
        elif self.command == "DELETE" and self.objects.delete(key):
            self.answer(204)
        elif self.command != "DELETE" and (found := self.objects.get(key)):
            self.on_get(found)
        else:
            self.fail(404, self.no_object)

    def on_get(self, found: Stored) -> None:
        headers = self.described(found)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
            start, last = int(wanted[1]), int(wanted[2])
            headers["Content-Range"] = f"bytes {start}-{last}/{len(found.content)}"
            self.answer(206, found.content[start : last + 1], headers)
        else:
            self.answer(200, found.content, headers)

    def described(self, found: Stored) -> dict[str, str]:
        return {"ETag": f'"{found.e_tag}"', "Last-Modified": format_datetime(found.modified, usegmt=True)}

    def fail(self, status: int, code: str) -> None:
        error = ElementTree.Element("Error")
        ElementTree.SubElement(error, "Code").text = code
        self.answer_xml(status, error)

    def answer_xml(self, status: int, root: ElementTree.Element) -> None:
        self.answer(status, ElementTree.tostring(root, "utf-8"), {"Content-Type": "application/xml"})

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class Google(_Server):
    """The XML API, https://cloud.google.com/storage/docs/xml-api/overview."""

    container = "/keel"
    creates = ("x-goog-if-generation-match", "0")
    exists = (412, "PreconditionFailed")
    no_object = "NoSuchKey"
    no_container = "NoSuchBucket"

    def on_object(self, key: str) -> None:
        """The XML API's multipart upload, or what the two clouds have alike."""
        upload = self.query.get("uploadId", "")
        if "uploads" in self.query:
            root = ElementTree.Element("InitiateMultipartUploadResult")
            ElementTree.SubElement(root, "UploadId").text = f"upload of {key}"
            self.answer_xml(200, root)
        elif upload and self.command == "PUT":
            self.objects.put_part(upload, self.query["partNumber"], self.body)
            self.answer(200, headers={"ETag": f'"{len(self.body)}"'})
        elif upload and self.command != "PUT" and (self.objects.uploads_lost or upload not in self.objects.parts):
            self.fail(404, "NoSuchUpload")
        elif upload and self.command == "POST":
            put = self.objects.complete(upload, key, re.findall("<PartNumber>(.*?)</PartNumber>", self.body.decode()))
            root = ElementTree.Element("CompleteMultipartUploadResult")
            ElementTree.SubElement(root, "ETag").text = f'"{put.e_tag}"'
            is_lost = self.objects.answers_lost > 0
            self.objects.answers_lost -= is_lost
            self.answer_xml(503 if is_lost else 200, root)
        elif upload:
            self.objects.parts.pop(upload)
            self.answer(204)
        else:
            super().on_object(key)

    @staticmethod
    def environment(endpoint: str) -> dict[str, str]:
        """A client's, with which it talks to the server at `endpoint`."""
        account = {"gcs_base_url": endpoint, "disable_oauth": True}
        names = ("client_email", "private_key", "private_key_id")
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account | dict.fromkeys(names, ""))}

    def on_container(self) -> None:
        found, last = self.objects.page(self.query.get("prefix", ""), self.query.get("continuation-token", ""))
        root = ElementTree.Element("ListBucketResult", xmlns="http://doc.s3.amazonaws.com/2006-03-01")
        ElementTree.SubElement(root, "IsTruncated").text = str(bool(last)).lower()
        if last:
            ElementTree.SubElement(root, "NextContinuationToken").text = last
        for key, stored in found:
            entry = ElementTree.SubElement(root, "Contents")
            ElementTree.SubElement(entry, "Key").text = key
            ElementTree.SubElement(entry, "LastModified").text = f"{stored.modified:%Y-%m-%dT%H:%M:%S.000Z}"
            ElementTree.SubElement(entry, "ETag").text = f'"{stored.e_tag}"'
            ElementTree.SubElement(entry, "Size").text = str(len(stored.content))
        self.answer_xml(200, root)


class Azure(_Server):
    """The Blob service, https://learn.microsoft.com/rest/api/storageservices/blob-service-rest-api."""

    container = "/devstoreaccount1/keel"
    creates = ("If-None-Match", "*")
    exists = (409, "BlobAlreadyExists")
    no_object = "BlobNotFound"
    no_container = "ContainerNotFound"

    def on_object(self, key: str) -> None:
        """Put Block and Put Block List, or what the two clouds have alike."""
        if self.query.get("comp") == "block":
            self.objects.put_part(key, self.query["blockid"], self.body)
            self.answer(201)
        elif self.query.get("comp") == "blocklist":
            blocks = re.findall("<(?:Uncommitted|Latest)>(.*?)</", self.body.decode())
            self.answer(201, headers=self.described(self.objects.complete(key, key, blocks)))
        else:
            super().on_object(key)

    @staticmethod
    def environment(endpoint: str) -> dict[str, str]:
        """A client's, with which it talks to the server at `endpoint`."""
        return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint}

    def on_container(self) -> None:
        if self.query.get("comp") == "batch":
            self.on_batch()
            return
        found, last = self.objects.page(self.query.get("prefix", ""), self.query.get("marker", ""))
        root = ElementTree.Element("EnumerationResults", ContainerName="keel")
        blobs = ElementTree.SubElement(root, "Blobs")
        for key, stored in found:
            blob = ElementTree.SubElement(blobs, "Blob")
            ElementTree.SubElement(blob, "Name").text = key
            properties = ElementTree.SubElement(blob, "Properties")
            modified = format_datetime(stored.modified, usegmt=True)
            ElementTree.SubElement(properties, "Last-Modified").text = modified
            ElementTree.SubElement(properties, "Etag").text = stored.e_tag  # without quotes, as the service has it here
            ElementTree.SubElement(properties, "Content-Length").text = str(len(stored.content))
            ElementTree.SubElement(properties, "Content-Type").text = "application/octet-stream"
        ElementTree.SubElement(root, "NextMarker").text = last
        self.answer_xml(200, root)

    def on_batch(self) -> None:
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE (\S+) HTTP", self.body.decode(), re.MULTILINE)):
            key = unquote(urlsplit(path).path).removeprefix(f"{self.container}/")
            status = "202 Accepted" if self.objects.delete(key) else "404 The specified blob does not exist."
            head = f"--end\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
            parts.append(f"{head}HTTP/1.1 {status}\r\nx-ms-version: 2023-11-03\r\n\r\n")
        content = "".join([*parts, "--end--\r\n"]).encode()
        self.answer(202, content, {"Content-Type": "multipart/mixed; boundary=end"})


Kind = type[Google] | type[Azure]


@contextmanager
def served(kind: Kind) -> Iterator[tuple[Objects, dict[str, str]]]:
    """A server with one empty bucket, "keel", and the environment of its clients."""
    objects = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(kind.__name__, (kind,), {"objects": objects}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield objects, {"AWS_ALLOW_HTTP": "true", **kind.environment(endpoint)}
    finally:
        server.shutdown()
        server.server_close()
