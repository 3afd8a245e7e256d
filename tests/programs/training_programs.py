"""Generates training programs: what users' loops do around a model, drawn from a seed.

A program is a list of statements of Python source: classes, models, an `offload` for each model,
and the steps of a loop. Those marked `offloaded_only` are left out when it trains plainly.
Everything else must give the same bits, or the same kind of error.

Each seed draws some *families*, which are named after what users do. Seed `n` always has the family
`FAMILIES[n % len(FAMILIES)]`, so every family occurs among as many seeds as there are families.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from program_blocks import ACTIVATIONS, BLOCK_OF, BLOCKS, Block


@dataclass(frozen=True)
class Statement:
    """One statement of a program, or a few that belong together.

    Attributes:
        text: Python source.
        family: what it was drawn for; "" for what every program has.
        offloaded_only: plain training leaves it out.
        may_raise: plain training may raise a RuntimeError here.
        simpler: other texts that a minimiser may put in its place.
    """

    text: str
    family: str = ""
    offloaded_only: bool = False
    may_raise: bool = False
    simpler: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = self.text.splitlines()
        if self.offloaded_only:
            lines[0] += "  # only offloaded"
        return "\n".join(lines)


@dataclass(frozen=True)
class Program:
    """What a seed led to.

    Attributes:
        seed: of it, and of all random numbers when it runs.
        statements: in order.
        families: what it has been drawn from.
        rounds: gradients may be summed in another order than plainly, as the guide of the weights
            says of weights on an accelerator.
        watched: gradients are noted after each backward, not only at the end.
        recomputes: a policy of its asks for recomputation, which refuses some layers.
        rests: weights rest on the host beside an accelerator, which some uses of them refuse.
    """

    seed: int
    statements: tuple[Statement, ...]
    families: frozenset[str]
    rounds: bool
    watched: bool
    recomputes: bool
    rests: bool = False

    def __str__(self) -> str:
        return "\n".join(str(statement) for statement in self.statements)

    def with_statements(self, statements: Sequence[Statement]) -> Program:
        """Return the same program with other statements."""
        return replace(self, statements=tuple(statements))


# ---- what models there are ----------------------------------------------------------------------

NET = """\
class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 16)

    def forward(self, x, step=0):
        for block in self.blocks:
            x = block(x) * (1 + 0.1 * step)
        return self.head(x)"""

EMBEDDING = """\
class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embed = nn.Embedding(32, 16, sparse=device == "cpu")
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(16, 16)

    def forward(self, x, step=0):
        x = x + self.embed((x[:, 0].detach().abs() * 10).long() % 32)
        for block in self.blocks:
            x = block(x) * (1 + 0.1 * step)
        return self.head(x)"""

REPEATED = """\
class Repeated(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.first, self.block, self.head = blocks[0], blocks[-1], nn.Linear(16, 16)

    def forward(self, x, step=0):
        x = self.first(x)
        for n in range(3):
            self.block.t = n / 3
            x = self.block(x)
        return self.head(x)"""

TIMED = """\
class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.t = 0.0

    def forward(self, x):
        return torch.sin(self.linear(x) * (1 + self.t))"""

BATCH = """\
def batch(seed, rows=8):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=draws, dtype=torch.float32).to(device)"""

IN_THREADS = """\
def in_threads(*jobs):
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]"""

RANDOM = {"dropout", "filled after it is saved", "random depth", "own torch generator"}
GLOBAL = {
    *("NumPy generator", "iterator", "counter of a class", "memory outside modules"),
    *("collected by the loop", "raises in the middle", "global read by the forward"),
    "attention",
}
STATEFUL = {
    "shared block",
    *("batch norm", "lazy batch norm", "spectral norm", "replaced buffer", "counter of calls"),
    *("custom function changes what another saved", "buffer changed in place"),
    *("large buffer changed in place", "own weight changed in forward", "counter of a closure"),
    *("own weight changed through data", "custom function changes what it saved"),
    "activation changed in place",
}
DOUBLE_DIFFERENTIABLE = {
    "shared block",
    *("gate", "chain of rebuilds", "global read by the forward", "counter of calls"),
    *("attribute set by the program", "dropout"),
    *("active adapter", "cached mask", "spectrum", "replaced buffer", "memory outside modules"),
    *("NumPy generator", "random depth", "iterator", "counter of a class", "batch norm"),
    *("filled after it is saved", "recurrent", "convolution", "depends on values"),
}
"""Blocks whose gradients have gradients."""

Step = Callable[["Draft"], None]
SHAPES: dict[str, Callable[[Draft], None]] = {}
STEPS: dict[str, Step] = {}
AFTER: dict[str, Step] = {}
AROUND: dict[str, tuple[str, ...]] = {
    "context around the forward": (
        "with torch.backends.mkldnn.flags(enabled=False):",
        "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):",
        "with parametrize.cached():",
        "with torch.autocast(torch.device(device).type, torch.bfloat16):",
        "with default_dtype(torch.float64):",
        "with torch.autograd.set_detect_anomaly(True):",
        "with warnings.catch_warnings(record=True):",
    ),
    "number of threads": ("with num_threads(2):",),
    "hook for the forward only": ("with hooked({model}):",),
}
BETWEEN: dict[str, tuple[str, ...]] = {
    "evaluation between forward and backward": (
        "with torch.no_grad():\n    note({call:batch(90)})",
        "{model}.eval()\nwith torch.inference_mode():\n    note({call:batch(91)})\n{model}.train()",
    ),
    "mode changed before backward": ("{model}.eval()",),
    "random numbers before backward": (
        "torch.rand(3)\nrandom.random()\nnp.random.rand()",
        "torch.manual_seed(3)",
    ),
    "requires_grad changed before backward": (
        "{params}[0].requires_grad_(False)",
        "for p in {params}:\n    p.requires_grad_(False)",
    ),
    "collector runs": ("gc.collect()",),
}
SETUPS: dict[str, str] = {
    "flat weights": """\
flat = torch.cat([p.detach().reshape(-1) for p in {params}])
at = 0
for p in {params}:
    p.data = flat[at : at + p.numel()].view_as(p)
    at += p.numel()""",
    "NumPy weights": """\
arrays = [p.detach().cpu().numpy() for p in {params}]""",
    "shared memory": "{model}.share_memory()",
    "frozen weights": "{params}[0].requires_grad_(False)",
    "data held by the model": """\
{model}.dataset = torch.utils.data.TensorDataset(torch.ones(2**14, 16, device=device))
for module in {model}.modules():
    module.rows = [torch.ones(2**12, 16, device=device)]""",
    "tied weights": "{tie}",
}
MEMORY = {"flat weights", "NumPy weights", "shared memory"}
"""Preparations that give weights other memory. The last would take it away from the others."""
LOOPS = ("always one graph alive", "accumulation over the loop")
POLICIES = (
    *("default policy", "small min_bytes", "without rebuilding", "num_layers", "keep_last"),
    *("recompute", "recompute+offload", "budget", "budget and weights", "weights"),
    *("weights and activations", "weights and recomputation", "weights and small min_bytes"),
    "plan",
)

CONTEXTS = {
    "default_dtype": """\
@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)""",
    "num_threads": """\
@contextlib.contextmanager
def num_threads(number):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)""",
    "hooked": """\
