"""Compiled blocks in one process: how many graphs they may have."""

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
import torch._inductor.config
from torch._inductor.utils import fresh_cache

from configs.errors import ConfigError, OutageError
from configs.schema import Compile, Model
from models import build_model
from parallelisms import compile as compiling
from parallelisms.compile import apply_compile, compiled, compiler_options
from scripts.parity_compare import attention_that_compiles

SHAPE = Model(dim=24, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40, vocab_size=32)
TOKENS = torch.arange(16).view(1, 16) % 32


@pytest.mark.slow
def test_each_block_may_have_other_frozen_parameters(monkeypatch):
    """Each makes two graphs, with gradients and without, of torch's limit of 8 for all blocks together."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(compiling.torch, "compile", partial(torch.compile, backend=backend))
    model = build_model(SHAPE)
    plain = build_model(SHAPE)
    plain.load_state_dict(model.state_dict())
    for number in range(SHAPE.n_layers):
        for parameter in list(model.get_submodule(f"layers.{number}").parameters())[:number]:
            parameter.requires_grad_(False)
    # What apply_compile sets is put back; monkeypatch would remove a setting of torch's.
    with torch._dynamo.config.patch(recompile_limit=8), attention_that_compiles():
        apply_compile(model, {})
        loss = model(TOKENS).square().mean()
        with torch.no_grad():
            assert torch.equal(model(TOKENS), plain(TOKENS))
    loss.backward()
    assert len(graphs) == 2 * SHAPE.n_layers


@pytest.mark.slow
def test_a_block_that_cannot_be_one_graph_is_refused_with_torchs_reason():
    """As in LongCat's loop over experts, whose sizes depend on values."""
    torch._dynamo.reset()
    model = build_model(SHAPE)
    block = model.get_submodule("layers.2")
    plain = block.forward
    block.forward = lambda x, *rest: plain(x if x.sum() > 0 else -x, *rest)
    with attention_that_compiles():
        apply_compile(model, {})
        with pytest.raises(ConfigError, match=r"can't compile layers\.2 as one graph: .*; set compile\.enable = false"):
            model(TOKENS)


@pytest.mark.slow
def test_one_that_is_compiled_again_and_again_is_refused():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        add_one = compiled(lambda x: x + 1, "the loss", None)
        add_one(torch.ones(2))
        add_one(torch.ones(3))
        with pytest.raises(ConfigError, match=r"compile.enable: the loss has been compiled 2 times, .*; set compile"):
            add_one(torch.ones(4))


@pytest.mark.slow
def test_a_compiler_that_is_killed_is_no_mistake_in_the_job(tmp_path):
    """The command may succeed another time, which ConfigError denies."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exec c++ --version;; esac\nkill -TERM $$\n')
    compiler.chmod(0o755)
    torch._dynamo.reset()
    with fresh_cache(), torch._inductor.config.patch({"cpp.cxx": (None, str(compiler)), "compile_threads": 1}):
        add_one = compiled(lambda x: x.sin() + 1, "the loss", None)
        with pytest.raises(OutageError, match=r"this host could not compile the loss: CppCompileError: .*tries again"):
            add_one(torch.ones(64))


def test_the_options_of_a_mode():
    always = {"use_static_cuda_launcher": False}
    assert compiler_options(Compile()) == always
    assert compiler_options(Compile(mode="reduce-overhead")) == always | {"triton.cudagraphs": True}


BAR = """
import multiprocessing, os
multiprocessing.set_start_method("spawn")  # as it is, but for forks, by default in Python 3.14
from parallelisms.compile import compiled
compiled(len, "the loss", None)
from tqdm import tqdm
list(tqdm("abc", disable=True))
os._exit(0)
"""


def test_a_process_that_compiles_leaks_no_semaphore():
    """Inductor shows a bar of tqdm, and train.py ends its process without the interpreter's shutdown."""
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.slow
def test_what_the_compiler_does_with_a_diagonal_is_nothing_to_warn_of():
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught, fresh_cache():
        warnings.simplefilter("always")
        found = compiled(lambda x: x.diagonal() + 1, "diagonal", None)(torch.ones(3, 3))
    assert torch.equal(found, torch.full((3,), 2.0))
    assert [str(warning.message) for warning in caught if warning.category is FutureWarning] == []
