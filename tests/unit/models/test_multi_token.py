"""Modules that predict further tokens, against DeepSeek-V3's equations written out, and the tokens that they see."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from configs.schema import Model
from models.documents import Documents
from tests.unit.hf_support import make_model
from trainer.data.loader import IGNORED, further_tokens
from trainer.loss import CrossEntropy

SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 96}
SEQ_LEN = 11


def model_of(**keys):
    model = make_model(Model(**SHAPE, multi_token={"depth": 3, "loss_weight": 0.7}, **keys), torch.float64)
    for module in model.multi_token.values():
        module.init_buffers()
    return model


def windows(n=2):
    return torch.randint(0, 96, (n, SEQ_LEN + 1))


def loss_of(model, tokens, targets, further, **arguments):
    return model(tokens, loss=partial(CrossEntropy(), targets=targets), further=further, **arguments)


def tensor_of(tokens, following, ids=None, depth=3):
    return torch.from_numpy(further_tokens(tokens.numpy(), following.numpy(), following.numpy(), ids, depth))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def papers_losses(model, window):
    """Equations 21 to 24 of one sequence, each depth with only as many tokens as the paper gives it; summed."""
    tokens = window[:-1]
    hidden = []
    hook = model.norm.register_forward_hook(lambda _, __, output: hidden.append(output[0]))
    model(tokens[None])
    hook.remove()
    states = hidden[0]
    losses = []
    for depth, module in enumerate(model.multi_token.values(), start=1):
        n = len(tokens) - depth
        embedded = model.embed_tokens.weight[window[depth : depth + n]] * model.embedding_scale
        joined = torch.cat((module.enorm(embedded), module.hnorm(states[:n])), dim=-1) @ module.eh_proj.weight.T
        angles = (model.window_rotary or model.rotary) if module.block.self_attn.window else model.rotary
        states = module.block(joined[None], *angles(torch.arange(n)[None]))[0][0]
        logits = module.norm(states) @ model.lm_head.weight.T
        losses.append(F.cross_entropy(logits, window[depth + 1 :], reduction="sum"))
    return losses


@pytest.mark.parametrize(
    "keys",
    [{}, {"tie_embeddings": True, "embedding_scale": "sqrt_dim"}, {"window": 4, "window_pattern": 3}],
    ids=["plain", "tied and scaled", "window"],
)
def test_gradients_have_the_papers_loss_and_the_value_has_not(keys):
    model = model_of(**keys)
    batch = windows()
    tokens, targets = batch[:, :-1], batch[:, 1:]
    loss = loss_of(model, tokens, targets, tensor_of(tokens, targets))
    found = gradients(model, loss)
    main = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    by_depth = [sum(parts) for parts in zip(*(papers_losses(model, window) for window in batch), strict=True)]
    torch.testing.assert_close(loss, main, rtol=1e-12, atol=0)
    expected = gradients(model, main + 0.7 / 3 * sum(by_depth))
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: name + text
        )
    recorded = torch.stack([module.loss for module in model.multi_token.values()])
    counts = [len(batch) * (SEQ_LEN - depth) for depth in (1, 2, 3)]
    torch.testing.assert_close(recorded[:, 0], torch.stack(by_depth), rtol=1e-12, atol=0)
    assert recorded[:, 1].tolist() == counts


def test_documents_are_as_if_alone():
    model = model_of()
    first, second = windows(1)[0][:7], windows(1)[0][:6]
    row = torch.cat((first[:-1], second[:-1]))[None]
    targets = torch.cat((first[1:-1], torch.tensor([IGNORED]), second[1:]))[None]
    ids = torch.tensor([[0] * 6 + [1] * 5])
    positions = torch.cat((torch.arange(6), torch.arange(5)))[None]
    further = tensor_of(row, targets, ids)
    loss = loss_of(model, row, targets, further, positions=positions, documents=Documents.find(ids))
    found = gradients(model, loss)
    alone = torch.zeros((), dtype=torch.float64)
    for window in (first[:-1], second):  # the last token of the first is no target of another
        main = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="sum")
        alone = alone + main + 0.7 / 3 * sum(papers_losses(model, window))
    expected = gradients(model, alone)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11)


def test_evaluation_and_sampling_do_not_run_the_modules():
    model = model_of()
    for module in model.multi_token.values():
        module.register_forward_pre_hook(lambda *_: pytest.fail("ran"))
    batch = windows()
    assert model(batch[:, :-1]).shape == (2, SEQ_LEN, 96)
    loss_of(model, batch[:, :-1], batch[:, 1:], None)


@pytest.mark.parametrize(
    ("tokens", "targets", "ids", "expected"),
    [
        ([5, 6, 7, 8], [6, 7, 8, 9], None, [[6, 7, 8], [7, 8, 9], [8, 9, -100], [9, -100, -100]]),
        ([5, 6, 7], [6, -100, 8], [0, 0, 1], [[6, -100, -100], [-100, -100, -100], [8, -100, -100]]),
        # Two places of a source meet after 6, whose own next token is 3.
        ([5, 6, 7, 8], [6, 3, 8, 9], None, [[6, 3, -100], [3, -100, -100], [8, 9, -100], [9, -100, -100]]),
        # The same, where by chance the next place begins with that token, and the documents tell.
        ([5, 6, 7, 8], [6, 7, 8, 9], [0, 0, 1, 1], [[6, 7, -100], [7, -100, -100], [8, 9, -100], [9, -100, -100]]),
    ],
    ids=["window", "documents", "places", "places and documents"],
)
def test_further_tokens_go_on_with_the_same_text(tokens, targets, ids, expected):
    numbers = None if ids is None else torch.tensor([ids])
    following = np.array([targets])
    found = further_tokens(np.array([tokens]), following, following, numbers, 2)
    assert found[..., 0].tolist() == [[row[:2] for row in expected]]
    assert found[..., 1].tolist() == [[row[1:] for row in expected]]


def test_a_token_without_loss_is_seen_and_is_no_target():
    tokens, following, targets = np.array([[[5, 6, 7, 8]], [[6, 7, 8, 9]], [[-100, -100, 8, -100]]])
    found = further_tokens(tokens, following, targets, None, 2)
    assert found[..., 0].tolist() == [[[6, 7], [7, 8], [8, 9], [9, -100]]]
    assert found[..., 1].tolist() == [[[-100, 8], [8, -100], [-100, -100], [-100, -100]]]


def test_more_depth_than_tokens_leaves_no_target():
    following = np.array([[2, 3]])
    found = further_tokens(np.array([[1, 2]]), following, following, None, 4)
    assert found[..., 0].tolist() == [[[2, 3, -100, -100], [3, -100, -100, -100]]]
    assert found[..., 1].tolist() == [[[3, -100, -100, -100], [-100, -100, -100, -100]]]
