"""Line numbers of keys and tables."""

import tomli

from configs.reading.line_numbers import line_numbers

DOCUMENT = '''# a comment with [brackets] = "and quotes
top.dotted."quoted key" = "text"

[training]  # [not.this]
steps = 10
betas = [ 0.9, # ]
  0.95,

  [1, 2]]
nested = {a = 1, b.c = [{d = "}"}], "e f" = '#'}

[[data.sources]]
name = 'first'
[data.sources.inner]
key = 1979-05-27 07:32:00
  [[data.sources]]
name = "sec\\"ond"
[ data . 'prepare' ]
output = """x
y"""
'''


def test_keys_and_tables():
    tomli.loads(DOCUMENT)
    assert line_numbers(DOCUMENT) == {
        ("top",): 2,
        ("top", "dotted"): 2,
        ("top", "dotted", "quoted key"): 2,
        ("training",): 4,
        ("training", "steps"): 5,
        ("training", "betas"): 6,
        ("training", "nested"): 10,
        ("data",): 12,
        ("data", "sources"): 12,
        ("data", "sources", 0): 12,
        ("data", "sources", 0, "name"): 13,
        ("data", "sources", 0, "inner"): 14,
        ("data", "sources", 0, "inner", "key"): 15,
        ("data", "sources", 1): 16,
        ("data", "sources", 1, "name"): 17,
        ("data", "prepare"): 18,
        ("data", "prepare", "output"): 19,
    }


def test_only_a_newline_ends_a_line():
    """Comments and strings may have what Python takes for the end of a line, too."""
    assert line_numbers("# a\u2028b\u0085c\x0bd\nsteps = 1\n") == {("steps",): 2}


def test_windows_line_ends():
    assert line_numbers(DOCUMENT.replace("\n", "\r\n")) == line_numbers(DOCUMENT)
