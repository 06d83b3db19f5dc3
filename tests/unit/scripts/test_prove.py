"""`keel prove`: the small job, the rows that cover the pairs, the comparison, the page."""

import json
import math
import re
from dataclasses import replace
from itertools import combinations
from math import gcd
from unittest import mock

import pytest
import torch

from configs.architectures import all_weights, family_of
from configs.errors import ConfigError
from configs.load import load
from configs.reading.merge import JOB_FILES
from models.hf import names
from scripts import prove
from scripts.proving.activations import first_block_apart
from scripts.proving.equal import Report, differences, worst
from scripts.proving.families import FamilyProof, families_page, prove_family
from scripts.proving.page import page, pair_verdicts
from scripts.proving.run import FLOAT32, Outcome, Prover
from scripts.proving.small import SmallJob, small_job
from scripts.proving.techniques import AXES, TECHNIQUES, Search, chosen, ranks_of, row_of

JOBS = sorted(file.name for file in JOB_FILES.glob("*.toml"))
SIZES = ("dim", "ffn_dim", "vocab_size", "n_experts", "expert_dim", "n_kv_heads")


def small(name, tmp_path, *overrides):
    config = load(name, overrides).config
    job = small_job(config, ranks=8)
    file = tmp_path / "small.toml"
    file.write_text(job.text)
    return config, job, load(str(file))


@pytest.mark.parametrize("name", JOBS)
def test_a_small_job_has_the_structure_and_divisors_of_the_job(name, tmp_path):
    config, _, loaded = small(name, tmp_path)
    assert loaded.warnings == ()
    model = loaded.config.model
    for size in SIZES:
        whole = getattr(config.model, size)
        assert (whole is None) or gcd(whole, 8) == gcd(getattr(model, size), 8), size
    assert (config.model.n_heads == (config.model.n_kv_heads or config.model.n_heads)) == (
        model.n_heads == model.n_kv_heads
    )
    assert kinds(config.model) == kinds(model)
    assert sum(weight.size for weight in all_weights(model)) < 200_000
    assert loaded.config.training.compute_dtype == "float64"
    for key in ("norm_eps", "rope_theta", "rope_scaling", "qk_norm", "tie_embeddings", "router"):
        assert getattr(config.model, key) == getattr(model, key)


def kinds(model):
    """The kinds of weights that a model has, without their layers."""
    return {".".join(part for part in weight.name.split(".") if not part.isdigit()) for weight in all_weights(model)}


def test_what_is_left_out_is_told(tmp_path):
    groups = '[{pattern = "layers.0.*", lr_scale = 0.5}, {pattern = "layers.31.*", freeze = true}]'
    _, job, loaded = small("llama_7b.toml", tmp_path, "--optimizer.groups", groups, "--float8.recipe", "rowwise")
    assert [note.split()[0] for note in job.notes] == ["computed", "float8", "1"]
    assert [group.pattern for group in loaded.config.optimizer.groups] == ["layers.0.*"]


@pytest.mark.parametrize(
    ("keys", "expected", "notes"),
    [
        ({"last": 5, "start_step": 100}, {"last": 2, "start_step": 1}, []),
        ({"decay": 0.9, "dtype": "bfloat16"}, {"decay": 0.9, "start_step": 0}, ["average.dtype"]),
    ],
)
def test_an_average_is_kept_and_covers_several_steps(tmp_path, keys, expected, notes):
    words = [word for key, value in {"interval": 10, **keys}.items() for word in (f"--average.{key}", str(value))]
    _, job, loaded = small("parity.toml", tmp_path, *words)
    assert loaded.config.average.model_dump(exclude_unset=True) == {"interval": 1, **expected}
    assert [note.split()[0] for note in job.notes if not note.startswith("computed")] == notes


@pytest.mark.parametrize("every_pair", [False, True])
def test_rows_cover_the_pairs(every_pair):
    techniques = chosen(AXES, has_documents=False)

    def refusal(row):
        return "no" if {"PP 2 zero-bubble", "compile"} <= {each.name for each in row} else ""

    search = Search(techniques, 4, refusal, every_pair)
    pairs = search.pairs()
    rows = list(search.rows(pairs.possible))
    covered = {pair for row in rows for pair in combinations(row, 2)}
    assert covered <= pairs.possible
    if every_pair:
        assert covered == pairs.possible
    kinds_met = {(one.name, other.axis) for pair in covered for one, other in (pair, pair[::-1])}
    for one, other in pairs.possible:
        same_kind = {name for name, axis in kinds_met if name == one.name and axis == other.axis}
        is_data = other.axis in ("ddp", "fsdp", "hsdp", "zero", "owner")
        assert same_kind or is_data or "compile" in (one.axis, other.axis), (one.name, other.name)
    assert all(ranks_of(row) <= 4 for row in rows)
    assert len(rows) < len(pairs.possible) / 2
    assert [name for pair in pairs.refused for name in sorted(each.name for each in pair)] == [
        "PP 2 zero-bubble",
        "compile",
    ]
    assert all(needed == 8 for needed in pairs.too_large.values())


