"""Documents in models of Hugging Face, against plain transformers, and what is refused of them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.errors import ConfigError
from configs.load import load
from models import build_model
from models.documents import Documents
from models.hf.model import cuts_of
from parallelisms.init import materialize
from tests.hf_families import NEEDS_TRANSFORMERS, VOCABULARY, words, write_config
from trainer.planning.unknown_names import require_known_names

pytestmark = NEEDS_TRANSFORMERS
LENGTHS = ((11, 1, 20), (5, 27))
DOCUMENTS = ("--data.document_mask", "true")
CP = ("--mesh.cp", "2", "--training.micro_batch_size", "2")
SINKS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager", "sliding_window": 4},
    **{"layer_types": ["sliding_attention", "full_attention"]},
}


def job(tmp_path, family, *more, **fields):
    return load("parity.toml", words(write_config(tmp_path / family, family, **fields), *more))


def both_models(config):
    """Keel's model and transformers', in float64 with the same weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        ours = build_model(config.model).double()
    materialize(ours, torch.device("cpu"), seed=1)
    fields = dict(config.model.fields)
    described = AutoConfig.for_model(fields.pop("model_type"), **fields)
    theirs = AutoModelForCausalLM.from_config(described, dtype=torch.float64)
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
    theirs.tie_weights()
    return ours, theirs


def packed():
    """Positions in the documents of `LENGTHS`, and the documents."""
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    return positions, Documents.find(ids)


