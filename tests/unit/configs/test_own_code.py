"""Jobs that name code of the user's own: each mistake's one message, before anything is built."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.load import load
from tests.conftest import ROOT
from tests.own_code import WORDS, write_files
from trainer.planning.unknown_names import require_known_names

WRONG = '''
from dataclasses import dataclass

import torch
from torch import nn

from models.own import CausalLm, Head, Options, plan_of_parts


@dataclass
class Plain:
    """A dataclass in place of a pydantic model."""

    vocab_size: int = 64
    dim: int = 16
    n_layers: int = 2
    scale: float = 1.0


class NoOptions(nn.Module):
    def __init__(self, options): super().__init__()


class NoSizes(nn.Module):
    def __init__(self, options: "Sizeless"): super().__init__()


@dataclass
class Sizeless:
    dim: int = 16


class NoPlan(nn.Module):
    def __init__(self, options: Plain): super().__init__()


class Raises(nn.Module):
    def __init__(self, options: Plain): raise RuntimeError("no such thing")


class Good(CausalLm):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.embed = nn.Embedding(options.vocab_size, options.dim)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(options.dim, options.dim) for i in range(options.n_layers)})
        self.head = Head(options.dim, options.vocab_size, bias=False)

    @property
    def plan(self): return plan_of_parts(self, "blocks", self.options.n_layers, ("embed",), ("head",))

    def forward(self, tokens, positions=None, documents=None, loss=None):
        x = self.embed(tokens) if self.embed is not None else tokens
        for block in self.blocks.values():
            x = x + block(x)
        return x if self.head is None else self.head(x, loss)


class NoValues(Good):
    init_std = None


class Dropping(Good):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.drop = nn.Dropout(0.1)


class Tied(Good):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.head.weight = self.embed.weight


class NoLoss(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        return self.head(self.embed(tokens))


class OneStage(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        return self.head(self.embed(tokens), loss)


class Functional(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        return self.head(torch.nn.functional.dropout(self.embed(tokens), 0.1), loss)


class InAttention(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        x = self.embed(tokens)
        return self.head(torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), loss)


class Outside(Good):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.extra = nn.Linear(4, 4)


class NoSource:
    def __init__(self, *settings): pass


def one_number(logits, targets): return logits.mean()


def negative(progress): return -progress
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("own"))
    (folder / "wrong_code.py").write_text(WRONG)
    (folder / "broken_code.py").write_text("import torch\n\nraise OSError('no disk')\n")
    (folder / "own.toml").write_text('base = "parity.toml"\n')
    return str(folder / "own.toml")


def message(job, *words):
    with pytest.raises(ConfigError) as caught:
        require_known_names(load(job, words))
    assert caught.value.exit_code == 78
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("no_such_module:GPT2", "no_such_module can't be imported (ModuleNotFoundError: No module named"),
        ("broken_code:GPT2", "broken_code can't be imported (OSError: no disk in "),
        ("broken_code:GPT2", "broken_code.py:3)"),
        ("my_model:GPT3", "my_model has no class GPT3"),
        ("wrong_code:NoOptions", "must take one argument, its options, annotated with their class"),
        ("wrong_code:NoSizes", "Sizeless has no vocab_size, a whole number of 1 or more"),
        ("wrong_code:NoPlan", "has no plan, which says how techniques may split it"),
        ("wrong_code:Raises", "cannot be built with these options: RuntimeError: no such thing in "),
        ("wrong_code:NoValues", "has no initial values, which may not depend on the mesh"),
        ("wrong_code:Dropping", "has dropout in drop, whose random numbers would not be the same on every mesh"),
        ("wrong_code:Functional", "the forward pass draws random numbers (aten.bernoulli_.float), as dropout does"),
        ("wrong_code:InAttention", "the forward pass draws random numbers (aten.bernoulli_.float), as dropout does"),
        ("wrong_code:NoLoss", "does not return what the loss returned"),
        ("my-model:GPT2", 'or string such as "module:Class", got "my-model:GPT2"'),
    ],
)
def test_a_wrong_class_is_one_message(job, model, part):
    assert part in message(job, "--model.architecture", model)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--model.options.dimm", "3"), "--model.options.dimm: GPT2Options has no option dimm; did you mean dim?"),
        (("--model.options.dim", "3.5"), "--model.options.dim: model.options.dim must be a valid integer, got 3.5"),
        (("--mesh.tp", "3"), "tp 3 does not divide model.options.n_heads 4"),
        (("--model.options.ffn_dim", "65", "--mesh.tp", "2"), "tp 2 does not divide 65, a size of blocks.0.up.weight"),
        (("--mesh.pp", "5"), "stages are more than n_layers 4"),
        (("--mesh.ep", "2"), "ep 2 distributes Keel's own experts"),
        (("--training.seq_len", "128"), "seq_len 128 is more than max_seq_len 64"),
        (("--float8.recipe", "rowwise"), "float8 matmuls replace Keel's own matrices"),
    ],
)
def test_what_a_model_cannot_do_is_refused(job, words, part):
    assert part in message(job, *WORDS, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("wrong_code:Good", "--mesh.tp", "2"), "its plan has no roles of tensor parallelism"),
        (("wrong_code:Good", "--mesh.cp", "2"), "names no module that has it (attention)"),
        (("wrong_code:Good", "--data.document_mask", "true"), "data.document_mask replaces the function that mixes"),
        (("wrong_code:Tied", "--mesh.pp", "2"), "where embedding and head share one matrix"),
        (("wrong_code:OneStage", "--mesh.pp", "2"), "the forward pass of stage 0 of the pipeline"),
        (("wrong_code:Outside", "--mesh.pp", "2"), "extra.weight is in no part of the plan"),
        (("wrong_code:Good", "--model.options.scale", "a"), 'model.options.scale must be a valid number, got "a"'),
        (("wrong_code:Good", "--model.options.size", "1"), "Plain has no option size"),
    ],
)
def test_what_the_plan_lacks_is_refused(job, words, part):
    assert part in message(job, "--model.architecture", *words)


@pytest.mark.parametrize(
    ("key", "name", "part"),
    [
        ("optimizer.name", "wrong_code:Good", "is no class derived from trainer.optimizers.rule.Rule"),
        ("lr_schedule.name", "wrong_code:negative", "must map the progress, from 0 to 1, to a number that is at least"),
        ("lr_schedule.name", "wrong_code:one_number", "raises TypeError"),
        ("training.loss", "wrong_code:one_number", "must return a loss for each token, a tensor of shape (2,)"),
        ("data.sources.0.kind", "no_such_module:Source", "no_such_module can't be imported"),
        ("lr_schedule.name", "cosin", 'did you mean "cosine"?'),
    ],
)
def test_other_code_is_checked_too(job, key, name, part):
    assert part in message(job, f"--{key}", name)


def test_a_file_names_the_line(job):
    file = Path(job).with_name("lines.toml")
    file.write_text('base = "parity.toml"\n[model]\narchitecture = "my_model:GPT2"\n[model.options]\ndimm = 3\n')
    lines = message(str(file)).splitlines()
    assert f"{file}:5: GPT2Options has no option dimm; did you mean dim?" in lines
    assert f"{file}:4: [model.options] lacks vocab_size, which GPT2Options needs" in lines


def test_options_complete_the_job_and_the_command_line_survives_another_architecture(job):
    loaded = load(job, (*WORDS[2:], *WORDS[:2]))  # options first
    assert loaded.config.model.options["dim"] == 32
    assert loaded.config.model.options["init_std"] == 0.02
    assert load(job, ["--model.architecture", "wrong_code:Good"]).config.model.options["scale"] == 1.0


def test_a_stored_config_imports_nothing(tmp_path):
    (tmp_path / "stored_code.py").write_text("open('imported', 'w').close()\n")
    (tmp_path / "config.toml").write_text(
        'base = "parity.toml"\n[model]\narchitecture = "stored_code:Model"\n'
        "options = {vocab_size = 64, dim = 16, n_layers = 2}\n"
    )
    program = (
        "from configs.load import load; from models import build_model\n"
        "config = load('config.toml', is_stored=True).config\n"
        "assert config.model.dim == 16\n"
        "try: build_model(config.model)\n"
        "except Exception as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Keel runs no code that a checkpoint or a run folder names" in ran.stdout, ran.stderr
    assert not (tmp_path / "imported").exists()
