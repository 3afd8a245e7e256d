"""Hardware: presets with sources, and the file that `ebbtide doctor --json` writes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbtide import PolicyError
from ebbtide.devices.hardware import FIGURES, document
from ebbtide.planning import Hardware

ALL = Hardware.names()
GB, TERA = 10**9, 10**12


def make(**changed: Any) -> Hardware:
    """A small machine whose figures are easy to compute with."""
    values: dict[str, Any] = {
        "name": "test",
        "device_memory_bytes": 24 * GB,
        "device_memory_bytes_per_s": 1e12,
        "matmul_fp32_flops": 50e12,
        "h2d_bytes_per_s": 20e9,
        "d2h_bytes_per_s": 25e9,
        "duplex_bytes_per_s": 40e9,
        "link_latency_s": 1e-5,
        "host_memory_bytes": 64 * GB,
        "pinned_limit_bytes": 32 * GB,
    } | changed
    figures = [name for name in FIGURES if values.get(name) is not None]
    sources = dict.fromkeys(figures, "assumed: a test")
    return Hardware(**({"sources": sources} | values))


# ---- presets -------------------------------------------------------------------------------------


def test_the_presets_that_the_design_names() -> None:
    wanted = {"rtx4090", "a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h200", "gh200"}
    assert wanted | {"gb200", "mi300x", "cpu"} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_a_source_that_says_how_it_is_known(name: str) -> None:
    hardware = Hardware.named(name)
    assert not hardware.is_measured  # nobody has run the doctor there
    known = [figure for figure in FIGURES if getattr(hardware, figure) is not None]
    assert known == [figure for figure in FIGURES if figure in hardware.sources]
    for figure in known:
        kind, _, text = hardware.sources[figure].partition(": ")
        assert kind in ("data sheet", "published", "assumed"), figure
        assert len(text) > 15, figure
        # No program gets what a data sheet says of a rate.
        assert kind != "data sheet" or figure.endswith("_bytes"), figure


@pytest.mark.parametrize("name", ALL)
def test_presets_are_sane(name: str) -> None:
    hardware = Hardware.named(name)
    one_way = (hardware.h2d_bytes_per_s, hardware.d2h_bytes_per_s)
    assert max(one_way) <= hardware.duplex_bytes_per_s <= sum(one_way)
    assert max(one_way) < hardware.device_memory_bytes_per_s
    assert hardware.matmul_flops("float64") <= hardware.matmul_flops("float32")
    assert hardware.matmul_flops("float32") <= hardware.matmul_flops("bfloat16")
    assert 0 < hardware.link_latency_s < 1e-3
    assert hardware.pinned_limit_bytes <= hardware.host_memory_bytes
    for figure, source in hardware.sources.items():
        # What is assumed is a share of what the data sheet says.
        share = re.match(r"assumed: ([\d.]+) of the ([\d.e]+) of", source)
        if share is not None:
            expected = float(share[1]) * float(share[2])
            assert getattr(hardware, figure) == pytest.approx(expected, rel=0.02), figure


@pytest.mark.parametrize("name", ["H100", " h100 ", "H100-SXM", "h100_sxm", "H100 SXM"])
def test_names_are_read_kindly(name: str) -> None:
    assert Hardware.named(name) == Hardware.named("h100-sxm")


@pytest.mark.parametrize("name", ["h10", "v100", "", None, 100])
def test_an_unknown_name_lists_all(name: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        Hardware.named(name)
    for known in ALL:
        assert known in str(caught.value)


# ---- what a plan asks ----------------------------------------------------------------------------


def test_times_of_copies() -> None:
    hardware = make()
    assert hardware.offload_s(25e9) == pytest.approx(1 + 1e-5)
    assert hardware.reload_s(25e9) == pytest.approx(1.25 + 1e-5)
    assert hardware.offload_s(0) == 1e-5


def test_types_of_products() -> None:
    hardware = make(matmul_fp64_flops=1e12, matmul_bf16_flops=400e12)
    assert hardware.matmul_flops(torch.float64) == hardware.matmul_flops("complex128") == 1e12
    assert hardware.matmul_flops(torch.float32) == hardware.matmul_flops(torch.complex64) == 50e12
    assert hardware.matmul_flops(torch.bfloat16) == 400e12
    assert hardware.matmul_flops(torch.float16) == 50e12  # not known to be faster
    with pytest.raises(PolicyError):
        hardware.matmul_flops(torch.int8)
    with pytest.raises(PolicyError):
        make().matmul_flops(torch.float64)


# ---- checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d2h_bytes_per_s": 0.0}, "d2h_bytes_per_s must be a number, more than 0"),
        ({"d2h_bytes_per_s": -1.0}, "d2h_bytes_per_s"),
        ({"h2d_bytes_per_s": float("nan")}, "h2d_bytes_per_s"),
        ({"h2d_bytes_per_s": float("inf")}, "h2d_bytes_per_s"),
        ({"matmul_fp32_flops": "50e12"}, "matmul_fp32_flops must be a number.*'50e12'"),
        ({"device_memory_bytes": 24e9}, "device_memory_bytes must be a whole number"),
        ({"device_memory_bytes": True}, "device_memory_bytes must be a whole number"),
        ({"link_latency_s": -1e-6}, "link_latency_s must be a number, 0 or more"),
        ({"duplex_bytes_per_s": 46e9}, r"more than both directions have alone \(4.5e\+10\)"),
        ({"name": ""}, "name must be text"),
        ({"computes_on_host": 1}, "computes_on_host must be True or False"),
    ],
)
def test_wrong_figures_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make(**changed)


# ---- JSON ----------------------------------------------------------------------------------------

rates = st.floats(1e-3, 1e18)
sizes = st.integers(1, 10**15)


@st.composite
def machines(draw: st.DrawFn) -> Hardware:
    down, up = draw(rates), draw(rates)
    optional = (f for f in FIGURES if f.startswith(("matmul_", "fft", "disk")))
    values: dict[str, Any] = {name: draw(st.none() | rates) for name in optional}
    values |= {"matmul_fp32_flops": draw(rates), "name": draw(st.text(min_size=1))}
    values |= {"computes_on_host": draw(st.booleans()), "device_memory_bytes": draw(sizes)}
    values |= {"h2d_bytes_per_s": up, "d2h_bytes_per_s": down}
    values |= {"duplex_bytes_per_s": draw(st.floats(0.1, 1)) * (up + down)}
    values |= {"link_latency_s": draw(st.floats(0, 1)), "pinned_limit_bytes": draw(sizes)}
    values |= {"host_memory_bytes": draw(sizes), "device_memory_bytes_per_s": draw(rates)}
    sources = {name: draw(st.text()) for name in FIGURES if values.get(name) is not None}
    return Hardware(sources=sources, **values)


@given(machines())
def test_json_gives_the_same_hardware(hardware: Hardware) -> None:
    assert Hardware.from_json(hardware.to_json()) == hardware
    with_figures = json.dumps(document(hardware, {"links": [1, 2]}))
    assert Hardware.from_json(with_figures) == hardware


def changed_json(part: str, **entries: Any) -> str:
    content = json.loads(make().to_json())
    (content if part == "file" else content[part]).update(entries)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON of an ebbtide-hardware: Expecting property name"),
        ("[]", "not the JSON of an ebbtide-hardware.*ebbtide doctor --json"),
        (changed_json("file", format="ebbtide-plan"), "not the JSON of an ebbtide-hardware"),
        (changed_json("file", version=1), "version 1, and this ebbtide reads version 2"),
        (changed_json("file", version=True), "version True"),
        (changed_json("file", hardware=3), "'hardware' of .* must be an object, got 3"),
        (
            changed_json("hardware", h2d_bytes_per_sec=1.0),
            "unknown keys: h2d_bytes_per_sec; did you mean 'h2d_bytes_per_s'?",
        ),
        (changed_json("hardware", h2d_bytes_per_s="fast"), "h2d_bytes_per_s must be a number"),
        (changed_json("hardware", sources=[]), "sources must be an object, got"),
        (
            changed_json("hardware", sources={"h2d_bytes_per_s": 1}),
            "sources must be of the type str, got 1",
        ),
    ],
)
def test_wrong_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Hardware.from_json(text)
