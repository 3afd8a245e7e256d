"""Small neural operators for the parity tests; each function draws one model and its inputs.

The sizes keep a forward and backward within about a second on one CPU thread, while most
activations stay above 64 KiB. neuralop is imported when a model is drawn, not before.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Drawn = tuple[nn.Module, dict[str, Tensor]]


def _operator(name: str, **config: Any) -> nn.Module:
    return getattr(importlib.import_module("neuralop.models"), name)(**config)


def fno_1d() -> Drawn:
    model = _operator("FNO", n_modes=(16,), in_channels=2, out_channels=1, hidden_channels=32)
    return model, {"x": torch.randn(4, 2, 512)}


def fno_2d(points: int = 64) -> Drawn:
    model = _operator(
        "FNO", n_modes=(12, 12), in_channels=1, out_channels=1, hidden_channels=24, n_layers=3
    )
    return model, {"x": torch.randn(2, 1, points, points)}


def fno_2d_small() -> Drawn:
    """On a quarter of the points: a CPU computes slowly in bfloat16."""
    return fno_2d(32)


def fno_3d() -> Drawn:
    model = _operator(
        "FNO",
        n_modes=(6, 6, 6),
        in_channels=1,
        out_channels=1,
        hidden_channels=12,
        n_layers=2,
        norm="group_norm",
    )
    return model, {"x": torch.randn(2, 1, 16, 16, 16)}


def fno_complex() -> Drawn:
    model = _operator(
        "FNO",
        n_modes=(8, 8),
        in_channels=2,
        out_channels=1,
        hidden_channels=16,
        n_layers=3,
        complex_data=True,
    )
    return model, {"x": torch.randn(2, 2, 48, 48, dtype=torch.complex64)}


def tfno() -> Drawn:
    model = _operator(
        "TFNO",
        n_modes=(12, 12),
        in_channels=1,
        out_channels=1,
        hidden_channels=24,
        n_layers=3,
        factorization="tucker",
        implementation="factorized",
        rank=0.1,
        domain_padding=0.1,
    )
    return model, {"x": torch.randn(2, 1, 48, 48)}


def uno() -> Drawn:
    model = _operator(
        "UNO",
        in_channels=1,
        out_channels=1,
        hidden_channels=16,
        lifting_channels=32,
        projection_channels=32,
        n_layers=5,
        uno_out_channels=[16, 24, 24, 24, 16],
        uno_n_modes=[[8, 8], [6, 6], [4, 4], [6, 6], [8, 8]],
        uno_scalings=[[1.0, 1.0], [0.5, 0.5], [1, 1], [1, 1], [2, 2]],
        horizontal_skips_map={4: 0, 3: 1},
        channel_mlp_skip="linear",
    )
    return model, {"x": torch.randn(2, 1, 64, 64)}


def sfno() -> Drawn:
    model = _operator(
        "SFNO", n_modes=(16, 16), in_channels=2, out_channels=1, hidden_channels=16, n_layers=3
    )
    return model, {"x": torch.randn(2, 2, 32, 64)}


def local_no() -> Drawn:
    model = _operator(
        "LocalNO",
        n_modes=(8, 8),
        in_channels=1,
        out_channels=1,
        hidden_channels=12,
        default_in_shape=(32, 32),
        n_layers=2,
        use_channel_mlp=True,
    )
    return model, {"x": torch.randn(2, 1, 32, 32)}


def codano() -> Drawn:
    model = _operator(
        "CODANO",
        output_variable_codimension=1,
        hidden_variable_codimension=4,
        lifting_channels=8,
        projection_channels=8,
        static_channel_dim=1,
        n_layers=3,
        n_heads=[2, 2, 2],
        n_modes=[[8, 8], [8, 8], [8, 8]],
        attention_scaling_factors=[0.5, 0.5, 0.5],
        per_layer_scaling_factors=[[1, 1], [0.5, 0.5], [2, 2]],
        use_horizontal_skip_connection=True,
        horizontal_skips_map={2: 0},
        enable_cls_token=True,
    )
    return model, {"x": torch.randn(1, 3, 32, 32), "static_channel": torch.randn(1, 1, 32, 32)}


def _unit_grid(points_per_axis: int, num_axes: int) -> Tensor:
    axes = [torch.linspace(0, 1, points_per_axis)] * num_axes
    return torch.stack(torch.meshgrid(axes, indexing="ij"), dim=-1)


def gino() -> Drawn:
    model = _operator(
        "GINO",
        in_channels=2,
        out_channels=1,
        gno_coord_dim=2,
        in_gno_radius=0.15,
        out_gno_radius=0.15,
        in_gno_transform_type="nonlinear",
        in_gno_channel_mlp_hidden_layers=[16, 16],
        out_gno_channel_mlp_hidden_layers=[16, 16],
        gno_embed_channels=8,
        # open3d and torch_scatter are optional; without them neuralop uses its own torch code.
        gno_use_open3d=False,
        gno_use_torch_scatter=False,
        fno_n_modes=(8, 8),
        fno_hidden_channels=16,
        fno_n_layers=2,
    )
    inputs = {
        "input_geom": torch.rand(200, 2),
        "latent_queries": _unit_grid(16, 2),
        "output_queries": torch.rand(150, 2),
        "x": torch.randn(2, 200, 2),
    }
    return model, inputs


def fnogno() -> Drawn:
    model = _operator(
        "FNOGNO",
        in_channels=3,
        out_channels=2,
        gno_coord_dim=2,
        gno_radius=0.12,
        gno_embed_channels=8,
        gno_channel_mlp_hidden_layers=[32, 16],
        gno_use_open3d=False,
        gno_use_torch_scatter=False,
        gno_batched=True,
        fno_n_modes=(8, 8),
        fno_hidden_channels=16,
        fno_n_layers=2,
    )
    inputs = {
        "in_p": _unit_grid(32, 2),
        "out_p": torch.rand(100, 2),
        "f": torch.randn(2, 32, 32, 3),
    }
    return model, inputs


def uqno() -> Drawn:
    """Two FNOs: `forward` runs the base model without gradients and trains the residual one."""
    base, _ = fno_2d()
    residual, inputs = fno_2d()
    return _operator("UQNO", base_model=base, residual_model=residual), inputs


class FourierGRUCell(nn.Module):
    """A gated recurrent unit on functions: its linear maps are Fourier layers.

    Source: Liu-Schiaffini et al., "Tipping Point Forecasting in Non-Stationary Dynamics on
        Function Spaces" (arXiv 2308.08794), section 4. No neuraloperator release up to 2.0.0
        contains its RNO yet, hence this one.
    """

    def __init__(self, channels: int, n_modes: tuple[int, ...]) -> None:
        super().__init__()
        blocks = importlib.import_module("neuralop.layers.fno_block").FNOBlocks
        fourier_layer = functools.partial(
            blocks, 2 * channels, channels, n_modes, n_layers=1, use_channel_mlp=False
        )
        self.update = fourier_layer()
        self.reset = fourier_layer()
        self.candidate = fourier_layer()

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([x, hidden], dim=1)
        update = torch.sigmoid(self.update(both))
        reset = torch.sigmoid(self.reset(both))
        candidate = F.selu(self.candidate(torch.cat([x, reset * hidden], dim=1)))
        return (1 - update) * hidden + update * candidate


class RecurrentOperator(nn.Module):
    """Stacked `FourierGRUCell`s, every one of them called once per time step.

    Shape:
        x: (batch, time, channel, height, width), float32; returns (batch, 1, height, width).
    """

    def __init__(self, in_channels: int, channels: int, n_modes: tuple[int, ...]) -> None:
        super().__init__()
        self.lifting = nn.Conv2d(in_channels, channels, 1)
        self.cells = nn.ModuleList(FourierGRUCell(channels, n_modes) for _ in range(2))
        self.projection = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        sequence = [self.lifting(frame) for frame in x.unbind(dim=1)]
        for cell in self.cells:
            hidden = torch.zeros_like(sequence[0])
            for step, frame in enumerate(sequence):
                hidden = cell(frame, hidden)
                sequence[step] = hidden
        return self.projection(sequence[-1])


def rno() -> Drawn:
    return RecurrentOperator(2, 12, (8, 8)), {"x": torch.randn(2, 3, 2, 32, 32)}


class TransportOperator(nn.Module):
    """An FNO on a latent grid whose points are carried to a target mesh by index (as in OTNO).

    Source: Li et al., "Geometric Operator Learning with Optimal Transport" (arXiv 2507.20065).
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.operator = _operator(
            "FNO",
            n_modes=(8, 8),
            in_channels=in_channels,
            out_channels=channels,
            hidden_channels=channels,
            n_layers=2,
            norm="group_norm",
        )
        self.projection = nn.Linear(channels, 1)

    def forward(self, x: Tensor, target_index: Tensor) -> Tensor:
        latent = self.operator(x).flatten(2).transpose(1, 2)
        return self.projection(F.gelu(latent[:, target_index]))


def otno() -> Drawn:
    inputs = {"x": torch.randn(2, 6, 32, 32), "target_index": torch.randint(0, 32 * 32, (700,))}
    return TransportOperator(6, 16), inputs
