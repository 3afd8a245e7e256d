"""The models on which parity is shown, and the bitwise comparison that shows it.

It knows nothing of ebbtide. A parity test reads:

    model, inputs = entry.build()
    plain = snapshot(entry, model, inputs)
    model, inputs = entry.build()
    with ebbtide.offload(model):
        offloaded = snapshot(entry, model, inputs)
    assert_bitwise_equal(plain, offloaded)
"""

import contextlib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import zoo_neuralop
import zoo_plain
import zoo_transformers

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]
Snapshot = dict[str, Tensor | None]

INSTALL_HINTS = {
    "neuralop.models": "pip install neuraloperator==2.0.0",
    "torch_harmonics": "pip install --no-deps --no-build-isolation torch-harmonics==0.8.0",
    "transformers": "pip install transformers",
}


@dataclass(frozen=True)
class Entry:
    """One model of the zoo and the step that the parity tests run on it.

    Args:
        name: also the pytest id.
        draw: makes the model and the keyword arguments of its forward from torch's global
            random numbers, on the CPU.
        requires: the module without which the entry is skipped.
        autocast: dtype of the autocast region around the forward; None for no such region.
        frozen: glob patterns of parameters that do not require gradients.
        idle: glob patterns of trainable parameters that the step does not use: no gradient.
    """

    name: str
    draw: Callable[[], tuple[nn.Module, Inputs]]
    requires: str | None = None
    autocast: torch.dtype | None = None
    frozen: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    def build(self, device: torch.device | str = "cpu") -> tuple[nn.Module, Inputs]:
        """Makes the model in training mode, and inputs that require gradients if not integers.

        Everything is drawn on the CPU and then moved: every device starts from the same numbers.
        Skips the calling test if `requires` cannot be imported.
        """
        if self.requires:
            reason = f"{self.name} needs {self.requires}: {INSTALL_HINTS[self.requires]}"
            pytest.importorskip(self.requires, reason=reason, exc_type=ImportError)
        torch.manual_seed(0)
        model, inputs = self.draw()
        model.to(device)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not _matches(name, self.frozen))
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        for tensor in inputs.values():
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        return model, inputs

    def run(self, model: nn.Module, inputs: Inputs, seed: int = 0) -> tuple[Tensor, Outputs]:
        """Seeds (for dropout), runs the forward, and returns the loss and the outputs.

        The loss is the model's own where the inputs have labels, else the mean of the squares.
        """
        torch.manual_seed(seed)
        # Of the inputs: the weights may be at rest on the host.
        device_type = next(iter(inputs.values())).device.type
        autocast = (
            torch.autocast(device_type, self.autocast)
            if self.autocast
            else contextlib.nullcontext()
        )
        with autocast:
            result = model(**inputs)
        if "labels" in inputs:
            return result.loss, (result.logits,)
        outputs = result if isinstance(result, tuple) else (result,)
        return torch.stack([_mean_square(output) for output in outputs]).sum(), outputs

    def loss(self, model: nn.Module, inputs: Inputs, seed: int = 0) -> Tensor:
        """The real scalar loss of one forward; see `run`."""
        return self.run(model, inputs, seed)[0]

    def without_gradient(self, parameter_name: str) -> bool:
        """Whether a step leaves the gradient of this parameter at None."""
        return _matches(parameter_name, self.frozen + self.idle)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _mean_square(output: Tensor) -> Tensor:
    real = torch.view_as_real(output) if output.is_complex() else output.float()
    return real.square().mean()


