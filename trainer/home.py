"""Where a run is at home: in a folder that all ranks see, or in a bucket, with a local folder on each host."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol

from checkpoint.bucket import Bucket, errors_for_user
from checkpoint.bucket_launch import Claim, claim_in
from checkpoint.bucket_storage import BucketStorage
from checkpoint.incarnation import FOLDER, Incarnation, Superseded
from checkpoint.lock import lock
from checkpoint.storage import FolderStorage
from configs.load import LoadedConfig
from configs.places import is_url
from configs.schema import Job
from trainer.elastic import facts_of_launch, take_folder
from trainer.guards.agreement import on_all_ranks
from trainer.guards.shared_folder import require_shared
from trainer.report.console import Console


class Home(Protocol):
    """The place of a run. One rank takes it for a launch; then every rank joins, knowing the launch's number."""

    incarnation: Incarnation | None
    """This launch, if launches are numbered; after `join`."""
    storage: FolderStorage
    """Where checkpoints are; after `join`."""

    def take(self, job: LoadedConfig, console: Console) -> int | None:
        """Take the run for this launch, and bring its files to the local folder, which exists; returns its number.

        Raises:
            KeelError: another launch has it, or the place can't be used.
            OSError: the disk refuses.
        """

    def join(self, number: int | None) -> None:
        """Know the launch that has taken the run, on every rank."""

    def require_seen(self) -> None:
        """Check that all ranks see the place; all must call it.

        Raises:
            KeelError: some do not.
        """

    def close(self, console: Console) -> None:
        """Keep there what this launch has written, at its end; on the rank that has taken the run. May be repeated."""


def home_of(job: Job) -> Home:
    """The place that `job.output_dir` names.

    Raises:
        UserError: the client for buckets is not installed.
    """
    return _InBucket(job.place, job.folder) if is_url(job.place) else _InFolder(job.folder)


class _InFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.incarnation: Incarnation | None = None
        self.storage: FolderStorage = FolderStorage()

    def take(self, job: LoadedConfig, console: Console) -> int | None:
        incarnation = take_folder(job, console.warning)
        return incarnation.number if incarnation else None

    def join(self, number: int | None) -> None:
        if number:
            self.incarnation = Incarnation(self._folder / FOLDER, number)
            self.storage = FolderStorage(self.incarnation.mark)

    def require_seen(self) -> None:
        require_shared(self._folder)

    def close(self, console: Console) -> None:
        """Nothing: all is written there already."""


class _InBucket:
    def __init__(self, url: str, folder: Path) -> None:
        self._folder = folder
        self._bucket = Bucket(url)
        self._taken: BucketStorage | None = None
        """The storage, on the rank that has taken the run, until it is closed."""
        self.incarnation: Incarnation | None = None
        self.storage: FolderStorage

    def take(self, job: LoadedConfig, console: Console) -> int | None:
        lock(self._folder, console.warning)
        with errors_for_user():
            self._bucket.require_usable()
            claim = claim_in(self._bucket, self._folder, facts_of_launch(job), console.warning, waits=bool(job.choice))
            storage = BucketStorage(self._bucket, self._folder, claim)
            storage.fetch(console.line)
        claim.beat(storage.push_status)
        self.incarnation = claim
        self.storage = self._taken = storage
        console.line(f"{self._bucket.url} is this run's folder; on this host, {self._folder}/ stands for it")
        return claim.number

    def join(self, number: int | None) -> None:
        if self.incarnation is None:
            assert number is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            claim = Claim(self._folder / FOLDER, number, self._bucket)
            self.incarnation = claim
            self.storage = BucketStorage(self._bucket, self._folder, claim)

    def require_seen(self) -> None:
        def look() -> None:
            with errors_for_user():
                self._bucket.list(f"{FOLDER}/")

        on_all_ranks(look)

    def close(self, console: Console) -> None:
        storage, self._taken = self._taken, None
        if storage is None:
            return
        with suppress(Superseded):  # what this launch says is no longer the run's
            try:
                storage.push()
                storage.claim.end()
            except OSError as error:
                console.warning(f"the last lines of metrics and log are in {self._folder}/ only: {error}")
