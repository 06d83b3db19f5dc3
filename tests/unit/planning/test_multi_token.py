"""What plans say of modules that predict further tokens: FLOPs, stages, and what each pipeline rank holds."""

import torch

from configs.layout import attention_features, layer_matrices, mesh_sizes, parameter_count
from configs.load import load
from configs.stages import layers_of_stages
from models import build_model
from parallelisms.pipeline import own_stages
from trainer.planning.flops import flops_per_token
from trainer.planning.memory import RankMemory
from trainer.planning.skeleton import skeleton

DEPTH = ("--model.multi_token.depth", "2")


def job(*words, ranks=1):
    return load("parity.toml", (*DEPTH, *words), ranks).config


def test_a_module_counts_as_a_layer_what_joins_and_a_head():
    model = job().model
    without = load("parity.toml", (), 1).config.model
    joined = 2 * model.dim**2
    vectors = 5 * model.dim  # the norms: two of what is joined, two of the block, one before the head
    layer = layer_matrices(model, model.n_layers)
    assert parameter_count(model) - parameter_count(without) == 2 * (layer + joined + vectors)
    head = model.vocab_size * model.dim
    scores = 3 * attention_features(model) * 32
    found = flops_per_token(model, 32).causal - flops_per_token(without, 32).causal
    assert found == 2 * (6 * (layer + joined + head) + scores)


def test_the_last_stage_gets_fewer_layers():
    assert list(map(len, layers_of_stages(job("--mesh.pp", "2", ranks=2)))) == [3, 1]


def test_each_rank_of_a_pipeline_holds_what_its_plan_says():
    config = job("--mesh.pp", "2", "--training.micro_batch_size", "2", ranks=2)
    for rank in (0, 1):
        with torch.device("meta"):
            stages = own_stages(build_model(config.model), config, rank)
        held = {name for stage in stages.values() for name, _ in stage.named_parameters()}
        memory = RankMemory(config, mesh_sizes(config, 2), "cpu", rank)
        assert memory.shapes.keys() == held
        assert ("embed_tokens.weight" in held, "multi_token.0.eh_proj.weight" in held) == (True, rank == 1)


def test_the_estimate_grows_by_the_modules_activations_and_losses():
    more, less = (
        RankMemory(config, mesh_sizes(config, 1), "cuda", 0) for config in (job(), load("parity.toml", (), 1).config)
    )
    moments = [next(moment for moment in memory.moments() if moment.name == "the loss") for memory in (more, less)]
    of_layer = next(reversed(less.blocks.values())).kept * less.config.training.micro_batch_size
    assert moments[0].activations - moments[1].activations >= 2 * of_layer > 0
    assert skeleton(more.config.model).plan.after_blocks[-1] == "lm_head"
