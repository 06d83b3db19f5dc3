"""Line numbers of keys: against documents whose lines are known because they were put together here."""

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.reading.line_numbers import line_numbers

DOCUMENT = '''# a comment with [brackets] = "and quotes
top.dotted."quoted.key" = """text
# no comment
key = 1 """""

[training]  # [not.this]
steps = 10
betas = [ 0.9, # ]
  0.95,

  [1]]
nested = {a = 1, b.c = [{d = "}"}], "e f" = '#'}

[[data.sources]]
name = 'first'
[data.sources.inner]
key = 1979-05-27 07:32:00
[[data.sources]]
name = "sec\\"ond"
[ data . 'prepare' ]
output = \'\'\'x
'y\'\'\'\'
empty = []
'''


def test_every_construct_of_toml():
    assert line_numbers(DOCUMENT) == {
        ("top",): 2,
        ("top", "dotted"): 2,
        ("top", "dotted", "quoted.key"): 2,
        ("training",): 6,
        ("training", "steps"): 7,
        ("training", "betas"): 8,
        ("training", "betas", 0): 8,
        ("training", "betas", 1): 9,
        ("training", "betas", 2): 11,
        ("training", "betas", 2, 0): 11,
        ("training", "nested"): 12,
        ("training", "nested", "a"): 12,
        ("training", "nested", "b"): 12,
        ("training", "nested", "b", "c"): 12,
        ("training", "nested", "b", "c", 0): 12,
        ("training", "nested", "b", "c", 0, "d"): 12,
        ("training", "nested", "e f"): 12,
        ("data",): 14,
        ("data", "sources"): 14,
        ("data", "sources", 0): 14,
        ("data", "sources", 0, "name"): 15,
        ("data", "sources", 0, "inner"): 16,
        ("data", "sources", 0, "inner", "key"): 17,
        ("data", "sources", 1): 18,
        ("data", "sources", 1, "name"): 19,
        ("data", "prepare"): 20,
        ("data", "prepare", "output"): 21,
        ("data", "prepare", "empty"): 23,
    }


def test_windows_line_ends():
    assert line_numbers(DOCUMENT.replace("\n", "\r\n")) == line_numbers(DOCUMENT)


SCALARS = (
    "1",
    "-inf",
    "true",
    "1979-05-27T07:32:00Z",
    "'# ] }'",
    '"\\"], \\\\"',
    '"""\n\n# ] """',
    '"""a\\\n  "" b"""',
    "'''\n= '' '''",
)
GAPS = st.sampled_from(["", " ", "\n", "  # , ] }\n", "\n\n\t"])
KEYS = st.sampled_from(["a", "b-1", "3", '"q."', "'='", '"#"'])


@st.composite
def values(draw, depth=2):
    """(text, {path below the value: line offset from the value's first line})."""
    kind = draw(st.sampled_from(["scalar", "array", "table"])) if depth else "scalar"
    if kind == "scalar":
        return draw(st.sampled_from(SCALARS)), {}
    if kind == "table":
        return _inline_table(draw, depth)
    text, lines = "[", {}
    for index in range(draw(st.integers(0, 3))):
        text += draw(GAPS)
        item, below = draw(values(depth - 1))
        _note(lines, (index,), below, text.count("\n"))
        text += item + draw(GAPS) + ","
    return text + draw(GAPS) + "]", lines


def _inline_table(draw, depth):
    parts, lines, offset = [], {}, 0
    for key in draw(st.lists(KEYS, unique=True, max_size=3)):
        item, below = draw(values(depth - 1))
        _note(lines, (_bare(key),), below, offset)
        parts.append(f" {key} = {item}")
        offset += item.count("\n")
    return "{" + ",".join(parts) + "}", lines


def _note(lines, path, below, offset):
    lines[path] = offset
    lines.update({(*path, *inner): offset + line for inner, line in below.items()})


def _bare(key):
    return key.strip("\"'")


@st.composite
def documents(draw):
    """(text, {path: line})."""
    text, lines = "", {}
    headers = draw(st.lists(st.sampled_from(["", "[t{}]", "[[l]]", "[t{}.'sub']", "[l.last{}]"]), max_size=5))
    n_tables = 0
    for number, header in enumerate(headers):
        text += draw(st.sampled_from(["", "\n", "# [x]\n"]))
        line = text.count("\n") + 1
        if header == "" and number:
            continue
        if header == "[[l]]":
            table = ("l", n_tables)
            n_tables += 1
            lines.setdefault(("l",), line)
        elif header.startswith("[l"):
            if not n_tables:
                continue
            table = ("l", n_tables - 1, f"last{number}")
        else:
            table = tuple(part.strip("[]'").format(number) for part in header.split(".") if part)
            for end in range(1, len(table)):
                lines.setdefault(table[:end], line)
        if header:
            lines[table] = line
            text += header.format(number) + "\n"
        for key in draw(st.lists(KEYS, unique=True, max_size=3)):
            value, below = draw(values())
            _note(lines, (*table, _bare(key)), below, text.count("\n") + 1)
            text += f"{key} ={draw(st.sampled_from(['', ' ']))}{value} # c\n"
    return text, lines


def paths(value, path=()):
    for part, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, part)
        yield from paths(item, (*path, part))


@settings(max_examples=150, deadline=None)
@given(documents())
def test_any_document(document):
    text, lines = document
    assert set(paths(tomli.loads(text))) == lines.keys()  # the generator itself is right
    assert line_numbers(text) == lines
