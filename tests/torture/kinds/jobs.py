"""Job files."""

import random
from pathlib import Path

from configs.display import summary
from configs.load import load
from configs.reading.toml_text import table_text
from tests.torture.kinds.kind import ROOT, Kind
from tests.torture.mutations import mutated_bytes, mutated_value


def _job(folder: Path) -> Path:
    (folder / "base.toml").write_text((ROOT / "configs" / "debug.toml").read_text())
    path = folder / "job.toml"
    path.write_text('base = "base.toml"\n' + (ROOT / "tests/end_to_end/tiny.toml").read_text())
    return path


def _mutated_job(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.5:
        return dice.choice((mutated_bytes, _toml_bomb))(content, dice)
    import tomli

    values = mutated_value(tomli.loads(content.decode()), dice)
    try:
        return table_text(values).encode()
    except Exception:  # no TOML can be made of these values
        return mutated_bytes(content, dice)


def _toml_bomb(content: bytes, dice: random.Random) -> bytes:
    n = dice.choice((10, 1_000, 8_000))
    bombs = (
        "a = " + "[" * n + "]" * n,
        "a = " + "{b = " * n + "1" + "}" * n,
        ".".join(["a"] * n) + " = 1",
        "[" + ".".join(["a"] * n) + "]",
        "".join(f"key{i} = {i}\n" for i in range(n)),
        "".join(f"[table{i}]\nx = 1\n" for i in range(n)),
        "".join(f'[[data.sources]]\nname = "{i}"\nkind = "synthetic"\n' for i in range(n)),
        "a = [" + "1," * n + "]",
        f"n = {'9' * n}",
        f"n = {'9' * n}.5e{'9' * n}",
        f'"{"k" * n}" = 1',
        'base = "job.toml"',
        'base = "/etc/passwd"',
        'base = "/dev/zero"',
        "base = [1]",
    )
    text = dice.choice(bombs)
    return (text + "\n" + content.decode() if dice.random() < 0.7 else content.decode() + "\n" + text).encode()


def _read_job(path: Path) -> str:
    loaded = load(str(path), world_size=1)
    return summary(loaded, 1) + loaded.to_toml(with_origins=True)


KINDS = (Kind("job.toml", _job, _mutated_job, _read_job),)
