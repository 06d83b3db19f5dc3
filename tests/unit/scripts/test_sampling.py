"""Drawing tokens, the cache of keys and values, and text as its tokens arrive, each against a reference."""

from dataclasses import replace
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.architectures.llama_keys import Router
from configs.errors import UserError
from configs.load import load
from configs.schema import Model
from models import build_model
from models.hf.family import built
from parallelisms.init import materialize
from scripts.sample import _Texts
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import NOT_FINITE, Distribution, draw, generators, probabilities
from scripts.sampling.generate import generate
from scripts.sampling.text import TextStream, prompt_tokens
from tests.hf_families import NEEDS_TRANSFORMERS, words, write_config
from tests.unit.hf_support import TINY, make_model
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

CPU = torch.device("cpu")
MODELS = TINY | {
    "deepseek": Model(
        dim=32,
        n_layers=3,
        n_heads=4,
        ffn_dim=48,
        vocab_size=96,
        n_experts=6,
        n_shared_experts=1,
        expert_dim=24,
        n_dense_layers=1,
        router=Router(scoring="sigmoid", load_balance="bias"),
    )
}
LAST_NUMBER = 1 - 2**-53
"""The largest number that a generator may return."""

# ------------------------------------------------------------------ drawing


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.05])
def test_probabilities_are_those_of_transformers(temperature, top_k, top_p):
    from transformers.generation import logits_process as theirs

    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    warpers = [theirs.TemperatureLogitsWarper(temperature)]
    warpers += [theirs.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [theirs.TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = logits
    for warper in warpers:
        expected = warper(None, expected)
    found = probabilities(logits, Distribution(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected.softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 1.0), (5, 1.0), (None, 0.8), (9, 0.9)])
def test_draws_follow_the_probabilities(top_k, top_p):
    n, distribution = 40_000, Distribution(1.3, top_k, top_p)
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(1))
    (generator,) = generators(7, 1)
    drawn = draw(logits.expand(n, -1), distribution, generator.random(n).tolist())
    expected = probabilities(logits, distribution)[0].numpy() * n
    counts = np.bincount(drawn.numpy(), minlength=12)
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 45  # for at most 11 degrees of freedom, more has a probability below 1e-5


@pytest.mark.parametrize("number", [0.0, LAST_NUMBER])
def test_a_token_without_probability_is_never_drawn(number):
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [5.0, 0.0, 1.0, 5.0]])
    first, last = (1, 0), (2, 3)
    drawn = draw(logits, Distribution(top_k=2), [number, number])
    assert tuple(drawn.tolist()) == (last if number else first)
    few = torch.full((1, 1000), -1e4)
    few[0, 500] = 0.1
    assert draw(few, Distribution(0.1), [number]).tolist() == [500]


def test_temperature_zero_is_the_most_likely_token_and_a_low_one_comes_near_it():
    logits = torch.randn(32, 100, generator=torch.Generator().manual_seed(2))
    greedy = draw(logits, Distribution(0), [LAST_NUMBER] * 32)
    assert greedy.tolist() == logits.argmax(-1).tolist()
    assert draw(logits, Distribution(1e-300), [LAST_NUMBER] * 32).tolist() == greedy.tolist()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_no_token(temperature, value):
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    assert draw(logits, Distribution(temperature), [0.0] * 3).tolist() == [0, NOT_FINITE, 0]


@pytest.mark.parametrize("distribution", [Distribution(0), Distribution(), Distribution(2.0, 3, 0.9)])
def test_padding_of_the_vocabulary_is_never_drawn(distribution):
    logits = torch.randn(50, 12, generator=torch.Generator().manual_seed(3))
    padded = torch.cat((logits, torch.full((50, 4), 9.0)), dim=1)
    numbers = generators(5, 1)[0].random(50).tolist()
    drawn = draw(padded, replace(distribution, vocab_size=12), numbers)
    assert drawn.tolist() == draw(logits, distribution, numbers).tolist()


def test_a_generators_numbers_depend_on_seed_place_and_key_alone():
    numbers = [generator.random() for generator in generators(3, 5)]
    assert numbers == [generator.random() for generator in generators(3, 9)[:5]]
    others = [*generators(4, 5), *generators(3, 5, 100), *generators(3, 5, 200)]
    assert len({*numbers, *(generator.random() for generator in others)}) == 20


# ------------------------------------------------------------------ the cache


def model_of(name, dtype=torch.float64):
    model = make_model(MODELS[name], dtype)
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.data.copy_(torch.randn(module.bias.shape))
    return model


