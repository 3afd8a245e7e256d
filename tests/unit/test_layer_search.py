"""Which modules are layers when the user names none: the blocks that a user would name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ebbtide
from architectures import (
    Attention,
    Bottleneck,
    DiffusersUNet,
    Experts,
    Mlp,
    Part,
    ResNet,
    Swin,
    SwinStage,
    TransformerBlock,
    UNet,
    UNetOfLists,
    convnext,
)
from ebbtide.runtime.layers import find_layers
from zoo import ENTRIES

BY_NAME = {entry.name: entry for entry in ENTRIES}


def names_of(pattern: str, *counts: int) -> list[str]:
    """``names_of("layer{}.{}", 3, 4)``: layer0.0 to layer0.2, then layer1.0 to layer1.3."""
    return [pattern.format(n, m) for n, count in enumerate(counts) for m in range(count)]


def holding(**modules: nn.Module) -> nn.Module:
    model = Part()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def mlps(count: int) -> list[nn.Module]:
    return [Mlp() for _ in range(count)]


# Convolutional nets


@pytest.mark.parametrize("depths", [(3, 4, 6, 3), (1, 1, 1, 1), (2, 1, 1, 2)])
def test_all_four_stages_of_a_resnet(depths: tuple[int, ...]) -> None:
    found = find_layers(ResNet(depths))
    expected = [f"layer{n + 1}.{m}" for n, depth in enumerate(depths) for m in range(depth)]
    assert found.names == expected
    assert found.num_calls == sum(depths)
    assert all(type(module) is Bottleneck for module in found.modules)


def test_a_resnet_counts_its_blocks_when_it_is_a_part() -> None:
    model = nn.Sequential(holding(body=ResNet((2, 2, 2, 2))), nn.Flatten(), nn.Linear(4, 4))
    assert find_layers(model).names == [f"0.body.layer{n}.{m}" for n in range(1, 5) for m in (0, 1)]


def test_convnext_blocks_without_stem_and_downsampling() -> None:
    found = find_layers(convnext((3, 3, 9, 3)))
    stages = {1: 3, 3: 3, 5: 9, 7: 3}
    assert found.names == [f"features.{n}.{m}" for n, depth in stages.items() for m in range(depth)]


@pytest.mark.parametrize("depths", [(2, 2, 6, 2), (1, 2, 1, 1)])
def test_a_stage_gives_way_to_its_blocks(depths: tuple[int, ...]) -> None:
    assert find_layers(Swin(depths)).names == names_of("layers.{}.blocks.{}", *depths)


def test_a_stage_of_one_block_of_another_class_counts_too() -> None:
    """As at the begin of an EfficientNet."""
    first = nn.Sequential(Attention())
    model = holding(blocks=nn.Sequential(first, nn.Sequential(*mlps(2)), nn.Sequential(*mlps(3))))
    assert find_layers(model).names == names_of("blocks.{}.{}", 1, 2, 3)


# U-Nets


def test_the_unet_of_diffusers() -> None:
    """Blocks with attention hold two lists that are called in turn: they are whole layers."""
    down, up = names_of("down_blocks.{1}", 3), names_of("up_blocks.{1}", 3)
    assert find_layers(DiffusersUNet()).names == [*down, *up, "mid_block"]


def test_a_unet_of_attributes() -> None:
    found = find_layers(UNet())
    assert found.names == ["inc", "up1", "up2", "down1", "down2"]  # as defined
    assert found.num_calls == 5


def test_a_unet_of_lists_and_a_bottleneck() -> None:
    found = find_layers(UNetOfLists())
    assert found.names == ["downs.0", "downs.1", "bottleneck", "ups.1", "ups.3"]


# Nested lists, several lists


def test_lists_in_lists() -> None:
    nested = nn.ModuleList([nn.ModuleList(mlps(2)), nn.ModuleList(mlps(1))])
    assert find_layers(holding(net=nested)).names == names_of("net.{}.{}", 2, 1)
    sequential = nn.Sequential(nn.Sequential(*mlps(2)), nn.Sequential(*mlps(3)))
    assert find_layers(sequential).names == names_of("{}.{}", 2, 3)
    deeper = nn.ModuleList([nn.ModuleList([SwinStage(8, 2, True)]) for _ in range(2)])
    found = find_layers(holding(net=deeper))
    assert found.names == names_of("net.{}.0.blocks.{}", 2, 2)


def test_pairs_in_a_list() -> None:
    """A list of (attention, perceptron): the pair itself is never called."""
    pairs = nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(3))
    found = find_layers(holding(layers=pairs, head=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 2))))
    assert found.names == names_of("layers.{}.{}", 2, 2, 2)


def test_several_lists_of_one_model() -> None:
    model = holding(
        encoder=holding(layers=nn.ModuleList(TransformerBlock() for _ in range(2))),
        decoder=holding(layers=nn.ModuleList(Mlp() for _ in range(3))),
    )
    found = find_layers(model)
    assert found.names == names_of("encoder.layers.{1}", 2) + names_of("decoder.layers.{1}", 3)
    assert found.num_calls == 5


def test_blocks_of_several_classes_in_one_list() -> None:
    """A hybrid of attention and another mixer, and one block that occurs once."""
    model = holding(layers=nn.ModuleList([TransformerBlock(), Mlp(), Mlp(), Attention()]))
    assert find_layers(model).names == [f"layers.{n}" for n in range(4)]


def test_blocks_hide_the_linear_maps_in_and_around_them() -> None:
    fcs = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    model = holding(layers=nn.ModuleList(mlps(2)), head=fcs)
    assert find_layers(model).names == ["layers.0", "layers.1"]
    assert find_layers(fcs).names == ["0", "2"]


# Experts and heads


@pytest.mark.parametrize("attends", [True, False])
def test_experts_are_no_layers(attends: bool) -> None:
    """By the name of their list."""
    blocks = nn.ModuleList(Experts(attends=attends) for _ in range(3))
    assert find_layers(holding(layers=blocks)).names == [f"layers.{n}" for n in range(3)]


def test_heads_inside_a_block_are_no_layers() -> None:
    def block() -> nn.Module:
        heads = nn.ModuleList(Attention() for _ in range(4))
        return holding(sa=holding(heads=heads, proj=nn.Linear(8, 8)), ffwd=Mlp())

    model = holding(blocks=nn.Sequential(*[block() for _ in range(3)]))
    assert find_layers(model).names == [f"blocks.{n}" for n in range(3)]


# Shared modules, single blocks


def test_one_module_under_two_names_is_one_layer() -> None:
    layers = nn.ModuleList(mlps(2))
    found = find_layers(holding(net=holding(layers=layers), alias=layers))
    assert [found.num_calls, len(found.modules)] == [2, 2]


def test_one_module_several_times_in_a_list() -> None:
    shared = Mlp()
    found = find_layers(nn.ModuleList([shared, Mlp(), shared]))
    assert (found.names, found.num_calls) == (["0", "1"], 3)


def test_a_single_block_may_be_called_several_times() -> None:
    """As in ALBERT; so any number of layers may be asked for."""
    model = holding(layers=nn.ModuleList(mlps(1)))
    found = find_layers(model)
    assert (found.names, found.num_calls) == (["layers.0"], None)
    ebbtide.offload(model, activations=ebbtide.ActivationPolicy(num_layers=12)).detach()


# Real ones


def transformers_model(model: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        with torch.device("meta"):
            return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return build


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
TEXT = {"num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 0, **SMALL}
REAL = {
    "bert": (
        transformers_model("BertForMaskedLM", "BertConfig", num_hidden_layers=3, **SMALL),
        ["bert.encoder.layer.#"] * 3,
    ),
    "bart": (
        transformers_model("BartForConditionalGeneration", "BartConfig", **BOTH, **TOKENS),
        ["model.encoder.layers.#"] * 2 + ["model.decoder.layers.#"] * 3,
    ),
    "whisper": (
        transformers_model("WhisperForConditionalGeneration", "WhisperConfig", **BOTH, **TOKENS),
        ["model.encoder.layers.#"] * 2 + ["model.decoder.layers.#"] * 3,
    ),
    "mixtral": (
        transformers_model(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_hidden_layers=3,
            num_key_value_heads=2,
            num_local_experts=4,
            **SMALL,
        ),
        ["model.layers.#"] * 3,
    ),
    "clip": (
        transformers_model(
            "CLIPModel",
            "CLIPConfig",
            text_config=TEXT,
            vision_config={"num_hidden_layers": 3, **SMALL},
        ),
        ["text_model.encoder.layers.#"] * 2 + ["vision_model.encoder.layers.#"] * 3,
    ),
    "mamba": (
        transformers_model("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=3),
        ["backbone.layers.#"] * 3,
    ),
    "resnet": (
        transformers_model("ResNetForImageClassification", "ResNetConfig"),
        ["resnet.encoder.stages.#.layers.#"] * 16,
    ),
    "swin": (
        transformers_model("SwinForImageClassification", "SwinConfig"),
        ["swin.encoder.layers.#.blocks.#"] * 12,
    ),
    "convnext": (
        transformers_model("ConvNextForImageClassification", "ConvNextConfig"),
        ["convnext.encoder.stages.#.layers.#"] * 18,
    ),
    "albert": (
        transformers_model("AlbertForMaskedLM", "AlbertConfig", num_hidden_layers=3, **SMALL),
        ["albert.encoder.albert_layer_groups.#"],
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    build, expected = REAL[name]
    assert [re.sub(r"\d+", "#", layer) for layer in find_layers(build()).names] == expected


@pytest.mark.parametrize(
    ("name", "layers", "num_calls"),
    [
        ("fno_2d", ["fno_blocks"], 3),
        ("tfno", ["fno_blocks"], 3),
        ("gino", ["fno_blocks"], 2),
        ("sfno", ["fno_blocks"], 3),
        ("codano", ["attention_layers.0", "attention_layers.1", "attention_layers.2"], 3),
        ("uqno", ["base_model.fno_blocks", "residual_model.fno_blocks"], 6),
        ("t5", names_of("encoder.block.{1}", 2) + names_of("decoder.block.{1}", 2), 4),
        ("unet", ["enter", "down1", "down2", "up2", "up1"], 5),
        ("recurrent", [], 0),
    ],
)
def test_models_of_the_zoo_call_the_layers_that_were_found(
    name: str, layers: list[str], num_calls: int
) -> None:
    entry = BY_NAME[name]
    model, inputs = entry.build()
    found = find_layers(model)
    assert (found.names, found.num_calls) == (layers, num_calls)
    calls: list[nn.Module] = []
    for module in found.modules:
        module.register_forward_hook(lambda module, *_: calls.append(module))
    entry.loss(model, inputs)
    assert len(calls) == num_calls


# Modules that compare in their own way


class Metric(nn.Module):
    """As those of torchmetrics: `==` makes another metric, which is true."""

    def __eq__(self, other: object) -> bool:
        return bool([self, other])

    def __hash__(self) -> int:
        return hash(("Metric", id(self)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_metrics_inside_a_model_are_no_layers() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Metric(), nn.Linear(4, 4), Metric())
    assert find_layers(plain).names == ["0", "3"]
    unet = UNet()
    unet._modules = {"metric": Metric(), **unet._modules}
    assert find_layers(unet).names == find_layers(UNet()).names


# What a budget plans for


def test_a_module_with_two_names_is_planned_for_once() -> None:
    """As the online and the averaged encoder of BYOL, and what redraws a Performer's features."""
    net = UNet()
    model = holding(first=net, again=holding(inner=net, stem=net.inc, head=nn.Linear(4, 4)))
    with ebbtide.offload(model, budget="90%") as handle:
        assert handle.layers[-1] == "again.head"
        assert {name.partition(".")[0] for name in handle.layers[:-1]} == {"first"}