def test_a_row_of_techniques_is_one_mesh():
    by_name = {each.name: each for each in TECHNIQUES}
    row = row_of((by_name["FSDP 2"], by_name["EP 2"], by_name["accumulation"]), batch=16)
    keys = dict(zip(row.overrides[::2], row.overrides[1::2], strict=True))
    assert (row.ranks, keys["--mesh.dp_shard"], keys["--mesh.ep"]) == (4, "4", "2")
    assert keys["--training.micro_batch_size"] == "2"  # 16 / (4 ranks x 2)
    row = row_of((by_name["owner 2"], by_name["EP 2"]), batch=16)
    keys = dict(zip(row.overrides[::2], row.overrides[1::2], strict=True))
    assert (row.ranks, keys["--mesh.dp_replicate"], keys["--mesh.dp_shard"], keys["--mesh.ep"]) == (4, "4", "1", "2")


def test_differences_are_relative_and_a_nan_is_one():
    expected = {
        "a": torch.tensor([1.0, 2.0]).double(),
        "b": torch.tensor([1e-20]).double(),
        "c": torch.ones(2).double(),
    }
    found = {"a": torch.tensor([1.0, 2.2]).double(), "b": torch.tensor([2e-20]).double(), "c": torch.ones(3).double()}
    result = differences(found, expected, floor=1e-5)
    assert result["a"] == pytest.approx(0.1)
    assert result["b"] < 1e-14  # zero but for round-off
    assert result["c"] == math.inf
    nan = differences({"a": torch.tensor([1.0, math.nan]).double()}, expected, 1e-5, names=["a"])
    assert worst(nan.values()) == math.inf
    buffer = {"bias": torch.tensor([0.02])}
    assert differences({"bias": torch.tensor([0.02 * (1 + 1e-7)])}, buffer, 1e-2) == {"bias": 0.0}
    assert differences({"bias": torch.tensor([0.021])}, buffer, 1e-2)["bias"] == pytest.approx(0.05, rel=1e-3)
    rotations = {"freqs_cis": torch.tensor([1.0 + 0.0j, 0.6 + 0.8j])}
    assert differences({"freqs_cis": torch.tensor([1.0 + 0.0j, 0.6 - 0.8j])}, rotations, 1e-2)["freqs_cis"] > 1.5


def test_a_report_says_what_is_wrong_first():
    right = Report(1e-10, {"w": 0.0}, 1e-16, 1e-16, {"a": 1e-15, "b": 1e-16})
    assert right.is_equal
    assert str(right) == "equal: loss, norm and 2 gradients, to 1.0e-15"
    wrong = Report(1e-10, {"w": 0.0}, 1e-16, 0.5, {"a": 1.0, "b": 2.0, "c": 0.0})
    assert wrong.wrong == ["b", "a"]
    assert "2 of 3 gradients, the first that backward reaches: b: 2.0e+00" in str(wrong)
    assert not Report(1e-10, {}, math.nan, 0.0, {}).is_equal


def test_the_block_where_activations_part():
    expected = {"layers.0": [0.5, 1.0], "layers.1": [1.0, 2.0]}
    twice = {"layers.0": [0.5, 0.5, 1.0, 1.0], "layers.1": [1.0, 1.0, 2.0, 2.1]}
    assert first_block_apart(expected, expected, 1e-10) == ""
    assert first_block_apart({**expected, "layers.1": [1.0, 2.1]}, expected, 1e-10) == "layers.1"
    assert first_block_apart({"layers.0": twice["layers.0"], "layers.1": [1.0, 1.0, 2.0, 2.0]}, expected, 1e-10) == ""
    assert first_block_apart({"layers.0": [0.5], "layers.1": [1.0]}, expected, 1e-10) == "layers.0"
    assert first_block_apart({**expected, "layers.1": [1.0, math.nan]}, expected, 1e-10) == "layers.1"


