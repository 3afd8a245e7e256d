"""Transformers' Trainer: a vision transformer tells rough random fields from smooth ones."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import ebbtide

SIZE, CLASSES = 64, 4
torch.manual_seed(0)

# Gaussian random fields whose spectra fall off at four different rates.
frequency = torch.fft.fftfreq(SIZE, 1 / SIZE)
wavenumber = (frequency[:, None] ** 2 + frequency**2).sqrt().clamp(min=1)
labels = torch.arange(48) % CLASSES
spectra = torch.fft.fft2(torch.randn(48, 3, SIZE, SIZE)) * wavenumber ** -labels.view(-1, 1, 1, 1)
images = torch.fft.ifft2(spectra).real
images = images / images.std((1, 2, 3), keepdim=True)

config = ViTConfig(
    image_size=SIZE,
    patch_size=4,
    hidden_size=192,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_labels=CLASSES,
)
model = ViTForImageClassification(config)
handle = ebbtide.offload(model)

trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        max_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    ),
    train_dataset=[
        {"pixel_values": image, "labels": label}
        for image, label in zip(images, labels, strict=True)
    ],
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
