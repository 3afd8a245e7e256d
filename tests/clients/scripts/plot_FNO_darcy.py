"""Train an FNO on Darcy flow: the example of that name in neuraloperator's gallery.

It is built as theirs: the data of Darcy flow, an `FNO`, the `Trainer` with two test resolutions,
then predictions at both. Theirs calls `load_darcy_flow_small`, which asks an archive on the network
even if the files are there; `load_darcy_pt` reads the same files. It knows nothing of ebbtide.
"""

from __future__ import annotations

import sys

import matplotlib.pyplot as plt
import torch
from neuralop import H1Loss, LpLoss, Trainer
from neuralop.data.datasets.darcy import load_darcy_pt
from neuralop.models import FNO
from neuralop.training import AdamW
from neuralop.utils import count_model_params

data_root, batch_size = sys.argv[1], int(sys.argv[2])
device = "cpu"
torch.manual_seed(0)

train_loader, test_loaders, data_processor = load_darcy_pt(
    n_train=256,
    batch_size=batch_size,
    test_resolutions=[16, 32],
    n_tests=[16, 8],
    test_batch_sizes=[16, 8],
    data_root=data_root,
)
data_processor = data_processor.to(device)

model = FNO(
    n_modes=(16, 16),
    in_channels=1,
    out_channels=1,
    hidden_channels=32,
    projection_channel_ratio=2,
)
model = model.to(device)
print(f"\nOur model has {count_model_params(model)} parameters.")
sys.stdout.flush()

optimizer = AdamW(model.parameters(), lr=8e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
l2loss, h1loss = LpLoss(d=2, p=2), H1Loss(d=2)
eval_losses = {"h1": h1loss, "l2": l2loss}

trainer = Trainer(
    model=model,
    n_epochs=2,
    device=device,
    data_processor=data_processor,
    wandb_log=False,
    eval_interval=1,
    use_distributed=False,
    verbose=True,
)
print(
    trainer.train(
        train_loader=train_loader,
        test_loaders=test_loaders,
        optimizer=optimizer,
        scheduler=scheduler,
        regularizer=False,
        training_loss=h1loss,
        eval_losses=eval_losses,
        save_every=1,
        save_dir="checkpoints",
    )
)

for resolution in (16, 32):
    figure = plt.figure(figsize=(7, 7))
    samples = test_loaders[resolution].dataset
    for index in range(3):
        data = data_processor.preprocess(samples[index], batched=False)
        prediction = model(data["x"].unsqueeze(0))
        panels = (data["x"][0], data["y"].squeeze(), prediction.squeeze().detach())
        for column, panel in enumerate(panels, start=1):
            figure.add_subplot(3, 3, 3 * index + column).imshow(panel.numpy())
    figure.savefig(f"predictions_{resolution}.png")
