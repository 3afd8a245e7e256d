"""The public surface: these names, documented, with keywords after the first argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import pytest

import ebbtide


def test_exported_names() -> None:
    assert ebbtide.__all__ == [
        "ActivationPolicy",
        "BudgetError",
        "EbbtideError",
        "Explanation",
        "Finding",
        "ForkedProcessError",
        "Inspection",
        "OffloadHandle",
        "OffloadSession",
        "OverlapStats",
        "PlannedStep",
        "PolicyError",
        "RebuildRecipe",
        "SavedTensorModifiedError",
        "Schedule",
        "ScheduleError",
        "StepStats",
        "StoreFullError",
        "Trace",
        "TraceEvent",
        "VerifyReport",
        "WeightPolicy",
        "__version__",
        "offload",
        "register_rebuild",
        "rehearse",
        "schedule",
        "verify",
        "wrap_forward_with_offload",
    ]


@pytest.mark.parametrize("name", ebbtide.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert hasattr(ebbtide, name)


def documented() -> Iterator[tuple[str, object]]:
    """Exported functions and classes, and what these define without an underscore."""
    for name in ebbtide.__all__:
        exported = getattr(ebbtide, name)
        if not callable(exported):
            continue
        yield name, exported
        if inspect.isclass(exported):
            for member_name, member in vars(exported).items():
                is_documented = callable(member) or isinstance(member, property)
                if is_documented and not member_name.startswith("_"):
                    yield f"{name}.{member_name}", member


DOCUMENTED = dict(documented())


def test_methods_and_properties_are_looked_at() -> None:
    assert {"OffloadHandle.detach", "OffloadHandle.stats", "offload"} <= DOCUMENTED.keys()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_everything_public_has_a_docstring(name: str) -> None:
    own = DOCUMENTED[name].__doc__  # not inspect.getdoc, which would take a base class's
    assert own
    # A dataclass without one is given its signature.
    assert not own.startswith(f"{name}(")


@pytest.mark.parametrize("function", [ebbtide.offload, ebbtide.wrap_forward_with_offload])
def test_all_but_the_first_argument_are_keywords(function: Callable[..., object]) -> None:
    first, *others = inspect.signature(function).parameters.values()
    assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert first.default is inspect.Parameter.empty
    assert others
    for parameter in others:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert parameter.default is not inspect.Parameter.empty, parameter


@pytest.mark.parametrize("function", [ebbtide.offload, ebbtide.wrap_forward_with_offload])
def test_every_argument_is_explained(function: Callable[..., object]) -> None:
    for name in inspect.signature(function).parameters:
        assert f"\n    {name}: " in inspect.getdoc(function), name


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ebbtide.PolicyError, ValueError),
        (ebbtide.ScheduleError, ValueError),
        (ebbtide.StoreFullError, OSError),
        (ebbtide.SavedTensorModifiedError, RuntimeError),
        (ebbtide.ForkedProcessError, RuntimeError),
    ],
)
def test_errors_form_one_tree(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, ebbtide.EbbtideError)
    assert issubclass(error, builtin)
