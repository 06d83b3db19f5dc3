"""Runs whose folder is in a bucket of a real S3 server, each launch with an empty disk."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checkpoint.bucket import Bucket
from checkpoint.bucket_files import bring
from checkpoint.bucket_launch import claim_in
from checkpoint.manifest import MANIFEST_NAME
from scripts import checkpoint as checkpoint_script
from scripts import compare, export_hf, fork, import_hf, report, runs
from tests.bucket.ceph import ACCESS_KEY, SECRET_KEY, Ceph
from tests.end_to_end.launch import (
    assert_same_tensors,
    curve,
    finish,
    keel,
    launch,
    start,
    status,
    tensors,
)

pytestmark = pytest.mark.slow

WORDS = "--checkpoint.interval 10 --metrics.fingerprint true"


def fresh(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_the_same_bits_as_on_a_disk_from_host_to_host(
    server: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One process, then two ranks elsewhere, which find nothing but the bucket; then the commands, elsewhere again."""
    a, b, c = (fresh(tmp_path, name) for name in "abc")
    url = "s3://keel/some/run"
    place = f"{WORDS} --job.output_dir {url}"
    first = launch(a, f"{place} --training.steps 15", env=server.environment)
    assert "s3://keel/some/run is this run's folder" in first.out
    launch(b, place, ranks=2, env=server.environment)
    launch(tmp_path, f"{WORDS} --training.steps 15")
    launch(tmp_path, WORDS, ranks=2)
    here = b / "runs/s3/keel/some/run"
    assert curve(here) == curve(tmp_path / "run")
    placeholder = here / "checkpoints/step-00000020/__0_0.distcp"
    assert not placeholder.read_bytes().strip(b"\0")

    monkeypatch.chdir(c)
    assert checkpoint_script.main(["verify", url]) == 0
    copy = c / "runs/copies/s3/keel/some/run"
    assert_same_tensors(tensors(copy), tensors(tmp_path / "run"))
    assert curve(copy) == curve(tmp_path / "run")
    assert runs.main([url]) == 0
    assert report.main([url, "--output", "page.html"]) == 0
    assert "20  " in capsys.readouterr().out
    replayed = keel(c, "replay", url, "--step", "12", "--ranks", "1", env=server.environment)
    assert replayed.code == 0, replayed.err

    bucket = Bucket(url)
    texts = [bucket.get(key) for key in bucket.list()]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    texts += [first.out.encode(), first.err.encode()]
    assert not [text for text in texts if ACCESS_KEY.encode() in text or SECRET_KEY.encode() in text]