@contextlib.contextmanager
def hooked(model):
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    hooks = [each.register_forward_hook(lambda module, inputs, y: y * 1.5) for each in linear]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()""",
}


def _in(table: dict[str, Step], family: str) -> Callable[[Step], Step]:
    def enter(function: Step) -> Step:
        table[family] = function
        return function

    return enter


class Draft:
    """A program that is being drawn.

    Args:
        seed: of its choices.
        device: "cpu" or "softdevice".
        families: what it may be drawn from.
        forced: the family that it must have.
    """

    def __init__(self, seed: str, device: str, families: Collection[str], forced: str) -> None:
        self.draw = random.Random(seed)
        self.device = device
        self.allowed, self.forced = families, forced
        self.statements: list[Statement] = []
        self.families: set[str] = set()
        self.models: list[str] = []
        self.paths: dict[str, str] = {}  # of the model of each block, by family
        self.kinds: set[str] = set()
        self.rounds = self.recomputes = self.weights = self.updates_by_pointer = False
        self.number = 0
        self.call_template = self.layers = ""

    def say(self, text: str, family: str = "", **others: bool | tuple[str, ...]) -> None:
        """Add a statement."""
        if family:
            self.families.add(family)
        self.statements.append(Statement(text, family, **others))  # type: ignore[arg-type]

    def define(self, text: str, family: str = "") -> None:
        """Add a definition, once."""
        if text and all(statement.text != text for statement in self.statements):
            self.say(text, family)

    def wants(self, family: str, probability: float) -> bool:
        """Draw whether the program has a family."""
        if family not in self.allowed:
            return False
        return self.draw.random() < probability or family == self.forced

    def choose(self, families: Collection[str]) -> str:
        """Draw one of the families that are allowed, or take the one that is forced."""
        if self.forced in families:
            return self.forced
        return self.draw.choice([family for family in families if family in self.allowed] or [""])

    @property
    def may_raise(self) -> bool:
        """Whether a block changes in place what a graph may have saved."""
        return any(BLOCK_OF[kind].may_raise for kind in self.kinds & BLOCK_OF.keys())

    @property
    def params(self) -> str:
        return f"[{', '.join(f'*{model}.parameters()' for model in self.models)}]"

    def call(self, x: str, step: str = "") -> str:
        """Return the expression that runs the model or models."""
        return self.call_template.format(x=x, step=f", {step}" if step else "")

    def next_batch(self) -> str:
        """Return the expression of an input that no step has had."""
        self.number += 1
        rows = ""
        if self.wants("variable lengths", 0.1):
            self.families.add("variable lengths")
            rows = f", {self.draw.choice((3, 5, 12))}"
        elif self.wants("number of threads", 0.0):
            rows = ", 4096"
        return f"batch({self.number}{rows})"

    def fill(self, text: str) -> str:
        """Put names into a statement of a table."""
        for number in (90, 91):
            text = text.replace(f"{{call:batch({number})}}", self.call(f"batch({number})"))
        if "to_vector" in text and self.weights and self.device != "cpu":
            # torch makes no vector of parameters on two devices.
            text = "with torch.no_grad():\n    for p in {params}:\n        p.mul_(0.95)"
        text = text.replace("{params}", self.params).replace("{model}", self.models[0])
        return text.replace("{tie}", self._tie())

    def _tie(self) -> str:
        model = self.models[0]
        return (
            f"squares = [m for m in {model}.modules() if isinstance(m, nn.Linear) and "
            "m.weight.shape == (16, 16) and type(m) is nn.Linear]\n"
            "if squares:\n    squares[-1].weight = squares[0].weight"
        )

    # ---- models and policies --------------------------------------------------------------------

    def set_up(self) -> None:
        """Draw models, what is done to them before they are offloaded, and how they are."""
        self.define(BATCH)
        shape = self.choose_shape()
        SHAPES[shape](self)
        self.families.add(shape)
        for family, text in SETUPS.items():
            if self.wants(family, 0.06) and self._has_room_for(family):
                self.say(self.fill(text), family)
        if self.wants("average of the weights", 0.25) and self.fits("average of the weights"):
            self.families.add("average of the weights")
            self.say(f"average = copy.deepcopy({self.models[0]})", "average of the weights")
        for model in self.models:
            self._offload(model)
        for model in self.models:
            self.say(self._optimizer(model))
        if self.wants("scheduler", 0.1):
            self.say(
                f"scheduler = torch.optim.lr_scheduler.StepLR({self.models[0]}_optimizer, 2)",
                "scheduler",
            )

    def choose_shape(self) -> str:
        if self.forced in STEPS and self.forced in NEEDS_TWO:
            return "generator and discriminator"
        shapes = set(SHAPES)
        if self.forced in BLOCK_OF or self.forced in NEEDED_BLOCKS or self.forced in THREADS:
            shapes -= {"shared block, attribute set by the loop"}
        if self.forced == "tied weights":
            shapes -= {"shared block, attribute set by the loop"}
        if self.forced in NOT_SPARSE:
            shapes -= {"sparse embedding"}
        if self.forced == "number argument":
            shapes -= {"sequential"}
        return self.choose(sorted(shapes))

    def _has_room_for(self, family: str) -> bool:
        """Return whether a preparation does not change what another family means."""
        lazy = "lazy batch norm" in self.kinds
        normed = self.kinds & {"spectral norm", "weight norm"}
        if family in MEMORY and (self.families | ({self.forced} & MEMORY)) & MEMORY - {family}:
            return False
        if self.forced == "tied weights" and family == "flat weights":
            return False
        if family == "NumPy weights":
            return self.device == "cpu" and not lazy and not normed
        if family in {"flat weights", "tied weights"}:
            return not lazy and not normed and self.families.isdisjoint({"flat weights"})
        return not lazy

    def model(self, name: str, num_blocks: int, *, border: str = "", net: str = NET) -> None:
        """Add a model of some blocks, and its definitions."""
        kinds = self._draw_kinds()
        makes = []
        for n in range(num_blocks):
            block = kinds[n % len(kinds)]
            self.families.add(block.family)
            self.kinds.add(block.family)
            self.define(block.source, block.family if block.family != "plain" else "")
            makes.append(block.make)
            self.paths.setdefault(block.family, f"{name}.blocks[{n}]")
        if border:
            for family, path in self.paths.items():
                self.paths[family] = path.replace(".blocks", "")
            makes.append(border)
            text = f"{name} = nn.Sequential({', '.join(makes)}).to(device)"
        else:
            self.define(net)
            text = f"{name} = Net({', '.join(makes)}).to(device)"
        outer = "nn.Sequential" if border else "Net"
        simpler = tuple(
            f"{name} = {outer}({', '.join(makes[:n] + makes[n + 1 :])}).to(device)"
            for n in range(len(makes))
        )
        self.models.append(name)
        self.say(text, simpler=simpler if len(makes) > 1 else ())

    def _draw_kinds(self) -> list[Block]:
        activation = self.draw.choice(ACTIVATIONS)
        plain = Block("plain", "", f"nn.Sequential(nn.Linear(16, 16), {activation})")
        kinds = []
        for _ in range(self.draw.choice((1, 1, 2, 3))):
            family = self.draw.choice([*BLOCK_OF, *["plain"] * (len(BLOCKS) // 3)])
            usable = family in self.allowed and self._suits(self.forced, {family})
            kinds.append(BLOCK_OF[family] if usable else plain)
        needed = NEEDED_BLOCKS.get(self.forced, self.forced)
        if needed in BLOCK_OF and needed not in self.kinds:
            kinds[0] = BLOCK_OF[needed]
        return kinds

    def _offload(self, model: str) -> None:
        policy = self.choose(POLICIES)
        tried = TRIED_WITH.get(self.forced, ())
        if tried and self.forced not in POLICIES and self.draw.random() < 0.75:
            policy = self.draw.choice(tried)
            policy = policy if policy in self.allowed else "small min_bytes"
        self.families.add(policy)
        draw, arguments = self.draw, []
        few = draw.choice(("1", "1", "256", "600"))
        rebuild = draw.choice(("", "", ", rebuild=False"))
        layers = 'layers=["blocks.*"]' if self.has_blocks(model) else f"layers=[*{model}]"
        layers = "layers=[model.block]" if "shared block" in self.kinds else layers
        small = f"activations=ebbtide.ActivationPolicy(min_bytes={few}{{}}{rebuild})"
        if policy == "small min_bytes":
            arguments.append(small.format(draw.choice(("", ", max_inflight_bytes=2048"))))
        elif policy == "without rebuilding":
            arguments.append("activations=ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)")
        elif policy in {"num_layers", "keep_last"}:
            arguments.append(small.format(f", {policy}=1"))
        elif policy in {"recompute", "recompute+offload", "weights and recomputation"}:
            mode = policy if "recomp" in policy[:9] and "weights" not in policy else "recompute"
            arguments.append(small.format(f', mode="{mode}"'))
            self.recomputes = True
        elif policy.startswith("budget") or policy == "plan":
            mib = draw.choice(("0", "0.2", "1", "2", "8", "64", "256"))
            arguments.append(f"budget=used() + int({mib} * 2**20)")
            arguments.append("activations=ebbtide.ActivationPolicy(min_bytes=1)")
        if "weights" in policy:
            buffering = draw.choice(("", "", "double_buffering=False", "num_layers=1"))
            arguments.append(f"weights=ebbtide.WeightPolicy({buffering})")
            self.weights = True
            if policy == "weights and activations" or policy == "weights and small min_bytes":
                arguments.insert(0, small.format(""))
        counts = {"num_layers", "keep_last"} & {policy} or "rec" in policy or "weights" in policy
        if self.layers:
            arguments.append(self.layers)
        elif counts or draw.random() < 0.5:
            arguments.append(layers)
        if self.device != "cpu" and draw.random() < 0.5 and policy != "plan":
            arguments.append(f'store="{draw.choice(("host", "tiered", "disk"))}"')
        text = f"{model}_handle = ebbtide.offload({', '.join([model, *arguments])})"
        simpler = [f"{model}_handle = ebbtide.offload({model})"]
        for n in range(len(arguments)):
            fewer = ", ".join([model, *arguments[:n], *arguments[n + 1 :]])
            simpler.append(f"{model}_handle = ebbtide.offload({fewer})")
        self.say(text, policy, offloaded_only=True, simpler=tuple(simpler))
        self.offload_text = text

    def has_blocks(self, model: str) -> bool:
        """Return whether the model has its blocks in a list of that name."""
        return any(statement.text.startswith(f"{model} = Net(") for statement in self.statements)

    def _optimizer(self, model: str) -> str:
        if any(statement.text == EMBEDDING for statement in self.statements):
            return f"{model}_optimizer = torch.optim.SGD({model}.parameters(), 0.1)"
        kind = self.draw.choice(
            (
                *("SGD({}, 0.1, momentum=0.9, foreach=False)", "SGD({}, 0.1, foreach=False)"),
                "AdamW({}, 0.01, foreach=False)",
            )
        )
        return f"{model}_optimizer = torch.optim.{kind.format(f'{model}.parameters()')}"

    # ---- the loop -------------------------------------------------------------------------------

    def loop(self) -> None:
        """Draw the steps."""
        mode = ""
        free = self.forced not in {*STEPS, *AFTER, "clipping", "gradients set to zero"}
        if free and self.forced != LOOPS[1] and self.wants(LOOPS[0], 0.1):
            mode = LOOPS[0]
        elif self.wants(LOOPS[1], 0.1):
            mode = LOOPS[1]
        budgeted = any(family.startswith("budget") for family in self.families)
        num_steps = self.draw.randint(6, 10) if budgeted else self.draw.randint(2, 6)
        forced_step = self.forced if self.forced in STEPS else ""
        forced_after = self.forced if self.forced in AFTER else ""
        favoured = [
            self.choose([s for s in STEPS if self.fits(s)]) for _ in range(2)
        ]  # a few kinds, so that a kind comes again
        at = self.draw.randrange(num_steps)
        if mode:
            self.families.add(mode)
        if mode == LOOPS[0]:
            self._overlapping(num_steps)
            return
        for n in range(num_steps):
            kind = self.draw.choice(["step", "step", *favoured])
            if forced_step and (n == at or self.draw.random() < 0.3):
                kind = forced_step
            plainly = n == at and not forced_step
            if plainly or kind not in self.allowed or not self.fits(kind):
                kind = "step"
            self.families.add(kind)
            STEPS[kind](self)
            if mode != LOOPS[1] or n % 2:
                self.update()
            if self.draw.random() < 0.3 or (forced_after and n == min(at, num_steps - 2)):
                after = forced_after or self.choose([a for a in AFTER if self.fits(a)])
                if self.fits(after) and after in self.allowed:
                    AFTER[after](self)
                    self.families.add(after)

    def fits(self, kind: str) -> bool:
        """Return whether a step can be taken with the blocks and models there are."""
        if kind in NEEDS_TWO and len(self.models) < 2:
            return False
        if kind in NEEDED_BLOCKS and NEEDED_BLOCKS[kind] not in self.kinds:
            return False
        if kind in NEEDS_SETUP and NEEDS_SETUP[kind] not in self.families:
            return False
        if kind == "weights in shared memory" and self.families & MEMORY:
            return False  # an array would refer to memory that torch has let go
        if kind in CPU_ONLY and self.device != "cpu":
            return False
        if kind in NOT_SPARSE and "sparse embedding" in self.families:
            return False
        return self._suits(kind, self.kinds)

    def _suits(self, kind: str, blocks: set[str]) -> bool:
        """Return whether plain training gives the same each time with such a step and blocks."""
        if kind in THREADS and blocks & (RANDOM | GLOBAL | STATEFUL):
            return False
        if kind in DOUBLE and not blocks <= DOUBLE_DIFFERENTIABLE | {"plain"}:
            return False
        if kind in NOT_STATEFUL and blocks & (STATEFUL | GLOBAL):
            return False
        if kind in NOT_HOOKED and "checkpoint inside" in blocks:
            return False  # torch refuses hooks of saved tensors there
        if kind in FUNCTIONAL and self.device != "cpu" and "convolution" in blocks:
            return False  # the accelerator in software cannot run its gradient without a bias's
        if kind in NOT_LAZY and "lazy batch norm" in blocks:
            return False
        return not (kind in NOT_PARAMETRIZED and blocks & {"spectral norm", "weight norm"})

    def _overlapping(self, num_steps: int) -> None:
        """Always one graph alive; a graph stays valid when weights are replaced by pointer."""
        previous = ""
        by_pointer = not self.weights and self.draw.random() < 0.6
        for _ in range(num_steps):
            loss = self.forward()
            if previous:
                self.backward(previous)
                if by_pointer:
                    self.say(
                        f"for p in {self.params}:\n"
                        f"    if p.grad is not None:\n"
                        f"        p.data = p.data - 0.1 * p.grad.to_dense()\n"
                        f"        p.grad = None",
                        "weights replaced by pointer",
                    )
            previous = loss
        if self.forced == LOOPS[0]:
            self._many_overlapping(previous)
        self.backward(previous)

    def _many_overlapping(self, loss: str) -> None:
        """So many that a step must have ended although there is always a graph."""
        collects = " + sum(collected)" if "collected by the loop" in self.kinds else ""
        self.say(
            f"for n in range(100, 180):\n"
            f"    following = {self.call('batch(n)')}.square().mean(){collects}\n"
            f"    {loss}.backward()\n"
            f"    {loss} = following\n"
            + ("    collected.clear()\n" if collects else "")
            + "del following",
            LOOPS[0],
            may_raise=self.may_raise,
        )
        # A backward that raises, plainly too, ends the loop before a step has to be over.
        for model in self.models:
            self.say(
                f'assert n < 179 or {model}_handle.stats.num_saved > 0, "no step has ended"',
                LOOPS[0],
                offloaded_only=True,
            )

    def forward(self, x: str = "", step: str = "") -> str:
        """Add a forward. Returns the name of the loss."""
        self.change_settings()
        for block in sorted(self.kinds & BLOCK_OF.keys()):
            if BLOCK_OF[block].resets:
                self.say(BLOCK_OF[block].resets, block)
        x = x or self.next_batch()
        loss = f"loss{self.number}"
        if not step and self.wants("number argument", 0.1) and "{step}" in self.call_template:
            self.families.add("number argument")
            step = self.draw.choice((str(self.number), f"{self.number / 7:.3f}"))
        text = f"{loss} = {self.call(x, step)}.square().mean()"
        if "collected by the loop" in self.kinds:
            text += " + sum(collected)"
        family, around = self._draw_around()
        if around:
            self.define(CONTEXTS.get(around.removeprefix("with ").partition("(")[0], ""))
            text = f"{around}\n    {text}"
        self.say(f"{text}\nnote({loss})", family, may_raise=self.may_raise)
        return loss

    def _draw_around(self) -> tuple[str, str]:
        for family, contexts in AROUND.items():
            again = self.forced not in AROUND or self.forced not in self.families
            if self.wants(family, 0.06) and (again or self.draw.random() < 0.6):
                text = self.fill(self.draw.choice(contexts))
                if self.device != "cpu" and ("mkldnn" in text or "num_threads" in text):
                    continue  # kernels read these settings when they run, not when queued
                if "autocast" in text and (self.device != "cpu" or self.kinds & NO_AUTOCAST):
                    continue
                if "float64" in text and self.kinds & NO_DOUBLE:
                    continue
                return family, text
        return "", ""

    def change_settings(self) -> None:
        """Set what blocks read, at times."""
        changes = {
            "attribute set by the program": f"{{}}.scale = {self.draw.choice((0.5, 2.0))}",
            "active adapter": f'{{}}.active = "{self.draw.choice("ab")}"',
            "global read by the forward": f'config["scale"] = {self.draw.choice((0.5, 2.0))}',
            "custom function changes what another saved": f"{{}}.late = {self.draw.random() < 0.5}",
        }
        for family, text in changes.items():
            if family in self.kinds and self.draw.random() < 0.5:
                self.say(text.format(self.paths[family]), family)

    def between(self) -> None:
        """Add what comes between a forward and its backward, at times."""
        for family, texts in BETWEEN.items():
            if self.wants(family, 0.06):
                self.say(self.fill(self.draw.choice(texts)), family)
                if family.startswith("requires_grad"):
                    self.undo = f"for p in {self.params}:\n    p.requires_grad_(True)"
                elif family.startswith("mode"):
                    self.undo = f"{self.models[0]}.train()"
        if self.draw.random() < 0.5:
            self.change_settings()

    undo = ""

    def backward(self, loss: str, text: str = "{loss}.backward()") -> None:
        """Add what comes before a backward, and the backward."""
        self.between()
        may_raise = self.may_raise
        may_raise |= "requires_grad changed before backward" in self.families
        self.say(f"{text.format(loss=loss)}\ndel {loss}", may_raise=may_raise)
        if self.undo:
            self.say(self.undo)
            self.undo = ""

    def update(self) -> None:
        """Add the optimizers' steps."""
        lines = []
        if self.wants("clipping", 0.1) and "sparse embedding" not in self.families:
            self.families.add("clipping")
            lines += [
                f"for p in {self.params}:",
                "    if p.grad is not None:",
                "        p.grad.mul_(min(1.0, 0.5 / (float(p.grad.cpu().norm()) + 1e-6)))",
            ]
        for model in self.models:
            lines.append(f"{model}_optimizer.step()")
        none = "set_to_none=False" if self.wants("gradients set to zero", 0.1) else ""
        lines += [f"{model}_optimizer.zero_grad({none})" for model in self.models]
        if none:
            self.families.add("gradients set to zero")
        if "scheduler" in self.families:
            lines.append("scheduler.step()")
        self.say("\n".join(lines))


