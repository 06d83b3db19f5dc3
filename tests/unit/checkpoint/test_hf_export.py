"""Exports in the hands of their real client, transformers, and what an export costs and refuses."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.export.model_files import checkpoint_files
from checkpoint.export.output import finish, unfinished_folder
from configs.errors import UserError
from configs.schema import Model
from scripts import export_hf as script
from tests.conftest import ROOT
from tests.unit.hf_support import TINY, make_model, save, skip_what_is_too_old, write_checkpoint
from trainer.report.units import parse_size

NO_TOKENIZER = TokenizerFiles()


def load(folder, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("max_shard_bytes", [10_000, 10**9])
def test_transformers_computes_the_same(tmp_path, name, max_shard_bytes):
    skip_what_is_too_old(name)
    ours = make_model(TINY[name])
    checkpoint = save(tmp_path / "step-00000001", ours)
    export_hf(checkpoint, tmp_path / "out", TokenizerFiles({}, 1, 2), max_shard_bytes=max_shard_bytes)
    theirs = load(tmp_path / "out")
    tokens = torch.randint(0, 96, (2, 64))  # beyond the stretched model's original_seq_len
    with torch.no_grad():
        expected, logits = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    start = tokens[:1, :5]
    generated = theirs.generate(start, max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = start
    with torch.no_grad():
        for _ in range(10):  # beyond a window, which is of 9 tokens
            expected = torch.cat((expected, ours(expected)[:, -1:].argmax(-1)), dim=1)
    assert generated.tolist() == expected.tolist()
    assert theirs.generation_config.eos_token_id == 2
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "out"}


DEEPSEEK_MOE = TINY["qwen2_moe"].model_copy(update={"shared_expert_gate": False, "attention_bias": False})
UNGATED = {
    "deepseek_moe": DEEPSEEK_MOE,
    "qwen3_next": TINY["qwen3_next_moe"].model_copy(update={"shared_expert_gate": False}),
}


@pytest.mark.parametrize("name", UNGATED)
@pytest.mark.parametrize("mup", [None, 8])
def test_shared_experts_without_a_gate_get_one_that_changes_nothing(tmp_path, name, mup):
    """Its sigmoid is 1/2, and what it multiplies is twice as large."""
    if mup and name == "qwen3_next":
        pytest.skip("muP has no rule for layers with a state")
    config = UNGATED[name].model_copy(update={"mup_base_dim": mup})
    ours = make_model(config)
    saved = save(tmp_path / "step-00000001", ours)
    export_hf(saved, tmp_path / "out", NO_TOKENIZER)
    tokens = torch.randint(0, 96, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "out")(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
    weights = load_file(tmp_path / "out/model.safetensors")
    prefix = "model.layers.1.mlp"
    assert not weights[f"{prefix}.shared_expert_gate.weight"].any()
    matrix = ours.get_parameter("layers.1.mlp.shared_experts.down_proj.weight")
    assert torch.equal(weights[f"{prefix}.shared_expert.down_proj.weight"], 2 * matrix)
    import_hf(tmp_path / "out", tmp_path / "back", None)
    again = checkpoint_files(tmp_path / "back")
    assert again.model.shared_expert_gate
    assert torch.equal(again.read("model.layers.1.mlp.shared_experts.down_proj.weight"), 2 * matrix)


@pytest.mark.parametrize("name", ["qwen2_moe", "untied"])
def test_a_class_of_its_own_that_a_model_has_not_is_refused(tmp_path, name, capsys):
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY[name]))
    assert script.main([str(checkpoint), str(tmp_path / "out"), "--own-class", "--tokenizer", "none"]) == 1
    assert "transformers has a class for this model; leave --own-class out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_class_of_its_own_is_no_remedy_for_a_model_that_no_class_computes(tmp_path, capsys):
    router = DEEPSEEK_MOE.router.model_copy(update={"load_balance": "bias", "scoring": "sigmoid"})
    model = DEEPSEEK_MOE.model_copy(update={"router": router})
    checkpoint = save(tmp_path / "step-00000001", make_model(model))
    assert script.main([str(checkpoint), str(tmp_path / "out"), "--own-class", "--tokenizer", "none"]) == 1
    assert "DeepseekV3ForCausalLM is the nearest class, and computes other models" in capsys.readouterr().err


def test_files_and_their_index(tmp_path):
    model = make_model(TINY["untied"])
    checkpoint = save(tmp_path / "step-00000001", model)
    largest = 96 * 32 * 4
    export_hf(checkpoint, tmp_path / "many", NO_TOKENIZER, max_shard_bytes=largest)
    export_hf(checkpoint, tmp_path / "one", NO_TOKENIZER)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert len(shards) > 3
    whole = load_file(tmp_path / "one/model.safetensors")
    pieces = {}
    for shard in shards:
        tensors = load_file(tmp_path / "many" / shard)
        assert all(index["weight_map"][name] == shard for name in tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= largest
        pieces |= tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in pieces.values())
    assert pieces.keys() == whole.keys()
    for name, parameter in model.named_parameters():
        name = name if name.startswith("lm_head") else f"model.{name}"
        assert torch.equal(pieces[name], parameter)
        assert torch.equal(whole[name], parameter)


def test_dtype(tmp_path):
    model = make_model(TINY["tied"])
    checkpoint = save(tmp_path / "step-00000001", model)
    assert script.main([str(checkpoint), str(tmp_path / "out"), "--dtype", "bfloat16", "--max-shard-size", "20KB"]) == 0
    theirs = load(tmp_path / "out", dtype="auto")
    assert theirs.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(theirs.get_parameter(f"model.{name}"), parameter.bfloat16())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"


def test_what_older_and_newer_readers_look_for(tmp_path):
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["stretched"]))
    export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER)
    config = json.loads((tmp_path / "out/config.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    assert config["rope_theta"] == 5000.0
    assert config["rope_scaling"] == {"rope_type": "llama3", **scaling}
    assert config["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 5000.0, **scaling}
    assert config["max_position_embeddings"] == 8 * 16


MEMORY = """
import sys
from pathlib import Path
import torch
from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from tests.held import held

