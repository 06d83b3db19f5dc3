"""Proves many families of transformers, one after the other: each technique alone, and a page of families by axes."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from configs.load import load
from configs.reading.hf_config import causal_families
from configs.reading.overrides import words
from configs.schema import Config
from scripts.proving.run import BOUND, FLOAT32, Outcome, Prover, Verdict, error_in, not_tried
from scripts.proving.small import small_job
from scripts.proving.techniques import TECHNIQUES, Technique

if TYPE_CHECKING:
    from scripts.rank_pool import RankPool


@dataclass(frozen=True)
class FamilyProof:
    """What came out of a family."""

    family: str
    refused: str = ""
    """Why no model of it is built; then there are no rows."""
    rows: list[Outcome] = field(default_factory=list)
    """First the comparison with transformers, then one process, then each technique."""

    @property
    def is_wrong(self) -> bool:
        """Whether a technique computes something else."""
        return any(outcome.verdict == "wrong" for outcome in self.rows)


@dataclass(frozen=True)
class FamilyProofs:
    """The content of a JSON file."""

    made_with: Mapping[str, Any]
    """Versions, ranks and keys, which are the same for all outcomes of a file."""
    families: Sequence[FamilyProof] = ()

    @classmethod
    def here(cls, ranks: int, overrides: Sequence[str]) -> "FamilyProofs":
        """No proof yet, of what is installed."""
        return cls(
            {"keys": list(overrides), "ranks": ranks, "torch": _release(), "transformers": version("transformers")}
        )

    @classmethod
    def from_text(cls, text: bytes) -> "FamilyProofs":
        """The inverse of `text`; raises ValueError, KeyError or TypeError if it is something else."""
        told = json.loads(text)
        families = told["families"]
        rows = ([Outcome(**row) for row in each["rows"]] for each in families)
        proofs = [FamilyProof(each["family"], each["refused"], of) for each, of in zip(families, rows, strict=True)]
        return cls(told["made_with"], proofs)

    def text(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self), indent=1)


def families_of(pattern: str) -> list[str]:
    """The families of transformers that a pattern such as qwen* names; none if it is not a pattern."""
    if not any(sign in pattern for sign in "*?["):
        return []
    return [family for family in causal_families() or () if fnmatch(family, pattern)]


def prove_family(
    pool: "RankPool",
    family: str,
    job_of: Callable[[str], Config],
    techniques: Sequence[Technique],
    ranks: int,
    known: FamilyProof | None,
) -> FamilyProof:
    """Compare a family's small model with transformers, then train it with each technique alone.

    Args:
        pool: the ranks.
        family: its name in transformers.
        job_of: returns the job that trains a family.
        techniques: those to try.
        ranks: the most ranks.
        known: what an earlier proof has of the family, which is not tried again.
    """
    before = known.rows if known else []
    tried = {outcome.name for outcome in before}
    left = [technique for technique in techniques if technique.name not in tried]
    if known and (known.refused or not left):
        return known
    try:
        config = job_of(family)
        with tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "small.toml"
            job.write_text(small_job(config, 1 << (ranks - 1).bit_length()).text)
            _require_small(job)
            found = _outcomes(pool, job, left, ranks)
            return FamilyProof(family, rows=[*before, *(each for each in found if each.name not in tried)])
    except ConfigError as error:
        return FamilyProof(family, refused="; ".join(str(error).splitlines()))


def _require_small(job: Path) -> None:
    """Raise ConfigError if a small model would still take the memory of the machine, or minutes for each technique."""
    from trainer.planning.skeleton import skeleton

    size = sum(map(prod, skeleton(load(str(job), world_size=1).config.model).shapes.values()))
    if size > _MOST_PARAMETERS:
        raise ConfigError(f"its small model still has {size:,} parameters: sizes of fields that Keel does not know")


_MOST_PARAMETERS = 200_000_000


def _outcomes(pool: "RankPool", job: Path, techniques: Sequence[Technique], ranks: int) -> Iterator[Outcome]:
    yield _against_transformers(pool, job)
    prover = Prover(pool, str(job), job.parent)
    alone = prover.outcome(())
    yield alone
    for technique in techniques if alone.verdict == "equal" else ():
        outcome = _outcome(prover, technique, ranks)
        if technique.run and outcome.verdict == "equal":
            plain = _against_transformers(pool, job, words(technique.run), bool(prover.own_float32()))
            outcome = replace(outcome, verdict=plain.verdict, reason=plain.reason or outcome.reason)
        yield not_tried((technique,), "a rank was killed: too little memory") if _KILLED in outcome.reason else outcome


def _outcome(prover: Prover, technique: Technique, ranks: int) -> Outcome:
    if technique.ranks > ranks:
        return not_tried((technique,), f"needs {technique.ranks} ranks")
    if _TIE not in prover.refusal((technique,)):
        return prover.outcome((technique,))
    separate = replace(technique, run={**technique.run, f"model.hf_overrides.{_TIE}": "false"})
    outcome = prover.outcome((separate,))
    return replace(outcome, reason="; ".join(filter(None, (outcome.reason, UNTIED))))


_TIE = "tie_word_embeddings"
"""A field that the advice of a refusal names if the technique needs a head of its own."""
UNTIED = f"with {_TIE} = false, since its default ties the embedding and the head"
"""What the reason of such an outcome says."""


def _against_transformers(
    pool: "RankPool", job: Path, overrides: tuple[str, ...] = (), has_float32: bool = False
) -> Outcome:
    """The outcome of the comparison of logits; of packed documents, those of models that cast to float32 are rounded.

    Raises:
        ConfigError: the model can't be built, or transformers' own fails.
    """
    from scripts.proving.plain import difference_from_transformers

    name = "transformers"
    try:
        difference, place, failure = pool.run(1, difference_from_transformers, str(job), overrides)[0]
    except RuntimeError as error:
        is_refusal, reason = error_in(str(error))
        if is_refusal:
            raise ConfigError(reason) from None
        return Outcome(name, (), 1, "wrong", reason)
    if failure:
        raise ConfigError(f"transformers itself fails with the small model: {failure}")
    verdict: Verdict = "equal" if difference <= (_FLOAT32_BOUND if has_float32 or place else BOUND) else "wrong"
    reason = f"logits {difference:.1e} off those of transformers" * (verdict == "wrong")
    if verdict == "equal" and place and difference > BOUND:
        reason = f"{FLOAT32}, in which transformers computes {place}, and Keel does not"
    return Outcome(name, (), 1, verdict, reason, {"loss": difference})


_FLOAT32_BOUND = 2e-6
_KILLED = "(exit code -9)"
"""How a rank ends of which the system takes the memory back."""


# --------------------------------------------------------------------------- the page

_SIGNS: Mapping[Verdict, str] = {"equal": "=", "refused": "-", "not tried": "", "wrong": "**wrong**"}
_HEAD = """# Families of transformers by technique