@pytest.mark.parametrize(
    ("family", "fields", "bound"),
    [
        ("llama", {}, 1e-13),
        ("granite", {"attention_multiplier": 0.3}, 1e-13),
        ("gemma3_text", {"sliding_window": 4}, 1e-6),
        ("gpt_oss", SINKS, 1e-6),
        ("gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0}, 1e-6),
        ("gpt2", {}, 1e-13),
        ("deepseek_v3", {}, 1e-6),
    ],
)
def test_packed_documents_are_each_document_alone(tmp_path, family, fields, bound):
    """A scale of its own, windows, sinks, softcapping, learned positions, values narrower than keys."""
    ours, theirs = both_models(job(tmp_path, family, **fields).config)
    tokens = torch.randint(3, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    rows = [
        torch.cat([theirs(document[None], use_cache=False).logits for document in row.split(lengths)], dim=1)
        for row, lengths in zip(tokens, map(list, LENGTHS), strict=True)
    ]
    expected = torch.cat(rows)
    found = ours(tokens, *packed())
    assert (found - expected).abs().max() < bound * expected.abs().max()
    factors = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        if name in gradients and parameter.grad is not None:
            difference = (gradients[name] - parameter.grad).norm()
            assert difference < 20 * bound * parameter.grad.norm().clamp(min=1.0), name


@pytest.mark.parametrize(
    ("family", "fields", "packs"),
    [("gpt_oss", SINKS, False), ("gpt_oss", SINKS, True), ("gemma3_text", {"sliding_window": 4}, True)],
)
def test_no_tensor_has_all_pairs_of_tokens(tmp_path, family, fields, packs):
    """The family's own function has the scores of them with sinks, and a mask of them with windows and documents."""
    ours, _ = both_models(job(tmp_path, family, **fields, max_position_embeddings=512).config)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            largest = max([largest, *(each.numel() for each in tree_leaves(out) if isinstance(each, torch.Tensor))])
            return out

    n_tokens = 512
    places = torch.arange(n_tokens)[None]
    documents = (places % 300, Documents.find(places // 300)) if packs else ()
    with Sizes():
        ours(places % VOCABULARY, *documents).sum().backward()
    assert largest < n_tokens**2


@pytest.mark.parametrize("window", [4, 5, 6])
def test_a_window_may_leave_out_one_token_or_none(window):
    from models.hf.attention import attend  # at the top, a transformers too old to train would fail

    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pairs = torch.ones(5, 5, dtype=torch.bool).tril().triu(1 - window)
    expected = (q @ k.mT / 2).masked_fill(~pairs, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, None, window), expected, rtol=0, atol=1e-14)


def test_positions_are_not_asked_for_documents(tmp_path, monkeypatch):
    """The question would make the host wait for the device in each forward pass; and plain runs have no mask."""
    from transformers import masking_utils

    asked = []
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked.append)
    ours, theirs = both_models(job(tmp_path, "llama").config)
    tokens = torch.arange(12)[None]
    expected = theirs(tokens, use_cache=False).logits
    assert len(asked) == 1
    assert torch.equal(ours(tokens), expected)
    assert len(asked) == 1
    assert masking_utils.find_packed_sequence_indices == asked.append


CHUNKS = {
    **{"attention_chunk_size": 8, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    **{"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96},
}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
LONG = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16},
        **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    },
}


@pytest.mark.parametrize(
    ("family", "fields", "more", "message"),
    [
        (
            "lfm2",
            CONVOLUTION,
            DOCUMENTS,
            r"document_mask is true, but lfm2 mixes tokens .*\(perhaps in Lfm2ShortConv\)",
        ),
        ("lfm2", CONVOLUTION, CP, "mesh.cp is 2, but lfm2 mixes tokens .* from whole sequences; set cp = 1"),
        ("phi3", LONG, DOCUMENTS, "rotary frequencies of phi3 depend on the largest position .* above 16 positions"),
        (
            "gemma2",
            {},
            (*CP, "--context.method", "ring"),
            'layers of gemma2 compute attention by a function of their own; context.method "gather" offers that',
        ),
        (
            "gpt_oss",
            SINKS | {"attn_implementation": "eager"},
            (*CP, "--context.method", "ring"),
            'layers of gpt_oss compute attention by a function of their own; context.method "gather" offers that',
        ),
        ("llama4_text", CHUNKS, (*CP, "--context.method", "all_to_all"), 'a sliding window; context.method "gather"'),
        ("bloom", {}, CP, "no layer of bloom computes attention by transformers' attention interface"),
    ],
)
def test_what_is_refused(tmp_path, family, fields, more, message):
    with pytest.raises(ConfigError, match=message):
        require_known_names(job(tmp_path, family, *more, **fields))


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", (*DOCUMENTS, *CP)),
        ("gemma3_text", (*DOCUMENTS, *CP, "--context.method", "all_to_all")),
        ("gpt_oss", DOCUMENTS),
        ("gpt_oss", (*DOCUMENTS, *CP)),
        ("gpt_oss", (*CP, "--context.method", "ring")),
        ("gpt_oss", (*DOCUMENTS, *CP, "--context.method", "all_to_all")),
        ("gemma3_text", CP),
        ("gemma3_text", (*CP, "--context.method", "ring")),
        ("gemma3_text", (*DOCUMENTS, *CP, "--context.method", "ring")),
        ("gemma2", (*DOCUMENTS, *CP)),
    ],
)
def test_what_is_offered(tmp_path, family, more):
    require_known_names(job(tmp_path, family, *more, **(SINKS if family == "gpt_oss" else {})))


def test_a_forward_pass_that_is_not_followed_to_its_end_has_no_attention_to_replace(tmp_path, monkeypatch):
    """Else the layers before the place where it failed would see whole sequences, and those after it only parts."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaDecoderLayer.forward

    def failing(layer, hidden_states, *args, **kwargs):
        if layer.self_attn.layer_idx == 1:
            hidden_states.sum().item()
        return original(layer, hidden_states, *args, **kwargs)

    config = job(tmp_path, "llama", rms_norm_eps=1.25e-5).config.model
    assert cuts_of(config).attention == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", failing)
    cuts_of.cache_clear()
    try:
        assert cuts_of(config).attention == ()
    finally:
        cuts_of.cache_clear()
