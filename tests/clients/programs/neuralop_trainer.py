"""neuraloperator's Trainer: a Fourier neural operator solves the Poisson equation."""

import torch
from neuralop import LpLoss, Trainer
from neuralop.models import FNO
from neuralop.training import AdamW
from torch.utils.data import DataLoader

import ebbtide

SIZE = 64
torch.manual_seed(0)

# -laplace u = f on a torus: mode k of u is that of f divided by |k|^2.
frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
squared = frequency[:, None] ** 2 + frequency**2
spectra = torch.fft.fft2(torch.randn(24, 1, SIZE, SIZE)) * (squared > 0)
force = torch.fft.ifft2(spectra).real
solution = torch.fft.ifft2(spectra / squared.clamp(min=1)).real
samples = [{"x": f, "y": u} for f, u in zip(force, solution, strict=True)]
loader = DataLoader(samples, batch_size=8)

model = FNO(n_modes=(16, 16), in_channels=1, out_channels=1, hidden_channels=32, n_layers=6)
handle = ebbtide.offload(model)

losses = []
relative_error = LpLoss(d=2)


def recorded_error(prediction: torch.Tensor, y: torch.Tensor, **_: object) -> torch.Tensor:
    loss = relative_error(prediction, y)
    losses.append(loss.item())
    return loss


optimizer = AdamW(model.parameters(), lr=1e-3)
trainer = Trainer(model=model, n_epochs=1, device="cpu")
trainer.train(
    train_loader=loader,
    test_loaders={},
    optimizer=optimizer,
    scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
    training_loss=recorded_error,
)
