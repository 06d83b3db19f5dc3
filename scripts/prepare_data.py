"""Turn text into token files: scripts/prepare_data.py INPUT... --output FOLDER --tokenizer FILE

Writes OUTPUT/train and, with --validation-fraction, OUTPUT/validation: the folders that a job file's
`[[data.sources]]` and `[[validation.sources]]` name. After a stop, the same command resumes where it stopped. Many
hosts do it together by --shard 0/N to --shard N-1/N, and then --finish: the bytes are the same. They need a disk that
all see, or an output in object storage.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.bucket_files import bring, bring_file, copy_of, has_all, local_file, put_folder
from configs.files import exists
from configs.machine import available_cores
from configs.places import is_url
from scripts.command import add_text_arguments, end, number_of, parser_of, positive, run_command, separator
from trainer.data.text.finish import finish
from trainer.data.text.listing import NAME as LIST
from trainer.data.text.on_ray import make_shares_on_ray
from trainer.data.text.prepare import Call, Remote, discard_shards, errors_of, is_begun, prepare, settings_of
from trainer.data.text.prepared_folder import RECORD, Settings, described
from trainer.data.text.shares import MAX_SHARES, make_share
from trainer.data.text.shares_in_bucket import bring_inputs, make_share_remotely, remove_work
from trainer.data.text.workers import Progress
from trainer.data.token_file import SUFFIX
from trainer.data.tokenizer import load_tokenizer, losses_of
from trainer.report.console import Console


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the preparation; returns the exit code."""
    parser = prepare_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.mask_after and not options.mask_until:
        parser.error("--mask-after does nothing without --mask-until, behind which tokens give loss")
    if options.prompt_key and options.mask_until:
        parser.error("--prompt-key and --mask-until both say what gives loss; leave one out")
    if options.fim_spm_rate is not None and not options.fim_rate:
        parser.error("--fim-spm-rate does nothing without --fim-rate, the share of documents to fill in the middle")
    if options.fim_rate and (options.prompt_key or options.mask_until):
        parser.error(
            "--fim-rate moves the middle of a whole document to its end, and --prompt-key and --mask-until divide "
            "documents; leave one out"
        )
    if options.prompt_key == options.text_key:
        parser.error(f"--prompt-key and --text-key both name {options.text_key!r}, so the prompt is the text itself")

    url = options.output if is_url(options.output) else None
    if options.ray and url is None and any(map(is_url, options.inputs)):
        parser.error("--ray with inputs in object storage needs --output there, too, since its hosts may share no disk")
    options.remote = None
    if url and (options.shard or options.finish or options.ray):
        options.remote = Remote(url, tuple(filter(is_url, options.inputs)), options.tokenizer)

    def work(console: Console) -> None:
        if not options.remote:
            _bring_inputs(options, console)
        options.inputs = [os.path.relpath(copy_of(name)) if is_url(name) else name for name in options.inputs]
        options.tokenizer = local_file(options.tokenizer)
        for loss in losses_of(load_tokenizer(options.tokenizer)):
            console.warning(loss)
        options.output = copy_of(url) if url else Path(options.output)
        if options.shard:
            _make_share(options, console)
        elif url is None:
            prepare_here(console)
        else:
            _prepare_in_bucket(options, url, partial(prepare_here, console), console)

    def prepare_here(console: Console) -> None:
        if exists(options.output / RECORD):
            call = _call(options)
            if call.remote:
                bring_inputs(call)
            record = prepare(call, console.line)  # only checks that it would be the same
            if options.finish:
                discard_shards(options.output)
            console.line(
                f"{url or options.output}: already there, from the same files and settings; nothing was written"
            )
        elif options.finish or options.ray:
            if options.ray:
                with console.progress("Tokenizing on Ray", in_bytes=True) as progress:
                    make_shares_on_ray(_call(options, progress), options.ray)
            with console.progress("Finishing", in_bytes=True) as progress:
                record = finish(_call(options, progress))
        else:
            with console.progress("Tokenizing", in_bytes=True) as progress:
                record = prepare(_call(options, progress), console.line)
        for message in record["bad_files"]:
            console.warning(f"skipped: {message}")
        for line in described(record, url or options.output):
            console.line(line)

    def if_stopped() -> str:
        output = copy_of(url) if url else Path(options.output)
        # A finished copy is still to be put into the bucket, which may have the work of other hosts, too.
        resumes = options.remote or is_begun(output) or (url and exists(output))
        return "stopped; the same command resumes from there" if resumes else "stopped; nothing was written"

    return run_command(work, if_stopped)


