"""Settings of a training that would end it later, or change it unasked: each is refused in one message, at once."""
# Fixtures are imported.
# ruff: noqa: F401, F811

import re

import pytest
from fit_helpers import checkpoints
from mistake_helpers import decoding, evaluate, fit, made, told

PROMPTS = "prompts.jsonl"
# Changes of a sound configuration, and what is said of them.
REFUSED = {
    "no logging": ({"trainer.log_every_n_steps": 0}, "trainer.log_every_n_steps is 0"),
    "no training": ({"trainer.limit_train_batches": 0}, "nothing would be trained"),
    "another sampler": ({"trainer.overfit_batches": 2}, "trainer.overfit_batches would put"),
    "a validation inside a step": (
        {"trainer.accumulate_grad_batches": 2, "trainer.val_check_interval": 3},
        "val_check_interval 3 validates after every 3 micro-batches, and a step takes 2",
    ),
    "workers below none": ({"data.num_workers": -1}, "data.num_workers is -1"),
    "a negative seed of the data": ({"data.seed": -1}, "data.seed is -1"),
    "a negative seed": ({"seed_everything": -1}, "seed_everything is -1; expected 0 to 4294967295"),
    "a limit without an end": ({"data.staging.max_gb": float("inf")}, "staging.max_gb is inf"),
    "a wait without an end": ({"data.object_store.timeout": float("inf")}, "object_store.timeout is inf"),
    "a logger whose package is missing": (
        {"trainer.logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}},
        "WandbLogger can't be made: Requirement 'wandb",
    ),
    "a group of settings that is null": ({"data.staging": None}, "data.staging is null; expected settings"),
    "a number that is null": (
        {"model.optimizer.lr": None},
        r"model.optimizer.lr is null; expected float. Leave it out for the default, 0.0006",
    ),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_is_refused(made, monkeypatch, capsys, name):
    changes, expected = REFUSED[name]
    message = told(monkeypatch, capsys, fit(made, changes))
    assert "Traceback" not in message
    assert re.search(expected, message), message


def callbacks_of(made) -> dict[str, tuple[list[dict], dict, str]]:
    """Callbacks, other changes, and what is said of them."""
    prompts, folder = made.folder / PROMPTS, made.folder
    long = folder / "long.jsonl"
    long.write_text('{"prompt": "' + "x" * 600 + '"}\n')
    best = checkpoints(folder, "best", monitor="decode/tau", mode="max")
    return {
        "null": (
            [decoding(prompts, max_new_tokens=None)],
            {},
            r"trainer.callbacks\[0\].init_args.max_new_tokens is null; expected int",
        ),
        "no validation": ([decoding(prompts)], {"trainer.limit_val_batches": 0}, "trainer.limit_val_batches is 0, and"),
        "nothing held back": ([decoding(prompts)], {"data.validation_fraction": 0.0}, "no sample is held back"),
        "a prompt too long": ([decoding(long)], {}, r"the prompt has 6\d\d tokens, and the target has 512 positions"),
        "a monitor that nothing measures": ([best], {}, "monitors decode/tau, which DecodedAcceptance measures"),
        "two of a kind": ([decoding(prompts), decoding(prompts)], {}, "Found more than one stateful callback"),
        "settings of the data": ([decoding(prompts)], {"data.batch_tokens": 10}, "data.batch_tokens is 10"),
        "an interval of time": (
            [decoding(prompts)],
            {"trainer.val_check_interval": "00:01:00:00"},
            "trainer.val_check_interval is a time",
        ),
    }


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "name",
    [
        *("null", "no validation", "nothing held back", "a prompt too long", "a monitor that nothing measures"),
        *("two of a kind", "settings of the data", "an interval of time"),
    ],
)
def test_it_is_refused_before_a_text_is_decoded(made, monkeypatch, capsys, name):
    callbacks, changes, expected = callbacks_of(made)[name]
    monkeypatch.setattr("callbacks.acceptance.FrozenTarget", None)
    message = told(monkeypatch, capsys, fit(made, {**changes, "trainer.callbacks": callbacks}))
    assert "Traceback" not in message
    assert re.search(expected, message), message


def test_a_null_in_the_file_of_a_command_is_refused(made, monkeypatch, capsys):
    message = told(monkeypatch, capsys, evaluate(made, config=made.folder / "evaluate.yaml"))
    assert "max_new_tokens is null; expected int" in message