source, result = map(Path, sys.argv[2:])
work = {
    "export": lambda: export_hf(source, result, TokenizerFiles(), max_shard_bytes=64_000_000),
    "import": lambda: import_hf(source, result, None, dtype="bfloat16"),
}
torch.save(torch.ones(3), "/dev/null")
print(held(work[sys.argv[1]]))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_shard(tmp_path):
    """A model of 101 MB, beside as much optimizer state, in shards of 64 MB; its largest tensor has 17 MB.

    Each way has a process of its own: what the allocator keeps of the one would serve the other, unseen.
    """

    def held_by(*arguments):
        command = [sys.executable, "-c", MEMORY, *map(str, arguments)]
        return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)

    config = Model(dim=512, n_layers=4, n_heads=8, ffn_dim=2048, vocab_size=8192)
    checkpoint = save(tmp_path / "step-00000001", make_model(config))
    exporting = held_by("export", checkpoint, tmp_path / "out")
    assert 50e6 < exporting < 64e6 + 17e6 + 10e6, exporting
    importing = held_by("import", tmp_path / "out", tmp_path / "back")
    assert 16e6 < importing < 64e6, importing


def test_an_existing_output_is_left_alone(tmp_path):
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["tied"]))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="out exists; name another folder"):
        export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_not_whole_leaves_nothing(tmp_path, monkeypatch):
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["tied"]))

    def stop(done, total):
        assert (tmp_path / "out.tmp").is_dir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER, progress=stop)
    (tmp_path / "out.tmp").mkdir()  # as after a kill
    (tmp_path / "out.tmp/rubbish").touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(UserError, match=r"out could not be written: .*No space left"):
            export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    seen = []
    export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1][0] == seen[-1][1] == sum(parameter.nbytes for parameter in make_model(TINY["tied"]).parameters())
    assert not (tmp_path / "out/rubbish").exists()


def test_a_checkpoint_that_does_not_fit_its_manifest(tmp_path, capsys):
    model = make_model(TINY["untied"])
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors["model.norm.weight"] = torch.ones(5)
    del tensors["model.lm_head.weight"]
    checkpoint = write_checkpoint(tmp_path / "step-00000001", tensors.items(), model.config)
    assert script.main([str(checkpoint), str(tmp_path / "out")]) == 1
    message = " ".join(capsys.readouterr().err.split())
    assert "model.lm_head.weight: missing, expected: float32 [96, 32]" in message
    assert "model.norm.weight: float32 [5], expected: float32 [32]" in message
    assert not (tmp_path / "out").exists()


def test_no_checkpoint(tmp_path, capsys):
    assert script.main([str(tmp_path), str(tmp_path / "out")]) == 1
    assert "MANIFEST.json" in capsys.readouterr().err


@pytest.mark.parametrize(("verify", "place"), [("hash", 0.3), ("size", 0)])
def test_a_flipped_byte(tmp_path, verify, place):
    """In the values it takes the hash to find it; in the frame around them torch fails, and the message is ours."""
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["tied"]))
    data = next(checkpoint.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[int(len(content) * place)] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: __0_0\.distcp"):
        export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER, verify=verify)
    assert script.main([str(checkpoint), str(tmp_path / "out"), "--verify", verify]) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["5XB", "-1", "0", "GB"])
def test_sizes_that_are_none(text, capsys):
    with pytest.raises(SystemExit):
        script.main(["a", "b", "--max-shard-size", text])
    assert "not a size" in capsys.readouterr().err


def test_sizes():
    assert [parse_size(text) for text in ("123", "1.5kb", "2 GiB", "5GB")] == [123, 1500, 2 << 30, 5 * 10**9]


def test_a_shape_that_transformers_refuses(tmp_path):
    config = Model(dim=30, n_layers=1, n_heads=4, head_dim=8, ffn_dim=16, vocab_size=16)
    checkpoint = save(tmp_path / "step-00000001", make_model(config))
    with pytest.raises(UserError, match=r"dim 30 is not a multiple of n_heads 4"):
        export_hf(checkpoint, tmp_path / "out", NO_TOKENIZER)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_two_commands_do_not_write_one_folder(tmp_path):
    """The later one is refused, instead of removing what the earlier one has written, which then looks complete."""
    output = tmp_path / "out"
    with unfinished_folder(output) as folder:
        (folder / "first").write_text("1")
        with pytest.raises(UserError, match="out is being written by another command"), unfinished_folder(output):
            pytest.fail("two have the folder")
        finish(folder, output)
    assert [path.name for path in output.iterdir()] == ["first"]


def test_what_a_killed_export_has_left_is_removed_but_nothing_behind_a_link(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("kept")
    left = tmp_path / "out.tmp"
    (left / "inside").mkdir(parents=True)
    (left / "inside" / "file").write_text("left")
    (left / "link").symlink_to(kept)
    with unfinished_folder(tmp_path / "out") as folder:
        assert not any(folder.iterdir())
        finish(folder, tmp_path / "out")
    (tmp_path / "other.tmp").symlink_to(kept)
    with pytest.raises(UserError, match="other could not be written"), unfinished_folder(tmp_path / "other"):
        pytest.fail("the folder of a link would be emptied")
    assert (kept / "file").read_text() == "kept"
