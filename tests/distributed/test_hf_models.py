"""Models of Hugging Face, trained by Keel on meshes, against plain transformers in one process, in float64."""

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from models import build_model
from parallelisms.init import materialize
from parallelisms.mesh import build_mesh
from parallelisms.parallelize import parallelize
from parallelisms.ranks import local_part
from parallelisms.torch_internals import has_zero_bubble
from scripts.parity_compare import STRAIGHT, Detour, compare
from scripts.parity_reference import batches
from scripts.parity_rows import DOCUMENTS as DOCUMENT_KEYS
from scripts.parity_rows import words as words_of
from tests.hf_families import FAMILIES, NEEDS_TRANSFORMERS, trained_by_transformers, words, write_config
from tests.marked import marked
from trainer.step import build_learner

pytestmark = NEEDS_TRANSFORMERS
BOUND = 1e-10
OWN_CASTS = {"gemma3_text": 2e-6, "deepseek_v3": 2e-6}
"""Families whose own code casts to float32, so that the order of sums shows there."""
WITHOUT_A_PLAN = ("gpt2", "deepseek_v3")
STEPS = ("--training.steps", "3", "--training.micro_batch_size", "2", "--optimizer.weight_decay", "0.0")
FSDP = ("--mesh.dp_shard", "2")
TP = ("--mesh.tp", "2")


def reference(overrides, path):
    torch.save(vars(trained_by_transformers(overrides)), path)


def assert_equal(ranks, n_ranks, folder, mesh, tmp_path, detour=STRAIGHT, bound=BOUND, of_model=(), of_weights=0.0):
    """Train on a mesh, and compare losses, norms, the first gradients and the last weights with transformers'.

    Adam enlarges differences of small gradients: `of_weights` is the weights' bound, if it is another.
    """
    path = str(tmp_path / "reference.pt")
    ranks(1, reference, words(folder, *STEPS, *of_model), path)
    difference, *_ = ranks(n_ranks, compare, "parity.toml", words(folder, *STEPS, *mesh), path, detour)
    assert max(difference.values[:3]) < bound, difference
    assert difference.values[3] < (of_weights or bound), difference


@pytest.mark.parametrize(
    "family",
    marked(list(FAMILIES), slow=["llama", "mixtral", "olmo2", "gpt_neox", "deepseek_v3", "olmoe", "gpt_oss"]),
)
def test_fsdp_is_transformers(ranks, tmp_path, family):
    folder = write_config(tmp_path / family, family)
    assert_equal(ranks, 2, folder, FSDP, tmp_path, bound=OWN_CASTS.get(family, BOUND))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    marked(
        [each for each in FAMILIES if each not in WITHOUT_A_PLAN],
        slow=["llama", "mixtral", "gemma3_text", "gpt_neox", "olmoe", "gpt_oss"],
    ),
)
def test_tensor_parallel_is_transformers(ranks, tmp_path, family):
    folder = write_config(tmp_path / family, family)
    assert_equal(ranks, 2, folder, TP, tmp_path, bound=OWN_CASTS.get(family, BOUND))


EP = (*FSDP, "--mesh.ep", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "start", "end"),
    [
        ("qwen3", FSDP, TP),
        ("qwen3_moe", EP, FSDP),
        ("qwen3_moe", FSDP, EP),
        ("qwen3_moe", TP, FSDP),
        ("qwen3_moe", FSDP, TP),
    ],
    ids=["FSDP to TP", "EP to FSDP", "FSDP to EP", "experts of TP to FSDP", "experts of FSDP to TP"],
)
def test_a_resume_moves_to_another_mesh(ranks, tmp_path, family, start, end):
    folder = write_config(tmp_path / family, family)
    (tmp_path / "state").mkdir()
    detour = Detour(move_at=2, overrides=words(folder, *STEPS, *end), folder=str(tmp_path / "state"))
    assert_equal(ranks, 2, folder, start, tmp_path, detour)


PP = ("--mesh.pp", "2", "--training.micro_batch_size", "1")
STAGES = {
    "llama": (),
    "qwen3": ("--model.hf_overrides.tie_word_embeddings", "false"),
    "gpt2": ("--model.hf_overrides.tie_word_embeddings", "false"),
    "gemma3_text": ("--model.hf_overrides.tie_word_embeddings", "false"),
    "granite": (
        "--model.hf_overrides.embedding_multiplier",
        "6.0",
        "--model.hf_overrides.tie_word_embeddings",
        "false",
    ),
    "mixtral": (),
    "deepseek_v3": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(STAGES, slow=["llama", "mixtral", "deepseek_v3", "granite"]))