# ---- shapes -------------------------------------------------------------------------------------


@_in(SHAPES, "one model")
def _one(draft: Draft) -> None:
    draft.model("model", draft.draw.randint(2, 4))
    draft.call_template = "model({x}{step})"


@_in(SHAPES, "encoder and decoder")
def _encoder_and_decoder(draft: Draft) -> None:
    border = draft.draw.choice(("nn.GELU()", "nn.SiLU()", "nn.LeakyReLU(0.1)", "nn.Tanh()"))
    draft.model("encoder", draft.draw.randint(1, 2), border=border)
    draft.model("decoder", draft.draw.randint(1, 2))
    draft.call_template = "decoder(encoder({x}){step})"


@_in(SHAPES, "generator and discriminator")
def _generator_and_discriminator(draft: Draft) -> None:
    border = draft.draw.choice(("nn.GELU()", "nn.SiLU()", "nn.Linear(16, 16)"))
    draft.model("generator", draft.draw.randint(1, 2), border=border)
    draft.model("discriminator", draft.draw.randint(1, 2))
    draft.call_template = "discriminator(generator({x}){step})"


@_in(SHAPES, "sparse embedding")
def _sparse(draft: Draft) -> None:
    draft.model("model", draft.draw.randint(1, 3), net=EMBEDDING)
    draft.call_template = "model({x}{step})"


