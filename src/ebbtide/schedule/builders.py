"""Build schedules: the default for k of N layers, or from a table."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping, Sequence

from ebbtide.errors import ScheduleError
from ebbtide.schedule.schedule import (
    Action,
    Direction,
    Pass,
    Schedule,
    Unit,
    Verb,
    read_order,
)

TableRow = tuple[bool, int, bool, int]
"""``(offload_fwd, offload_num, reload_fwd, reload_num)``: the layer is released before layer
``offload_num`` starts its forward (True) or backward (False), and its reload starts when layer
``reload_num`` starts its forward (True) or backward (False)."""

Order = str | Iterable[str | Pass]
"""Passes in order, as text such as ``"F0..F3 B3..B0"`` or as a sequence of passes."""


def default(num_layers: int, model_layers: int) -> Schedule:
    """Build the default schedule, which offloads the first k of N layers.

    Every copy gets as much time as the order allows. Layers 0 to k-1 are offloaded while they
    compute. Layer i is released before the forward of layer N-k+i, and its reload starts once that
    layer has finished its backward. So at most N-k layers have their saved tensors on the device.

    Args:
        num_layers: k, from 0 to N-1.
        model_layers: N, 1 or more.

    Returns:
        The checked schedule over ``F0..F{N-1} B{N-1}..B0``.

    Raises:
        ScheduleError: k or N is out of range.
    """
    _check_layers(model_layers)
    if _is_no_count(num_layers) or not num_layers < model_layers:
        raise ScheduleError(
            f"num_layers={num_layers!r} must be a whole number from 0 to model_layers - 1 = "
            f"{model_layers - 1}: the last layer stays, as its backward follows its forward at once"
        )
    later = model_layers - num_layers
    table = {layer: (True, later + layer, False, later + layer - 1) for layer in range(num_layers)}
    return from_table(table, model_layers)


def from_table(
    table: Mapping[int, TableRow], model_layers: int, *, order: Order | None = None
) -> Schedule:
    """Build the schedule that a synchronization table describes.

    Args:
        table: for each layer to offload, ``(offload_fwd, offload_num, reload_fwd, reload_num)``:
            the layer is released before layer ``offload_num`` starts its forward (True) or
            backward (False), and its reload starts when layer ``reload_num`` starts its forward
            (True) or backward (False).
        model_layers: number of layers in the order; one layer run on eight microbatches counts as
            eight.
        order: order of the passes; None means all forwards, then the backwards in reverse.

    Returns:
        The checked schedule.

    Raises:
        ScheduleError: the table cannot be read, or the schedule that it describes cannot be run.
    """
    _check_layers(model_layers)
    passes = plain_order(model_layers) if order is None else read_order(order)
    numbered = Schedule(passes).num_layers
    if numbered != model_layers:
        raise ScheduleError(f"the order has {numbered} layers, not model_layers={model_layers}")
    offloads, releases, reloads = [], [], []
    for layer, row in table.items():
        if _is_no_count(layer) or not _is_row(row):
            raise ScheduleError(
                f"the table's row {layer!r}: {row!r} is not of the form layer: (offload_fwd, "
                f"offload_num, reload_fwd, reload_num), such as 1: (False, 0, True, 4)"
            )
        unit = Unit(layer)
        offload_fwd, offload_num, reload_fwd, reload_num = row
        offloads.append((Pass(Direction.FORWARD, unit), Action(Verb.OFFLOAD, unit)))
        releases.append((_anchor(offload_fwd, offload_num), Action(Verb.RELEASE, unit)))
        reloads.append((_anchor(reload_fwd, reload_num), Action(Verb.RELOAD, unit)))
    # Releases come first at each anchor, so that they make room for its reloads.
    return Schedule(passes, [*releases, *offloads, *reloads]).check()


def find_order(table: Mapping[int, TableRow], model_layers: int) -> tuple[Pass, ...]:
    """Find an order of passes in which a table can be run, with each forward as early as possible.

    Args:
        table: as for `from_table`.
        model_layers: number of layers; their forwards come in ascending order.

    Returns:
        The plain order if the table fits it, else another order that the table fits.

    Raises:
        ScheduleError: the table fits no order.
    """
    try:
        return from_table(table, model_layers).order
    except ScheduleError as error:
        refused = error
    before: dict[Pass, set[Pass]] = {each: set() for each in plain_order(model_layers)}
    for layer in range(model_layers):
        before[_anchor(False, layer)].add(_anchor(True, layer))
        if layer:
            before[_anchor(True, layer)].add(_anchor(True, layer - 1))
    for layer, (offload_fwd, offload_num, reload_fwd, reload_num) in table.items():
        out, back = _anchor(offload_fwd, offload_num), _anchor(reload_fwd, reload_num)
        use = _anchor(False, layer)
        if not {out, back, use} <= before.keys():
            raise refused
        before[out].add(_anchor(True, layer))
        before[back].add(out)
        if back != use:
            before[use].add(back)
    sorter = graphlib.TopologicalSorter(before)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        raise refused from None
    order: list[Pass] = []
    ready: list[Pass] = []
    while sorter.is_active():
        ready += sorter.get_ready()
        ready.sort(key=lambda each: (not each.is_forward, each.unit))
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return from_table(table, model_layers, order=order).order


def plain_order(model_layers: int) -> tuple[Pass, ...]:
    """Return all forwards in ascending order, then all backwards in descending order."""
    forwards = [Pass(Direction.FORWARD, Unit(layer)) for layer in range(model_layers)]
    backwards = [Pass(Direction.BACKWARD, Unit(layer)) for layer in range(model_layers)]
    return (*forwards, *reversed(backwards))


def _anchor(forward: bool, layer: int) -> Pass:
    return Pass(Direction.FORWARD if forward else Direction.BACKWARD, Unit(layer))


def _check_layers(model_layers: int) -> None:
    if _is_no_count(model_layers) or model_layers < 1:
        raise ScheduleError(f"model_layers must be a whole number, 1 or more, got {model_layers!r}")


def _is_row(row: object) -> bool:
    if not isinstance(row, Sequence) or len(row) != 4:
        return False
    flags, counts = row[::2], row[1::2]
    return all(isinstance(flag, bool) for flag in flags) and not any(map(_is_no_count, counts))


def _is_no_count(value: object) -> bool:
    return isinstance(value, bool) or not isinstance(value, int) or value < 0