# What the handle says


def test_a_handle_shows_its_layers_in_the_order_of_their_calls() -> None:
    model = UNet()
    with ebbtide.offload(model) as handle:
        assert handle.layers == ("inc", "up1", "up2", "down1", "down2")
        model(torch.randn(1, 3, 16, 16)).sum().backward()
        assert handle.layers == ("inc", "down1", "down2", "up1", "up2")
        with torch.no_grad():
            model.inc(torch.randn(1, 3, 16, 16))
        assert handle.layers == ("inc", "down1", "down2", "up1", "up2")


def test_numbered_attributes_of_a_model_without_blocks() -> None:
    """As in the first Fourier neural operators, and in the small nets of many tutorials."""
    first = [nn.Conv2d(4, 4, 3) for _ in range(4)]
    names = ("conv0", "w0", "conv1", "w1", "fc1", "fc2")
    beside = {"fc": nn.Linear(4, 4), "norm1": nn.BatchNorm2d(4), "norm2": nn.BatchNorm2d(4)}
    other = {"head1": nn.Conv1d(4, 4, 1), "head2": nn.Linear(4, 4)}  # not of one class
    modules = dict(zip(names, (*first, nn.Linear(4, 4), nn.Linear(4, 4)), strict=True))
    model = holding(**modules, **beside, **other)
    assert find_layers(model).names == list(names)
    assert find_layers(holding(net=model)).names == [f"net.{name}" for name in names]
    assert not find_layers(holding(conv1=nn.Conv2d(4, 4, 3), fc1=nn.Linear(4, 4))).names
    convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3) for _ in range(3))
    assert find_layers(holding(c=convolutions, **modules)).names == names_of("c.{1}", 3)
    # Blocks are what a user would name.
    blocks = nn.ModuleList(mlps(3))
    assert find_layers(holding(blocks=blocks, **modules)).names == names_of("blocks.{1}", 3)


def test_every_block_of_a_resnet_leaves_with_the_same_bits() -> None:
    """One layer of each stage, and not only those of the last: activations and weights."""

    def gradients(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model(torch.randn(2, 3, 32, 32)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(ResNet((2, 1, 2, 1)))
    plain = gradients(models[0])
    activations = ebbtide.ActivationPolicy(num_layers=5, min_bytes=1)
    weights = ebbtide.WeightPolicy(num_layers=5)
    with ebbtide.offload(models[1], activations=activations, weights=weights) as handle:
        offloaded = [gradient.clone() for gradient in gradients(models[1])]
        storages = handle.inspect().storages
        resting = {each.name.rpartition(".conv")[0] for each in handle.inspect().parameters}
    layers = {each.name for each in storages if each.decision == "offload"}
    assert layers == {"layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer3.1"}
    assert layers <= resting
    assert "layer4.0" not in resting
    assert all(map(torch.equal, plain, offloaded))
