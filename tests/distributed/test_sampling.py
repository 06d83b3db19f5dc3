"""A checkpoint of any mesh is continued as transformers continues its export."""

import pytest
import torch
import torch.distributed as dist

from checkpoint.export.hf_export import export_hf
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from checkpoint.reader import Description, Log
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts import sample as script
from scripts.export.hf_tokenizer import tokenizer_files
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import Distribution, generators
from scripts.sampling.generate import generate
from scripts.sampling.load import load_trained
from scripts.sampling.text import prompt_tokens
from trainer.data.loader import build_loader
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
from trainer.step import build_learner

VOCAB = 352
TEXTS = ["def main(argv):\n    return [str(x) for x in argv]\n\n\nclass A(dict):\n    'naïve 漢字 🙂'\n" * 20]
PROMPTS = ["def main(", "", "class A(dict):\n    '", "x", "return [str(x) for x in"]


def job_of(folder, words):
    given = ["--tokenizer.path", str(folder / "tokenizer.model"), "--model.vocab_size", str(VOCAB)]
    return load("parity.toml", (*given, *words), dist.get_world_size())


def learn(job, steps):
    """Train a little on this mesh; returns the learner."""
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(job.config, mesh)
    loader = build_loader(job.config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    for _, micro_batches in zip(range(steps), loader, strict=False):
        learner.step(micro_batches, lr=1e-2)
    loader.close()
    return learner


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    train_sentencepiece(iter(TEXTS), folder / "tokenizer.model", VOCAB)
    return folder


def save(folder, run, words, n_steps=3):
    """Train in float32 on this mesh, and save as a run does."""
    float32 = [word for key in ("dtype", "compute_dtype", "reduce_dtype") for word in (f"--training.{key}", "float32")]
    job = job_of(folder, (*float32, *words))
    learner = learn(job, n_steps)
    resolved = job.config.model_dump(mode="json")
    of_run = Description(resolved, learner.mesh.sizes.axes, load_tokenizer(folder / "tokenizer.model").hash)
    manager = CheckpointManager(run / "checkpoints", job.config.checkpoint, of_run, Log())
    assert manager.resume(learner.state()) is None
    manager.begin_lineage()
    manager.save(n_steps, learner.state(), {"tokens": 0})
    manager.close()


def greedy(run, n):
    """The tokens of prompts and texts."""
    trained = load_trained(run, None, "auto", None, None)
    prompts = [prompt_tokens(trained.tokenizer, prompt) for prompt in PROMPTS]
    tokens, model = [list(prompt) for prompt in prompts], CachedModel(trained.model, trained.device)
    randomness = generators(0, len(prompts))
    for step in generate(model, prompts, n, trained.seq_len, Distribution(0), randomness, trained.tokenizer.eos_id):
        for text, token in zip(tokens, step, strict=True):
            text += [] if token is None else [token]
    return tokens


AT_ONCE = ("--training.micro_batch_size", "4")
MODELS = {"Llama": (), "tied": ("--model.tie_embeddings", "true"), "Mixtral": ("--model.n_experts", "4")}
WRITERS = {"FSDP 2": (2, AT_ONCE), "FSDP 2 x TP 2": (4, ("--mesh.tp", "2", *AT_ONCE))}


@pytest.mark.parametrize(
    ("model", "writer"),
    [
        ("Llama", "FSDP 2"),
        pytest.param("Llama", "FSDP 2 x TP 2", marks=pytest.mark.long),
        pytest.param("tied", "FSDP 2", marks=pytest.mark.slow),
        pytest.param("tied", "FSDP 2 x TP 2", marks=pytest.mark.long),
        pytest.param("Mixtral", "FSDP 2", marks=pytest.mark.long),
        pytest.param("Mixtral", "FSDP 2 x TP 2", marks=pytest.mark.slow),
    ],
)
def test_greedy_texts_are_those_of_transformers(ranks, folder, tmp_path, capsys, model, writer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    n_ranks, words = WRITERS[writer]
    run, export = tmp_path / "run", tmp_path / "export"
    ranks(n_ranks, save, folder, run, (*MODELS[model], *words))
    checkpoint = step_folder(run / "checkpoints", 3)
    export_hf(checkpoint, export, tokenizer_files(folder / "tokenizer.model"))
    theirs, reader = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    prompts = [reader(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    whole = [theirs.generate(each, max_new_tokens=15, do_sample=False, pad_token_id=0)[0].tolist() for each in prompts]
    assert greedy(run, 15) == whole
    assert len(set(map(tuple, whole))) == 5
    decode = load_tokenizer(folder / "tokenizer.model").decode  # theirs shows bytes that are no text in another way
    expected = [decode(tokens) for tokens in whole]
    for source in (run, checkpoint, export):
        assert script.main([str(source), *PROMPTS, "--temperature", "0", "--max-tokens", "15"]) == 0
        out, err = capsys.readouterr()
        assert out == script.SEPARATOR.join(expected) + "\n"
        assert "tokens/s" in err
