"""A folder of prepared text: what was asked for, what its record says, and whether its inputs are still the same."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.errors import UserError
from configs.files import exists, is_file, is_folder
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file, shortened
from trainer.data.text.bad_files import skipped_lines
from trainer.data.text.documents import Keys
from trainer.data.text.listing import changes, read_list

RECORD = "prepare.json"
TRAIN = "train"
VALIDATION = "validation"
ADVICE = (
    "Choose another output folder (in a job: data.prepare.output, and path of the sources in it); or, if no run uses "
    "this one, delete it to have it made again"
)
"""What to do about a folder that was prepared in another way."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the content of the prepared folder, besides the inputs' content."""

    inputs: list[str]
    text_key: str
    tokenizer_hash: str
    vocab_size: int
    validation_fraction: float
    separator: str = ""
    drop_duplicates: bool = False
    pack: int | None = None
    """The seq_len that the documents are packed for; None: a stream."""
    mask_until: str | None = None
    """The text behind which tokens give loss (see `loss_mask`); None: all tokens do."""
    mask_after: str | None = None
    """The text behind which they give none again; None: they do up to the document's end."""
    prompt_key: str | None = None
    """The field or column of a text that comes before the document's, and gives no loss; None: there is none."""
    fim_rate: float | None = None
    """The share of the documents of TRAIN whose middle comes last (see `fill_in`); None: none."""
    fim_spm_rate: float | None = None
    """The share of these that have the suffix first; None: the usual one."""

    @property
    def keys(self) -> Keys:
        """Where records have their texts."""
        return Keys(self.text_key, self.prompt_key)

    @property
    def has_mask(self) -> bool:
        """Whether token files say which tokens give loss."""
        return self.mask_until is not None or self.prompt_key is not None

    @property
    def splits(self) -> list[str]:
        """The folders inside OUTPUT."""
        return [TRAIN, VALIDATION] if self.validation_fraction else [TRAIN]


@dataclass
class Split:
    """Counts of one of the folders inside OUTPUT."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0

    def add(self, documents: int, tokens: int, text_bytes: int) -> None:
        """Add to the counts."""
        self.documents += documents
        self.tokens += tokens
        self.text_bytes += text_bytes


def described(record: dict[str, Any], output: str | Path) -> list[str]:
    """A record in lines for people."""
    lines = [f"read {record['inputs']['files']:,} files of {record['inputs']['bytes']:,} bytes"]
    lines += skipped_lines(record["skipped"])
    if record["empty_documents"]:
        lines.append(f"skipped: {record['empty_documents']:,} empty documents")
    if "rearranged" in record:
        lines.append(f"rearranged: {record['rearranged']:,} documents of {TRAIN}, to fill in the middle")
    if "duplicates" in record:
        lines.append(f"dropped: {record['duplicates']:,} documents that equal an earlier one")
    for name in (TRAIN, VALIDATION):
        if name in record:
            split = Split(*(record[name][key] for key in _SPLIT))
            counts = f"{split.documents:,} documents, {split.tokens:,} tokens, {split.text_bytes:,} bytes of text"
            lines.append(f"{output}/{name}: {counts}")
        if masked := record.get("masked", {}).get(name):
            share = masked["tokens_with_loss"] / max(1, split.tokens)
            lines.append(
                f"{output}/{name}: {masked['tokens_with_loss']:,} tokens ({share:.2%}) give loss; "
                f"{masked['documents_without_loss']:,} documents have no such token"
            )
        if packed := record.get("packed", {}).get(name):
            lines.append(
                f"{output}/{name}: {packed['windows']:,} windows for training.seq_len = {packed['seq_len']}, "
                f"{packed['waste']:.2%} of them padding; {packed['cut_documents']:,} documents are longer than a window"
            )
    return lines


def is_finished(output: Path, settings: Settings, advice: str = ADVICE) -> bool:
    """Whether OUTPUT was prepared with these settings.

    Args:
        advice: what to do if it was made with others.

    Raises:
        UserError: it contains anything else.
    """
    if is_file(output / RECORD):
        check_same(output, read_json(output / RECORD).get("settings"), settings, advice)
        return True
    if exists(output) and (not is_folder(output) or any(output.iterdir())):
        raise UserError(f"{output}: exists but is not a folder of prepared text; choose another output folder")
    return False


def check_inputs(
    output: Path, settings: Settings, say: Callable[[str], None], if_changed: Callable[[str], None] | None
) -> None:
    """Compare the inputs with a finished folder's, as far as they still exist.

    Args:
        say: called with remarks.
        if_changed: called with what was added, removed or changed since, instead of raising an error.

    Raises:
        UserError: text was added, removed or changed since.
    """
    changed, gone = changes(read_list(output), settings.inputs, output)
    if changed and if_changed is None:
        raise UserError("\n".join([f"{output}: was made from other files:", *changed, ADVICE]))
    if changed and if_changed:
        if_changed("\n".join(changed))
    if gone:
        say(f"{output}: the text that it was made from is gone ({', '.join(gone)}), so it was not compared")


def check_same(folder: str | Path, before: Any, settings: Settings, advice: str) -> None:
    now = asdict(settings)
    then = before if isinstance(before, dict) else {}
    values = {key: shortened(repr(then.get(key)), 400) for key in now}
    changed = [f"  {key}: {values[key]} then, {now[key]!r} now" for key in now if then.get(key) != now[key]]
    if changed:
        raise UserError(f"{folder}: was made with other settings:\n" + "\n".join(changed) + f"\n{advice}")


def read_record(output: Path) -> dict[str, Any]:
    """The record of a finished preparation.

    Raises:
        UserError: it is incomplete.
    """
    record = read_json(output / RECORD)
    if not _fits(record, _FORM):
        raise UserError(f"{output / RECORD}: not in the form that Keel writes; delete its folder to have it made again")
    return record


_SPLIT = dict.fromkeys(asdict(Split()), int)
_PACKED = {"seq_len": int, "windows": int, "cut_documents": int, "waste": float}
_FORM = {
    "bad_files": [str],
    "empty_documents": int,
    TRAIN: _SPLIT,
    f"{VALIDATION}?": _SPLIT,
    "inputs": {"files": int, "bytes": int, "xxh3_128": str},
    "skipped": {"*": {"count": int, "first": [str]}},
    "duplicates?": int,
    "rearranged?": int,
    "packed?": {"*": _PACKED},
    "masked?": {"*": {"tokens_with_loss": int, "documents_without_loss": int}},
}
"""A record's form: types, lists of them, and objects; "?" marks what may be missing, "*" stands for any key."""


def _fits(value: Any, form: Any) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(_fits(item, form[0]) for item in value)
    if not isinstance(form, dict):
        return type(value) is form
    if not isinstance(value, dict):
        return False
    if "*" in form:
        return all(_fits(item, form["*"]) for item in value.values())
    needed = {key for key in form if not key.endswith("?")}
    return needed <= value.keys() and all(
        _fits(value[name], part) for key, part in form.items() if (name := key.rstrip("?")) in value
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read an object that `configs.files.write_json` has written.

    Raises:
        UserError: the file is not one.
    """
    try:
        content = parse_json(read_file(path, MAX_JSON_BYTES))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({error}); delete its folder to have it made again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: cannot be read (not an object); delete its folder to have it made again")
    return content
