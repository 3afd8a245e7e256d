"""What the models of generated training programs are made of, as source text.

A block is a module that maps `(rows, WIDTH)` to `(rows, WIDTH)`. Each stands for something that
users' forwards do beside arithmetic: they read globals, change attributes and buffers, draw random
numbers, collect what they have seen. The texts become part of the program that uses them, so that
a program that fails can be read, minimised and run alone.
"""

from __future__ import annotations

from dataclasses import dataclass

WIDTH = 16

ACTIVATIONS = (
    *("nn.GELU()", "nn.GELU(approximate='tanh')", "nn.SiLU()", "nn.Mish()", "nn.ELU()"),
    *("nn.Softplus()", "nn.LeakyReLU(0.1)", "nn.Tanh()", "nn.ReLU()", "nn.Hardswish()"),
    *("nn.ReLU(inplace=True)", "nn.Sigmoid()", "nn.PReLU()"),
    "nn.Sequential(nn.Sigmoid(), nn.LPPool1d(1.7, 1))",  # powers
)
"""Of plain blocks."""


@dataclass(frozen=True)
class Block:
    """A kind of block.

    Attributes:
        family: what users do that it stands for.
        source: defines the class, and what it reads and changes outside of itself.
        make: an expression that makes one.
        may_raise: plain training may raise with it where graphs outlive a forward.
        resets: a statement before each forward, for what the loop sets.
        cpu_only: it cannot run on the software accelerator.
    """

    family: str
    source: str
    make: str
    may_raise: bool = False
    resets: str = ""
    cpu_only: bool = False


def _block(family: str, body: str, make: str, before: str = "", **others: object) -> Block:
    """Make a kind of block from its methods, which follow a linear layer."""
    name = make.partition("(")[0]
    source = f"{before}class {name}(nn.Module):\n{body.rstrip()}"
    return Block(family, source, make, **others)  # type: ignore[arg-type]


_INIT = """\
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
"""