@_in(SHAPES, "shared block, attribute set by the loop")
def _repeated(draft: Draft) -> None:
    draft.define(TIMED)
    draft.define(REPEATED)
    first = draft.draw.choice(("nn.Linear(16, 16)", "Timed()"))
    draft.models.append("model")
    draft.kinds.add("shared block")
    draft.layers = draft.draw.choice(("layers=[model.block]", 'layers=["block", "first"]', ""))
    draft.say(f"model = Repeated({first}, Timed()).to(device)")
    draft.call_template = "model({x}{step})"


@_in(SHAPES, "sequential")
def _sequential(draft: Draft) -> None:
    draft.model("model", draft.draw.randint(2, 3), border="nn.Linear(16, 16)")
    draft.call_template = "model({x})"


# ---- steps --------------------------------------------------------------------------------------


@_in(STEPS, "step")
def _step(draft: Draft) -> None:
    draft.backward(draft.forward())


@_in(STEPS, "accumulation")
def _accumulation(draft: Draft) -> None:
    for _ in range(draft.draw.randint(2, 3)):
        draft.backward(draft.forward())


@_in(STEPS, "several forwards, one backward")
def _one_backward(draft: Draft) -> None:
    first, second = draft.forward(), draft.forward()
    draft.rounds |= draft.weights
    draft.backward(second, f"({first} + {{loss}}).backward()\ndel {first}")