def test_pipeline_is_transformers(ranks, tmp_path, family):
    """Gemma's and GPT-2's embeddings are scaled or added to before the layers, which only the first stage may do."""
    folder = write_config(tmp_path / family, family)
    bound = OWN_CASTS.get(family, BOUND)
    assert_equal(ranks, 2, folder, (*STAGES[family], *PP), tmp_path, bound=bound, of_model=STAGES[family])


SCHEDULES = {
    "gpipe": (*PP, "--pipeline.schedule", "gpipe"),
    "interleaved": (*PP, "--pipeline.schedule", "interleaved_1f1b"),
    "zero-bubble": (*PP, "--pipeline.schedule", "zero_bubble_v"),
    "1f1b x FSDP 2": (*PP, *FSDP),
    "1f1b x TP 2": (*PP, *TP),
    "1f1b, full recomputation": (*PP, "--activation_checkpoint.mode", "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", marked(SCHEDULES, slow=[name for name in SCHEDULES if name != "1f1b x TP 2"]))
def test_every_schedule_is_transformers(ranks, tmp_path, schedule):
    if schedule == "zero-bubble" and not has_zero_bubble():
        pytest.skip("this torch has no zero-bubble schedule")
    folder = write_config(tmp_path / "qwen3", "qwen3", tie_word_embeddings=False, num_hidden_layers=4)
    assert_equal(ranks, 4 if " x " in schedule else 2, folder, SCHEDULES[schedule], tmp_path)


WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "olmoe", "gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(WITH_EXPERTS, slow=["mixtral", "deepseek_v3", "olmoe"]))
def test_expert_parallel_is_transformers(ranks, tmp_path, family):
    """DeepSeek's mixtures have shared experts; those of GPT-OSS have biases, and gate and up features in turns."""
    folder = write_config(tmp_path / family, family)
    assert_equal(ranks, 2, folder, EP, tmp_path, bound=OWN_CASTS.get(family, BOUND))


ON_EXPERTS = {
    "x FSDP 2": ("--mesh.dp_shard", "4", "--mesh.ep", "2"),
    "x TP 2": (*EP, *TP),
    "x HSDP 2x2": ("--mesh.dp_replicate", "2", *EP),
    "x PP 2": (*EP, "--mesh.pp", "2"),
    "x ZeRO 1": (*EP, "--fsdp.zero_stage", "1"),
    "full recomputation": (*EP, "--activation_checkpoint.mode", "full"),
    "selective recomputation": (*EP, "--activation_checkpoint.mode", "selective"),
    "compiled": (*EP, "--compile.enable", "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    # Compiled, the loads below and rows of test_parity.py find the same.
    marked(ON_EXPERTS, slow=[name for name in ON_EXPERTS if name not in ("x TP 2", "compiled")], long=["compiled"]),
)
@pytest.mark.parametrize("family", marked(["mixtral", "gpt_oss"], long=["mixtral"]))
def test_every_technique_on_distributed_experts_is_transformers(ranks, tmp_path, family, technique):
    folder = write_config(tmp_path / family, family)
    bound = 2e-5 if technique == "compiled" else BOUND
    mesh = (*ON_EXPERTS[technique], "--training.micro_batch_size", "1")
    assert_equal(ranks, 4 if technique.endswith(" 2") or "2x2" in technique else 2, folder, mesh, tmp_path, bound=bound)


def held(overrides, name):
    """The shape of this rank's part of a parameter."""
    config = load("parity.toml", overrides, world_size=torch.distributed.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, torch.distributed.get_world_size()), torch.device("cpu"))
    with torch.device("meta"):
        model = build_model(config.model)
    (stage,) = parallelize(model, mesh, config).values()
    return local_part(stage.get_parameter(name)).shape


SPLIT = {
    "TP 4": ("--mesh.tp", "4"),
    "FSDP 2 x TP 2": (*FSDP, *TP),
    "HSDP 2 x TP 2": ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "1", *TP),
    "PP 2 x TP 2": ("--mesh.pp", "2", *TP, "--training.micro_batch_size", "1"),
    "ZeRO 1 x TP 2": (*FSDP, *TP, "--fsdp.zero_stage", "1"),
    "full recomputation": (*TP, "--activation_checkpoint.mode", "full"),
    "selective recomputation": (*TP, "--activation_checkpoint.mode", "selective"),
    "compiled": (*TP, "--compile.enable", "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "technique",
    marked(SPLIT, slow=[name for name in SPLIT if name not in ("FSDP 2 x TP 2", "compiled")], long=["compiled"]),
)
@pytest.mark.parametrize("family", marked(["mixtral", "gpt_oss"], slow=["gpt_oss"]))
def test_every_technique_on_split_experts_is_transformers(ranks, tmp_path, family, technique):
    """Mixtral has gate after gate, then up; GPT-OSS both in turns, transposed matrices and biases."""
    heads = {"num_key_value_heads": 4} if technique == "TP 4" else {}
    folder = write_config(tmp_path / family, family, **heads)
    bound = 2e-5 if technique == "compiled" else BOUND
    n_ranks = 4 if " x " in technique or technique == "TP 4" else 2
    assert_equal(ranks, n_ranks, folder, SPLIT[technique], tmp_path, bound=bound)


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        ("mixtral", {"gate_up_proj": (4, 96, 64), "down_proj": (4, 64, 48)}),
        ("gpt_oss", {"gate_up_proj": (4, 64, 96), "down_proj": (4, 48, 64), "gate_up_proj_bias": (4, 96)}),
    ],
)
def test_a_rank_holds_its_part_of_every_expert(ranks, tmp_path, family, shapes):
    folder = write_config(tmp_path / family, family)
    for name, shape in shapes.items():
        assert ranks(2, held, words(folder, *TP), f"model.layers.0.mlp.experts.{name}") == [shape] * 2


