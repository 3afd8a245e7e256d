"""Runs of a `Trainer` that end early, repeat or overlap, and what its callback refuses."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

# The Trainer imports `datasets` where that is installed, which in turn may lack what it needs.
pytest.importorskip(
    "transformers.trainer", exc_type=ImportError, reason="the Trainer cannot be imported here"
)

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import ebbtide
from callback_bench import (
    DATA,
    DEFAULTS,
    ROWS,
    SMALL,
    assert_is_plain,
    gpt2,
    results,
    trainer_for,
)
from ebbtide.interop.training_offload import TrainingOffload
from ebbtide.interop.transformers import OffloadCallback
from run_program import weights_digest


class Fail(TrainerCallback):
    """Raises at a step, once."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", ["same trainer", "new trainer", "new callback"])
def test_training_goes_on_after_an_error(
    error: type[BaseException], again: str, tmp_path: Path
) -> None:
    """As in a notebook whose cell is run again: the model is trained further."""

    def train(make: Any) -> tuple[list[str], str]:
        model, callbacks = gpt2(), make()
        options = {"gradient_accumulation_steps": 2, "max_steps": 2}
        trainer = trainer_for(model, tmp_path, [*callbacks, Fail(error("stop"))], **options)
        with pytest.raises(error, match="stop"):
            trainer.train()
        if again != "same trainer":
            callbacks = callbacks if again == "new trainer" else make()
            trainer = trainer_for(model, tmp_path, callbacks, **options)
        trainer.train()
        if callbacks:
            assert_is_plain(model)
        return results(trainer)

    assert train(lambda: [OffloadCallback(activations=SMALL)]) == train(list)


def test_detach_after_an_error(tmp_path: Path) -> None:
    model = gpt2()
    fail = Fail(ValueError("stop"))
    with OffloadCallback(activations=SMALL) as callback:
        trainer = trainer_for(model, tmp_path, [callback, fail], gradient_accumulation_steps=2)
        with pytest.raises(ValueError, match="stop"):
            trainer.train()
        with torch.no_grad():
            model(input_ids=ROWS[:2])  # it works as it is
    assert_is_plain(model)
    callback.detach()
    ebbtide.offload(model).detach()


def test_the_model_of_a_failed_run_is_freed_with_its_trainer(tmp_path: Path) -> None:
    callback = OffloadCallback(activations=SMALL)
    trainer = trainer_for(
        gpt2(), tmp_path, [callback, Fail(ValueError("stop"))], gradient_accumulation_steps=2
    )
    with pytest.raises(ValueError, match="stop"):
        trainer.train()
    model = weakref.ref(trainer.model)
    del trainer, callback
    gc.collect()
    assert model() is None


def test_a_smaller_batch_is_found(tmp_path: Path) -> None:
    class NoMemory(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.train_batch_size > 6:
                raise RuntimeError("CUDA out of memory.")

    def train(callbacks: list[TrainerCallback]) -> tuple[list[str], str]:
        trainer = trainer_for(gpt2(), tmp_path, [*callbacks, NoMemory()], auto_find_batch_size=True)
        trainer.train()
        assert trainer._train_batch_size == 6
        assert_is_plain(trainer.model)
        return results(trainer)

    assert train([OffloadCallback(activations=SMALL)]) == train([])


def test_trials_of_a_search_make_models_of_their_own(tmp_path: Path) -> None:
    callback = OffloadCallback(activations=SMALL)
    arguments = TrainingArguments(str(tmp_path), **DEFAULTS)
    trainer = Trainer(args=arguments, model_init=gpt2, train_dataset=DATA, callbacks=[callback])
    trainer.train()
    first = trainer.model
    trainer.train()
    assert trainer.model is not first
    assert weights_digest(trainer.model) == weights_digest(first)
    assert_is_plain(first)
    assert_is_plain(trainer.model)


def test_two_trainers_at_once(tmp_path: Path) -> None:
    """The second trains another model inside a step of the first, as a reward model might."""
    inner: list[Any] = []

    class Nested(TrainerCallback):
        def __init__(self, callbacks: list[TrainerCallback]) -> None:
            self.callbacks = callbacks

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step == 2:
                other = trainer_for(gpt2(), tmp_path, self.callbacks)
                other.train()
                inner.append(results(other))

    plain = trainer_for(gpt2(), tmp_path, [Nested([])])
    plain.train()
    nested = Nested([OffloadCallback(activations=SMALL)])
    trainer = trainer_for(gpt2(), tmp_path, [OffloadCallback(activations=SMALL), nested])
    trainer.train()
    assert results(trainer) == results(plain)
    assert inner[0] == inner[1]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": "20 apples"}, "budget"),
        ({"budget": "0B"}, "is 0 bytes"),
        ({"budget": "1GiB", "plan": "plan.json"}, "budget makes a plan"),
        ({"activations": True}, "activations must be"),
        ({"weights": SMALL}, "weights must be"),
        ({"trace": "yes"}, "trace must be"),
        ({"budget": "1GiB", "activations": ebbtide.ActivationPolicy(num_layers=2)}, "min_bytes"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ebbtide.PolicyError, match=message):
        OffloadCallback(**arguments)


def test_two_callbacks_for_one_model(tmp_path: Path) -> None:
    trainer = trainer_for(gpt2(), tmp_path, [OffloadCallback(), OffloadCallback()])
    with pytest.raises(ebbtide.PolicyError):
        trainer.train()


def test_offloaded_by_hand_as_well(tmp_path: Path) -> None:
    model = gpt2()
    handle = ebbtide.offload(model)
    with pytest.raises(ebbtide.PolicyError):
        trainer_for(model, tmp_path, [OffloadCallback()]).train()
    handle.detach()


def test_data_parallel_in_one_process_is_refused(tmp_path: Path) -> None:
    trainer = trainer_for(gpt2(), tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ebbtide.PolicyError):
        OffloadCallback().on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model
        )
    assert_is_plain(trainer.model)


