"""Rules for the kernel of attention; what only the GPU and torch decide is checked when the run starts."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.schema import Config

_GPU_ONLY = ("cudnn", "flash3", "flex")


def _attention(config: Config, _: int | None) -> Iterator[Problem]:
    backend = config.attention.backend
    for reason in _reasons(config, backend):
        yield "attention.backend", f'backend "{backend}" {reason}'


def _reasons(config: Config, backend: str) -> Iterator[str]:
    if backend in _GPU_ONLY and config.job.device == "cpu":
        yield 'runs on GPUs only, and job.device is "cpu"; set "auto" or "flash2"'
    if backend in ("cudnn", "flex") and config.data.document_mask:
        yield 'does not take packed documents (data.document_mask); set "auto", "flash2" or "flash3"'
    if backend == "cudnn" and config.training.deterministic:
        yield 'adds up gradients in any order, which training.deterministic forbids; set "auto" or "flash2"'
    if backend == "flex" and not config.compile.enable:
        yield "holds all scores unless it is compiled; set compile.enable = true"
    if backend == "flex" and config.mesh.cp > 1 and config.context.method != "all_to_all":
        yield f'has no form for context.method = "{config.context.method}"; set context.method = "all_to_all"'


RULES: tuple[Rule, ...] = (_attention,)
