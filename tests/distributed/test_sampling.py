"""Samples on every mesh are those of one process, and a checkpoint of any mesh is continued as transformers does."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from checkpoint.export.hf import export_hf
from checkpoint.manager import CheckpointManager
from checkpoint.manifest import step_folder
from checkpoint.reader import Description, Log
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts import sample as script
from scripts.export.hf_tokenizer import tokenizer_files
from scripts.parity import dtype_overrides
from scripts.sampling.cache import CachedModel
from scripts.sampling.generate import generate
from scripts.sampling.load import load_trained
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece
from trainer.sampling import periodic
from trainer.sampling.draw import Distribution, generators
from trainer.sampling.periodic import Sampler
from trainer.sampling.text import prompt_tokens
from trainer.step import build_learner
from trainer.validation import validate

VOCAB = 352
TEXTS = ["def main(argv):\n    return [str(x) for x in argv]\n\n\nclass A(dict):\n    'naïve 漢字 🙂'\n" * 20]
N_TOKENS = 8
PROMPTS = ["def main(", "", "class A(dict):\n    '", "x", "return [str(x) for x in"]


def job_of(folder, words, **validation):
    settings = {"interval": 1, "sequences": 8, "samples": PROMPTS} | validation
    given = [word for key, value in settings.items() for word in (f"--validation.{key}", _toml(value))]
    given += ["--validation.sources", '[{name = "noise", kind = "synthetic"}]']
    given += ["--tokenizer.path", str(folder / "tokenizer.model"), "--model.vocab_size", str(VOCAB)]
    return load("parity.toml", (*given, *words), dist.get_world_size())


def sampler(job, temperature=periodic.TEMPERATURE):
    """A sampler of few tokens."""
    with patch.object(periodic, "MAX_TOKENS", N_TOKENS), patch.object(periodic, "TEMPERATURE", temperature):
        return Sampler(job)


def learn(job, steps=3):
    """Train a little on this mesh; returns the learner and its loader of validation data."""
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(job.config, mesh)
    loader = build_loader(job.config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    for _, micro_batches in zip(range(steps), loader, strict=False):
        learner.step(micro_batches, lr=1e-2)
    loader.close()
    return learner, build_loader(job.config, mesh.dp_rank, mesh.sizes.dp, start_sample=0, validation=True)


def _toml(value):
    return str(value).replace("'", '"') if not isinstance(value, list) else f"[{', '.join(map(_quoted, value))}]"


def _quoted(text):
    return '"' + text.replace("\n", "\\n") + '"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    train_sentencepiece(iter(TEXTS), folder / "tokenizer.model", VOCAB)
    return folder


# ------------------------------------------------------------------ during training


def sampled(folder, words):
    """Samples by temperature."""
    job = job_of(folder, words)
    learner, validation = learn(job)
    validation.close()
    return {each: sampler(job, each).sample(learner, 7, lambda: False) for each in (0, 1.0)}


MIXTURE = ("--model.n_experts", "4")
AT_ONCE = ("--training.micro_batch_size", "4")
"""Sequences of a step, and texts."""
MESHES = {
    "FSDP 2": (2, ()),
    "FSDP 2, two texts at once": (2, ("--training.micro_batch_size", "2")),
    "TP 2": (2, ("--mesh.tp", "2", *AT_ONCE)),
    "PP 2": (2, ("--mesh.pp", "2", *AT_ONCE)),
    "CP 2": (2, ("--mesh.cp", "2", *AT_ONCE)),
    "owner 2": (2, ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1")),
    "HSDP 2x2": (4, ("--mesh.dp_replicate", "2")),
    "FSDP 2 x TP 2": (4, ("--mesh.tp", "2", *AT_ONCE)),
    "PP 2 x CP 2, interleaved": (
        4,
        (
            *("--mesh.pp", "2", "--mesh.cp", "2", "--context.method", "ring"),
            *("--pipeline.schedule", "interleaved_1f1b", *AT_ONCE),
        ),
    ),
    "EP 2, experts": (2, ("--mesh.ep", "2", *MIXTURE)),
    "documents": (2, ("--data.document_mask", "true")),
}


@pytest.fixture(scope="module")
def alone(ranks, folder):
    """The samples of one process, of the dense model and of the mixture."""
    return {words: ranks(1, sampled, folder, words)[0] for words in ((), MIXTURE)}


@pytest.mark.parametrize(
    "name",
    marked(
        MESHES,
        slow=["FSDP 2, two texts at once", "owner 2", "PP 2 x CP 2, interleaved", "documents"],
        long=["TP 2", "CP 2", "HSDP 2x2", "FSDP 2 x TP 2", "EP 2, experts"],
    ),
)
def test_samples_are_those_of_one_process(ranks, folder, alone, name):
    n_ranks, words = MESHES[name]
    expected = alone[MIXTURE if "experts" in name else ()]
    assert ranks(n_ranks, sampled, folder, words) == [expected] * n_ranks
    for samples in expected.values():
        assert [each["prompt"] for each in samples] == PROMPTS
        assert len({each["text"] for each in samples}) == 5
    assert expected[0] != expected[1.0]


def naive(folder, words):
    """The greedy samples, and what a plain loop over the whole model without any batch makes of it."""
    job = job_of(folder, words)
    learner, validation = learn(job)
    validation.close()
    tokenizer, texts = load_tokenizer(folder / "tokenizer.model"), []
    for prompt in PROMPTS:
        tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
        for _ in range(N_TOKENS):
            with torch.no_grad():
                tokens.append(int(learner.stages[0](torch.tensor([tokens]))[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_id:
                break
        texts.append(tokenizer.decode(tokens))
    return [each["prompt"] + each["text"] for each in sampler(job, 0).sample(learner, 7, lambda: False)], texts


def test_greedy_samples_are_the_most_likely_tokens(ranks, folder):
    found, expected = ranks(1, naive, folder, ())[0]
    assert found == expected


def state_after(folder, samples):
    """Weights and torch's random state after two more steps, which a validation with or without samples precedes."""
    job = job_of(folder, ("--training.micro_batch_size", "2"), samples=samples)
    learner, validation = learn(job)
    validate(learner, validation, None, lambda: False)
    sample = sampler(job).sample(learner, 3, lambda: False)
    assert (sample is None) == (not samples)
    loader = build_loader(job.config, learner.mesh.dp_rank, learner.mesh.sizes.dp, start_sample=24)
    losses = [
        learner.step(micro_batches, lr=1e-2).result().loss for _, micro_batches in zip(range(2), loader, strict=False)
    ]
    for each in (loader, validation):
        each.close()
    return losses, torch.get_rng_state().sum().item(), sampler(job).sample(learner, 3, lambda: True)