@contextlib.contextmanager
def deterministic(*, warn_only: bool = True) -> Iterator[None]:
    """Within the block torch takes its deterministic kernels, where it has them.

    With `warn_only`, attention on CUDA takes others; without it, what has none raises.

    On a CPU only gino and fnogno need it: with several threads, the gradient of an indexed
    tensor (their coordinates) is otherwise summed in the order in which the threads arrive.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warned_only)


def snapshot(entry: Entry, model: nn.Module, inputs: Inputs) -> Snapshot:
    """Runs one forward and backward; copies the loss, the outputs and all of `gradients`.

    Gradients accumulate, as they do in training: on a model that has already stepped, call
    `model.zero_grad()` first and set the inputs' gradients to None.
    """
    with deterministic():
        loss, outputs = entry.run(model, inputs)
        loss.backward()
    taken: Snapshot = {"loss": loss.detach().clone()}
    for number, output in enumerate(outputs):
        taken[f"output {number}"] = output.detach().clone()
    return taken | gradients(model, inputs)


def gradients(model: nn.Module, inputs: Inputs) -> Snapshot:
    """Copies of what a backward left: every parameter's and input's gradient, and the buffers.

    A missing gradient is None. Tied parameters appear once, under their first name.
    """
    taken: Snapshot = {}
    for name, parameter in model.named_parameters():
        taken[f"gradient of {name}"] = _copy(parameter.grad)
    for name, tensor in inputs.items():
        taken[f"gradient of input {name}"] = _copy(tensor.grad)
    for name, buffer in model.named_buffers():
        taken[f"buffer {name}"] = _copy(buffer)
    return taken


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def assert_bitwise_equal(actual: Snapshot, expected: Snapshot) -> None:
    """Asserts equal names, dtypes, shapes, strides and bits: NaN equals NaN, -0.0 is not 0.0.

    Raises:
        AssertionError: names the first tensor that differs, and its first differing element.
    """
    assert actual.keys() == expected.keys(), (
        f"different tensors: {sorted(actual.keys() ^ expected.keys())}"
    )
    for name, tensor in actual.items():
        difference = _difference(tensor, expected[name])
        assert difference is None, f"{name}: {difference}"


def tensors_in(arguments: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, and in their lists.

    `tree_leaves` finds them, too, and takes five times as long.
    """
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from tensors_in(each)


def _difference(actual: Tensor | None, expected: Tensor | None) -> str | None:
    if actual is None or expected is None:
        return None if actual is expected else f"{_layout(actual)} != {_layout(expected)}"
    if _layout(actual) != _layout(expected):
        return f"{_layout(actual)} != {_layout(expected)}"
    differs = (_element_bytes(actual) != _element_bytes(expected)).any(dim=1).nonzero()
    if not differs.numel():
        return None
    first = int(differs[0])
    return (
        f"{differs.numel()} of {actual.numel()} elements differ, first at flat index {first}: "
        f"{actual.reshape(-1)[first].item()!r} != {expected.reshape(-1)[first].item()!r}"
    )


def _layout(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    # The stride of a dimension of size 1 addresses nothing and is free to differ.
    strides = tuple(
        stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1
    )
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {strides}"


def _element_bytes(tensor: Tensor) -> Tensor:
    """Shape: (element, byte of the element), uint8; on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return flat.view(torch.uint8).reshape(-1, flat.element_size())


def _neuralop_entries() -> list[Entry]:
    names = "fno_1d fno_2d fno_3d fno_complex tfno uno codano gino fnogno rno otno"
    return [
        *(Entry(name, getattr(zoo_neuralop, name), "neuralop.models") for name in names.split()),
        Entry("sfno", zoo_neuralop.sfno, "torch_harmonics"),
        Entry("local_no", zoo_neuralop.local_no, "torch_harmonics"),
        Entry("uqno", zoo_neuralop.uqno, "neuralop.models", idle=("base_model.*",)),
        Entry(
            "fno_2d_frozen",
            zoo_neuralop.fno_2d,
            "neuralop.models",
            frozen=("lifting.*", "fno_blocks.convs.1.*"),
        ),
        Entry("fno_2d_bf16", zoo_neuralop.fno_2d_small, "neuralop.models", autocast=torch.bfloat16),
    ]


def _transformers_entries() -> list[Entry]:
    llama = zoo_transformers.llama
    names = "llama llama_tied llama_checkpointed gpt2 vit t5"
    return [
        *(Entry(name, getattr(zoo_transformers, name), "transformers") for name in names.split()),
        Entry("llama_bf16", llama, "transformers", autocast=torch.bfloat16),
        Entry(
            "llama_frozen",
            llama,
            "transformers",
            frozen=("model.embed_tokens.*", "model.layers.[01].*"),
        ),
    ]


def _plain_entries() -> list[Entry]:
    names = "convnet convnet_channels_last unet recurrent"
    return [
        *(Entry(name, getattr(zoo_plain, name)) for name in names.split()),
        Entry(
            "mixture_of_experts",
            zoo_plain.mixture_of_experts,
            idle=("mixtures.0.experts.3.*", "mixtures.1.experts.0.*"),
        ),
    ]


ENTRIES = (*_neuralop_entries(), *_transformers_entries(), *_plain_entries())
