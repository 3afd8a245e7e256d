"""What test_gpu_sanitizer runs: two offloaded steps of a small model, and their parity."""

import sys

import ebbtide
from gpu_bench import TIGHT, batch, find_device, take_step, tower
from zoo import assert_bitwise_equal


def main(store: str) -> None:
    device = find_device()
    assert device is not None
    model, x = tower(device, num_layers=3), batch(device)
    expected = take_step(model, x)
    with ebbtide.offload(model, activations=TIGHT, store=store):
        for _ in range(2):
            assert_bitwise_equal(take_step(model, x), expected)
    print("same bits")


if __name__ == "__main__":
    main(sys.argv[1])
