"""Prove that each technique computes what one process computes: scripts/prove.py MODEL [--axes fsdp,tp] [--ranks N]

MODEL is a job file, a folder of Hugging Face or its config.json, the name of a family of transformers (qwen3), the
import path of a model of your own (my_package.my_model:MyModel), or a pattern of families ("qwen*", "*"), which tries
each technique alone and makes one page of them.

The job's model is made small: the same structure, with every kind of layer and every option, and sizes that a mesh can
cut where it can cut the job's. One process trains it for four steps in plain PyTorch, in float64. Then each technique
and the pairs of techniques train it on gloo ranks of this machine, and the losses, norms, first gradients, weights and
buffers are compared, to 1e-10. What the job refuses is listed with its reason. Of what is wrong, the first wrong
parameter is named, and the block after which activations differ.

Exit code: 0 if all is equal or refused with a reason, 1 if something is wrong, 78 for a mistake in the job.
"""

import argparse
import json
import os
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from configs.errors import ConfigError
from configs.files import exists, is_file, write_atomically, write_json
from configs.load import find_job_file, load
from configs.own_code import is_import_path
from configs.reading.hf_config import CONFIG_NAME, causal_families
from configs.schema import Config
from scripts.command import add_job_argument, end, job_of, parsed, parser_of, positive, require_places, run_command
from scripts.proving.families import FamilyProof, FamilyProofs, families_of, families_page, prove_family
from scripts.proving.run import BOUND, Outcome, Prover, Verdict, call, prove_all
from scripts.proving.small import SmallJob, small_job
from scripts.proving.techniques import AXES, TECHNIQUES, Technique, chosen
from trainer.report.console import Console
from trainer.report.units import duration