@_in(STEPS, "retained graph")
def _retained(draft: Draft) -> None:
    loss = draft.forward()
    draft.backward(loss, "{loss}.backward(retain_graph=True)\n{loss}.backward()")


@_in(STEPS, "graphs end in another order")
def _another_order(draft: Draft) -> None:
    losses = [draft.forward() for _ in range(3)]
    draft.draw.shuffle(losses)
    for loss in losses:
        draft.backward(loss)


@_in(STEPS, "autograd.grad")
def _grad(draft: Draft) -> None:
    draft.backward(
        draft.forward(),
        f"trained = [p for p in {draft.params} if p.requires_grad]\n"
        "for p, g in zip(trained, torch.autograd.grad({loss}, trained, allow_unused=True)):\n"
        "    p.grad = g",
    )


@_in(STEPS, "gradient penalty")
def _penalty(draft: Draft) -> None:
    draft.rounds |= draft.weights
    draft.next_batch()
    n = draft.number
    draft.say(
        f"x = batch({n}).requires_grad_()\n"
        f"y = {draft.call('x')}.square().mean()\n"
        f"(g,) = torch.autograd.grad(y, x, create_graph=True)\n"
        f"loss{n} = y + (g.norm(dim=1) - 1).square().mean()\n"
        f"note(loss{n})\n"
        f"del y, g, x",
        "gradient penalty",
    )
    draft.backward(f"loss{n}")


@_in(STEPS, "double backward through weights")
def _double(draft: Draft) -> None:
    draft.rounds |= draft.weights
    loss = draft.forward()
    draft.say(
        f"trained = [p for p in {draft.params} if p.requires_grad]\n"
        f"gs = torch.autograd.grad({loss}, trained, create_graph=True, allow_unused=True)\n"
        f"{loss} = {loss} + sum(g.square().sum().to(device) for g in gs if g is not None)\n"
        f"del gs",
        "double backward through weights",
    )
    draft.backward(loss)


@_in(STEPS, "functional call")
def _functional(draft: Draft) -> None:
    model = draft.models[0]
    draft.next_batch()
    n = draft.number
    inner = draft.call_template.replace(f"{model}({{x}}{{step}})", "CALL").replace(
        f"{model}({{x}})", "CALL"
    )
    call = (
        f"torch.func.functional_call({model}, "
        f"{{k: (p * 0.9).to(device) for k, p in {model}.named_parameters()}}, (batch({n}),))"
    )
    draft.say(
        f"loss{n} = {inner.format(x='', step='').replace('CALL', call)}.square().mean()\n"
        f"note(loss{n})",
        "functional call",
    )
    draft.backward(f"loss{n}")


@_in(STEPS, "MAML")
def _maml(draft: Draft) -> None:
    model = draft.models[0]
    draft.rounds |= draft.weights
    draft.next_batch()
    n = draft.number
    draft.say(
        f"fast = {{k: p.to(device) for k, p in {model}.named_parameters() if p.requires_grad}}\n"
        f"for _ in range(2):\n"
        f"    y = torch.func.functional_call({model}, fast, (batch({n}),)).square().mean()\n"
        f"    gs = torch.autograd.grad(y, list(fast.values()), create_graph=True, "
        f"allow_unused=True)\n"
        f"    pairs = zip(fast.items(), gs)\n"
        f"    fast = {{k: p if g is None else p - 0.1 * g for (k, p), g in pairs}}\n"
        f"y = torch.func.functional_call({model}, fast, (batch({n + 500}),))\n"
        f"loss{n} = y.square().mean()\n"
        f"note(loss{n})\n"
        f"del fast, y, gs, pairs",
        "MAML",
    )
    draft.backward(f"loss{n}")


@_in(STEPS, "functional gradient")
def _functional_gradient(draft: Draft) -> None:
    model = draft.models[0]
    draft.next_batch()
    n = draft.number
    draft.say(
        f"def loss_of(weights):\n"
        f"    y = torch.func.functional_call({model}, weights, (batch({n}),))\n"
        f"    return y.square().mean()\n\n\n"
        f"gs = torch.func.grad(loss_of)({{k: p.detach().to(device) for k, p in "
        f"{model}.named_parameters()}})\n"
        f"for k, p in {model}.named_parameters():\n"
        f"    p.grad = gs[k].to(p.device) if p.requires_grad else None",
        "functional gradient",
    )


@_in(STEPS, "generator and discriminator in turn")
def _gan(draft: Draft) -> None:
    first, second = draft.models[:2]
    draft.next_batch()
    n = draft.number
    draft.say(
        f"fake = {first}(batch({n}))\n"
        f"loss{n} = {second}(fake.detach()).square().mean() - {second}(batch({n + 500})).mean()\n"
        f"note(loss{n})",
        "generator and discriminator in turn",
    )
    draft.rounds |= draft.weights
    draft.backward(f"loss{n}")
    draft.say(f"{second}_optimizer.step()\n{second}_optimizer.zero_grad()")
    draft.say(f"loss{n} = -{second}(fake).mean()\nnote(loss{n})\ndel fake")
    draft.backward(f"loss{n}")


@_in(STEPS, "cycle through two models")
def _cycle(draft: Draft) -> None:
    first, second = draft.models[:2]
    draft.next_batch()
    n = draft.number
    draft.rounds |= draft.weights
    draft.say(
        f"loss{n} = {first}({second}({first}(batch({n})))).square().mean()\nnote(loss{n})",
        "cycle through two models",
    )
    draft.backward(f"loss{n}")


@_in(STEPS, "threads take gradients of one graph")
def _threads_of_one_graph(draft: Draft) -> None:
    draft.define(IN_THREADS)
    loss = draft.forward()
    draft.say(
        f"trained = [p for p in {draft.params} if p.requires_grad]\n"
        f"how = dict(retain_graph=True, allow_unused=True)\n"
        f"for _ in range(5):\n"
        f"    jobs = [lambda: torch.autograd.grad({loss}, trained, **how)] * 3\n"
        f"    for gs in in_threads(*jobs):\n"
        f"        note([g for g in gs if g is not None])\n"
        f"del gs, jobs",
        "threads take gradients of one graph",
    )
    draft.backward(loss)


@_in(STEPS, "threads share one model")
def _threads_share(draft: Draft) -> None:
    draft.define(IN_THREADS)
    draft.next_batch()
    n = draft.number
    draft.say(
        f"trained = [p for p in {draft.params} if p.requires_grad]\n\n\n"
        f"def gradients(seed):\n"
        f"    loss = {draft.call('batch(seed)')}.square().mean()\n"
        f"    gs = torch.autograd.grad(loss, trained, allow_unused=True)\n"
        f"    return [loss.detach(), *gs]\n\n\n"
        f"for gs in in_threads(*[lambda k=k: gradients({n} + k) for k in range(3)]):\n"
        f"    note(gs)\n"
        f"    for p, g in zip(trained, gs[1:]):\n"
        f"        p.grad = None if g is None else g.to(p.device)\n"
        f"del gs",
        "threads share one model",
    )


@_in(STEPS, "threads train one model each")
def _threads_each(draft: Draft) -> None:
    draft.define(IN_THREADS)
    draft.next_batch()
    first, second = draft.models[:2]
    draft.say(
        f"def train(model, optimizer, seed):\n"
        f"    losses = []\n"
        f"    for n in range(4):\n"
        f"        loss = model(batch(seed + n)).square().mean()\n"
        f"        loss.backward()\n"
        f"        optimizer.step()\n"
        f"        optimizer.zero_grad()\n"
        f"        losses.append(loss.detach())\n"
        f"    return losses\n\n\n"
        f"for losses in in_threads(\n"
        f"    lambda: train({first}, {first}_optimizer, 10),\n"
        f"    lambda: train({second}, {second}_optimizer, 20),\n"
        f"):\n"
        f"    note(losses)",
        "threads train one model each",
    )