Made by `{command}` with transformers {version} and torch {torch}.

Each family's default configuration, [made small](exactness.md#what-it-does), trains for four steps in float64 with each
technique alone, and losses, gradient norms, first gradients, weights and buffers are compared with one process in plain
PyTorch. The first column compares logits with those of the model that transformers itself builds, of the same weights.

| sign | meaning |
|---|---|
| = | equal to {bound:.0e} |
| ≈ | equal to the round-off of float32, in which the family computes a part itself, whatever type it is given |
| =ᵗ, ≈ᵗ | the same with a head of its own, since a pipeline separates the embedding from the head |
| - | refused, before anything is built (`compile`: in the first step); the reasons are below |
| **wrong** | something else is computed |
"""


def families_page(proofs: Sequence[FamilyProof], command: str) -> str:
    """The Markdown page of proofs: the counts, a row for each family that is built, and all reasons."""
    built = sorted((proof for proof in proofs if not proof.refused), key=lambda proof: proof.family)
    tried = {outcome.name for proof in built for outcome in proof.rows}
    columns = [name for name in ("transformers", *(each.name for each in TECHNIQUES)) if name in tried]
    rows = ["| family | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for proof in built:
        signs = {outcome.name: _sign(outcome) for outcome in proof.rows}
        rows.append(f"| {proof.family} | " + " | ".join(signs.get(name, "") for name in columns) + " |")
    head = _HEAD.format(command=command, version=version("transformers"), torch=_release(), bound=BOUND)
    parts = [head, "## Counts", _counts(built, columns), "## Families", "\n".join(rows)]
    parts += ["## Reasons", _reasons(built), "## Families of which no model is built", _unbuilt(proofs)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _release() -> str:
    return version("torch").partition("+")[0]


def _sign(outcome: Outcome) -> str:
    is_float32 = outcome.verdict == "equal" and FLOAT32 in outcome.reason
    is_untied = outcome.verdict == "equal" and UNTIED in outcome.reason
    return ("≈" if is_float32 else _SIGNS[outcome.verdict]) + "ᵗ" * is_untied


def _counts(built: Sequence[FamilyProof], columns: Sequence[str]) -> str:
    """A table with the numbers of families by column and verdict."""
    rows = [f"{len(built)} families are built.", "", "| technique | equal | refused | wrong |", "|---|---|---|---|"]
    for name in columns:
        verdicts = [outcome.verdict for proof in built for outcome in proof.rows if outcome.name == name]
        figures = [str(verdicts.count(verdict)) for verdict in ("equal", "refused", "wrong")]
        rows.append(f"| {name} | {' | '.join(figures)} |")
    return "\n".join(rows)


def _reasons(built: Sequence[FamilyProof]) -> str:
    """Each reason to refuse, or what is wrong, with the techniques and families of which it is."""
    found: dict[str, dict[str, list[str]]] = {}
    for proof in built:
        for outcome in proof.rows:
            if outcome.reason and outcome.verdict != "equal":
                reason = _without_name(outcome.reason.split("; ")[0], proof.family)
                found.setdefault(reason, {}).setdefault(outcome.name, []).append(proof.family)
    return "\n".join(
        f"- {reason}: " + "; ".join(f"{name}: {_listed(families, len(built))}" for name, families in by_name.items())
        for reason, by_name in found.items()
    )


def _unbuilt(proofs: Sequence[FamilyProof]) -> str:
    found: dict[str, list[str]] = {}
    for proof in proofs:
        if proof.refused:
            found.setdefault(_without_name(proof.refused, proof.family), []).append(proof.family)
    return "\n".join(f"- {reason}: {', '.join(families)}" for reason, families in found.items())


def _listed(families: Sequence[str], of: int) -> str:
    return "all" if len(families) == of else ", ".join(families)


def _without_name(reason: str, family: str) -> str:
    """The reason in words that are the same for all families that have it."""
    reason = reason.replace("--model.hf: ", "")
    reason = re.sub(r" \(perhaps in [^)]*\)|(?<=small model of it differs) by \S+", "", reason)
    reason = re.sub(rf"\b(this )?{re.escape(family)}\b(?!\.\w)", "the family", reason)
    return reason.replace("|", r"\|").replace("<", r"\<")
