"""Generated training programs on torch's own streams, in several orders (`make soft-programs`)."""

import pytest
import torch

import softdevice
from program_runs import check_seed
from training_programs import FAMILIES, generate

ORDERS = ("threads", "compute-first", "copies-first", "random:N")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("first", range(4))
def test_a_program_trains_as_without_ebbtide(first: int, order: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for seed in range(first, len(FAMILIES), 20):
            program, difference, _ = check_seed(seed, "softdevice", order)
            assert difference is None, (
                f"seed {seed}, order {softdevice.order()}: {program}\n\n"
                f"{difference.kind}: {difference.text}"
            )
    finally:
        torch.set_num_threads(before)


def test_programs_differ_from_those_on_a_cpu_only_in_their_device() -> None:
    for seed in range(20):
        assert generate(seed, "softdevice").statements[0].text == 'device = "softdevice"'
