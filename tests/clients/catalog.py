"""The clients: programs of the frameworks that people train with, each with two lines added."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KnownFailure:
    """Why a client does not train yet as it does without ebbtide.

    Attributes:
        reason: what goes wrong, for the page of the clients.
        match: a regular expression that each of the client's problems matches. A problem of another
            kind fails the test, and so does a client without problems.
    """

    reason: str
    match: str


@dataclass(frozen=True)
class Client:
    """A client.

    Attributes:
        title: what the page calls it.
        program: its file in ``programs``.
        note: what its user should know.
        ranks: number of its processes.
        quick: whether `make test` runs it, for which it must need only what `.venv` has.
        known: why it fails, if it does.
        needs: the packages that it imports, if `make clients` does not install them.
        stays: whether nothing moves once the first step has shown that it would not pay.
        own_checkpoints: its framework's setting by which layers are recomputed, if it has one.
    """

    title: str
    program: str
    note: str
    ranks: int = 1
    quick: bool = False
    known: KnownFailure | None = None
    needs: tuple[str, ...] = ()
    stays: bool = False
    own_checkpoints: str | None = None


CLIENTS = [
    Client(
        "Transformers' Trainer, GPT-2",
        "transformers_trainer.py",
        "Offload the model before or after you give it to the `Trainer`. With "
        "`gradient_checkpointing=True` little is left to offload.",
    ),
    Client(
        "Transformers' Trainer, ViT",
        "transformers_vit.py",
        "As for GPT-2.",
    ),
    Client(
        "PEFT, LoRA on a Llama",
        "peft_lora.py",
        "Offload what `get_peft_model` returns. Frozen weights are never copied as activations.",
    ),
    Client(
        "TRL, SFTTrainer",
        "trl_sft.py",
        "`SFTConfig` turns gradient checkpointing on; turn it off, or little is left to offload.",
    ),
    Client(
        "Lightning",
        "lightning_module.py",
        "Offload the `LightningModule`. Its `training_step` may call `self.net(x)`.",
    ),
    Client(
        "Accelerate",
        "accelerate_loop.py",
        "Offload the model before `prepare`. Each microbatch of an accumulation is a step of its "
        "own in `handle.stats`.",
    ),
    Client(
        "DistributedDataParallel",
        "ddp.py",
        "Offload the model before or after you wrap it. Each process has a store of its own.",
        ranks=2,
        quick=True,
    ),
    Client(
        "FSDP2, fully_shard",
        "fsdp2.py",
        "Unsharded parameters are recognized as parameters and never copied as activations.",
        ranks=2,
    ),
    Client(
        "Tensor parallelism",
        "tensor_parallel.py",
        "The local shards of activations are offloaded; each process has a store of its own.",
        ranks=2,
    ),
    Client(
        "torchvision, ResNet-50",
        "torchvision_resnet.py",
        "Many of its activations are small; at a small batch, lower `min_bytes`.",
    ),
    Client(
        "timm, ConvNeXt",
        "timm_convnext.py",
        "With small images, the tensors of the last stages are below `min_bytes` and stay.",
    ),
    Client(
        "diffusers, UNet",
        "diffusers_unet.py",
        "The tensors of the inner levels are small: they stay, unless you lower `min_bytes`.",
    ),
    Client(
        "torch_geometric, GATv2",
        "torch_geometric_graph.py",
        "The largest tensors have a row for each edge of the graph.",
    ),
    Client(
        "neuraloperator's Trainer, FNO",
        "neuralop_trainer.py",
        "Offload the model before you give it to the `Trainer`. The peak that remains is the "
        "memory of one Fourier layer.",
        quick=True,
    ),
    Client(
        "A PINN, Burgers' equation",
        "pinn.py",
        "The graph that `torch.autograd.grad(..., create_graph=True)` makes needs what it has read "
        "until the second backward. After the first step these tensors stay; `handle.explain()` "
        "says so.",
        quick=True,
        stays=True,
    ),
    Client(
        "A PINO, Helmholtz' equation",
        "pino.py",
        "The residual is computed outside the model, and what it saves stays.",
    ),
]

# Their packages ask for versions of their own, so `make clients-science` has an environment for
# them. docs/guides/scientific.md has a section for each.
SCIENCE = [
    Client(
        "Aurora",
        "science/aurora_forecast.py",
        "",
        needs=("aurora",),
        own_checkpoints="model.configure_activation_checkpointing()",
    ),
    Client(
        "PhysicsNeMo, MeshGraphNet",
        "science/physicsnemo_meshgraphnet.py",
        "",
        needs=("physicsnemo", "torch_scatter"),
        own_checkpoints="MeshGraphNet(num_processor_checkpoint_segments=3)",
    ),
    Client("PhysicsNeMo, FNO", "science/physicsnemo_fno.py", "", needs=("physicsnemo",)),
    Client(
        "anemoi, graph transformer",
        "science/anemoi_processor.py",
        "",
        needs=("anemoi.models",),
        own_checkpoints="gradient_checkpointing=True",
    ),
    Client(
        "Makani's structure (a stand-in)",
        "science/makani_stand_in.py",
        "",
        own_checkpoints="checkpointing_level: 3",
    ),
]