def test_a_budget_beside_gradient_checkpointing_is_warned_of(tmp_path: Path) -> None:
    callback = OffloadCallback(budget="90%")
    trainer = trainer_for(gpt2(), tmp_path, [callback], activation_checkpointing=True)
    with pytest.warns(UserWarning, match="gradient checkpointing"):
        trainer.train()


def test_a_copy_of_the_callback_offloads_nothing_yet(tmp_path: Path) -> None:
    callback = OffloadCallback(activations=SMALL)
    trainer_for(gpt2(), tmp_path, [callback], max_steps=1).train()
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.handle is None
        trainer = trainer_for(gpt2(), tmp_path, [copied], max_steps=1)
        trainer.train()
        assert copied.handle.stats.offloaded_bytes > 0


def test_missing_transformers_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None\nimport ebbtide.interop.transformers"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert 'pip install "ebbtide[transformers]"' in run.stderr.splitlines()[-1]


def test_steps_are_counted_once() -> None:
    """A step that did not run, such as one that was skipped, adds nothing."""
    offload = TrainingOffload(activations=SMALL)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(3)])
    offload.count_step()
    assert offload.take_metrics(1) == {}
    offload.begin(model, run=model)
    assert offload.is_attached
    offload.count_step()
    assert offload.take_metrics(1) == {}
    model(torch.randn(64, 64)).sum().backward()
    offload.count_step()
    offload.count_step()
    once = offload.take_metrics(1)
    assert offload.handle is not None
    assert once["ebbtide/offloaded_bytes"] == offload.handle.stats.offloaded_bytes
    offload.end()
    assert not offload.is_attached


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_optimizer_steps_inside_backward(
    max_grad_norm: float, accumulated: int, tmp_path: Path
) -> None:
    """With the Trainer's own optimizer, scheduler, clipping and log of the norm."""
    options = {
        "gradient_accumulation_steps": accumulated,
        "max_grad_norm": max_grad_norm,
        "optim": "adamw_torch",
        "max_steps": 5,
    }
    plain = trainer_for(gpt2(), tmp_path, **options)
    for _ in range(2):  # the second run begins anew, and trains the trained model
        plain.train()
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            seen.append(kwargs["optimizer"].optimizer.overlap)

    callback = OffloadCallback(activations=SMALL, weights=ebbtide.WeightPolicy(), overlap=True)
    trainer = trainer_for(gpt2(), tmp_path, [callback, Look()], **options)
    for _ in range(2):
        trainer.train()
    assert results(trainer) == results(plain)
    norms, expected = (
        [log["grad_norm"] for log in each.state.log_history if "grad_norm" in log]
        for each in (trainer, plain)
    )
    assert norms == expected
    assert len(norms) == 5
    clips = 0 < max_grad_norm < min(norms)
    assert seen[-1].num_steps == 5
    assert (seen[-1].num_overlapped == 0) is clips  # how many is a matter of time
    assert_is_plain(trainer.model)


def test_what_changes_gradients_cannot_overlap(tmp_path: Path) -> None:
    callback = OffloadCallback(overlap=True)
    trainer = trainer_for(gpt2(), tmp_path, [callback], optim="adafactor")
    with pytest.raises(ebbtide.PolicyError, match="Adafactor may need all gradients"):
        trainer.train()
    callback.detach()