def test_the_page_shows_pairs_and_escapes():
    figures = {"loss": 1e-16, "norm": 1e-16, "gradients": 1e-16, "weights": 1e-16}
    found = [
        Outcome("FSDP 2 x TP 2 x <b>", ("FSDP 2", "TP 2", "<b>"), 4, "equal", figures=figures),
        Outcome("TP 2", ("TP 2",), 2, "wrong", "gradient of <script>", figures, ("w",)),
    ]
    verdicts = pair_verdicts(found)
    assert verdicts[frozenset(("FSDP 2", "TP 2"))] == "equal"
    assert verdicts[frozenset(("TP 2",))] == "wrong"
    text = page("job.toml", SmallJob("[model]\n", ("a note",)), found, ["FSDP 2", "TP 2", "<b>"], 3.0)
    assert "<script>" not in text
    assert "<b>" not in text.replace("&lt;b&gt;", "")
    assert "http" not in text.replace("http-equiv", "")


def test_an_axis_that_does_not_exist_is_a_config_error(capsys):
    assert prove.main(["debug.toml", "--axes", "fsdp,tpp"]) == 78
    assert "--axes: there is no axis 'tpp'; did you mean tp?" in capsys.readouterr().err


def test_a_folder_that_does_not_exist_is_told_before_the_work(tmp_path, capsys):
    assert prove.main(["debug.toml", "--json", str(tmp_path / "none/a.json")]) == 78
    assert f"there is no folder {tmp_path}/none; create it" in capsys.readouterr().err


def test_what_a_stopped_proof_of_families_has_written_is_told(tmp_path, capsys, monkeypatch):
    def proofs(*_):
        yield FamilyProof("olmo", "", [])
        raise KeyboardInterrupt

    monkeypatch.setattr(prove, "_prove_families", proofs)
    file = tmp_path / "a.json"
    assert prove.main(["olm[o]", "--json", str(file)]) == 130
    assert f"stopped; {file} has the families proven so far, and the same command goes on" in capsys.readouterr().err
    assert prove.main(["olm[o]"]) == 130
    assert "stopped; nothing was written" in capsys.readouterr().err


def hf_job(tmp_path, **fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "vocab_size": 262144,
    "sliding_window": 512,
    "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * 3,
    "eos_token_id": 106,
    "pad_token_id": 0,
}


def test_a_small_hugging_face_model_has_every_kind_of_layer(tmp_path):
    small = json.loads(family_small(GEMMA, tmp_path))
    kinds = small["layer_types"]
    assert kinds.count("full_attention") == 1
    assert len(kinds) == small["num_hidden_layers"] == 4
    assert (small["num_attention_heads"], small["num_key_value_heads"], small["head_dim"]) == (3, 1, 16)
    assert (small["sliding_window"], small["hidden_size"]) == (8, 48)
    assert gcd(small["vocab_size"], 8) == gcd(GEMMA["vocab_size"], 8)
    assert small["eos_token_id"] < small["vocab_size"] < 300
    assert small["model_type"] == "gemma3_text"


def test_small_experts_are_more_than_a_token_goes_to(tmp_path):
    fields = {**GEMMA, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128}
    small = json.loads(family_small({**fields, "moe_intermediate_size": 768, "num_key_value_heads": 4}, tmp_path))
    assert (small["num_experts"], small["num_experts_per_tok"], small["moe_intermediate_size"]) == (8, 2, 32)
    assert small["num_attention_heads"] == small["num_key_value_heads"] == 4
    assert json.loads(family_small({**fields, "num_experts": 6}, tmp_path))["num_experts"] == 6


def family_small(fields, tmp_path):
    config = prove.job_of_model(str(hf_job(tmp_path, **fields))).model
    return family_of(config).small(config, 8)["hf_config"]


def test_a_model_may_be_a_folder_a_file_or_a_family(tmp_path):
    hf_job(tmp_path, **GEMMA)
    by_folder = prove.job_of_model(str(tmp_path))
    assert by_folder == prove.job_of_model(str(tmp_path / "config.json"))
    assert by_folder.model.n_layers == 18
    family = prove.job_of_model("gpt2", ["--model.hf_overrides.n_layer", "6"]).model
    assert (family.model_type, family.n_layers, family.fields["attn_pdrop"]) == ("gpt2", 6, 0.0)
    with pytest.raises(ConfigError, match=r"job qwen33: no job file[^\n]*\nFamilies [a-z ]* similar name: qwen3, "):
        prove.job_of_model("qwen33")
    with pytest.raises(ConfigError, match=r"^job xyz: no job file[^\n]*$"):
        prove.job_of_model("xyz")


