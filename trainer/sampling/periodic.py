"""Samples during training: at each validation the model continues `validation.samples`, on any mesh.

The model runs as in a validation: the same shapes, without gradients, in the place of the loss a function that takes
the logits after each text so far. So every technique is served as it is, and nothing is compiled again. A token costs
a forward pass over a whole window, where a cache of keys and values would cost one position; such a cache would be a
second way to compute attention on each mesh. The data-parallel ranks share the texts.

The random numbers are keyed by the seed, the step and the text's place. Training's own state is not read or changed,
so a resumed run continues the texts as an undisturbed one.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from configs.errors import UserError
from configs.load import LoadedConfig
from trainer.data.loader import IGNORED, MicroBatch
from trainer.data.tokenizer import load_tokenizer
from trainer.sampling.draw import NOT_FINITE, Distribution, draw, generators
from trainer.sampling.text import prompt_tokens
from trainer.step import Learner

MAX_TOKENS = 64
"""Tokens by which a text is continued, at most: each takes a forward pass over a whole window."""
TEMPERATURE = 0.8
Sample = dict[str, str]
"""`prompt`, and the `text` that follows it."""


class Sampler:
    """Continues the texts of `validation.samples`, if there are any; the same on all ranks."""

    def __init__(self, job: LoadedConfig) -> None:
        """Read the tokenizer, and turn the texts into tokens.

        Raises:
            KeelError: a text has too many tokens, or the tokenizer can't be read.
        """
        self._config = job.config
        settings = job.config.validation
        self._prompts: list[list[int]] = []
        if not settings.samples:
            return
        assert job.config.tokenizer.path is not None  # configs/checks/data.py
        self._tokenizer = load_tokenizer(job.config.tokenizer.path)
        seq_len = job.config.training.seq_len
        self._n_tokens = min(MAX_TOKENS, seq_len // 2)
        room = seq_len - self._n_tokens
        for number, text in enumerate(settings.samples, 1):
            try:
                self._prompts.append(prompt_tokens(self._tokenizer, text, room))
            except UserError as error:
                sizes = f"training.seq_len {seq_len} - {self._n_tokens} that follow"
                raise job.error("validation.samples", f"text {number} {error} ({sizes})") from None
        self._distribution = Distribution(TEMPERATURE, vocab_size=self._tokenizer.vocab_size)

    def sample(self, learner: Learner, step: int, is_over: Callable[[], bool]) -> list[Sample] | None:
        """Continue the texts; all ranks must call it, and get the same result.

        Args:
            learner: its model is not changed.
            step: steps of training so far.
            is_over: called before each token; must return the same on all ranks.

        Returns:
            A sample for each text, or None if there are no texts, or `is_over` ended the sampling.
        """
        if not self._prompts:
            return None
        texts = [list(prompt) for prompt in self._prompts]
        randomness = generators(self._config.training.seed, len(texts), step)
        growing = set(range(len(texts)))
        for _ in range(self._n_tokens):
            if is_over():
                return None
            tokens = self._next(learner, texts, growing, [generator.random() for generator in randomness])
            for number in [*growing]:
                if tokens[number] in (NOT_FINITE, self._tokenizer.eos_id):
                    growing.remove(number)
                if tokens[number] != NOT_FINITE:
                    texts[number].append(tokens[number])
            if not growing:
                break
        return [self._sample(number, text) for number, text in enumerate(texts)]

    def _sample(self, number: int, tokens: Sequence[int]) -> Sample:
        decode = self._tokenizer.decode
        text = decode(tokens)[len(decode(self._prompts[number])) :]
        return {"prompt": self._config.validation.samples[number], "text": text}

    def _next(
        self, learner: Learner, texts: Sequence[Sequence[int]], growing: set[int], numbers: Sequence[float]
    ) -> list[int]:
        """The next token of each growing text; NOT_FINITE for the others."""
        drawn = torch.full((len(texts),), NOT_FINITE)
        for batch in self._batches(learner, texts, growing):
            last = _LogitsAtTargets()
            learner.passes.evaluate([learner.call(each, last) for each in learner.own_part([batch])])
            if len(last.texts):
                drawn[last.texts] = draw(last.logits, self._distribution, [numbers[i] for i in last.texts])
        return learner.mesh.max_over_all(drawn).tolist()

    def _batches(self, learner: Learner, texts: Sequence[Sequence[int]], growing: set[int]) -> list[MicroBatch]:
        """This data-parallel rank's texts, in as many micro-batches as on every other; the rest of a window is padding.

        The target of a text's last token is the text's number; all other targets are IGNORED.
        """
        training = self._config.training
        dp = learner.mesh.sizes.dp
        shape = (training.micro_batch_size, training.seq_len)
        n_batches = -(-len(texts) // (dp * training.micro_batch_size))
        tokens = torch.zeros(n_batches, *shape, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for row, number in enumerate(range(learner.mesh.dp_rank, len(texts), dp)):
            text = texts[number]
            tokens.flatten(0, 1)[row, : len(text)] = torch.tensor(text)
            if number in growing:
                targets.flatten(0, 1)[row, len(text) - 1] = number
        positions = documents = None
        if self._config.data.document_mask:
            positions = torch.arange(shape[1]).repeat(shape[0], 1)
            documents = torch.zeros(shape, dtype=torch.int64)
        return [MicroBatch(*each, positions, documents, []) for each in zip(tokens, targets, strict=True)]


class _LogitsAtTargets:
    """Stands in for the loss: keeps the logits of the tokens that have a target; they stay empty where no head is."""

    def __init__(self) -> None:
        self.texts: list[int] = []
        """The targets."""
        self.logits = torch.empty(0)
        """(texts, vocab)."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Arguments as of `CrossEntropy`; returns zero, (), in the place of a loss."""
        is_wanted = targets != IGNORED
        self.texts = targets[is_wanted].tolist()
        logits = F.linear(hidden[is_wanted], weight)
        if group is not None and self.texts:
            parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, logits, group=group)
            logits = torch.cat(parts, -1)
        self.logits = logits
        return hidden.new_zeros(())