@_in(STEPS, "threads, a budget each")
def _threads_budget(draft: Draft) -> None:
    _threads_each(draft)


@_in(STEPS, "dropped graph")
def _dropped(draft: Draft) -> None:
    loss = draft.forward()
    draft.say(f"del {loss}", "dropped graph")
    draft.backward(draft.forward())


@_in(STEPS, "dropped graph, then its input changes")
def _dropped_changed(draft: Draft) -> None:
    x = draft.next_batch()
    how = draft.draw.choice(("", ".requires_grad_()"))
    draft.say(f"x = {x}{how}")
    loss = draft.forward("F.gelu(x)" if draft.draw.random() < 0.6 else "x")
    draft.say(
        f"del {loss}\nwith torch.no_grad():\n    x.mul_(0.5)",
        "dropped graph, then its input changes",
    )
    draft.backward(draft.forward("x"))


@_in(STEPS, "activation between models outlives a graph")
def _outlives(draft: Draft) -> None:
    draft.next_batch()
    n = draft.number
    draft.say(
        f"x = batch({n}).requires_grad_()\n"
        f"a = x * 2\n"
        f"g = F.gelu(a)\n"
        f"metric = {draft.call('g')}.mean()\n"
        f"note(metric)\n"
        f"loss{n} = {draft.call('g.detach()')}.square().mean()\n"
        f"note(loss{n})\n"
        f"del metric, g\n"
        f"with torch.no_grad():\n"
        f"    a.mul_(0.5)",
        "activation between models outlives a graph",
    )
    draft.rounds |= draft.weights
    draft.backward(f"loss{n}")


@_in(STEPS, "gradient scaling")
def _scaling(draft: Draft) -> None:
    draft.backward(draft.forward(), "({loss} * 1024).backward()")
    draft.say(
        f"for p in {draft.params}:\n    if p.grad is not None:\n        p.grad = p.grad / 1024",
        "gradient scaling",
    )


@_in(STEPS, "exception in a forward")
def _failing_forward(draft: Draft) -> None:
    path = draft.paths["raises in the middle"]
    draft.next_batch()
    draft.say(
        f"{path}.fails = True\n"
        f"with contextlib.suppress(ValueError):\n"
        f"    {draft.call(f'batch({draft.number})')}\n"
        f"{path}.fails = False",
        "exception in a forward",
    )
    draft.backward(draft.forward())


@_in(STEPS, "exception in a backward")
def _failing_backward(draft: Draft) -> None:
    loss = draft.forward()
    draft.say(
        f"{loss}.grad_fn.next_functions[0][0].register_prehook(lambda gs: 1 / 0)\n"
        f"with contextlib.suppress(ZeroDivisionError):\n"
        f"    {loss}.backward()\n"
        f"del {loss}\n"
        f"for p in {draft.params}:\n"
        f"    p.grad = None",
        "exception in a backward",
    )
    draft.backward(draft.forward())


@_in(STEPS, "weight written before backward")
def _written(draft: Draft) -> None:
    loss = draft.forward()
    which = draft.draw.choice(("weight", "bias"))
    draft.say(
        f"with torch.no_grad():\n"
        f"    for k, p in {draft.models[0]}.named_parameters():\n"
        f'        if k.endswith("{which}"):\n'
        f"            p.mul_(0.9)",
        "weight written before backward",
    )
    draft.say(f"{loss}.backward()", "weight written before backward", may_raise=True)
    draft.say(f"del {loss}", may_raise=True)


@_in(STEPS, "output changed in place")
def _output_changed(draft: Draft) -> None:
    draft.next_batch()
    n = draft.number
    change = draft.draw.choice(("y.data.add_(1)", "y.detach().mul_(0.5)", "y.mul_(2)"))
    if ".data" in change:
        change = "y = y.detach().clone().mul_(2)"
    draft.say(
        f"y = {draft.call(f'batch({n})')}\nloss{n} = y.square().mean()\nnote(loss{n})\n{change}",
        "output changed in place",
    )
    draft.say(f"loss{n}.backward()", "output changed in place", may_raise=True)
    draft.say(f"del loss{n}, y", may_raise=True)


@_in(STEPS, "refused change of an activation")
def _spoiled(draft: Draft) -> None:
    path = draft.paths["activation changed in place"]
    draft.say(f"{path}.spoils = True", "refused change of an activation")
    loss = draft.forward()
    draft.say(f"{path}.spoils = False")
    draft.say(f"{loss}.backward()", "refused change of an activation", may_raise=True)


@_in(STEPS, "NumPy buffer refilled")
def _buffer(draft: Draft) -> None:
    draft.define("buffer = np.zeros((8, 16), np.float32)")
    draft.define("x = torch.from_numpy(buffer).to(device)")
    n = draft.number = draft.number + 1
    draft.say(f"buffer[:] = batch({n}).cpu().numpy()\nx = torch.from_numpy(buffer).to(device)")
    kept = draft.forward("x")
    draft.number += 1
    fill = f"buffer[:] = batch({draft.number}).cpu().numpy()"
    again = draft.draw.choice(("", "", "\nx = torch.from_numpy(buffer).to(device)"))
    if draft.device != "cpu":
        again = "\nx = torch.from_numpy(buffer).to(device)"
    draft.say(fill + again, "NumPy buffer refilled")
    draft.backward(draft.forward("x"))
    draft.say(f"del {kept}")


@_in(STEPS, "shared memory refilled")
def _shared(draft: Draft) -> None:
    draft.define("slot = torch.zeros(8, 16).share_memory_()")
    draft.define("view = slot.numpy()")
    n = draft.number = draft.number + 1
    draft.say(f"view[:] = batch({n}).cpu().numpy()")
    kept = draft.forward("slot.to(device)")
    draft.number += 1
    draft.say(f"view[:] = batch({draft.number}).cpu().numpy()", "shared memory refilled")
    draft.backward(draft.forward("slot.to(device)"))
    draft.say(f"del {kept}")


@_in(STEPS, "two slots filled in turn")
def _slots(draft: Draft) -> None:
    draft.define("slots = [torch.zeros(8, 16) for _ in range(2)]")
    losses = []
    draft.rounds |= draft.weights
    for k in range(2):
        draft.number += 1
        draft.say(
            f"slots[{k}].numpy()[:] = batch({draft.number}).cpu().numpy()",
            "two slots filled in turn",
        )
        losses.append(draft.forward(f"slots[{k}].to(device)"))
    draft.backward(losses[1], f"({losses[0]} + {{loss}}).backward()\ndel {losses[0]}")


@_in(STEPS, "graph kept over steps")
def _kept(draft: Draft) -> None:
    draft.say(f"kept = {draft.forward()}", "graph kept over steps")
    draft.backward(draft.forward())


@_in(STEPS, "input needs a gradient")
def _input_gradient(draft: Draft) -> None:
    draft.say(f"x = {draft.next_batch()}.requires_grad_()")
    draft.backward(draft.forward("x"))
    draft.say("note(x.grad)", "input needs a gradient")