def measured(overrides):
    """The balance of a step's experts."""
    config = load("parity.toml", overrides, world_size=torch.distributed.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, torch.distributed.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    micro_batches = next(iter(batches(config, mesh.dp_rank, mesh.sizes.dp)))
    learner.step(micro_batches, 1e-3).result()
    return learner.load_balance.measure()


def counted(overrides):
    """The same by plain transformers: what its experts are given, one number after the other."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = load("parity.toml", overrides, world_size=1).config
    with torch.device("meta"):
        ours = build_model(config.model).double()
    materialize(ours, torch.device("cpu"), config.training.seed)
    fields = dict(config.model.fields)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float64
    )
    model.load_state_dict(dict(ours.named_parameters()), strict=False)
    model.tie_weights()
    loads = {}
    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "experts"):
            load_of_layer = loads.setdefault(layer, [0] * 4)

            def note(_module, inputs, load_of_layer=load_of_layer):
                for number in inputs[1].flatten().tolist():
                    load_of_layer[number] += 1

            block.mlp.experts.register_forward_pre_hook(note)
    for batch in next(iter(batches(config, 0, 1))):
        model(input_ids=batch.tokens, use_cache=False)
    return loads


LOADS = {
    "one process": (),
    "FSDP 2, full recomputation": (*FSDP, "--activation_checkpoint.mode", "full"),
    "TP 2": TP,
    "EP 2": EP,
    "CP 2": ("--mesh.cp", "2"),
    "PP 2": ("--mesh.pp", "2", "--training.micro_batch_size", "1"),
    "PP 2 zero-bubble": (*("--mesh.pp", "2", "--training.micro_batch_size", "1"), *SCHEDULES["zero-bubble"][-2:]),
    "compiled": ("--compile.enable", "true"),
    "compiled, full recomputation": ("--compile.enable", "true", "--activation_checkpoint.mode", "full"),
}


@pytest.mark.parametrize(
    "mesh",
    marked(
        LOADS,
        slow=["one process", "TP 2", "EP 2", "CP 2", "PP 2", "PP 2 zero-bubble", "compiled"],
        long=["compiled, full recomputation"],
    ),
)
@pytest.mark.parametrize("family", marked(["qwen3_moe", "deepseek_v3"], long=["deepseek_v3"]))
def test_loads_of_experts_are_what_transformers_experts_are_given(ranks, tmp_path, family, mesh):
    """DeepSeek's first layer has no experts."""
    if mesh == "PP 2 zero-bubble" and not has_zero_bubble():
        pytest.skip("this torch has no zero-bubble schedule")
    layers = {"num_hidden_layers": 4} if mesh == "PP 2 zero-bubble" else {}
    folder = write_config(tmp_path / family, family, **layers)
    (expected,) = ranks(1, counted, words(folder, *STEPS))
    n_ranks = 2 if "2" in mesh else 1
    for balance in ranks(n_ranks, measured, words(folder, *STEPS, *LOADS[mesh])):
        assert balance.tokens_per_expert == expected
        assert balance.load_imbalance == max(max(load) * 4 / sum(load) for load in expected.values())
        assert balance.router_entropy is None
        assert balance.router_entropies is None


DOCUMENTS = words_of(DOCUMENT_KEYS)
CP = ("--mesh.cp", "2", "--context.method")
PACKED = {
    "documents": (),
    "FSDP 2": FSDP,
    "TP 2": TP,
    "CP 2 gather": (*CP, "gather"),
    "CP 2 ring": (*CP, "ring"),
    "CP 2 all_to_all": (*CP, "all_to_all"),
    "CP 2 gather x TP 2": (*CP, "gather", *TP),
    "CP 2 ring x FSDP 2": (*CP, "ring", *FSDP),
    "CP 2 gather, full recomputation": (*CP, "gather", "--activation_checkpoint.mode", "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", marked(PACKED, slow=[name for name in PACKED if name != "CP 2 gather x TP 2"]))
def test_packed_documents_are_transformers_of_each_document(ranks, tmp_path, mesh):
    folder = write_config(tmp_path / "qwen3", "qwen3")
    n_ranks = 1 if mesh == "documents" else 4 if " x " in mesh else 2
    assert_equal(ranks, n_ranks, folder, (*DOCUMENTS, *PACKED[mesh]), tmp_path, of_model=DOCUMENTS)


OF_FAMILIES = {
    "gemma3_text": FSDP,  # one of its layers has a window
    "llama": (*CP, "ring"),
    "mixtral": (*CP, "gather"),
    "deepseek_v3": (*CP, "all_to_all"),  # values narrower than keys
    "granite": (*CP, "gather"),  # a scale of its own
}


@pytest.mark.slow
@pytest.mark.parametrize("family", marked(OF_FAMILIES, slow=["llama", "mixtral", "deepseek_v3", "granite"]))
def test_packed_documents_of_families(ranks, tmp_path, family):
    folder = write_config(tmp_path / family, family, **{"sliding_window": 3} if family == "gemma3_text" else {})
    bound = OWN_CASTS.get(family, BOUND)
    keys = (*DOCUMENTS, *OF_FAMILIES[family])
    assert_equal(ranks, 2, folder, keys, tmp_path, bound=bound, of_model=DOCUMENTS)


@pytest.mark.parametrize("method", marked(["gather", "ring", "all_to_all"], slow=["gather", "all_to_all"]))
def test_parts_of_sequences_are_transformers(ranks, tmp_path, method):
    folder = write_config(tmp_path / "llama", "llama")
    assert_equal(ranks, 2, folder, (*CP, method), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("split", [(), (*CP, "gather"), (*CP, "all_to_all")])
def test_documents_in_a_pipeline_are_transformers(ranks, tmp_path, split):
    folder = write_config(tmp_path / "llama", "llama")
    assert_equal(ranks, 4 if split else 2, folder, (*DOCUMENTS, *PP, *split), tmp_path, of_model=DOCUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("run", [(), DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("method", ["ring", "all_to_all"])
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_and_sinks_in_parts_are_transformers(ranks, tmp_path, family, method, run):
    folder = write_config(tmp_path / family, family, sliding_window=5)
    bounds = {} if family == "gpt_oss" else OF_CASTS
    assert_equal(ranks, 2, folder, (*run, *CP, method), tmp_path, of_model=run, **bounds)


GATHER = (*CP, "gather")
SEEN = {
    "gemma3_text": {"sliding_window": 5},
    "gpt_oss": {"sliding_window": 5},  # sinks
    "gemma2": {
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4_text": {
        **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
        **{
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
        },
    },
    "llama": {"attn_implementation": "eager"},
}
"""Layers that do not compute plain causal attention by torch's function, or none that do."""
OF_CASTS = {"bound": 2e-6, "of_weights": 5e-5}
"""Of families whose softmax, norms or rotations are in float32."""


@pytest.mark.slow
@pytest.mark.parametrize("run", marked([(), DOCUMENTS], slow=[()]), ids=["whole", "documents"])
@pytest.mark.parametrize("family", marked(SEEN, slow=[name for name in SEEN if name != "gpt_oss"]))
def test_every_mask_is_transformers_of_whole_sequences(ranks, tmp_path, family, run):
    folder = write_config(tmp_path / family, family, **SEEN[family])
    bounds = {} if family == "gpt_oss" else OF_CASTS | ({"bound": 1e-8} if family == "llama4_text" else {})
    assert_equal(ranks, 2, folder, (*run, *GATHER), tmp_path, of_model=run, **bounds)


ON_PARTS = {
    "CP 4": ("--mesh.cp", "4", "--context.method", "gather"),
    "x FSDP 2": (*GATHER, *FSDP),
    "x TP 2": (*GATHER, *TP),
    "x PP 2": (*GATHER, *PP),
    "full recomputation": (*GATHER, "--activation_checkpoint.mode", "full"),
    "selective recomputation": (*GATHER, "--activation_checkpoint.mode", "selective"),
    "compiled": (*GATHER, "--compile.enable", "true"),
    "ring x FSDP 2": (*CP, "ring", *FSDP),
    "ring x TP 2": (*CP, "ring", *TP),
    "ring, selective recomputation": (*CP, "ring", "--activation_checkpoint.mode", "selective"),
    "ring, compiled": (*CP, "ring", "--compile.enable", "true"),
}
_LONG = [name for name in ON_PARTS if name.endswith("compiled")]


@pytest.mark.parametrize(
    "technique", marked(ON_PARTS, slow=[name for name in ON_PARTS if name not in _LONG], long=_LONG)
)
def test_every_technique_on_sinks_and_windows_in_parts_is_transformers(ranks, tmp_path, technique):
    folder = write_config(tmp_path / "gpt_oss", "gpt_oss", sliding_window=5)
    bound = 2e-5 if technique in _LONG else BOUND
    n_ranks = 4 if technique.endswith((" 4", "x FSDP 2", "x TP 2", "x PP 2")) else 2
    assert_equal(ranks, n_ranks, folder, (*DOCUMENTS, *ON_PARTS[technique]), tmp_path, bound=bound, of_model=DOCUMENTS)


MESHES = {
    "DDP 2": ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "1"),
    "HSDP 2x2": ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2", "--training.micro_batch_size", "1"),
    "ZeRO 1": (*FSDP, "--fsdp.zero_stage", "1"),
    "ZeRO 2": (*FSDP, "--fsdp.zero_stage", "2"),
    "FSDP 2 x TP 2": (*FSDP, *TP),
    "full recomputation": (*FSDP, "--activation_checkpoint.mode", "full"),
    "selective recomputation": (*TP, "--activation_checkpoint.mode", "selective"),
    "owner partition": ("--fsdp.partition", "owner", "--mesh.dp_replicate", "2", "--mesh.dp_shard", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", marked(MESHES, slow=["DDP 2", "HSDP 2x2", "ZeRO 1", "ZeRO 2", "owner partition"]))
def test_every_technique_is_transformers(ranks, tmp_path, mesh):
    folder = write_config(tmp_path / "qwen3", "qwen3", tie_word_embeddings=False)
    n_ranks = 4 if mesh in ("HSDP 2x2", "FSDP 2 x TP 2") else 2
    assert_equal(ranks, n_ranks, folder, MESHES[mesh], tmp_path)


COMPILED = {
    "FSDP 2": FSDP,
    "TP 2": TP,
    "PP 2": PP,
    "FSDP 2, documents": (*FSDP, *DOCUMENTS),
    "CP 2, documents": (*DOCUMENTS, *CP, "gather"),
    "FSDP 2, selective recomputation": (*FSDP, "--activation_checkpoint.mode", "selective"),
    "TP 2, full recomputation": (*TP, "--activation_checkpoint.mode", "full"),
}


@pytest.mark.parametrize(
    "technique",
    marked(
        COMPILED,
        slow=["PP 2", "CP 2, documents", "FSDP 2, selective recomputation"],
        long=["FSDP 2", "TP 2", "FSDP 2, documents", "TP 2, full recomputation"],
    ),
)
def test_compiled_layers_are_transformers(ranks, tmp_path, technique):
    """The norms of Qwen3 compute in float32, which the compiler rounds in another order."""
    folder = write_config(tmp_path / "qwen3", "qwen3", tie_word_embeddings=False)
    run = DOCUMENTS if "documents" in technique else ()
    words = (*COMPILED[technique], "--compile.enable", "true")
    assert_equal(ranks, 2, folder, words, tmp_path, bound=2e-5, of_model=run, of_weights=2e-4)
