"""Names that only the model or torch knows are checked by --validate, as they are before a run is built."""

import pytest

from configs.command_line import answer, parse_command_line
from configs.errors import ConfigError
from configs.load import load
from trainer.planning.for_validate import check_names

SELECTIVE = ("--activation_checkpoint.mode", "selective")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--optimizer.groups", '[{pattern = "*.up_porj.*", lr_scale = 0.1}]'),
            '--optimizer.groups: optimizer.groups[0]: pattern "*.up_porj.*" matches no parameter; the nearest '
            "names are layers.",
        ),
        (
            ("--optimizer.groups", '[{pattern = "*", lr_scale = 0.1}, {pattern = "*norm*", lr_scale = 2.0}]'),
            '--optimizer.groups: optimizer.groups[1]: pattern "*norm*" selects no parameter, because earlier',
        ),
        (
            ("--optimizer.groups", '[{pattern = "*", freeze = true}]'),
            "--optimizer.groups: optimizer.groups: all parameters are frozen",
        ),
        (
            (*SELECTIVE, "--activation_checkpoint.save_ops", '["aten.mmm"]'),
            '--activation_checkpoint.save_ops: activation_checkpoint.save_ops: no op is named "aten.mmm"; nearest: ',
        ),
        (
            (*SELECTIVE, "--activation_checkpoint.save_every_nth_matmul", "9"),
            "--activation_checkpoint.save_every_nth_matmul: activation_checkpoint.save_every_nth_matmul = 9 keeps no",
        ),
    ],
)
def test_validate_refuses_what_does_not_exist(words, message):
    command = parse_command_line(["--config", "debug.toml", "--validate", *words])
    with pytest.raises(ConfigError) as caught:
        answer(command, {}, check_names=check_names)
    assert str(caught.value).startswith(message)


def test_all_mistakes_come_at_once():
    groups = ("--optimizer.groups", '[{pattern = "nothing", freeze = true}]')
    ops = (*SELECTIVE, "--activation_checkpoint.save_ops", '["nothing"]')
    with pytest.raises(ConfigError) as caught:
        check_names(load("debug.toml", [*groups, *ops]))
    first, second = str(caught.value).splitlines()
    assert first.startswith("--optimizer.groups: ")
    assert second.startswith("--activation_checkpoint.save_ops: ")


def test_names_that_exist_are_no_mistake(capsys):
    groups = ("--optimizer.groups", '[{pattern = "*norm*", lr_scale = 0.1}]')
    ops = (*SELECTIVE, "--activation_checkpoint.save_ops", '["aten.mm", "aten._scaled_dot_product_*"]')
    command = parse_command_line(["--config", "debug.toml", "--validate", *groups, *ops])
    assert answer(command, {}, check_names=check_names)
    assert "debug" in capsys.readouterr().out


def test_a_job_without_such_names_needs_no_torch():
    def torch_is_asked(_):
        raise AssertionError

    assert answer(parse_command_line(["--config", "llama_8b.toml", "--validate"]), {}, check_names=torch_is_asked)
