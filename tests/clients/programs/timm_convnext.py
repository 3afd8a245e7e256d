"""timm: a ConvNeXt learns which of four roughnesses a random field has."""

import timm
import torch
import torch.nn.functional as F

import ebbtide

SIZE, BATCH, CLASSES = 96, 24, 4
torch.manual_seed(0)

frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
wavenumber = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp(min=1)
labels = torch.arange(BATCH) % CLASSES

model = timm.create_model("convnext_atto", num_classes=CLASSES)
handle = ebbtide.offload(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(3):
    # Gaussian random fields whose spectra fall off at four different rates.
    spectra = torch.fft.fft2(torch.randn(BATCH, 3, SIZE, SIZE))
    images = torch.fft.ifft2(spectra * wavenumber ** -labels.view(-1, 1, 1, 1)).real
    images = images / images.std((1, 2, 3), keepdim=True)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
