"""Train an FNO on Darcy flow with its activations offloaded, by neuraloperator's Trainer.

Run: pip install "ebbtide[neuralop]", then python examples/neuralop_trainer.py --resolution 128
"""

import argparse

import torch
from neuralop import H1Loss, LpLoss, Trainer
from neuralop.models import FNO
from neuralop.training import AdamW

import ebbtide
from ebbtide.tools.darcy import load_darcy_flow_small

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--resolution", type=int, default=64, help="nodes along each side of the grid")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--samples", type=int, default=128, help="training samples")
parser.add_argument("--epochs", type=int, default=4)
args = parser.parse_args()

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)

train_loader, test_loaders, data_processor = load_darcy_flow_small(
    n_train=args.samples,
    n_tests=[16],
    batch_size=args.batch_size,
    test_batch_sizes=[args.batch_size],
    train_resolution=args.resolution,
    test_resolutions=[args.resolution],
    encode_input=True,
)
data_processor = data_processor.to(device)

model = FNO(
    n_modes=(16, 16),
    in_channels=1,
    out_channels=1,
    hidden_channels=32,
    projection_channel_ratio=2,
).to(device)
optimizer = AdamW(model.parameters(), lr=8e-3, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
l2_loss, h1_loss = LpLoss(d=2, p=2), H1Loss(d=2)

trainer = Trainer(
    model=model,
    n_epochs=args.epochs,
    device=device,
    data_processor=data_processor,
    verbose=True,
)
# The Trainer has no callbacks, so ebbtide attaches to the model. After the block the model is as it
# was before.
with ebbtide.offload(model) as handle:
    trainer.train(
        train_loader=train_loader,
        test_loaders=test_loaders,
        optimizer=optimizer,
        scheduler=scheduler,
        training_loss=l2_loss,
        eval_losses={"l2": l2_loss, "h1": h1_loss},
    )

print("\nebbtide's statistics of the last training step:")
print(handle.stats)