def prompts_of(lengths):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 96, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("lengths", [(5,), (4, 4), (1, 9, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_the_cache_gives_the_logits_of_the_whole_text(name, lengths):
    model, texts = model_of(name), prompts_of(lengths)
    cached = CachedModel(model_of(name), CPU)
    for _ in range(2):  # a second batch does not see the first
        texts = prompts_of(lengths)
        logits = cached.start(texts, max(lengths) + 6)
        for _ in range(6):
            with torch.no_grad():
                expected = torch.stack([model(torch.tensor([text]))[0, -1] for text in texts])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
            tokens = logits.argmin(-1)
            texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
            logits = cached.step(tokens)


def of_family(tmp_path, family, **fields):
    """A small model of transformers in float64, in which every weight and bias matters."""
    config = load("parity.toml", words(write_config(tmp_path / family, family, **fields)), world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, CPU, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(("family", "fields"), [("phi", {}), ("gemma2", {"final_logit_softcapping": 2.0})])
def test_a_familys_head_may_have_a_bias_or_softcapping(tmp_path, family, fields):
    model = of_family(tmp_path, family, **fields)
    texts = prompts_of((1, 9, 4))
    with torch.no_grad():
        expected = torch.stack([model.family(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(CachedModel(model, CPU).start(texts, 12), expected, rtol=0, atol=1e-6)


FIRST_LENGTH = {"original_max_position_embeddings": 8}
PHI3 = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, "max_position_embeddings": 8}


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phi3", {"rope_parameters": PHI3 | FIRST_LENGTH | {"partial_rotary_factor": 1.0}} | FIRST_LENGTH),
        ("llama", DYNAMIC),
    ],
)
def test_a_text_does_not_depend_on_longer_ones_where_frequencies_do(tmp_path, family, fields):
    """Phi-3's are others for all of a batch that has a longer sequence; transformers' dynamic ones also after it."""
    model = of_family(tmp_path, family, **fields)
    theirs = built(model.config).double()
    theirs.load_state_dict(model.state_dict())
    texts = prompts_of((6, 8, 13, 20))
    with torch.no_grad():  # no text comes after a longer one
        expected = torch.stack([theirs(input_ids=torch.tensor([text])).logits[0, -1] for text in texts])
    cached = CachedModel(model, CPU)
    torch.testing.assert_close(cached.start(texts, 24), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(cached.start(texts[::-1], 24), expected.flip(0), rtol=0, atol=1e-6)


def texts_of(name, lengths, batch_size, max_tokens=8, seq_len=64, eos_id=None, distribution=None):
    """The tokens that follow each prompt."""
    prompts, cached = prompts_of(lengths), CachedModel(model_of(name), CPU)
    randomness, found = generators(5, len(prompts)), [[] for _ in prompts]
    for first in range(0, len(prompts), batch_size):
        batch = slice(first, first + batch_size)
        how = distribution or Distribution(1.0, 20, 0.9)
        for step in generate(cached, prompts[batch], max_tokens, seq_len, how, randomness[batch], eos_id):
            for number, token in enumerate(step, first):
                if token is not None:
                    found[number].append(token)
    return found


@pytest.mark.parametrize("name", ["untied", "mixtral"])
def test_a_text_does_not_depend_on_its_batch(name):
    lengths = (3, 11, 1, 6, 3)
    alone = texts_of(name, lengths, 1)
    assert len({tuple(text) for text in alone}) == 5
    assert texts_of(name, lengths, 2) == texts_of(name, lengths, 3) == texts_of(name, lengths, 5) == alone
    assert texts_of(name, lengths[:2], 2) == alone[:2]


def test_texts_end_at_eos_at_the_limit_and_at_the_models_length():
    lengths = (3, 11, 1, 6)
    whole = texts_of("untied", lengths, 4, max_tokens=30, seq_len=24)
    assert [len(text) for text in whole] == [21, 13, 23, 18]
    assert [len(text) for text in texts_of("untied", lengths, 4, max_tokens=15, seq_len=24)] == [15, 13, 15, 15]
    eos = whole[0][4]
    ended = texts_of("untied", lengths, 4, max_tokens=30, seq_len=24, eos_id=eos)
    assert ended == [text[: text.index(eos) + 1] if eos in text else text for text in whole]
    assert len(ended[0]) <= 5
    assert texts_of("untied", (24,), 1, seq_len=24) == [[]]


def test_a_model_that_is_not_finite_is_a_message():
    model = model_of("untied")
    model.norm.weight.data.fill_(float("nan"))
    steps = generate(CachedModel(model, CPU), [[1]], 5, 64, Distribution(), generators(0, 1), None)
    with pytest.raises(UserError, match="output is not finite"):
        next(steps)


def test_torchs_random_state_is_not_used():
    before = torch.get_rng_state()
    cached = CachedModel(model_of("untied"), CPU)
    torch.set_rng_state(before)
    list(generate(cached, prompts_of((3, 4)), 5, 64, Distribution(), generators(0, 2), None))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_can_be_trained_on_after_a_pass_with_a_cache():
    """Nothing but `attend` was replaced."""
    model = build_model(TINY["tied"])
    names = [name for name, _ in model.named_parameters()]
    CachedModel(model, CPU)
    assert [name for name, _ in model.named_parameters()] == names


# ------------------------------------------------------------------ text

TEXTS = ["def f(x):\n    return {'a': 1}\n" * 20, "Größe, 漢字, 🙂, naïve 👩‍👩‍👧\n" * 20]


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Tokenizers of all kinds whose tokens may be parts of a character."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece(iter(TEXTS), folder / "own.model", 300)
    byte_level = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    marks = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=marks, show_progress=False
    )
    byte_level.train_from_iterator(TEXTS[:1], trainer)
    byte_level.save(str(folder / "byte_level.json"))
    fallback = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={f"<0x{byte:02X}>": byte for byte in range(256)}
            | {"\u2581": 256, "a": 257, "\u2581a": 258, "<s>": 259},
            merges=[("\u2581", "a")],
            byte_fallback=True,
        )
    )
    fallback.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    fallback.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])
    fallback.save(str(folder / "fallback.json"))
    return {path.stem: load_tokenizer(path) for path in folder.iterdir() if path.suffix in (".json", ".model")}


