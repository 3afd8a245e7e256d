"""The ways in which Aurora, PhysicsNeMo and anemoi are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ways import Attach, assert_same_with_and_without

Trained = tuple[Sequence[float], nn.Module]


def run_steps(model: nn.Module, loss_of: Callable[[], Tensor], count: int = 3) -> Trained:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(count):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def steps(model: nn.Module, *inputs: Any, mixed: bool = False, count: int = 3) -> Trained:
    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            return model(*inputs).float().square().mean()

    return run_steps(model, loss, count)


# Aurora


def aurora_model(**options: Any) -> Any:
    aurora = pytest.importorskip("aurora", reason="needs microsoft-aurora")
    return aurora.AuroraSmallPretrained(
        embed_dim=32,
        num_heads=2,
        encoder_depths=(1, 1),
        encoder_num_heads=(1, 2),
        decoder_depths=(1, 1),
        decoder_num_heads=(2, 1),
        window_size=(2, 4, 4),
        latent_levels=4,
        **options,
    )


def aurora_batch(size: tuple[int, int] = (16, 32)) -> Any:
    from aurora import Batch, Metadata

    surface, levels = ("2t", "10u", "10v", "msl"), (250, 850)
    return Batch(
        surf_vars={name: torch.randn(1, 2, *size) for name in surface},
        static_vars={name: torch.randn(*size) for name in ("lsm", "z", "slt")},
        atmos_vars={name: torch.randn(1, 2, 2, *size) for name in ("z", "u", "v", "t", "q")},
        metadata=Metadata(
            torch.linspace(90, -90, size[0]),
            torch.linspace(0, 360, size[1] + 1)[:-1],
            (datetime(2020, 6, 1, 12),),
            levels,
        ),
    )


def aurora_loss(prediction: Any) -> Tensor:
    fields = [*prediction.surf_vars.values(), *prediction.atmos_vars.values()]
    return torch.stack([field.float().square().mean().log1p() for field in fields]).sum()


@pytest.mark.parametrize(
    "options",
    [{}, {"autocast": True}, {"use_lora": True}],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("checkpoints", ["no checkpoints", "before", "after"])
def test_aurora(options: dict[str, Any], checkpoints: str) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = aurora_model(**options)
        if checkpoints == "before":
            model.configure_activation_checkpointing()
        attach(model)
        if checkpoints == "after":
            model.configure_activation_checkpointing()
        batch = aurora_batch()
        return run_steps(model, lambda: aurora_loss(model(batch)))

    assert_same_with_and_without(train)


def test_aurora_through_a_rollout_of_three_steps() -> None:
    def train(attach: Attach) -> Trained:
        from aurora.rollout import rollout

        torch.manual_seed(0)
        model = aurora_model(use_lora=True)
        attach(model)
        batch = aurora_batch()

        def loss() -> Tensor:
            return torch.stack([aurora_loss(each) for each in rollout(model, batch, 3)]).sum()

        return run_steps(model, loss)

    pytest.importorskip("aurora", reason="needs microsoft-aurora")
    assert_same_with_and_without(train)


# PhysicsNeMo


def physicsnemo(module: str) -> Any:
    pytest.importorskip("physicsnemo", reason="needs nvidia-physicsnemo")
    return pytest.importorskip(f"physicsnemo.models.{module}")


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
def test_physicsnemo_fno(mixed: bool) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = physicsnemo("fno").FNO(1, 1, latent_channels=8, num_fno_layers=3, num_fno_modes=4)
        attach(model)
        return steps(model, torch.randn(2, 1, 24, 24), mixed=mixed)

    assert_same_with_and_without(train)


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
def test_physicsnemo_afno(mixed: bool) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = physicsnemo("afno").AFNO([32, 32], 2, 2, [4, 4], embed_dim=32, num_blocks=4)
        attach(model)
        return steps(model, torch.randn(2, 2, 32, 32), mixed=mixed)

    assert_same_with_and_without(train)


@pytest.mark.parametrize("own", [False, True], ids=["", "their checkpoints"])
def test_physicsnemo_unet(own: bool) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = physicsnemo("unet").UNet(
            1,
            1,
            model_depth=2,
            feature_map_channels=[8, 8, 16, 16],
            num_conv_blocks=2,
            gradient_checkpointing=own,
        )
        attach(model)
        return steps(model, torch.randn(1, 1, 16, 16, 16))

    assert_same_with_and_without(train)


@pytest.mark.parametrize("own", [0, 2], ids=["", "their checkpoints"])
def test_physicsnemo_diffusion_unet(own: int) -> None:
    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = physicsnemo("diffusion_unets").SongUNet(
            img_resolution=32,
            in_channels=2,
            out_channels=2,
            model_channels=16,
            channel_mult=[1, 2],
            num_blocks=1,
            attn_resolutions=[16],
            checkpoint_level=own,
        )
        attach(model)
        x, noise = torch.randn(2, 2, 32, 32), torch.rand(2)
        return steps(model, x, noise, None)

    assert_same_with_and_without(train)


@pytest.mark.parametrize("own", [0, 2], ids=["", "their checkpoints"])
@pytest.mark.parametrize("options", [{}, {"do_concat_trick": True}])
def test_physicsnemo_meshgraphnet(own: int, options: dict[str, Any]) -> None:
    module = physicsnemo("meshgraphnet")
    pytest.importorskip("torch_scatter", reason="MeshGraphNet needs torch_scatter")
    from torch_geometric.data import Data

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = module.MeshGraphNet(
            2,
            3,
            1,
            processor_size=4,
            hidden_dim_processor=32,
            hidden_dim_node_encoder=32,
            hidden_dim_edge_encoder=32,
            hidden_dim_node_decoder=32,
            mlp_activation_fn="silu",
            num_processor_checkpoint_segments=own,
            **options,
        )
        attach(model)
        mesh = Data(edge_index=torch.randint(0, 100, (2, 500)), num_nodes=100)
        return steps(model, torch.randn(100, 2), torch.randn(500, 3), mesh)

    assert_same_with_and_without(train)


# anemoi


@pytest.mark.parametrize("own", [False, True], ids=["", "their checkpoints"])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bf16"])
def test_anemoi_graph_transformer(own: bool, mixed: bool) -> None:
    pytest.importorskip("anemoi.models", reason="needs anemoi-models")
    from anemoi.models.distributed.shapes import GraphShardInfo
    from anemoi.models.layers.processor import GraphTransformerProcessor

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = GraphTransformerProcessor(
            num_layers=4,
            num_channels=32,
            num_chunks=2,
            num_heads=4,
            mlp_hidden_ratio=2,
            edge_dim=3,
            graph_attention_backend="pyg",
            gradient_checkpointing=own,
            layer_kernels=None,
        )
        attach(model)
        edges = torch.randint(0, 100, (2, 500))
        edges = edges[:, edges[1].argsort()]
        x = torch.randn(100, 32, requires_grad=True)
        return steps(model, x, 1, GraphShardInfo(), torch.randn(500, 3), edges, mixed=mixed)

    assert_same_with_and_without(train, moves=not own)


@pytest.mark.parametrize("own", [False, True], ids=["", "their checkpoints"])
def test_anemoi_transformer(own: bool) -> None:
    pytest.importorskip("anemoi.models", reason="needs anemoi-models")
    from anemoi.models.distributed.shapes import GraphShardInfo
    from anemoi.models.layers.processor import TransformerProcessor

    def train(attach: Attach) -> Trained:
        torch.manual_seed(0)
        model = TransformerProcessor(
            num_layers=4,
            num_channels=32,
            num_chunks=2,
            num_heads=4,
            mlp_hidden_ratio=2,
            attention_implementation="scaled_dot_product_attention",
            gradient_checkpointing=own,
            layer_kernels=None,
        )
        attach(model)
        return steps(model, torch.randn(100, 32, requires_grad=True), 1, GraphShardInfo())

    assert_same_with_and_without(train, moves=not own)


def test_aurora_is_planned_from_its_first_step() -> None:
    """Its code looks at values."""

    def train(handle: Callable[[nn.Module], None]) -> Trained:
        torch.manual_seed(0)
        model = aurora_model()
        handle(model)
        batch = aurora_batch((32, 64))
        return run_steps(model, lambda: aurora_loss(model(batch)), 5)

    def attach(model: nn.Module) -> None:
        handles.append(ebbtide.offload(model, budget="4GiB"))

    handles: list[ebbtide.OffloadHandle] = []
    plain = train(lambda _: None)
    planned = train(attach)
    assert plain[0] == planned[0]
    assert handles[0].plan is not None
    handles[0].detach()
    for before, after in zip(plain[1].parameters(), planned[1].parameters(), strict=True):
        assert torch.equal(before, after)