@_in(STEPS, "input is a view")
def _view(draft: Draft) -> None:
    n = draft.number = draft.number + 1
    how = draft.draw.choice(("t().contiguous().t()", "repeat(1, 2)[:, ::2]", "expand(8, 16)"))
    draft.say(f"x = batch({n}).{how}")
    draft.backward(draft.forward("x"))


@_in(STEPS, "penalty on the weights")
def _weight_decay(draft: Draft) -> None:
    draft.rounds |= draft.weights
    loss = draft.forward()
    draft.backward(
        loss,
        f"({{loss}} + sum(0.01 * p.square().sum().to(device) for p in {draft.params})).backward()",
    )


@_in(STEPS, "gradients of some weights")
def _some(draft: Draft) -> None:
    draft.backward(
        draft.forward(),
        f"trained = [p for p in {draft.params} if p.requires_grad]\n"
        "{loss}.backward(inputs=trained[:2])",
    )


@_in(STEPS, "gradient hooks")
def _hooks(draft: Draft) -> None:
    loss = draft.forward()
    draft.say(
        f"hook = [p for p in {draft.params} if p.requires_grad][-1].register_hook(lambda g: g * 2)",
        "gradient hooks",
    )
    draft.backward(loss)
    draft.say("hook.remove()")


# ---- between steps ------------------------------------------------------------------------------


def _after(family: str, *texts: str) -> None:
    def say(draft: Draft) -> None:
        draft.say(draft.fill(draft.draw.choice(texts)), family, may_raise=draft.may_raise)

    AFTER[family] = say


_after(
    "evaluation",
    "with torch.no_grad():\n    note({call:batch(90)})",
    "{model}.eval()\nwith torch.inference_mode():\n    note({call:batch(90)})\n{model}.train()",
    "{model}.eval()\nnote({call:batch(90)}.detach())\n{model}.train()",
)
_SWAP_BACK = "with torch.no_grad():\n    note({call:batch(90)})\n"
_FOLLOW = """\
average = globals().get("average") or copy.deepcopy({model}).to(device)
with torch.no_grad():
    for p, e in zip({model}.parameters(), average.parameters()):
        e.lerp_(p.detach().to(e.device), 0.5)
"""
_after("average follows", _FOLLOW)
_after(
    "average swapped in by pointer",
    _FOLLOW
    + "before = [p.data for p in {model}.parameters()]\n"
    + "for p, e in zip({model}.parameters(), average.parameters()):\n"
    + "    p.data = e.data.clone()\n"
    + _SWAP_BACK
    + "for p, old in zip({model}.parameters(), before):\n"
    + "    p.data = old\n"
    + "del before, old",
    _FOLLOW
    + "before = [p.data for p in {model}.parameters()]\n"
    + "for p, e in zip({model}.parameters(), average.parameters()):\n"
    + "    p.data = e.data\n"
    + _SWAP_BACK
    + "for p, old in zip({model}.parameters(), before):\n"
    + "    p.data = old\n"
    + "del before, old",
)
_after(
    "average and weights swap pointers",
    _FOLLOW
    + "for p, e in zip({model}.parameters(), average.parameters()):\n"
    + "    p.data, e.data = e.data, p.data\n"
    + _SWAP_BACK
    + "for p, e in zip({model}.parameters(), average.parameters()):\n"
    + "    p.data, e.data = e.data, p.data",
)
_after(
    "average swapped in by copy",
    _FOLLOW
    + "before = {{k: v.detach().clone() for k, v in {model}.state_dict().items()}}\n".replace(
        "{{", "{"
    ).replace("}}", "}")
    + "{model}.load_state_dict(average.state_dict())\n"
    + _SWAP_BACK
    + "{model}.load_state_dict(before)\n"
    + "del before",
)
_NEW_OPTIMIZER = "\n{model}_optimizer = torch.optim.SGD({model}.parameters(), 0.1, foreach=False)"
_after(
    "state assigned",
    "state = {k: v.detach().clone() * 0.9 for k, v in {model}.state_dict().items()}\n"
    "{model}.load_state_dict(state, assign=True)\n"
    "del state" + _NEW_OPTIMIZER,
)
_after(
    "average assigned and swapped back",
    _FOLLOW
    + "before = {model}.state_dict(keep_vars=True)\n"
    + "{model}.load_state_dict(average.state_dict(), assign=True)\n"
    + _SWAP_BACK
    + "{model}.load_state_dict(before, assign=True)\n"
    + "del before",
)
_after(
    "parameters set and set back",
    _FOLLOW
    + "before = [(m, k, p) for m in {model}.modules() for k, p in m._parameters.items() if p is not"
    + " None]\n"
    + "others = [p for m in average.modules() for p in m._parameters.values() if p is not None]\n"
    + "for (m, k, _), e in zip(before, others):\n"
    + "    setattr(m, k, nn.Parameter(e.detach().clone()))\n"
    + _SWAP_BACK
    + "for m, k, p in before:\n"
    + "    setattr(m, k, p)\n"
    + "del before, others, m, k, p",
)
_after(
    "parameter replaced",
    "for module in {model}.modules():\n"
    "    if type(module) is nn.Linear:\n"
    "        module.weight = nn.Parameter(module.weight.detach().clone() * 0.9)" + _NEW_OPTIMIZER,
    "for module in {model}.modules():\n"
    "    if type(module) is nn.Linear:\n"
    '        setattr(module, "bias", nn.Parameter(torch.zeros(len(module.bias), device=device)))'
    + _NEW_OPTIMIZER,
)
_after(
    "weights written",
    "with torch.no_grad():\n    for p in {params}:\n        p.mul_(0.95)",
    "for p in {params}:\n    p.data.mul_(0.95)",
    "for p in {params}:\n    p.data = p.data * 0.95",
    "torch.nn.utils.vector_to_parameters(\n"
    "    torch.nn.utils.parameters_to_vector({params}).detach() * 0.95, {params}\n)",
)
_after("flat weights written", "flat.mul_(0.95)")
_after("NumPy weights written", "for array in arrays:\n    array *= 0.95")
_after(
    "state saved and loaded",
    "file = io.BytesIO()\ntorch.save({model}.state_dict(), file)\nfile.seek(0)\n"
    "{model}.load_state_dict(torch.load(file))",
    "state = copy.deepcopy({model}.state_dict())\nnote(list(state.values()))\n"
    "{model}.load_state_dict(state)\ndel state",
)
_after(
    "copy of the model trains",
    "other = copy.deepcopy({model}).to(device)\n"
    "torch.optim.SGD(other.parameters(), 0.1, foreach=False)\n"
    "other(batch(80)).square().mean().backward()\n"
    "note([p.grad for p in other.parameters() if p.grad is not None])\n"
    "del other",
)
_after("weights frozen", "{params}[0].requires_grad_(False)", "{params}[-1].requires_grad_(False)")
_after("weights thawed", "for p in {params}:\n    p.requires_grad_(True)")
_after("weights in shared memory", "{model}.share_memory()")
_after("new optimizer", _NEW_OPTIMIZER[1:])


@_in(AFTER, "model dropped")
def _model_dropped(draft: Draft) -> None:
    family = "model dropped"
    other = "nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(device)"
    policy = draft.draw.choice(
        (
            "activations=ebbtide.ActivationPolicy(min_bytes=1)",
            "weights=ebbtide.WeightPolicy()",
            "activations=ebbtide.ActivationPolicy(min_bytes=1, rebuild=False)",
        )
    )
    backward = draft.draw.choice((".backward()", ""))
    draft.say(f"other = {other}", family)
    draft.say(f"ebbtide.offload(other, {policy})", family, offloaded_only=True)
    draft.say("alive = weakref.ref(other[0].weight)", family)
    draft.say(f"other(batch(81)).square().mean(){backward}", family)
    draft.say("del other\nnote(alive() is None)\ndel alive", family)