some_text = st.text(st.sampled_from("ab é漢🙂 \n\u200d") | st.characters(codec="utf-8", exclude_characters="\u2581"))


@pytest.mark.parametrize("name", ["own", "byte_level", "fallback"])
@settings(max_examples=100, deadline=None)
@given(prompt=some_text, text=some_text)
def test_text_comes_whole_character_by_whole_character(readers, name, prompt, text):
    tokenizer = readers[name]
    start, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
    if whole[: len(start)] != start:  # a token across the border
        start = []
    stream = TextStream(tokenizer, start)
    pieces = [stream.push(token) for token in whole[len(start) :]]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text + prompt
    assert tokenizer.decode(start) + "".join(pieces) + stream.end() == tokenizer.decode(whole)


@pytest.mark.parametrize("name", ["own", "byte_level"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_bytes_that_are_no_text_come_as_a_decoder_shows_them(readers, name, data):
    tokenizer = readers[name]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    stream = TextStream(tokenizer, [])
    assert "".join(map(stream.push, tokens)) + stream.end() == tokenizer.decode(tokens)


def test_a_character_of_four_tokens_waits_for_the_last(readers):
    tokenizer = readers["byte_level"]
    stream = TextStream(tokenizer, tokenizer.encode("a"))
    assert [stream.push(token) for token in tokenizer.encode("🙂b")] == ["", "", "", "🙂", "b"]


def test_a_gap_is_filled_without_the_space_that_a_tokenizer_puts_before_every_text(readers, capsys):
    """`fallback` does, as Llama 2's; the middle of a document that was rearranged has it like every text."""
    tokenizer = readers["fallback"]
    texts = _Texts(SimpleNamespace(tokenizer=tokenizer), ["a", ""], [tokenizer.encode("a"), []], "c")
    for tokens in zip_longest(tokenizer.encode("a b"), tokenizer.encode(" a")):
        texts.push(0, tokens)
    texts.end(0, 2)
    assert capsys.readouterr().out == "aa bc\n---\n ac\n"


def test_a_prompt_starts_with_bos(readers):
    tokenizer = readers["own"]
    assert prompt_tokens(tokenizer, "") == [tokenizer.bos_id]
    assert prompt_tokens(tokenizer, "ab") == [tokenizer.bos_id, *tokenizer.encode("ab")]
    with pytest.raises(UserError, match="is not valid UTF-8"):
        prompt_tokens(tokenizer, "\udcff")
    with pytest.raises(UserError, match="has a suffix that is not valid UTF-8"):
        prompt_tokens(tokenizer, "a", "\udcff")


def test_without_bos_an_empty_prompt_is_a_message(readers):
    tokenizer = readers["own"]
    tokenizer = type("WithoutBos", (), {"bos_id": None, "encode": tokenizer.encode})()
    with pytest.raises(UserError, match="no BOS token to start from; give a text"):
        prompt_tokens(tokenizer, "")
