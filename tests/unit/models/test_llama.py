"""The model against Hugging Face's LlamaForCausalLM and Qwen3ForCausalLM, and its parts against brute force."""

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from configs.architectures.llama_keys import RopeScaling
from configs.schema import Model
from models import build_model
from models.attention import document_mask
from models.documents import Documents

SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 176, "vocab_size": 512}


def hugging_face(config: Model) -> LlamaForCausalLM:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling:
        scaling = config.rope_scaling
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.ffn_dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads or config.n_heads,
            head_dim=config.head_dim or config.dim // config.n_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=1024,
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n_kv_heads": None, "rope_theta": 500_000.0},
        {"tie_embeddings": True, "rope_scaling": RopeScaling(factor=32.0, original_seq_len=64)},
        {"head_dim": 16, "norm_eps": 1e-3},
    ],
    ids=["llama 2, grouped queries", "all heads", "llama 3.2: tied, stretched rotary", "head_dim apart from dim"],
)
def test_logits_are_those_of_transformers(change):
    config = Model(**(SHAPE | change))
    torch.manual_seed(0)
    ours, theirs = build_model(config), hugging_face(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)  # norms away from one: their weights must count
    state = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in ours.state_dict().items()}
    assert theirs.load_state_dict(state).missing_keys == []
    tokens = torch.randint(0, config.vocab_size, (2, 256))
    with torch.no_grad():
        expected = theirs(tokens).logits
        difference = (ours(tokens) - expected).abs().max()
    assert expected.abs().max() > 1
    assert difference <= 1e-5


def rms_norm(self, x):
    """Qwen3RMSNorm without its cast to float32."""
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


@pytest.mark.parametrize("tied", [False, True])
def test_qk_norm_is_qwen3s_in_loss_and_gradients(monkeypatch, tied):
    monkeypatch.setattr(Qwen3RMSNorm, "forward", rms_norm)
    config = Model(**SHAPE, head_dim=24, qk_norm="head", tie_embeddings=tied, rope_theta=1e6, norm_eps=1e-3)
    theirs = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=3,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=24,
            rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=tied,
        )
    ).double()
    torch.manual_seed(0)
    ours = build_model(config).double()
    ours.rotary.init_buffers()  # angles in float32, as in transformers
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.1).add_(parameter.ndim == 1)
    state = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in ours.state_dict().items()}
    assert theirs.load_state_dict(state).missing_keys == []
    tokens, targets = torch.randint(0, 512, (2, 2, 64))
    losses = [
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()) for logits in (ours(tokens), theirs(tokens).logits)
    ]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)
    for loss in losses:
        loss.backward()
    gradients = {name.removeprefix("model."): p.grad for name, p in theirs.named_parameters()}
    assert gradients["layers.1.self_attn.q_norm.weight"].abs().min() > 0
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-8, atol=1e-10)


def test_documents_do_not_see_each_other():
    torch.manual_seed(0)
    model = build_model(Model(**SHAPE)).double()
    first, second = torch.randint(0, 512, (1, 5)), torch.randint(0, 512, (1, 8))
    ids = torch.tensor([[0] * 5 + [1] * 8])
    positions = torch.cat((torch.arange(5), torch.arange(8)))[None]
    with torch.no_grad():
        packed = model(torch.cat((first, second), dim=1), positions, Documents.find(ids))
        apart = torch.cat((model(first), model(second)), dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-12, atol=1e-12)


def test_document_mask_by_brute_force():
    ids = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1]])
    mask = document_mask(ids)
    for batch, query, key in torch.cartesian_prod(torch.arange(2), torch.arange(6), torch.arange(6)).tolist():
        expected = key <= query and bool(ids[batch, query] == ids[batch, key])
        assert mask[batch, 0, query, key] == expected


def test_the_plan_names_modules_that_exist_and_all_parameters():
    for tied in (False, True):
        model = build_model(Model(**(SHAPE | {"tie_embeddings": tied})))
        modules = dict(model.named_modules())
        grouped = {id(p) for names in model.plan.fsdp_groups for n in names for p in modules[n].parameters()}
        left = [name for name, p in model.named_parameters() if id(p) not in grouped]
        assert left == (["embed_tokens.weight", "norm.weight"] if tied else [])
        assert all(name in modules for name in model.plan.blocks)
