"""Train an FNO on Darcy flow with its activations offloaded, in neuraloperator's own loop.

Run: pip install "ebbtide[neuralop]", then python examples/neuralop_darcy.py --resolution 128
"""

import argparse
import time

import torch
from neuralop import H1Loss, LpLoss
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

# The one line that ebbtide adds. Losses, gradients and weights stay the same to the bit.
model.forward = ebbtide.wrap_forward_with_offload(model.forward)

for epoch in range(args.epochs):
    begin_s = time.perf_counter()
    model.train()
    data_processor.train()  # in training, targets are normalized too
    train_l2 = 0.0
    for batch in train_loader:  # each batch is a dict with the keys "x" and "y"
        batch = data_processor.preprocess(batch)
        optimizer.zero_grad()
        prediction, batch = data_processor.postprocess(model(batch["x"]), batch)
        loss = l2_loss(prediction, batch["y"])  # the sum over the batch
        loss.backward()
        optimizer.step()
        train_l2 += loss.item() / args.samples
    scheduler.step()
    print(f"epoch {epoch}: train L2 {train_l2:.4f}, {time.perf_counter() - begin_s:.1f} s")

model.eval()
data_processor.eval()  # predictions are in the pressure's own unit, and so are their errors
test_l2 = test_h1 = 0.0
with torch.no_grad():  # autograd saves nothing here, so nothing is offloaded
    for batch in test_loaders[args.resolution]:
        batch = data_processor.preprocess(batch)
        prediction, batch = data_processor.postprocess(model(batch["x"]), batch)
        test_l2 += l2_loss(prediction, batch["y"]).item() / 16
        test_h1 += h1_loss(prediction, batch["y"]).item() / 16
print(f"test L2 {test_l2:.4f}, H1 {test_h1:.4f}")

print("\nebbtide's statistics of the last training step:")
print(model.forward.handle.stats)