@pytest.mark.slow
def test_a_family_of_transformers_is_proven(capsys):
    assert prove.main(["qwen3", "--axes", "fsdp,tp", "--ranks", "2"]) == 0
    assert "3 equal, 1 not tried, to 1e-10" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_family_computes_in_float32_is_no_fault_and_is_said(capsys):
    assert prove.main(["gemma3_text", "--axes", "tp", "--ranks", "2"]) == 0
    told = capsys.readouterr().out
    assert "to the round-off of float32, in which the model itself computes model.layers.0." in told


@pytest.mark.long
def test_a_model_that_amplifies_round_off_has_wider_bounds(capsys):
    """CPM-Ant's gradients move by 1e-4 if its weights change by 1e-7: plain transformers, compiled, shows the same."""
    assert prove.main(["cpmant", "--axes", "compile", "--ranks", "1"]) == 0
    told = capsys.readouterr().out
    assert "to the round-off of float32, in which the model itself computes cpmant.encoder.layers.0" in told
    assert re.search(r"and which moves its gradients by [1-9]e-0[345]$", told, re.MULTILINE)


@pytest.mark.parametrize(
    ("effects", "bounds"),
    [
        ((1e-12, 1e-12, 1e-12, 1e-12), (1e-6, 1e-5, 1e-5, 1e-3)),
        ((1e-6, 1e-5, 1e-4, 1e-3), (1e-5, 1e-4, 1e-3, 1e-2)),
        ((0.5, 0.5, 0.5, 0.5), (1e-2, 5e-1, 1e-2, 1e-1)),
    ],
)
def test_the_bounds_of_a_model_that_computes_in_float32(tmp_path, effects, bounds):
    """Ten times the effect of round-off, at least what all such models have, and never so wide that a fault hides."""
    pool = mock.Mock(run=lambda *_: [effects])
    prover = Prover(pool, "parity.toml", tmp_path)
    assert prover._wider_bounds(()) == pytest.approx(bounds)


@pytest.mark.slow
def test_a_style_that_is_left_out_is_named_though_the_loss_is_right(capsys):
    # As happened where transformers' plans were applied by hand: each rank had its heads' part of the norms' gradients.
    assert prove.main(["qwen3", "--axes", "tp", "--ranks", "2"], on_ranks=without_sums) == 1
    told = capsys.readouterr().out
    assert "self_attn.k_norm.weight" in told
    assert "the first loss is right" in told


def without_sums(function, *arguments):
    with mock.patch.dict(names._ROLES, replicated_with_grad_allreduce=None):
        return function(*arguments)


@pytest.mark.slow
def test_a_proof_of_one_axis(tmp_path, capsys):
    words = ["debug.toml", "--axes", "fsdp,accumulation", "--ranks", "2"]
    assert prove.main([*words, "--json", str(tmp_path / "a.json"), "--page", str(tmp_path / "a.html")]) == 0
    assert "4 equal, to 1e-10" in capsys.readouterr().out
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["1 process", "FSDP 2", "accumulation", "FSDP 2 x accumulation"]
    assert all(max(row["figures"].values()) < 1e-12 for row in rows)
    assert "FSDP 2" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_a_pattern_of_families_makes_one_page(tmp_path):
    json_file = tmp_path / "families.json"
    page_file = tmp_path / "families.md"
    words = ["--axes", "fsdp,tp,CP 2 ring,ep", "--ranks", "2", "--json", str(json_file), "--page", str(page_file)]
    assert prove.main(["olmo[2]", *words]) == 0
    (proof,) = json.loads(json_file.read_text())["families"]
    verdicts = {row["name"]: row["verdict"] for row in proof["rows"]}
    equal = dict.fromkeys(("transformers", "1 process", "FSDP 2", "TP 2", "CP 2 ring"), "equal")
    assert verdicts == equal | {"EP 2": "refused"}
    assert "| olmo2 | = | = | = | = | - |" in page_file.read_text()
    assert prove.main(["bert[-]gen*", *words]) == 0
    assert "shares lm_head.bias with lm_head.decoder.bias, which techniques would separate" in page_file.read_text()


