"""A model and tokenizer of Keel as lm-eval wants them.

A text begins with BOS, as every document in training. The windows are lm-eval's own for `transformers` models, so that
the scores of an export are the same (there with `add_bos_token=True`; for rolling likelihoods, which put BOS before the
text themselves, without).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from configs.errors import UserError
from configs.plan import attention_of, recurrent_of
from models.hf.check import depends_on_longest
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import Distribution, generators
from scripts.sampling.generate import generate
from scripts.sampling.load import Trained
from trainer.loss import logits_of

_Request = tuple[Any, list[int], list[int]]
"""Anything, the tokens of a context, and those that continue it."""


class KeelLM(TemplateLM):
    """Computes what lm-eval's tasks ask for, in batches."""

    def __init__(self, trained: Trained, batch_size: int) -> None:
        """
        Args:
            trained: its model must not be used by others meanwhile.
            batch_size: sequences computed at once.

        Raises:
            UserError: the tokenizer has neither BOS nor EOS.
        """
        super().__init__()
        self._trained = trained
        self._batch_size = 1 if depends_on_longest(trained.model) else batch_size
        marks = [mark for mark in (trained.tokenizer.bos_id, trained.tokenizer.eos_id) if mark is not None]
        if not marks:
            raise UserError("the tokenizer has neither BOS nor EOS, so there is no token to begin a text with")
        self._first = marks[0]
        self._end = marks[-1]

    @property
    def eot_token_id(self) -> int:
        """The end of a document."""
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        return self._first

    @property
    def max_length(self) -> int:
        """The model's sequence length."""
        return self._trained.seq_len

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, after BOS unless `add_special_tokens` is False."""
        bos = self._trained.tokenizer.bos_id
        begin = [bos] if bos is not None and add_special_tokens is not False else []
        return [*begin, *self._trained.tokenizer.encode(string)]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The same as lm-eval's, without a bar that TQDM_DISABLE leaves."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[_Request], **_: Any) -> list[tuple[float, bool]]:
        """The log-likelihood of each request's continuation, and whether it is the most likely one."""
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        results: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), self._batch_size):
            batch = order[first : first + self._batch_size]
            results |= dict(zip(batch, self._score([requests[i] for i in batch]), strict=True))
        return [results[i] for i in range(len(requests))]

    def _score(self, requests: Sequence[_Request]) -> list[tuple[float, bool]]:
        windows = [self._window(context, continuation) for _, context, continuation in requests]
        tokens = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.int64)
        for row, window in zip(tokens, windows, strict=True):
            row[: len(window)] = torch.tensor(window)  # no token sees the padding after it
        scores: list[tuple[float, bool]] = []

        def score(hidden: Tensor, weight: Tensor, **of_head: Any) -> Tensor:
            for row, window, (_, _, continuation) in zip(hidden, windows, requests, strict=True):
                logits = logits_of(row[len(window) - len(continuation) : len(window)], weight, **of_head)
                wanted = torch.tensor(continuation, device=logits.device)
                own = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
                total = own.gather(-1, wanted[:, None]).sum().item()
                scores.append((total, bool((logits.argmax(-1) == wanted).all())))
            return hidden.new_zeros(())

        with torch.no_grad():
            self._trained.model(tokens.to(self._trained.device), None, loss=score)
        return scores

    def _window(self, context: list[int], continuation: list[int]) -> list[int]:
        """The tokens that the model reads: the last ones before each target."""
        if len(continuation) > self.max_length:
            raise UserError(
                f"a text of {len(continuation)} tokens must be scored in one piece, and the model's seq_len is "
                f"{self.max_length}; leave out the task, or train with longer sequences"
            )
        return [*context, *continuation][-(self.max_length + 1) : -1]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of the sequence length."""
        totals = []
        for request in requests:
            windows = get_rolling_token_windows(
                self.tok_encode(request.args[0], add_special_tokens=False), self._first, self.max_length, context_len=1
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(score for score, _ in self._loglikelihood_tokens(parts)))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until one of its stop sequences, EOS or its limit."""
        with _attention_restored(self._trained.model):
            model = CachedModel(self._trained.model, self._trained.device)
            return [self._continue(model, *request.args) for request in requests]

    def _continue(self, model: CachedModel, context: str, settings: dict[str, Any]) -> str:
        wanted: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        stops = handle_stop_sequences(wanted["until"], eos=None)
        most = wanted["max_gen_toks"]
        if most >= self.max_length:
            raise UserError(f"the task generates up to {most} tokens (max_gen_toks), and seq_len is {self.max_length}")
        prompt = self.tok_encode(context)[-(self.max_length - most) :]
        distribution = Distribution(
            wanted["temperature"] if wanted["do_sample"] else 0.0,
            wanted.get("top_k"),
            wanted.get("top_p", 1.0),
            self._trained.tokenizer.vocab_size,
        )
        tokenizer = self._trained.tokenizer
        tokens = []
        text = ""
        arguments = (most, self.max_length, distribution, generators(0, 1), tokenizer.eos_id)
        for (token,) in generate(model, [prompt], *arguments):
            tokens.append(token)
            text = tokenizer.decode([each for each in tokens if each is not None])
            if any(stop and stop in text for stop in stops):
                break
        return postprocess_generated_text(text, stops, None)


@contextmanager
def _attention_restored(model: torch.nn.Module) -> Iterator[None]:
    """Give the model its own functions that mix tokens back, which `CachedModel` replaces."""
    attends = [(module, module.attend) for module in attention_of(model)]
    mixes = [(module, module.mix) for module in recurrent_of(model)]
    try:
        yield
    finally:
        for attention, attend in attends:
            attention.attend = attend
        for recurrent, mix in mixes:
            recurrent.mix = mix