def test_sampling_changes_nothing_of_the_run(ranks, folder):
    (*without, _), (*with_samples, cut_short) = (ranks(2, state_after, folder, each)[0] for each in ([], PROMPTS))
    assert without == with_samples
    assert cut_short is None


def sampled_by_copies(folder, words, kept):
    """Samples of a rank that computes with copies of its parameters, and the loss and norm of the step after them."""
    job = job_of(folder, (*dtype_overrides("bfloat16"), *AT_ONCE, *words))
    learner, validation = learn(job)
    validation.close()
    assert learner.optimizer.copies is not None
    assert bool(learner.optimizer.copies.kept) == kept
    samples = sampler(job, 1.0).sample(learner, 7, lambda: False)
    loader = build_loader(job.config, learner.mesh.dp_rank, learner.mesh.sizes.dp, start_sample=24)
    result = learner.step(next(loader), lr=1e-2).result()
    loader.close()
    return samples, result.loss, result.grad_norm


def test_copies_that_are_freed_give_the_samples_of_kept_ones(ranks, folder):
    [kept] = ranks(1, sampled_by_copies, folder, (), True)
    assert ranks(1, sampled_by_copies, folder, ("--fsdp.reshard_after_forward", "always"), False) == [kept]
    assert len({each["text"] for each in kept[0]}) == len(PROMPTS)