def test_runs_that_begin_at_one_in_a_bucket(server: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In another place, whole or with its weights alone; forked; and compared with it. Each on a host of its own."""
    a, b, c, d = (fresh(tmp_path, name) for name in "abcd")
    url = "s3://keel/first"
    launch(tmp_path, f"{WORDS} --job.output_dir whole")
    launch(a, f"{WORDS} --job.output_dir {url}", env=server.environment)
    second = f"{WORDS} --job.output_dir s3://keel/second --checkpoint.load {url}/checkpoints/step-00000010"
    launch(b, second, ranks=2, env=server.environment)
    second = f"{WORDS} --job.output_dir second --checkpoint.load whole/checkpoints/step-00000010"
    launch(tmp_path, second, ranks=2)
    assert curve(b / "runs/s3/keel/second") == curve(tmp_path / "second")
    copied = b / "runs/copies/s3/keel/first/checkpoints/step-00000010/__0_0.distcp"
    assert not copied.read_bytes().strip(b"\0")  # only the parts were read
    outcome = launch(c, f"{WORDS} --checkpoint.init_from {url} --training.steps 1", env=server.environment)
    assert "starting from the weights of runs/copies/s3/keel/first/checkpoints/step-00000020" in outcome.out
    launch(tmp_path, f"{WORDS} --checkpoint.init_from whole --training.steps 1 --job.output_dir from_folder")
    assert curve(c / "run") == curve(tmp_path / "from_folder")

    monkeypatch.chdir(d)
    assert fork.main([url, "--at", "10"]) == 0
    job = d / "runs/first-fork/config.toml"
    there = "--job.output_dir s3://keel/fork --checkpoint.load runs/first-fork"
    launch(d, there, config=job, env=server.environment)
    assert curve(d / "runs/s3/keel/fork") == curve(tmp_path / "whole")[10:]
    launch(d, "", config=job)  # without the server
    assert curve(d / "runs/first-fork") == curve(tmp_path / "whole")
    assert_same_tensors(tensors(d / "runs/first-fork"), tensors(tmp_path / "whole"))
    for first, second, file in ((url, "s3://keel/second", "there"), (tmp_path / "whole", tmp_path / "second", "here")):
        scored = ["--validation.interval", "10", "--validation.sources", '[{name = "noise", kind = "synthetic"}]']
        assert compare.main([str(first), str(second), "--json", file, *scored]) == 0
    there, here = (json.loads((d / file).read_text())["configs"] for file in ("there", "here"))
    assert [side["losses"] for side in there] == [side["losses"] for side in here]
    assert checkpoint_script.main(["prune", url, "--keep-last", "1"]) == 0
    assert not Bucket(url).list("checkpoints/step-00000010/")
    assert checkpoint_script.main(["verify", url]) == 0


def test_results_of_commands_in_the_bucket(server: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A fork, a mean and an import, made by one host and used by others, have the bits of those on a disk."""
    a, b, c, d = (fresh(tmp_path, name) for name in "abcd")
    url = "s3://keel/source"
    launch(tmp_path, f"{WORDS} --job.output_dir whole")
    launch(a, f"{WORDS} --job.output_dir {url}", env=server.environment)
    monkeypatch.chdir(b)
    lower = ("--optimizer.lr", "0.001")
    assert fork.main([url, "--at", "10", "--output", "s3://keel/forked", *lower]) == 0
    assert fork.main([str(tmp_path / "whole"), "--at", "10", "--output", str(tmp_path / "forked"), *lower]) == 0
    job = b / "runs/copies/s3/keel/forked/config.toml"
    launch(tmp_path, "", ranks=2, config=tmp_path / "forked/config.toml")
    launch(c, "", ranks=2, config=job, env=server.environment)
    assert curve(c / "runs/s3/keel/forked") == curve(tmp_path / "forked")
    assert checkpoint_script.main(["verify", "s3://keel/forked"]) == 0

    assert checkpoint_script.main(["average", url, "s3://keel/mean", "--last", "2"]) == 0
    assert checkpoint_script.main(["average", str(tmp_path / "whole"), str(tmp_path / "mean"), "--last", "2"]) == 0
    assert export_hf.main([str(tmp_path / "whole"), "s3://keel/as_hf"]) == 0
    assert export_hf.main([str(tmp_path / "whole"), str(tmp_path / "as_hf")]) == 0
    assert import_hf.main(["s3://keel/as_hf", "s3://keel/imported"]) == 0
    assert import_hf.main([str(tmp_path / "as_hf"), str(tmp_path / "imported")]) == 0
    for name in ("mean", "imported"):
        words = f"{WORDS} --training.steps 2 --job.output_dir {name}_begun --checkpoint.init_from"
        launch(tmp_path, f"{words} {tmp_path / name}", ranks=2)
        launch(d, f"{words} s3://keel/{name}", ranks=2, env=server.environment)
        assert curve(d / f"{name}_begun") == curve(tmp_path / f"{name}_begun")
        copied = d / f"runs/copies/s3/keel/{name}/__0_0.distcp"
        assert not copied.read_bytes().strip(b"\0")  # only the parts were read
        assert checkpoint_script.main(["verify", f"s3://keel/{name}"]) == 0
        assert export_hf.main([f"s3://keel/{name}", f"{name}_hf"]) == 0
        assert export_hf.main([str(tmp_path / name), f"{name}_hf_here"]) == 0
        assert content(Path(f"{name}_hf")) == content(Path(f"{name}_hf_here"))
        again = ["average", url, f"s3://keel/{name}", "--last", "2"]
        assert checkpoint_script.main(again) == 1  # never replaced
    assert fork.main([url, "--at", "10", "--output", "s3://keel/forked"]) == 1
    copies = b / "runs/copies/s3/keel"
    assert not [path for path in copies.iterdir() if path.name.endswith((".new", ".unfinished"))]


def test_commands_after_a_save_find_the_tensors(server: Ceph, tmp_path: Path):
    """Each export has the bits of a run on a disk."""
    url = "s3://keel/after"
    table = "[{name = 'export', command = 'keel export {checkpoint} {output}/hf', every = 10}]"
    words = f'{WORDS} --checkpoint.keep_last 1 --checkpoint.after_save "{table}"'
    launch(tmp_path, f"{words} --job.output_dir {url}", env=server.environment)
    launch(tmp_path, f"{words} --job.output_dir whole")
    run = tmp_path / "runs/s3/keel/after"
    for step in (10, 20):
        name = f"after_save/export/step-{step:08d}/hf/model.safetensors"
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    keys = Bucket(url).list()
    assert "after_save/export/step-00000020.log" in keys


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_exports_into_the_bucket(
    server: Ceph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """By commands after a save, and by hand, of all forms: the files of an export to a disk."""
    transformers = pytest.importorskip("transformers")
    table = "[{name = 'export', command = 'keel export {checkpoint} s3://keel/exports/{step}', every = 10}]"
    words = f'{WORDS} --checkpoint.after_save "{table}"'
    launch(tmp_path, f"{words} --job.output_dir s3://keel/exported", env=server.environment)
    monkeypatch.chdir(tmp_path)
    forms = {
        "10": ("/checkpoints/step-00000010",),
        "20": ("",),
        "cut": ("", "--max-shard-size", "100KB", "--dtype", "bfloat16"),
        "optimizer": ("", "--optimizer"),
        "some": ("", "--optimizer", "--gather", "*attention*=stay"),
    }
    for name, (inside, *options) in forms.items():
        source = f"s3://keel/exported{inside}"
        if name not in ("10", "20"):
            assert export_hf.main([source, f"s3://keel/exports/{name}", *options]) == 0
        assert export_hf.main([source, name, *options]) == 0
        bucket = Bucket(f"s3://keel/exports/{name}")
        there = {key: bucket.get(key) for key in bucket.list()}
        assert there == content(tmp_path / name)
        assert len(there) > 1
    assert not list((tmp_path / "runs/copies/s3/keel/exports").iterdir())
    model = transformers.AutoModelForCausalLM.from_pretrained(bring("s3://keel/exports/cut"))
    assert "embed_tokens.weight" in "".join(model.state_dict())
    capsys.readouterr()
    assert export_hf.main(["s3://keel/exported", "s3://keel/exports/20"]) == 1
    assert "error: s3://keel/exports/20 exists; name another place, or remove it" in capsys.readouterr().err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert export_hf.main(["10", "s3://keel/exports/new"]) == 1
    assert "error: s3://keel/exports/new: the credentials are not valid" in capsys.readouterr().err


def test_a_server_that_is_killed_and_comes_back_costs_the_run_nothing(server: Ceph, tmp_path: Path):
    """It is away for 8 seconds, in the middle of the saves; training goes on, and every save arrives."""
    url = "s3://keel/outage"
    words = "--metrics.tensorboard false --checkpoint.interval 40 --training.steps 400"
    process = start(tmp_path, f"{words} --job.output_dir {url}", env=server.environment)
    ended = threading.Thread(target=process.wait)
    ended.start()
    run = tmp_path / "runs/s3/keel/outage"
    committed = f"checkpoints/step-{'[0-9]' * 8}/MANIFEST.json"
    while not list(run.glob(committed)):
        assert ended.is_alive()
        time.sleep(0.02)
    before = len(curve(run))
    server.kill_gateway()
    time.sleep(8)
    after = len(curve(run))
    server.start_gateway()
    outcome = finish(process)
    assert outcome.code == 0, outcome.err
    assert after >= before
    assert after % 40 == 0  # training goes on to a save that waits for the last
    assert status(run)["state"] == "done"
    keys = Bucket(url).list()
    assert sum(key.endswith(MANIFEST_NAME) for key in keys) == 10
    launch(tmp_path, f"{words} --job.output_dir undisturbed")
    assert curve(run) == curve(tmp_path / "undisturbed")


def test_what_the_real_server_says_of_a_name_or_a_key_that_is_wrong(server: Ceph, tmp_path: Path):
    wrong = server.environment | {"AWS_SECRET_ACCESS_KEY": "another"}
    outcome = launch(tmp_path, "--job.output_dir s3://none/run", env=server.environment, expect=78)
    assert "s3://none/run: there is no such bucket; create it, or correct the name" in outcome.err
    outcome = launch(tmp_path, "--job.output_dir s3://keel/denied", env=wrong, expect=78)
    assert "s3://keel/denied: the credentials are not valid; correct them" in outcome.err
    assert "another" not in outcome.err + outcome.out


def test_of_many_who_claim_at_once_each_gets_a_number_of_its_own(server: Ceph, tmp_path: Path):
    """By the server's conditional PUT."""

    def claimed(_: int) -> int:
        while True:  # those who have claimed have ended
            claim = claim_in(Bucket("s3://keel/claims"), tmp_path, {}, print, waits=True)
            claim.end()
            return claim.number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(claimed, range(16))) == [*range(1, 17)]


def test_more_keys_than_a_page_of_a_listing_has(server: Ceph):
    bucket = Bucket("s3://keel/many")
    names = [f"parts/{number:04d}" for number in range(1100)]
    list(bucket.pool.map(lambda name: bucket.put(name, b"1"), names))
    assert sorted(bucket.list("parts/")) == names
    bucket.delete(names)
    assert not bucket.list()