BLOCKS = (
    _block(
        "gate",
        """\
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))
""",
        "Gate()",
    ),
    _block(
        "chain of rebuilds",
        _INIT
        + """
    def forward(self, x):
        y = F.gelu(F.silu(self.linear(x)) * 1.5)
        return self.linear(y * y.sin())
""",
        "Chain()",
    ),
    _block(
        "filled after it is saved",
        _INIT
        + """        self.act = nn.RReLU()

    def forward(self, x):
        return self.act(self.linear(x))
""",
        "Noisy()",
    ),
    Block("dropout", "", "nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.LayerNorm(16))"),
    Block("batch norm", "", "nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU())"),
    Block(
        "lazy batch norm", "", "nn.Sequential(nn.Linear(16, 16), nn.LazyBatchNorm1d(), nn.SiLU())"
    ),
    Block(
        "spectral norm",
        "",
        "nn.Sequential(norms.spectral_norm(nn.Linear(16, 16)), nn.GELU())",
    ),
    Block(
        "weight norm",
        "",
        "nn.Sequential(norms.weight_norm(nn.Linear(16, 16)), nn.GELU())",
    ),
    _block(
        "attribute set by the program",
        _INIT
        + """        self.scale = 1.0

    def forward(self, x):
        return F.gelu(self.linear(x) * self.scale)
""",
        "Scaled()",
    ),
    _block(
        "active adapter",
        """\
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.adapters = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
        self.active = "a"

    def forward(self, x):
        return F.silu(self.linear(x) + self.adapters[self.active](x))
""",
        "Adapted()",
    ),
    _block(
        "counter of calls",
        _INIT
        + """        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x) / self.calls)
""",
        "Counted()",
    ),
    _block(
        "counter of a class",
        _INIT
        + """
    def forward(self, x):
        ClassCounted.calls += 1
        return torch.tanh(self.linear(x) / (1 + 0.1 * ClassCounted.calls))
""".replace("\n    def", "\n    calls = 0\n\n    def", 1),
        "ClassCounted()",
    ),
    _block(
        "counter of a closure",
        """\
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        count = itertools.count(1)
        self.temperature = lambda: 1 + 1 / next(count)

    def forward(self, x):
        return torch.tanh(self.linear(x) * self.temperature())
""",
        "Annealed()",
    ),
    _block(
        "collected by the loop",
        _INIT
        + """
    def forward(self, x):
        y = F.gelu(self.linear(x))
        collected.append(y.square().mean())
        return y
""",
        "Collecting()",
        before="collected = []\n\n\n",
        resets="collected.clear()",
    ),
    _block(
        "replaced buffer",
        _INIT
        + """        self.register_buffer("queue", torch.zeros(4, 16))

    def forward(self, x):
        y = torch.tanh(self.linear(x) - self.queue.mean(0))
        self.queue = torch.cat([self.queue[1:], y.detach().mean(0, keepdim=True)])
        return y
""",
        "Queued()",
    ),
    _block(
        "buffer changed in place",
        _INIT
        + """        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        y = self.linear(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return torch.tanh(y - self.mean.clone())
""",
        "Centred()",
    ),
    _block(
        "large buffer changed in place",
        _INIT
        + """        self.register_buffer("bank", torch.zeros(2**14, 16))
        self.at = 0

    def forward(self, x):
        y = torch.tanh(self.linear(x) + 0.1 * self.bank[:8].mean())
        self.bank[self.at : self.at + len(y)] = y.detach()
        self.at = (self.at + len(y)) % 64
        return y
""",
        "Banked()",
    ),
    _block(
        "own weight changed in forward",
        _INIT
        + """
    def forward(self, x):
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return torch.tanh(self.linear(x))
""",
        "Decaying()",
        may_raise=True,
    ),
    _block(
        "own weight changed through data",
        _INIT
        + """
    def forward(self, x):
        self.linear.weight.data.clamp_(-0.2, 0.2)
        return torch.tanh(self.linear(x))
""",
        "Clamped()",
    ),
    _block(
        "activation changed in place",
        _INIT
        + """        self.spoils = False

    def forward(self, x):
        y = torch.sigmoid(self.linear(x))
        if self.spoils:
            y.mul_(2)
        return y
""",
        "Spoiling()",
    ),
    _block(
        "input changed in place",
        _INIT
        + """
    def forward(self, x):
        y = self.linear(x)
        y.add_(x).mul_(0.7)
        return F.gelu(y)
""",
        "InPlace()",
    ),
    _block(
        "memory outside modules",
        _INIT
        + """
    def forward(self, x):
        y = self.linear(x)
        memory["centre"] = memory["centre"] * 0.9 + y.detach().mean(0) * 0.1
        return torch.tanh(y - memory["centre"])
""",
        "Remembering()",
        before='memory = {"centre": torch.zeros(16, device=device)}\n\n\n',
    ),
    _block(
        "cached mask",
        _INIT
        + """
    def forward(self, x):
        return F.silu(mask(len(x)) @ self.linear(x))
""",
        "Masked()",
        before="""\
@functools.lru_cache
def mask(rows):
    return torch.ones(rows, rows, device=device).tril() / rows


""",
    ),
    _block(
        "NumPy generator",
        _INIT
        + """
    def forward(self, x):
        return F.gelu(self.linear(x) + 0.1 * float(noise.normal()))
""",
        "NumPyNoise()",
        before="noise = np.random.default_rng(0)\n\n\n",
    ),
    _block(
        "iterator",
        _INIT
        + """
    def forward(self, x):
        return F.gelu(self.linear(x) * next(scales))
""",
        "Iterating()",
        before="scales = itertools.cycle([1.0, 1.5, 0.5])\n\n\n",
    ),
    _block(
        "own torch generator",
        _INIT
        + """        self.draws = torch.Generator().manual_seed(5)

    def forward(self, x):
        noise = torch.randn(16, generator=self.draws).to(x.device)
        return F.silu(self.linear(x) + 0.1 * noise)
""",
        "OwnNoise()",
    ),
    _block(
        "random depth",
        _INIT
        + """
    def forward(self, x):
        if self.training and random.random() < 0.3:
            return x
        return x + F.gelu(self.linear(x)) * float(np.random.rand())
""",
        "RandomDepth()",
    ),
    _block(
        "depends on values",
        _INIT
        + """
    def forward(self, x):
        y = self.linear(x)
        return F.gelu(y) if y.sum() > 0 else torch.tanh(y)
""",
        "Branching()",
    ),
    _block(
        "global read by the forward",
        _INIT
        + """
    def forward(self, x):
        return F.gelu(self.linear(x) * config["scale"])
""",
        "Configured()",
        before='config = {"scale": 1.0}\n\n\n',
    ),
    _block(
        "custom function",
        _INIT
        + """
    def forward(self, x):
        return torch.tanh(Cube.apply(self.linear(x), 0.5))
""",
        "CustomCube()",
        before="""\
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, x * x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx, g):
        x, square = ctx.saved_tensors
        return g * (square * 2 + x * x) * ctx.factor, None


""",
    ),
    _block(
        "custom function changes what it saved",
        _INIT
        + """
    def forward(self, x):
        y = self.linear(x)
        return torch.tanh(Square.apply(y) + y * y.sin())
""",
        "CustomSquare()",
        before="""\
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.mul_(2)


""",
        may_raise=True,
    ),
    _block(
        "custom function changes what another saved",
        _INIT
        + """        self.late = False

    def forward(self, x):
        y = self.linear(x)
        if self.late:
            return torch.tanh(y * y.sin() + Doubling.apply(y))
        return torch.tanh(Doubling.apply(y) + y * y.sin())
""",
        "CustomDoubling()",
        before="""\
class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.mul_(2)


""",
        may_raise=True,
    ),
    _block(
        "dropped metric, then its input changes",
        """\
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        a = self.first(x)
        g = F.gelu(a)
        metric = self.second(g).mean()
        y = self.second(g.detach())
        del metric, g
        a.mul_(0.5)
        return y + a
""",
        "Logging()",
    ),
    _block(
        "checkpoint inside",
        _INIT
        + """
    def forward(self, x):
        inner = torch.utils.checkpoint.checkpoint
        return inner(lambda y: F.gelu(self.linear(y)) * y, x, use_reentrant=False)
""",
        "Checkpointed()",
    ),
    _block(
        "spectrum",
        _INIT
        + """
    def forward(self, x):
        spectrum = torch.fft.rfft(self.linear(x))
        return torch.fft.irfft(spectrum * spectrum[:, :1].conj() * 0.1, n=16)
""",
        "Spectral()",
    ),
    _block(
        "attention",
        """\
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)[0, 0] + x
""",
        "Attention()",
    ),
    _block(
        "recurrent",
        """\
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRUCell(16, 16)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.rnn(x, h)
        return h
""",
        "Recurrent()",
    ),
    _block(
        "convolution",
        """\
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x):
        y = self.norm(self.conv(x.view(-1, 4, 4)))
        return F.hardswish(y).reshape(x.shape) + x
""",
        "Convolving()",
    ),
    _block(
        "raises in the middle",
        _INIT
        + """        self.fails = False

    def forward(self, x):
        y = F.gelu(self.linear(x))
        if self.fails:
            raise ValueError("a bad batch")
        return self.linear(y)
""",
        "Failing()",
    ),
)
BLOCK_OF = {block.family: block for block in BLOCKS}