def main(arguments: Sequence[str] | None = None, on_ranks: Callable = call) -> int:
    """Prove a job; returns the exit code. `on_ranks` is `Prover`'s."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice would stand between the rows, once a rank
    options, overrides = parsed(_parser(), arguments)
    found: list[Outcome] = []
    proofs: list[FamilyProof] = []

    def work(console: Console) -> None:
        started = time.perf_counter()
        job = job_of(options)
        axes = _axes(options.axes)
        require_places({"--json": options.json, "--page": options.page})
        if families := families_of(job):
            proofs.extend(_prove_families(console, families, options, chosen(axes, False), overrides))
            return
        config = job_of_model(job, overrides)
        ranks = 1 << (max(8, options.ranks) - 1).bit_length()
        small = small_job(config, ranks)
        techniques = chosen(axes, config.data.document_mask)
        _announce(console, job, small, options.ranks)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "small.toml"
            file.write_text(small.text)
            from scripts.rank_pool import RankPool

            with closing(RankPool(size=max(options.ranks, 1))) as pool:
                prover = Prover(pool, str(file), Path(folder), on_ranks)
                for outcome in prove_all(prover, techniques, options.ranks, options.every_pair):
                    found.append(outcome)
                    _tell(console, outcome)
        seconds = time.perf_counter() - started
        _conclude(console, found, seconds)
        if options.json:
            record = {
                "job": job,
                "bound": BOUND,
                "ranks": options.ranks,
                "seconds": seconds,
                "small_job": small.text,
                "notes": small.notes,
                "rows": [asdict(outcome) for outcome in found],
            }
            write_json(options.json, record)
            console.line(f"written: {options.json}")
        if options.page:
            from scripts.proving.page import page

            names = [technique.name for technique in TECHNIQUES]
            write_atomically(options.page, [page(job, small, found, names, seconds)])
            console.line(f"written: {options.page}")
        if not any(outcome.verdict in ("equal", "wrong") for outcome in found):
            raise ConfigError(f"nothing was proven: {found[0].reason}")

    def if_stopped() -> str:
        if proofs and options.json:
            return f"stopped; {options.json} has the families proven so far, and the same command goes on from there"
        if proofs and options.page:
            return f"stopped; {options.page} shows the families proven so far"
        return "stopped; nothing was written"

    code = run_command(work, if_stopped)
    is_wrong = any(outcome.verdict == "wrong" for outcome in found) or any(proof.is_wrong for proof in proofs)
    return code or int(is_wrong)


def _prove_families(
    console: Console,
    families: Sequence[str],
    options: argparse.Namespace,
    techniques: Sequence[Technique],
    overrides: Sequence[str],
) -> Iterator[FamilyProof]:
    """Prove one family after the other; prints a line for each, and then writes the files with all families so far."""
    from scripts.rank_pool import RankPool

    earlier = _earlier(options.json, options.ranks, overrides)
    known = {proof.family: proof for proof in earlier.families}
    more = f"; {options.json} has {len(known)} of them, and is continued" if known else ""
    console.line(f"{len(families)} families, made small, each technique alone, on up to {options.ranks} ranks{more}")
    with closing(RankPool(size=options.ranks)) as pool:
        for family in families:
            started = time.perf_counter()
            proof = prove_family(
                pool,
                family,
                lambda name: job_of_model(name, overrides),
                techniques,
                options.ranks,
                known.get(family),
            )
            _tell_family(console, proof, time.perf_counter() - started)
            known[family] = proof
            if options.json:
                write_atomically(options.json, [replace(earlier, families=list(known.values())).text()])
            if options.page:
                words = [] if options.axes is None else ["--axes", options.axes]
                words += ["--ranks", str(options.ranks), "--page", "PAGE"]
                command = shlex.join(["keel", "prove", options.job or options.config, *words])
                write_atomically(options.page, [families_page(list(known.values()), command)])
            yield proof


def _earlier(file: Path | None, ranks: int, overrides: Sequence[str]) -> FamilyProofs:
    """What the file of an earlier proof has, which is continued; nothing if there is none.

    Raises:
        ConfigError: it is of other versions, ranks or keys, or holds something else.
    """
    here = FamilyProofs.here(ranks, overrides)
    if file is None or not exists(file):
        return here
    remedy = "move it away, or name another file"
    try:
        earlier = FamilyProofs.from_text(file.read_bytes())
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"--json {file} exists, and is not of a proof of families; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"--json {file} can't be read: {error.strerror}; {remedy}") from None
    if changed := [name for name in here.made_with if earlier.made_with.get(name) != here.made_with[name]]:
        raise ConfigError(f"--json {file} was made with another {' and '.join(changed)}; {remedy}")
    return earlier


def _tell_family(console: Console, proof: FamilyProof, seconds: float) -> None:
    if proof.refused:
        console.line(f"{proof.family:28s} not built: {proof.refused}", "dim")
        return
    names = {verdict: [each.name for each in proof.rows if each.verdict == verdict] for verdict in _VERDICTS}
    parts = [f"{len(names['equal'])} equal", f"{len(names['refused'])} refused"]
    console.line(f"{proof.family:28s} {', '.join(parts)}; {duration(seconds)}", "bold red" if names["wrong"] else "")
    for outcome in proof.rows:
        if outcome.verdict == "wrong":
            console.line(f"    WRONG {outcome.name}: {outcome.reason}", "bold red")


_VERDICTS: tuple[Verdict, ...] = ("equal", "refused", "not tried", "wrong")


def job_of_model(model: str, overrides: Sequence[str] = ()) -> Config:
    """The job that a command line names, or for a model of Hugging Face a job that trains it.

    Raises:
        ConfigError: there is no such job, folder or family, or it is not valid.
    """
    if model.endswith(".json") or is_file(Path(model) / CONFIG_NAME):
        return _job_of_hf(model, overrides)
    if is_import_path(model):
        return load(_JOB, ["--model.architecture", model, *overrides]).config
    families = causal_families() or ()
    if model not in families:
        _require_job(model, families)
        return load(model, overrides).config
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG_NAME).write_text(_default_config(model))
        return _job_of_hf(folder, overrides)


def _require_job(name: str, families: Iterable[str]) -> None:
    """Raise ConfigError if there is no such job; the message has the families with a similar name."""
    try:
        find_job_file(name)
    except ConfigError as error:
        near = get_close_matches(name, list(families), 3, 0.7)
        advice = f"\nFamilies of transformers with a similar name: {', '.join(near)}" if near else ""
        raise ConfigError(f"{error}{advice}") from None


def _job_of_hf(source: str, overrides: Sequence[str]) -> Config:
    return load(_JOB, ["--model.architecture", "hf", "--model.hf", source, *overrides]).config


_JOB = "parity.toml"
"""The job that trains a model that is named without one."""


def _default_config(family: str) -> str:
    """The config.json that transformers writes for a family, without dropout, whose numbers no mesh would share.

    Raises:
        ConfigError: the family's own checks refuse it.
    """
    from transformers import AutoConfig

    try:
        fields = AutoConfig.for_model(family).to_dict()
    except Exception as error:  # the family's own checks refuse its own defaults
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{family} has no default configuration ({reason}); name a config.json") from None
    random = {
        name: 0.0 for name, value in fields.items() if re.search("drop|jitter", name) and isinstance(value, float)
    }
    return json.dumps(fields | random)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add_job_argument(parser)
    axes = f"try only these, with commas between them: {', '.join(AXES)}; or a technique, such as 'PP 2 gpipe'"
    parser.add_argument("--axes", metavar="AXES", help=axes)
    parser.add_argument("--ranks", type=positive, default=4, metavar="N", help="the most ranks (default: %(default)s)")
    parser.add_argument(
        "--every-pair", action="store_true", help="try each pair, and not only each technique with each other axis"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the outcomes as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write one HTML file that shows them")
    return parser


def _axes(text: str | None) -> Sequence[str]:
    """The axes, or the names of single techniques, on the command line.

    Raises:
        ConfigError: one does not exist.
    """
    named = AXES if text is None else [each.strip() for each in text.split(",")]
    techniques = [technique.name for technique in TECHNIQUES]
    for name in named:
        if name not in (*AXES, *techniques):
            near = get_close_matches(name, AXES, 1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(AXES)}"
            raise ConfigError(f"--axes: there is no axis {name!r}; {advice}")
    return named


def _announce(console: Console, job: str, small: SmallJob, ranks: int) -> None:
    console.line(f"{job}, made small, on up to {ranks} rank{'s' * (ranks > 1)}, against one process in plain PyTorch")
    for note in small.notes:
        console.line(f"  {note}")
    console.line()
    console.line(f"{'':44s} {'loss':>7s} {'norm':>7s} {'grad':>7s} {'weight':>7s} {'s':>5s}", "bold")


def _tell(console: Console, outcome: Outcome) -> None:
    if outcome.verdict in ("refused", "not tried"):
        reason = outcome.reason.split("; ")[0]  # without the advice, which the page has
        console.line(f"{outcome.name:44s} {outcome.verdict}: {reason}", "dim")
        return
    figures = " ".join(f"{value:7.0e}" for value in outcome.figures.values()) or " " * 31
    style = "bold red" if outcome.verdict == "wrong" else ""
    verdict = "WRONG" if outcome.verdict == "wrong" else "equal"
    console.line(f"{outcome.name:44s} {figures} {outcome.seconds:5.1f} {verdict}", style)
    if outcome.reason:
        console.line(f"    {outcome.reason}", style)


def _conclude(console: Console, found: Sequence[Outcome], seconds: float) -> None:
    counts = Counter(outcome.verdict for outcome in found)
    words = [f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict]]
    console.line()
    console.line(f"{', '.join(words)}, to {BOUND:.0e}; {duration(seconds)}")
    wrong = min(
        (outcome for outcome in found if outcome.verdict == "wrong"),
        key=lambda outcome: len(outcome.techniques),
        default=None,
    )
    if wrong:
        console.line(f"first wrong: {wrong.name}: {wrong.reason}", "bold red")


if __name__ == "__main__":
    end(main)