@pytest.mark.slow
def test_a_proof_of_families_goes_on_where_it_was_stopped(tmp_path, capsys):
    """What the file has is not tried again; a model with tied matrices is proven on a pipeline with separate ones."""
    file = tmp_path / "families.json"
    words = ["--ranks", "2", "--json", str(file), "--page", str(tmp_path / "families.md")]
    assert prove.main(["gemm[a]", "--axes", "accumulation", *words]) == 0
    found = json.loads(file.read_text())
    found["families"][0]["rows"][-1]["figures"]["loss"] = 0.5
    file.write_text(json.dumps(found))
    assert prove.main(["gemm[a]", "--axes", "accumulation,PP 2 1f1b", *words]) == 0
    rows = json.loads(file.read_text())["families"][0]["rows"]
    assert [row["name"] for row in rows] == ["transformers", "1 process", "accumulation", "PP 2 1f1b"]
    assert rows[2]["figures"]["loss"] == 0.5
    assert "with tie_word_embeddings = false" in rows[3]["reason"]
    page = (tmp_path / "families.md").read_text()
    assert "| family | transformers | PP 2 1f1b | accumulation |" in page
    assert "| gemma | = | ≈ᵗ | ≈ |" in page
    assert prove.main(["gemm[a]", "--axes", "fsdp", *words, "--ranks", "3"]) == 78
    assert "was made with another ranks; move it away, or name another file" in capsys.readouterr().err
    file.write_text("[]")
    assert prove.main(["gemm[a]", "--axes", "fsdp", *words]) == 78


@pytest.mark.slow
def test_a_class_of_torch_optimizers_is_proven(capsys):
    keys = ["--optimizer.name", "torch.optim:RAdam", "--optimizer.options.decoupled_weight_decay", "true"]
    assert prove.main(["parity.toml", "--axes", "fsdp,pp", "--ranks", "2", *keys]) == 0
    said = capsys.readouterr().out
    assert "6 equal, 4 not tried, to 1e-10" in said, said


def test_an_optimizer_that_is_not_elementwise_proves_nothing(capsys):
    keys = ["--optimizer.name", "torch.optim:Adafactor"]
    assert prove.main(["parity.toml", "--axes", "fsdp", "--ranks", "2", *keys]) == 78
    said = capsys.readouterr()
    assert "2 refused, to 1e-10" in said.out
    assert 'nothing was proven: "torch.optim:Adafactor" does not update each element by itself: of a mat' in said.err


def test_reasons_are_joined_by_what_they_say():
    """The name of a family is no part of the reason; float32's round-off is a sign of its own."""
    refused = Outcome("TP 2", ("TP 2",), 2, "refused", "opt has no plan of tensor parallelism; set tp = 1")
    other = replace(refused, reason="bloom has no plan of tensor parallelism; set tp = 1")
    cast = Outcome("FSDP 2", ("FSDP 2",), 2, "equal", f"{FLOAT32}, in which the model itself computes x")
    proofs = [FamilyProof("opt", rows=[cast, refused]), FamilyProof("bloom", rows=[other])]
    unbuilt = [
        FamilyProof("bert", "bert is shared"),
        FamilyProof("dbrx", "transformers cannot build this dbrx"),
        FamilyProof("rwkv", "the rule of rwkv for rwkv.blocks.0"),
    ]
    text = families_page([*proofs, *unbuilt], "keel prove")
    assert "| opt | ≈ | - |" in text
    assert "- the family has no plan of tensor parallelism: TP 2: all" in text
    assert "- the family is shared: bert" in text
    assert "- transformers cannot build the family: dbrx" in text
    assert "- the rule of the family for rwkv.blocks.0: rwkv" in text
    assert not FamilyProof("opt", rows=[cast, refused]).is_wrong
    assert FamilyProof("opt", rows=[replace(cast, verdict="wrong")]).is_wrong


def test_several_reasons_against_a_family_are_told_apart():
    proof = prove_family(None, "blt", lambda name: prove.job_of_model(name, ()), (), 2, None)
    assert "hidden_size, a whole number of 1 or more; set model.hf_overrides.hidden_size; --model.hf: " in proof.refused


FAMILY_JOBS = (
    "llama_1b",
    "qwen2.5_7b",
    "qwen3_0.6b",
    "qwen3_30b_a3b",
    "qwen3_next_80b_a3b",
    "mistral_7b",
    "mixtral_8x7b",
    "olmo2_1b",
    "olmo3_7b",
    "smollm3_3b",
    "gemma3_1b",
    "deepseek_moe_16b",
    "deepseek_v3",
)


@pytest.mark.long
@pytest.mark.parametrize("job", FAMILY_JOBS)
def test_the_job_file_of_each_family_is_proven(job, capsys):
    """One job of each description: techniques alone, and recomputation with each."""
    assert prove.main([f"{job}.toml", "--axes", "fsdp,tp,cp,pp,ep,ac", "--ranks", "2"]) == 0
    assert re.search(r"^(1[6-9]|2\d) equal, [1-4] refused", capsys.readouterr().out, re.MULTILINE)