_after(
    "input on the parameters' device",
    "with torch.no_grad():\n"
    "    note({model}(torch.ones(8, 16, device=next({model}.parameters()).device)))",
)


@_in(AFTER, "offloaded again")
def _again(draft: Draft) -> None:
    model = draft.models[-1]
    draft.say(f"{model}_handle.detach()", "offloaded again", offloaded_only=True)
    draft.say(draft.offload_text, "offloaded again", offloaded_only=True)
    draft.say(draft._optimizer(model), "offloaded again")


@_in(AFTER, "detached")
def _detached(draft: Draft) -> None:
    model = draft.models[-1]
    draft.say(f"{model}_handle.detach()", "detached", offloaded_only=True)
    draft.say(draft._optimizer(model), "detached")


NEEDS_TWO = {
    *("generator and discriminator in turn", "cycle through two models"),
    *("threads train one model each", "threads, a budget each"),
}
THREADS = {
    *("threads take gradients of one graph", "threads share one model"),
    *("threads train one model each", "threads, a budget each"),
}
DOUBLE = {"gradient penalty", "double backward through weights", "MAML"}
NEEDED_BLOCKS = {
    "exception in a forward": "raises in the middle",
    "refused change of an activation": "activation changed in place",
}
NOT_LAZY = {
    *("average assigned and swapped back", "parameters set and set back"),
    *("MAML", "functional call", "functional gradient", "threads share one model"),
    *("average follows", "average swapped in by pointer", "average and weights swap pointers"),
    *("average swapped in by copy", "copy of the model trains", "state assigned"),
    *("average of the weights", "flat weights", "NumPy weights", "shared memory"),
}
CPU_ONLY = {"NumPy weights written"}
NOT_SPARSE = {
    *("double backward through weights", "MAML", "functional gradient", "gradient scaling"),
    *("gradient penalty", "penalty on the weights", "functional call"),
    *("threads share one model", "threads train one model each", "threads, a budget each"),
    *("weights in shared memory", "functional gradient", "clipping"),
}
NOT_STATEFUL = {"functional gradient"}
FUNCTIONAL = {"MAML", "functional call", "functional gradient"}
NOT_HOOKED = {"functional gradient"}
NOT_PARAMETRIZED = {
    *("average assigned and swapped back", "parameters set and set back"),
    *("MAML", "functional call", "functional gradient", "parameter replaced", "state assigned"),
    *("average swapped in by copy", "double backward through weights", "gradient penalty"),
    *("copy of the model trains", "average of the weights", "flat weights", "NumPy weights"),
    "tied weights",
}
NO_AUTOCAST = {"spectrum", "custom function", "custom function changes what it saved"}
NO_DOUBLE = {"own torch generator", "cached mask"}
NEEDS_SETUP = {"flat weights written": "flat weights", "NumPy weights written": "NumPy weights"}

_RECOMPUTED = ("recompute", "recompute+offload", "budget")
_AT_REST = ("weights", "weights and activations", "budget and weights")
_BUDGET = ("budget", "budget", "budget and weights")
_MOVED = ("small min_bytes", "num_layers", "keep_last")
TRIED_WITH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *("functional call", "MAML", "shared block, attribute set by the loop"),
            *("attribute set by the program", "active adapter", "counter of calls", "iterator"),
            *("counter of a class", "counter of a closure", "replaced buffer", "dropout"),
            *("own weight changed in forward", "own weight changed through data"),
            *("global read by the forward", "NumPy generator", "own torch generator"),
            *("activation changed in place", "refused change of an activation", "spectral norm"),
            *("context around the forward", "hook for the forward only", "batch norm"),
            *("requires_grad changed before backward", "mode changed before backward"),
            *("random depth", "weight written before backward", "lazy batch norm"),
            *("input changed in place", "random numbers before backward", "depends on values"),
            *("buffer changed in place", "weight norm", "always one graph alive"),
        ),
        _RECOMPUTED,
    ),
    **dict.fromkeys(
        (
            *("average follows", "average swapped in by pointer", "average swapped in by copy"),
            *("average and weights swap pointers", "state assigned", "parameter replaced"),
            *("average assigned and swapped back", "parameters set and set back"),
            *("weights written", "flat weights written", "flat weights", "NumPy weights"),
            *("NumPy weights written", "shared memory", "weights in shared memory"),
            *("tied weights", "threads take gradients of one graph", "state saved and loaded"),
            *("copy of the model trains", "input on the parameters' device", "offloaded again"),
            *("detached", "average of the weights", "weights frozen", "weights thawed"),
            *("new optimizer", "penalty on the weights", "gradient hooks"),
        ),
        _AT_REST,
    ),
    **dict.fromkeys(
        (
            *("memory outside modules", "cached mask", "collected by the loop"),
            *("sparse embedding", "large buffer changed in place", "threads, a budget each"),
            *("number argument", "variable lengths", "gradient penalty", "data held by the model"),
        ),
        _BUDGET,
    ),
    **dict.fromkeys(
        (
            *("filled after it is saved", "number of threads", "NumPy buffer refilled"),
            *("shared memory refilled", "two slots filled in turn", "chain of rebuilds", "gate"),
            *("custom function changes what it saved", "encoder and decoder"),
            "custom function changes what another saved",
            *("generator and discriminator", "dropped graph, then its input changes"),
            *("dropped metric, then its input changes", "output changed in place"),
            *("activation between models outlives a graph", "threads share one model"),
            *("threads train one model each", "graph kept over steps", "dropped graph"),
        ),
        _MOVED,
    ),
}
"""Policies that decide something for what such a family does. Three programs in four have one."""

FAMILIES: tuple[str, ...] = (
    *BLOCK_OF,
    *SHAPES,
    *STEPS,
    *AFTER,
    *AROUND,
    *BETWEEN,
    *SETUPS,
    *LOOPS,
    *POLICIES,
    *("variable lengths", "number argument", "scheduler", "clipping", "gradients set to zero"),
    "average of the weights",
)
"""What users do. A seed has the one at its place modulo the number of them, and some others."""


def generate(
    seed: int,
    device: str = "cpu",
    *,
    without: Collection[str] = (),
    only: str = "",
    alone: bool = False,
) -> Program:
    """Return the program of a seed.

    Args:
        seed: draws everything.
        device: that its tensors are on.
        without: families that it is not drawn from, to look beyond faults that are known.
        only: the family that it must have, instead of the seed's.
        alone: it has no other families, beside a model, a policy and plain steps.
    """
    families = [family for family in FAMILIES if family not in without]
    forced = only or families[seed % len(families)]
    if alone:
        parts = {NEEDED_BLOCKS.get(forced), NEEDS_SETUP.get(forced), forced, "one model", "step"}
        families = [family for family in families if family in parts or family in POLICIES]
    draft = Draft(f"{seed} {forced}", device, families, NEEDS_SETUP.get(forced, forced))
    draft.say(f'device = "{device}"')
    draft.set_up()
    draft.forced = forced
    draft.loop()
    return Program(
        seed,
        tuple(draft.statements),
        frozenset(draft.families),
        rounds=draft.rounds and device != "cpu",
        watched=draft.draw.random() < 0.7,
        recomputes=draft.recomputes,
        rests=draft.weights and device != "cpu",
    )