def _prepare_in_bucket(
    options: argparse.Namespace, url: str, prepare_here: Callable[[], None], console: Console
) -> None:
    """Prepare into `options.output`, a copy on this host, and put it into the bucket."""
    was_there = has_all(url, RECORD)
    if was_there or not any(options.output.rglob(f"*{SUFFIX}")):  # what has no tokens was for comparison only
        shutil.rmtree(options.output, ignore_errors=True)
    for name in (RECORD, LIST) if was_there else ():
        bring_file(f"{url}/{name}")
    prepare_here()
    if not was_there:
        shutil.copyfile(options.tokenizer, options.output / f"tokenizer{options.tokenizer.suffix}")
        with console.progress(f"Putting {url}", in_bytes=True) as progress:
            put_folder(options.output, url, RECORD, progress)
    if options.remote:
        with errors_of(options.output):
            remove_work(options.remote)
    shutil.rmtree(options.output)


def _bring_inputs(options: argparse.Namespace, console: Console) -> None:
    for name in filter(is_url, options.inputs):
        with console.progress(f"Bringing {name}", in_bytes=True) as progress:
            bring(name, progress)


_FOUND = {"inputs", "tokenizer_hash", "vocab_size"}
"""What of the settings is no option that decides what is written."""


def _call(options: argparse.Namespace, progress: Progress = Call.progress) -> Call:
    choices = {each.name: getattr(options, each.name) for each in fields(Settings) if each.name not in _FOUND}
    settings = settings_of(options.inputs, options.output, options.tokenizer, **choices)
    own = (options.output, options.tokenizer, options.processes, options.max_bad_files, progress)
    return Call(settings, *own, remote=options.remote)


def _make_share(options: argparse.Namespace, console: Console) -> None:
    share, shares = options.shard
    with console.progress(f"Shard {share}/{shares}", in_bytes=True) as progress:
        make = make_share_remotely if options.remote else make_share
        done = make(_call(options, progress), share, shares)
    if done is None:
        output = options.remote.output if options.remote else options.output
        console.line(f"{output}: already there, from the same settings; nothing was written")
    else:
        console.line(
            f"shard {share}/{shares}: finished; of its parts, {done[0]} were written now, {done[1]} were there"
        )


def prepare_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add(
        "--output",
        required=True,
        metavar="FOLDER",
        help="folder to create, with train/ and validation/; or its place in object storage, s3://BUCKET/NAME",
    )
    add("--tokenizer", required=True, metavar="FILE", help="SentencePiece .model, or a tokenizer.json")
    add(
        "--processes",
        type=positive,
        default=available_cores(),
        metavar="N",
        help="number of processes (default: %(default)s)",
    )
    add(
        "--validation-fraction",
        type=number_of(lambda f: 0 <= f < 1, "in [0, 1)"),
        default=0.0,
        metavar="F",
        help="fraction of the documents to hold out",
    )
    add_text_arguments(parser)
    add(
        "--prompt-key",
        type=_key,
        metavar="K",
        help="field or column that holds what comes before the text and gives no loss, in files of records",
    )
    add("--drop-duplicates", action="store_true", help="use only the first of documents with exactly the same text")
    add(
        "--pack",
        type=positive,
        metavar="SEQ_LEN",
        help="pack whole documents into windows of this training.seq_len; the default is one stream, cut into windows",
    )
    add(
        "--mask-until",
        type=_marker,
        metavar="TEXT",
        help=r"only tokens behind this text give loss: an answer behind '<|assistant|>'; \n is a line end, \t a tab",
    )
    add(
        "--mask-after",
        type=_marker,
        metavar="TEXT",
        help="tokens behind this text give no loss again, until the next --mask-until: the end of an answer",
    )
    add(
        "--fim-rate",
        type=number_of(lambda rate: 0 < rate <= 1, "above 0 and at most 1"),
        metavar="R",
        help="move the middle of this share of the training documents to their end: fill in the middle",
    )
    add(
        "--fim-spm-rate",
        type=number_of(lambda rate: 0 <= rate <= 1, "from 0 to 1"),
        metavar="S",
        help="the share of these with the suffix before the prefix (SPM) (default: 0.5)",
    )
    many = parser.add_mutually_exclusive_group()
    many.add_argument(
        "--shard",
        type=_share,
        metavar="I/N",
        help="do only shard I of N, from 0 to N-1, on any host that has the same inputs; when all are done: --finish",
    )
    many.add_argument("--finish", action="store_true", help="put the shards together; the options are the same")
    many.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="do all shards as tasks of a cluster of Ray, or of the one that runs here (auto), and finish",
    )
    return parser


def _share(text: str) -> tuple[int, int]:
    """The type of an option that is one of several shares."""
    share, _, shares = text.partition("/")
    if not (share.isdecimal() and shares.isdecimal() and int(share) < int(shares) <= MAX_SHARES):
        raise argparse.ArgumentTypeError(f"{text} is not I/N with I from 0 to N-1, and N up to {MAX_SHARES:,}")
    return int(share), int(shares)


def _key(text: str) -> str:
    """The type of an option that names a field."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name names no field or column")
    return text


def _marker(text: str) -> str:
    """The type of an option that is a text to look for."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text is everywhere; give the text that marks the place")
    return separator(text)


if __name__ == "__main__":
    end(main)