def graphs(folder, words, backend):
    """The number of compiled graphs, and of graph breaks, after validations, and after samples between and after."""
    torch._dynamo.reset()
    counters.clear()
    compile_, torch.compile = torch.compile, lambda *args, **how: compile_(*args, **({"backend": backend} | how))
    try:
        job = job_of(folder, ("--compile.enable", "true", *words))
        learner, validation = learn(job, steps=0)
        loader = build_loader(job.config, learner.mesh.dp_rank, learner.mesh.sizes.dp, start_sample=0)
        sampler, found = Sampler(job), []
        for step, micro_batches in zip(range(4), loader, strict=False):
            learner.step(micro_batches, lr=1e-2)
            if step > 0:
                validate(learner, validation, None, lambda: False)
                found.append(counters["stats"]["unique_graphs"])
            if step > 1:
                assert sampler.sample(learner, step, lambda: False) is not None
                found.append(counters["stats"]["unique_graphs"])
    finally:
        torch.compile = compile_
    for each in (loader, validation):
        each.close()
    return found, sum(counters["graph_break"].values())


COMPILED = {
    "plain": (1, ()),
    "documents": (1, ("--data.document_mask", "true")),
    "TP 2": (2, ("--mesh.tp", "2", *AT_ONCE)),
    "CP 2 x FSDP 2, documents": (4, ("--mesh.cp", "2", "--data.document_mask", "true", *AT_ONCE)),
    "PP 2, experts": (2, ("--mesh.pp", "2", *MIXTURE, *AT_ONCE)),
}


@pytest.mark.parametrize(
    "name", marked(COMPILED, slow=["plain", "documents", "PP 2, experts"], long=["TP 2", "CP 2 x FSDP 2, documents"])
)
def test_samples_run_the_graphs_of_the_validation(ranks, folder, name):
    """Dynamo decides what to compile, so its graphs are run without a compiler."""
    n_ranks, words = COMPILED[name]
    for found, breaks in ranks(n_ranks, graphs, folder, words, "eager"):
        assert found == found[:1] * 5, found
        assert found[0] > 0
        assert breaks == 0


# ------------------------------------------------------------------ from a checkpoint


def save(folder, run, words, n_steps=3):
    """Train in float32 on this mesh, and save as a run does."""
    float32 = [word for key in ("dtype", "compute_dtype", "reduce_dtype") for word in (f"--training.{key}", "float32")]
    job = job_of(folder, (*float32, *words))
    learner, validation = learn(job, n_steps)
    validation.close()
    resolved = job.config.model_dump(mode="json")
    of_run = Description(resolved, learner.mesh.sizes.axes, load_tokenizer(folder / "tokenizer.model").hash)
    manager = CheckpointManager(run / "checkpoints", job.config.checkpoint, of_run, Log())
    assert manager.resume(learner.state()) is None
    manager.begin_lineage()
    manager.save(n_steps, learner.state(), {"tokens": 0})
    manager.close()


def greedy(run, n):
    """The tokens of prompts and texts."""
    trained = load_trained(run)
    prompts = [prompt_tokens(trained.tokenizer, prompt, trained.seq_len) for prompt in PROMPTS]
    tokens, model = [list(prompt) for prompt in prompts], CachedModel(trained.model, trained.device)
    randomness = generators(0, len(prompts))
    for step in generate(model, prompts, n, trained.seq_len, Distribution(0), randomness, trained.tokenizer.eos_id):
        for text, token in zip(tokens, step, strict=True):
            text += [] if token is None else [token]
    return tokens


MODELS = {"Llama": (), "tied": ("--model.tie_embeddings", "true"), "Mixtral": MIXTURE}
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
