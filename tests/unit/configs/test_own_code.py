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

from models.own import CausalLm, Experts, Head, Options, plan_of_parts


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


class Branching(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        return self.head(self.embed(tokens) * (2 if (tokens > 3).any() else 1), loss)


class Selecting(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        x = self.embed(tokens)
        x[tokens > 3] *= 2
        x = x + x[tokens > 3].mean()
        return self.head(x, loss)


class InAttention(Good):
    def forward(self, tokens, positions=None, documents=None, loss=None):
        x = self.embed(tokens)
        return self.head(torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1), loss)


class WrongPlan(Good):
    @property
    def plan(self): return plan_of_parts(self, "blocks", self.options.n_blocks, ("embed",), ("head",))


class Uncounted(Good):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.blocks = nn.ModuleDict({"0": nn.ModuleDict({"experts": Experts(4, 16, 8)}), "1": nn.ModuleDict()})

    @property
    def plan(self): return plan_of_parts(self, "blocks", 2, ("embed",), ("head",), experts="experts", n_experts=4)


class Outside(Good):
    def __init__(self, options: Plain):
        super().__init__(options)
        self.extra = nn.Linear(4, 4)


class NoSource:
    def __init__(self, *settings): pass


def one_number(logits, targets): return logits.mean()


def negative(progress): return -progress
'''


OPTIMIZERS = '''
import torch
from torch.optim import Optimizer

from trainer.optimizers.rule import Rule
from trainer.optimizers.training import TrainingOptimizer


class Whole(Optimizer):
    """Divides by the norm of a gradient."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "t": 0})

    def direction(self, grad): return grad / grad.norm()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, self.direction(p.grad) * group["lr"], group)

    def move(self, p, by, group): p.sub_(by)


class Clipping(Whole):
    def direction(self, grad): return grad / (grad.square().mean().sqrt() / 2).clamp(min=1.0)


class Rows(Whole):
    def direction(self, grad): return grad / grad.norm(dim=-1, keepdim=True)


class Attribute(Whole):
    t = 0

    def direction(self, grad):
        self.t += 1
        return grad / self.t


class InGroup(Whole):
    def direction(self, grad): return grad

    def move(self, p, by, group):
        group["t"] += 0.5
        p.sub_(by / group["t"])


class Replacing(Whole):
    def direction(self, grad): return grad

    def move(self, p, by, group): p.data = p.data - by


class Failing(Whole):
    def direction(self, grad): return grad * (1 / 0)


class NoLr(Optimizer):
    def __init__(self, params, rate=1e-3): super().__init__(params, {"rate": rate})


class Normed(TrainingOptimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / p.grad.norm() * group["lr"])


class NormedRule(Rule):
    def state(self, parameter): return {}

    def without_state(self, groups): return Normed(groups, {"lr": self.config.lr})
'''


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = write_files(tmp_path_factory.mktemp("own"))
    (folder / "wrong_code.py").write_text(WRONG)
    (folder / "wrong_optimizers.py").write_text(OPTIMIZERS)
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
        (
            "wrong_code:WrongPlan",
            "built with these options: AttributeError: 'Plain' object has no attribute 'n_blocks'",
        ),
        ("wrong_code:Uncounted", "has experts, but no option experts_per_token, by which its FLOPs are counted"),
        ("wrong_code:Raises", "cannot be built with these options: RuntimeError: no such thing in "),
        ("wrong_code:NoValues", "has no initial values, which may not depend on the mesh"),
        ("wrong_code:Dropping", "has dropout in drop, whose random numbers would not be the same on every mesh"),
        ("wrong_code:Functional", "the forward pass draws random numbers (aten.bernoulli_.float), as dropout does"),
        ("wrong_code:Branching", "this pass is without memory, so it must not ask for values, as `if mask.any()` does"),
        ("wrong_code:Selecting", "this pass is without memory, so it must not ask for values, as `if mask.any()` does"),
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
        (("--mesh.ep", "2"), "mesh.ep is 2, but its plan has no stacked experts"),
        (("--training.seq_len", "128"), "seq_len 128 is more than max_seq_len 64"),
        (("--float8.recipe", "rowwise"), "float8 matmuls replace Keel's own matrices"),
    ],
)
def test_what_a_model_cannot_do_is_refused(job, words, part):
    assert part in message(job, *WORDS, *words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--mesh.ep", "2", "--model.options.n_experts", "5"), "mesh.ep 2 does not divide the 5 experts of blocks.0."),
        (("--mesh.ep", "4", "--mesh.dp_shard", "2"), "ep 4 does not divide dp_shard 2 x cp 1 = 2"),
        (("--mesh.tp", "2", "--model.options.ffn_dim", "65"), "tp 2 does not divide"),
        (
            ("--model.options.router.load_balance", "none", "--model.options.router.n_group", "2"),
            "did you mean n_groups?",
        ),
        (("--mesh.ep", "2", "--expert.exchange", "buffers"), 'and so exchange = "buffers" does nothing'),
    ],
)
def test_what_a_mixture_cannot_do_is_refused(job, words, part):
    assert part in message(job, *WORDS, "--model.architecture", "my_mixture:MixtureGPT2", *words)


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
        ("optimizer.name", "wrong_code:Good", "is neither a class of torch optimizers nor one derived from"),
        ("optimizer.name", "wrong_optimizers:Whole", '"wrong_optimizers:Whole" does not update each element by itself'),
        ("optimizer.name", "wrong_optimizers:Clipping", "the same as two halves, differ after 8 updates. Ranks hold"),
        (
            "optimizer.name",
            "wrong_optimizers:Rows",
            "the same as a vector, differ after 8 updates. Ranks hold parts of",
        ),
        ("optimizer.name", "wrong_optimizers:NormedRule", "does not update each element by itself: a small matrix"),
        ("optimizer.name", "wrong_optimizers:Attribute", "does not go on from its state: resumed after update 4"),
        ("optimizer.name", "wrong_optimizers:InGroup", "keeps t in its groups, which a checkpoint does not have; of"),
        ("optimizer.name", "wrong_optimizers:Replacing", "computes something else in Keel than alone: it must write"),
        ("optimizer.name", "wrong_optimizers:Failing", "raises ZeroDivisionError: division by zero in "),
        ("optimizer.name", "wrong_optimizers:NoLr", "NoLr takes no lr, which the schedule sets for each step"),
        ("optimizer.name", "torch.optim:LBFGS", "LBFGS needs a closure, to compute gradients several times in a step"),
        ("optimizer.name", "torch.optim:Adafactor", "of a matrix it keeps row_var, of shape (2, 1), where others keep"),
        ("optimizer.name", "torch.optim:Muon", '"torch.optim:Muon" does not update each element by itself'),
        ("optimizer.name", "torch.optim:SparseAdam", "SparseAdam takes no weight_decay; set it to 0, here and in"),
        ("lr_schedule.name", "wrong_code:negative", "must map the progress, from 0 to 1, to a number that is at least"),
        ("lr_schedule.name", "wrong_code:one_number", "raises TypeError"),
        ("training.loss", "wrong_code:one_number", "must return a loss for each token, a tensor of shape (2,)"),
        ("data.sources.0.kind", "no_such_module:Source", "no_such_module can't be imported"),
        ("lr_schedule.name", "cosin", 'did you mean "cosine"?'),
    ],
)
def test_other_code_is_checked_too(job, key, name, part):
    assert part in message(job, f"--{key}", name)


TORCH = ("--optimizer.name", "torch.optim:RMSprop")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--optimizer.options.momentm", "0.9"), "--optimizer.options.momentm: RMSprop has no option momentm; did you"),
        (("--optimizer.options.momentm", "0.9"), "did you mean momentum?"),
        (("--optimizer.options.lr", "0.9"), "--optimizer.options.lr: lr is a key of [optimizer] itself; set"),
        (("--optimizer.options.alpha", "-3.0"), "raises ValueError: Invalid alpha value: -3.0"),
        (("--optimizer.momentum", "0.5"), "--optimizer.momentum: momentum is an option of such a class; set"),
        (("--optimizer.weight_decay_by", "schedule"), "what RMSprop multiplies weight_decay by is for itself to say"),
        (("--training.reduction", "exact"), '--training.reduction: "exact" promises the same bits on every mesh, but'),
        (("--model.mup_base_dim", "64"), "which Keel does not know of torch.optim:RMSprop"),
    ],
)
def test_what_a_class_of_torch_optimizers_cannot_do_is_refused(job, words, part):
    assert part in message(job, *TORCH, *words)


def test_a_class_without_dense_gradients_and_options_of_a_rule_are_refused(job):
    sparse = ("--optimizer.name", "torch.optim:SparseAdam", "--optimizer.weight_decay", "0")
    assert "raises RuntimeError: SparseAdam does not support dense gradients" in message(job, *sparse)
    rule = ("--optimizer.name", "my_rule:Momentum", "--optimizer.options.size", "1")
    assert '"my_rule:Momentum" is a Rule, which reads the other keys of [optimizer]' in message(job, *rule)


@pytest.mark.parametrize("kind", ["Adadelta", "Adagrad", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD"])
def test_elementwise_classes_pass(job, kind):
    require_known_names(load(job, ("--optimizer.name", f"torch.optim:{kind}")))


def test_a_file_names_the_line_of_an_option(job):
    file = Path(job).with_name("options.toml")
    file.write_text('base = "parity.toml"\n[optimizer]\nname = "torch.optim:Adamax"\noptions = {maximise = true}\n')
    assert f"{file}:4: Adamax has no option maximise; did you mean maximize?" in message(str(file))


def test_a_key_of_another_architecture_is_named(job):
    found = message(job, "--model.architecture", "my_model:GPT2", "--model.dim", "8")
    assert '--model.dim: model.dim is no key of architecture "my_model:GPT2"; leave it out; what its class' in found


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


@pytest.mark.slow
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
